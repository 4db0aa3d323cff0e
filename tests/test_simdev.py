"""What the simulated device catches on the device's side: missing waits, early frees, reused slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

try:
    import simdev as sim
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from simdev.testing import fresh_device, on_device, pinned, upload

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    with fresh_device():
        yield


# ---- reads and writes on the device


def test_reading_an_upload_without_a_wait_is_an_error() -> None:
    """The plainest mistake: the weight is used on another stream than it was copied on."""
    weight = upload(pinned(64, 64), sim.Stream())
    with pytest.raises(RuntimeError, match="SimRaceError: read-after-write"):
        weight + 1


def test_race_message_names_both_accesses_the_block_and_the_missing_wait() -> None:
    """Whoever reads the message has to know what to mend without a debugger."""
    stream = sim.Stream()
    weight = upload(pinned(64, 64), stream)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(8, 64, device="sim") @ weight
    side = f"stream{stream.stream_id}(sim:0)"
    message = str(caught.value)
    assert "aten::mm on default(sim:0) reads block #" in message
    assert "[0,16384)" in message
    assert f"copy_h2d on {side}, which writes" in message
    assert f"Missing: default(sim:0) has to wait for {side}" in message


def test_poison_mode_lists_the_race_and_the_read_sees_nan() -> None:
    """For code that goes on: the wrong values are then plain to see in the result."""
    sim.configure(mode="poison")
    weight = upload(pinned(64, 64), sim.Stream())
    result = weight + 1
    assert len(sim.races()) == 1
    assert sim.counters()["races"] == 1
    assert result.isnan().all().item()


def test_poison_reaches_copies_to_the_host() -> None:
    """A download that does not wait for the upload sees poison too."""
    sim.configure(mode="poison")
    weight = upload(pinned(64, 64), sim.Stream())
    assert weight.cpu().isnan().all()
    assert "copy_d2h" in sim.races()[0]


def test_off_mode_checks_nothing_and_computes_the_same() -> None:
    """For measuring the code under test, not its waits."""
    sim.configure(mode="off")
    source = pinned(64, 64)
    weight = upload(source, sim.Stream())
    expected = source + 1
    source.zero_()
    assert torch.equal((weight + 1).cpu(), expected)
    assert sim.races() == []
    assert sim.check_pending() == (0, 0, 0, 0)


@pytest.mark.parametrize("wait", ["event", "stream", "host_stream", "host_event", "device", "host_query"])
def test_any_kind_of_wait_orders_the_read(wait: str) -> None:
    """Each way that CUDA has of waiting counts as one."""
    stream = sim.Stream()
    event = sim.Event()
    source = pinned(64, 64)
    weight = upload(source, stream)
    event.record(stream)
    if wait == "event":
        sim.current_stream().wait_event(event)
    elif wait == "stream":
        sim.current_stream().wait_stream(stream)
    elif wait == "host_stream":
        stream.synchronize()
    elif wait == "host_event":
        event.synchronize()
    elif wait == "device":
        sim.synchronize()
    else:
        while not event.query():
            pass
    assert torch.equal((weight + 1).cpu(), source + 1)
    assert sim.races() == []


def test_waits_chain_through_a_third_stream() -> None:
    """Order is transitive: A before B and B before C puts A before C."""
    first, second = sim.Stream(), sim.Stream()
    weight = upload(pinned(64, 64), first)
    second.wait_stream(first)
    sim.current_stream().wait_stream(second)
    weight + 1


def test_event_recorded_before_the_copy_does_not_order_it() -> None:
    """An event covers what its stream had been given by then, no more."""
    stream, event = sim.Stream(), sim.Event()
    event.record(stream)
    weight = upload(pinned(64, 64), stream)
    sim.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="read-after-write"):
        weight + 1


def test_event_recorded_again_stands_for_the_later_point_only() -> None:
    """A wait queued on the first recording is no wait for what came between the two."""
    stream, event = sim.Stream(), sim.Event()
    event.record(stream)
    sim.current_stream().wait_event(event)
    weight = upload(pinned(64, 64), stream)
    event.record(stream)
    with pytest.raises(RuntimeError, match="read-after-write"):
        weight + 1
    sim.current_stream().wait_event(event)
    weight + 1


def test_event_recorded_again_on_another_stream_forgets_the_first() -> None:
    """It stands for one point of one stream."""
    first, second, event = sim.Stream(), sim.Stream(), sim.Event()
    weight = upload(pinned(64, 64), first)
    event.record(first)
    event.record(second)
    sim.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="read-after-write"):
        weight + 1


def test_event_never_recorded_waits_for_nothing() -> None:
    """As on CUDA, such a wait passes in silence, so the race has to be seen at the read."""
    weight = upload(pinned(64, 64), sim.Stream())
    sim.current_stream().wait_event(sim.Event())
    with pytest.raises(RuntimeError, match="read-after-write"):
        weight + 1


def test_refilling_a_slot_still_in_use_is_an_error() -> None:
    """Double buffering without a wait for the layer that still computes with the slot."""
    slot = on_device(64, 64)
    torch.ones(64, 64, device="sim") @ slot
    with sim.stream(sim.Stream()), pytest.raises(RuntimeError, match=r"write-after-read: copy_h2d .* aten::mm"):
        slot.copy_(pinned(64, 64), non_blocking=True)


def test_two_uploads_into_one_slot_from_two_streams_are_an_error() -> None:
    """Which of them would win is anybody's guess."""
    slot = on_device(64, 64)
    with sim.stream(sim.Stream()):
        slot.copy_(pinned(64, 64), non_blocking=True)
    with sim.stream(sim.Stream()), pytest.raises(RuntimeError, match="write-after-write"):
        slot.copy_(pinned(64, 64), non_blocking=True)


def test_reads_on_two_streams_need_no_order() -> None:
    """Only a write makes a race."""
    weight = on_device(64, 64)
    weight + 1
    with sim.stream(sim.Stream()):
        weight + 2
    assert sim.races() == []


def test_wait_for_one_of_two_readers_is_not_enough_to_write() -> None:
    """Neither reader has waited for the other, so the writer has to wait for both."""
    slot, first, second, writer = on_device(64, 64), sim.Stream(), sim.Stream(), sim.Stream()
    for stream in (first, second):
        with sim.stream(stream):
            slot + 1
    writer.wait_stream(second)
    with sim.stream(writer), pytest.raises(RuntimeError, match="write-after-read"):
        slot.copy_(pinned(64, 64), non_blocking=True)
    writer.wait_stream(first)
    with sim.stream(writer):
        slot.copy_(pinned(64, 64), non_blocking=True)


def test_read_on_the_copy_stream_itself_does_not_cover_for_the_missing_wait() -> None:
    """The copy stream may read what it has written, which helps nobody else."""
    stream = sim.Stream()
    weight = upload(pinned(64, 64), stream)
    with sim.stream(stream):
        weight + 1
    with pytest.raises(RuntimeError, match=r"read-after-write: .* copy_h2d"):
        weight + 1


def test_disjoint_parts_of_one_buffer_need_no_order() -> None:
    """A flat buffer may be computed with at one end and filled at the other."""
    buffer = on_device(128)
    buffer[:64] * 2
    with sim.stream(sim.Stream()):
        buffer[64:].copy_(pinned(64), non_blocking=True)
    assert sim.races() == []


def test_overlapping_parts_of_one_buffer_do() -> None:
    """A byte in common is enough."""
    buffer = on_device(128)
    buffer[:65] * 2
    with sim.stream(sim.Stream()), pytest.raises(RuntimeError, match="write-after-read"):
        buffer[64:].copy_(pinned(64), non_blocking=True)


def test_early_read_is_remembered_behind_later_reads_of_other_parts() -> None:
    """Dropping old accesses must not drop one that nothing later covers."""
    buffer = on_device(128)
    buffer[:64] * 2
    for _ in range(50):
        buffer[64:] * 2
    with sim.stream(sim.Stream()), pytest.raises(RuntimeError, match="write-after-read"):
        buffer[:64].copy_(pinned(64), non_blocking=True)


def test_wait_for_an_earlier_read_is_enough_for_its_part() -> None:
    """A later read of another part by the same stream must not be charged to this one."""
    buffer, event, stream = on_device(128), sim.Event(), sim.Stream()
    buffer[:64] * 2
    event.record(sim.current_stream())
    buffer[64:] * 2
    stream.wait_event(event)
    with sim.stream(stream):
        buffer[:64].copy_(pinned(64), non_blocking=True)
    assert sim.races() == []


# ---- freeing and reusing device memory


def use_then_free_then_allocate(fix: str) -> None:
    """Frees a weight on its copy stream while the default stream computes with it, then uploads the next one."""
    stream, source = sim.Stream(), pinned(64, 64)
    weight = upload(source, stream)
    sim.current_stream().wait_stream(stream)
    torch.ones(64, 64, device="sim") @ weight
    if fix == "record_stream":
        weight.record_stream(sim.current_stream())
    elif fix == "host_wait":
        sim.current_stream().synchronize()
    del weight
    if fix == "stream_wait":
        stream.wait_stream(sim.current_stream())
    upload(source, stream)


def test_memory_reused_while_another_stream_computes_with_it_is_an_error() -> None:
    """The free came too early: the next upload may land under the kernel's feet."""
    with pytest.raises(RuntimeError, match=r"copy_h2d .* aten::mm .*before free of block #.* record_stream\(default"):
        use_then_free_then_allocate("nothing")


@pytest.mark.parametrize("fix", ["record_stream", "host_wait", "stream_wait"])
def test_memory_reused_after_any_of_the_three_remedies_is_fine(fix: str) -> None:
    """Each of them keeps the memory away from the next upload."""
    use_then_free_then_allocate(fix)
    assert sim.races() == []


def test_hazard_of_a_freed_block_survives_an_unused_owner() -> None:
    """A block that is allocated and freed in between has not waited for anybody."""
    stream, source = sim.Stream(), pinned(64, 64)
    weight = upload(source, stream)
    sim.current_stream().wait_stream(stream)
    torch.ones(64, 64, device="sim") @ weight
    del weight
    with sim.stream(stream):
        torch.empty(64, 64, device="sim")
    with pytest.raises(RuntimeError, match="before free of block"):
        upload(source, stream)


def test_record_stream_holds_memory_back_until_the_stream_is_done() -> None:
    """Freed for the program, but not for the allocator."""
    stream = sim.Stream()
    weight = upload(pinned(256, 256), stream)
    size = weight.nbytes
    sim.current_stream().wait_stream(stream)
    for _ in range(20):
        torch.ones(256, 256, device="sim") @ weight
    weight.record_stream(sim.current_stream())
    before = sim.mem(0)
    del weight
    assert sim.mem(0)["allocated"] == before["allocated"] - size
    assert sim.mem(0)["active"] == before["active"]
    assert sim.check_pending()[3] == 1
    sim.synchronize()
    assert sim.mem(0)["active"] == before["active"] - size


def allocate_here_and_fill_on_a_side_stream(wait: bool) -> None:
    """Allocates a slot that may get the memory of a temporary that kernels still use, and fills it elsewhere."""
    stream, ones = sim.Stream(), on_device(64, 64)
    (ones @ ones) @ ones
    slot = torch.empty(64, 64, device="sim")
    if wait:
        stream.wait_stream(sim.current_stream())
    with sim.stream(stream):
        slot.copy_(pinned(64, 64), non_blocking=True)


def test_filling_new_memory_on_a_side_stream_needs_a_wait_for_its_home_stream() -> None:
    """The memory's previous owner may still be in use by kernels queued on the home stream."""
    with pytest.raises(RuntimeError, match="use of the memory's previous owner, block #"):
        allocate_here_and_fill_on_a_side_stream(wait=False)


def test_filling_new_memory_on_a_side_stream_after_that_wait_is_fine() -> None:
    """The same with the wait in its place."""
    allocate_here_and_fill_on_a_side_stream(wait=True)
    assert sim.races() == []


def test_writing_part_of_new_memory_leaves_the_hazard_on_the_rest() -> None:
    """The home stream's own write orders only the bytes it writes."""
    ones = on_device(64, 64)
    (ones @ ones) @ ones
    slot = torch.empty(64, 64, device="sim")
    slot[:8].zero_()
    with sim.stream(sim.Stream()), pytest.raises(RuntimeError, match="previous owner"):
        slot[32:].copy_(pinned(32, 64), non_blocking=True)


def test_fresh_memory_reads_as_nan() -> None:
    """What was never written is not zero by luck."""
    assert torch.empty(8, device="sim").isnan().all().item()
