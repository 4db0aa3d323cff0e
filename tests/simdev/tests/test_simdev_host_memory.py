"""What the simulated device catches on the host's side of a copy, in pinned and in registered memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

try:
    import simdev as sim
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from simdev.testing import SIZE, fresh_device, on_device, pinned, upload

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    with fresh_device():
        yield


# ---- the host's side of copies


def test_source_overwritten_while_the_upload_is_pending() -> None:
    """The copy may have read old bytes, new bytes or both."""
    stream, source = sim.Stream(), pinned(64, 64)
    upload(source, stream)
    source.zero_()
    with pytest.raises(RuntimeError, match=r"source of copy_h2d on stream.* into block #.* overwritten"):
        stream.synchronize()


def test_device_side_wait_does_not_free_the_source() -> None:
    """A stream has waited for the copy, but the host, which writes, has not."""
    stream, source = sim.Stream(), pinned(64, 64)
    weight = upload(source, stream)
    sim.current_stream().wait_stream(stream)
    result = weight + 1
    source.zero_()
    with pytest.raises(RuntimeError, match="overwritten by the host"):
        result.cpu()


def test_source_may_be_overwritten_after_a_host_wait() -> None:
    """The same with the wait in its place."""
    stream, source = sim.Stream(), pinned(64, 64)
    upload(source, stream)
    stream.synchronize()
    source.zero_()
    sim.synchronize()
    assert sim.races() == []


def test_check_pending_finds_an_overwritten_source_without_waiting() -> None:
    """So that a test can ask in the middle of a schedule."""
    source = pinned(64, 64)
    upload(source, sim.Stream())
    assert sim.check_pending()[0] == 1
    source.zero_()
    with pytest.raises(RuntimeError, match="overwritten"):
        sim.check_pending()


def test_dropped_pinned_source_is_kept_until_its_copy_is_over() -> None:
    """PyTorch's allocator does not hand out pinned memory again while a copy uses it."""
    base = sim.mem(0)["pinned"]
    stream, source = sim.Stream(), pinned(64, 64)
    weight, expected = upload(source, stream), source.clone()
    del source
    assert sim.mem(0)["pinned"] - base == SIZE
    stream.synchronize()
    assert sim.mem(0)["pinned"] == base
    assert torch.equal(weight.cpu(), expected)


def test_download_target_holds_poison_until_the_host_waits() -> None:
    """Reading it early gives NaN, not the values that happened to be there."""
    target = torch.zeros(64, 64).pin_memory()
    target.copy_(torch.ones(64, 64, device="sim"), non_blocking=True)
    assert target.isnan().all()
    sim.synchronize()
    assert (target == 1).all()


def test_writing_to_a_pending_download_target_is_an_error() -> None:
    """The copy would overwrite it, or not."""
    target = torch.zeros(64, 64).pin_memory()
    target.copy_(torch.ones(64, 64, device="sim"), non_blocking=True)
    target.fill_(5)
    with pytest.raises(RuntimeError, match=r"target of copy_d2h on default.*overwritten"):
        sim.synchronize()


def test_round_trip_through_one_pinned_buffer_needs_only_device_order() -> None:
    """Down and up again on one stream: the host has no part in it."""
    source, buffer = on_device(64, 64), torch.zeros(64, 64).pin_memory()
    buffer.copy_(source, non_blocking=True)
    back = buffer.to("sim", non_blocking=True)
    assert torch.equal(back.cpu(), source.cpu())
    assert sim.races() == []


def test_uploading_from_a_pending_download_target_on_another_stream_is_an_error() -> None:
    """The upload may read before the download has written."""
    source, buffer = on_device(64, 64), torch.zeros(64, 64).pin_memory()
    buffer.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match=r"host memory race: copy_h2d .* pinned host block #"):
        upload(buffer, sim.Stream())


def test_downloading_over_a_pending_upload_source_on_another_stream_is_an_error() -> None:
    """The upload may still have to read what the download writes."""
    buffer, result = pinned(64, 64), on_device(64, 64)
    upload(buffer, sim.Stream())
    with pytest.raises(RuntimeError, match=r"host memory race: copy_d2h .* pinned host block #"):
        buffer.copy_(result, non_blocking=True)


def test_reusing_one_pinned_buffer_in_stream_order_is_fine() -> None:
    """Up, then down into the same buffer, then down again, all on one stream."""
    buffer = pinned(64, 64)
    uploaded = buffer.to("sim", non_blocking=True)
    buffer.copy_(uploaded + 1, non_blocking=True)
    buffer.copy_(uploaded + 2, non_blocking=True)
    sim.synchronize()
    assert torch.equal(buffer, (uploaded + 2).cpu())
    assert sim.races() == []


def test_nonblocking_upload_of_pageable_memory_stages_the_source() -> None:
    """The source is free at once; other streams still have to wait for the target."""
    source, stream = torch.randn(64, 64), sim.Stream()
    expected = source.clone()
    weight = upload(source, stream)
    source.zero_()
    with pytest.raises(RuntimeError, match="read-after-write"):
        weight + 0
    sim.current_stream().wait_stream(stream)
    assert torch.equal((weight + 0).cpu(), expected)
    assert sim.counters()["h2d_nonblocking_but_sync"] == 1


def test_blocking_upload_orders_everything() -> None:
    """The host waits for it, and all later work comes after the host."""
    source = torch.randn(64, 64)
    with sim.stream(sim.Stream()):
        weight = source.to("sim")
    assert torch.equal((weight + 0).cpu(), source)


@pytest.mark.parametrize("change", ["dtype", "layout"])
def test_upload_that_changes_dtype_or_layout_is_not_asynchronous(change: str) -> None:
    """It goes through temporaries in pageable memory, pinned source or not."""
    source = pinned(64, 64)
    if change == "dtype":
        target = torch.empty(64, 64, device="sim", dtype=torch.bfloat16)
    else:
        target = torch.empty(64, 64, device="sim").t()
    target.copy_(source, non_blocking=True)
    assert sim.counters()["h2d_nonblocking_but_sync"] == 1
    assert torch.equal(target.cpu(), source.to(target.dtype))


# ---- registered host memory


def test_registered_memory_is_page_locked_where_it_lies() -> None:
    """Copies from it are asynchronous, and it counts as registered, not as pinned."""
    source, stream, before = torch.randn(64, 64), sim.Stream(), sim.mem(0)
    assert not source.is_pinned()
    sim.host_register(source)
    assert source.is_pinned()
    assert source[8:].is_pinned()
    weight = upload(source, stream)
    assert sim.counters()["h2d_nonblocking_but_sync"] == 0
    assert sim.counters()["h2d_pageable_bytes"] == 0
    stream.synchronize()
    assert torch.equal(weight.cpu(), source)
    assert sim.mem(0)["registered"] - before["registered"] == SIZE
    assert sim.mem(0)["pinned"] == before["pinned"]
    sim.host_unregister(source)
    assert not source.is_pinned()
    assert sim.mem(0)["registered"] == before["registered"]
    assert sim.mem(0)["registered_peak"] - before["registered"] == SIZE


def test_registering_twice_or_unregistering_what_is_not_registered_is_refused() -> None:
    """As the driver refuses it, parts included."""
    source = torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="not registered"):
        sim.host_unregister(source)
    sim.host_register(source[32:])
    for overlapping in (source, source[40:]):
        with pytest.raises(RuntimeError, match="page-locked already"):
            sim.host_register(overlapping)
    with pytest.raises(RuntimeError, match="page-locked already"):
        sim.host_register(pinned(4))
    sim.host_unregister(source[32:])


def test_overwriting_a_registered_source_is_an_error() -> None:
    """The same as for pinned memory, with the block's kind in the message."""
    source, stream = torch.randn(64, 64), sim.Stream()
    sim.host_register(source)
    upload(source, stream)
    source.zero_()
    with pytest.raises(RuntimeError, match=r"registered host block #.* overwritten"):
        stream.synchronize()
    sim.host_unregister(source)


def test_unregistering_under_a_pending_copy_is_an_error() -> None:
    """The pages are no longer locked while the device reads them."""
    source, stream = torch.randn(64, 64), sim.Stream()
    sim.host_register(source)
    upload(source, stream)
    with pytest.raises(RuntimeError, match=r"early free: registered .* unregistered while copy_h2d on stream"):
        sim.host_unregister(source)


@pytest.mark.parametrize("copies", [1, 3])
def test_freeing_registered_memory_under_a_pending_copy_is_an_error(copies: int) -> None:
    """Nobody keeps it for the copy, as pinned memory is kept."""
    source, stream = torch.randn(64, 64), sim.Stream()
    sim.host_register(source)
    for _ in range(copies):
        upload(source, stream)
    del source
    with pytest.raises(RuntimeError, match=r"early free: registered host block #.* freed while copy_h2d"):
        stream.synchronize()


def test_freeing_memory_that_is_still_registered_is_an_error() -> None:
    """Whoever gets the addresses next would be taken for page-locked."""
    source = torch.randn(64, 64)
    sim.host_register(source)
    del source
    with pytest.raises(RuntimeError, match="freed before host_unregister"):
        sim.check_pending()


def test_views_keep_registered_memory_alive() -> None:
    """Dropping the tensor that was registered is fine while its storage lives on."""
    source = torch.randn(64, 64)
    sim.host_register(source)
    view, stream = source[:32], sim.Stream()
    del source
    upload(view, stream)
    stream.synchronize()
    sim.host_unregister(view)
    assert sim.races() == []
