"""Copies between two simulated devices: ordered where CUDA orders them, and races where it does not."""

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


@pytest.fixture
def two_devices() -> None:
    """Makes sim:1 exist."""
    sim.configure(ndev=2)


@pytest.mark.usefixtures("two_devices")
def test_copies_between_devices_on_their_current_streams_are_ordered() -> None:
    """There and back again, with kernels between, and nobody has to wait by hand."""
    first = torch.randn(64, 64, device="sim:0")
    second = (first + 1).to("sim:1", non_blocking=True)
    third = (second * 2).to("sim:0", non_blocking=True)
    assert torch.equal((third - 2).cpu(), (first.cpu() + 1) * 2 - 2)
    assert sim.races() == []
    assert sim.counters()["p2p_bytes"] == 2 * SIZE


@pytest.mark.usefixtures("two_devices")
def test_chain_of_copies_through_one_buffer_on_each_device_is_ordered() -> None:
    """Each hop overwrites what the hop before it read, on both sides."""
    here, there = on_device(64, 64, device="sim:0"), on_device(64, 64, device="sim:1")
    for _ in range(3):
        there.copy_(here, non_blocking=True)
        there.add_(1)
        here.copy_(there, non_blocking=True)
        here.mul_(2)
    assert sim.races() == []
    assert (here == 22).all().item()


@pytest.mark.usefixtures("two_devices")
def test_copy_between_devices_waits_for_the_target_to_be_out_of_use() -> None:
    """The target's current stream may still be computing with what the copy overwrites."""
    here, there = on_device(64, 64, device="sim:0"), on_device(64, 64, device="sim:1")
    there @ there
    there.copy_(here, non_blocking=True)
    assert sim.races() == []


@pytest.mark.usefixtures("two_devices")
def test_source_written_on_a_side_stream_is_a_race_for_a_copy_between_devices() -> None:
    """The copy waits for the two current streams, and for no others."""
    stream = sim.Stream("sim:0")
    weight = upload(pinned(64, 64), stream)
    with pytest.raises(RuntimeError, match=r"read-after-write: copy_p2p on default\(sim:0\) reads"):
        weight.to("sim:1")
    sim.current_stream("sim:0").wait_stream(stream)
    weight.to("sim:1")


@pytest.mark.usefixtures("two_devices")
def test_copy_between_devices_on_a_side_stream_has_to_be_waited_for() -> None:
    """On the target's side, the copy is over only for the stream that was current there."""
    source, stream = on_device(64, 64, device="sim:0"), sim.Stream("sim:1")
    with sim.stream(stream):
        target = source.to("sim:1", non_blocking=True)
    with pytest.raises(RuntimeError, match=r"read-after-write: .*\(sim:1\) reads .* copy_p2p on default\(sim:0\)"):
        target + 1
    sim.current_stream("sim:1").wait_stream(stream)
    target + 1


@pytest.mark.usefixtures("two_devices")
def test_target_still_in_use_on_a_side_stream_is_a_race_for_a_copy_between_devices() -> None:
    """A kernel on the target's device may still be reading what the copy overwrites."""
    source, target = on_device(64, 64, device="sim:0"), on_device(64, 64, device="sim:1")
    with sim.stream(sim.Stream("sim:1")):
        target @ target
    with pytest.raises(RuntimeError, match=r"write-after-read: copy_p2p .* writes"):
        target.copy_(source, non_blocking=True)


@pytest.mark.usefixtures("two_devices")
def test_source_overwritten_from_a_side_stream_under_a_copy_between_devices() -> None:
    """The copy runs on the source's current stream, so another stream there has to wait for that one."""
    source, stream = on_device(64, 64, device="sim:0"), sim.Stream("sim:0")
    source.to("sim:1", non_blocking=True)
    with sim.stream(stream), pytest.raises(RuntimeError, match=r"write-after-read: aten::zero_ .* copy_p2p"):
        source.zero_()
    stream.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(stream):
        source.zero_()


@pytest.mark.usefixtures("two_devices")
def test_event_of_one_device_orders_work_on_another() -> None:
    """Events cross devices."""
    source, stream, event = on_device(64, 64, device="sim:0"), sim.Stream("sim:1"), sim.Event()
    with sim.stream(stream):
        target = source.to("sim:1", non_blocking=True)
    event.record(sim.current_stream("sim:0"))
    sim.current_stream("sim:1").wait_event(event)
    target + 1
    assert sim.races() == []


@pytest.mark.usefixtures("two_devices")
def test_devices_have_their_own_memory_and_cap() -> None:
    """A cap on one does not limit the other."""
    base, before = sim.memory_allocated("sim:1"), sim.memory_allocated("sim:0")
    sim.configure(cap=base + SIZE, device=1)
    held = torch.ones(64, 64, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError, match="sim:1"):
        torch.ones(64, 64, device="sim:1")
    torch.ones(64, 64, device="sim:0")
    assert sim.memory_allocated(1) - base == held.nbytes
    assert sim.memory_allocated("sim:0") == before


@pytest.mark.usefixtures("two_devices")
def test_mixing_two_devices_in_one_operator_is_refused() -> None:
    """With the words that CUDA has for it."""
    with pytest.raises(RuntimeError, match="found at least two devices, sim:0 and sim:1"):
        torch.ones(4, device="sim:0") + torch.ones(4, device="sim:1")


def test_device_that_does_not_exist_is_refused() -> None:
    """There is one device unless more are asked for."""
    assert sim.device_count() == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.ones(4, device="sim:1")
