"""What the simulated device counts, and the times that its clock tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

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


# ---- counting


def test_cap_raises_out_of_memory_and_leaves_the_rest_usable() -> None:
    """A refused allocation changes nothing but the count of refusals."""
    sim.configure(cap=sim.memory_allocated() + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4194304 bytes"):
        torch.zeros(1 << 20, device="sim")
    assert sim.mem(0)["ooms"] == 1
    torch.zeros(1 << 17, device="sim")


def test_cap_is_what_mem_get_info_tells() -> None:
    """So code that plans by free memory plans by the cap."""
    sim.configure(cap=sim.memory_allocated() + (1 << 20))
    held = torch.zeros(1 << 16, device="sim")
    free, total = sim.mem_get_info()
    assert (free, total) == ((1 << 20) - held.nbytes, sim.get_device_properties().total_memory)
    assert torch.sim.mem_get_info() == (free, total)


def test_allocation_waits_for_memory_held_back_by_record_stream() -> None:
    """A stall, and not an error: the memory comes free by itself."""
    stream, ones = sim.Stream(), on_device(256, 256)
    sim.configure(flops=1e9)
    with sim.stream(stream):
        ones @ ones
    ones.record_stream(stream)
    sim.configure(cap=sim.mem(0)["active"] + 1000)
    size = ones.nbytes
    del ones
    before = sim.times()["host"]
    torch.empty(size, device="sim", dtype=torch.uint8)
    assert sim.mem(0)["stalls"] == 1
    assert sim.times()["host"] > before + 0.01


def test_allocations_and_frees_are_counted() -> None:
    """One for each tensor with memory of its own; views and empty tensors have none."""
    before = sim.mem(0)
    first = torch.zeros(8, device="sim")
    view = first[2:]
    empty = torch.empty(0, device="sim")
    second = first + 1
    assert sim.mem(0)["allocs"] - before["allocs"] == 2
    assert sim.counters()["allocs"] == 2
    del first, view, empty, second
    assert sim.mem(0)["frees"] - before["frees"] == 2
    assert sim.mem(0)["allocated"] == before["allocated"]


def test_in_place_work_allocates_nothing() -> None:
    """What a ring of fixed slots is for."""
    slot, source = on_device(64, 64), pinned(64, 64)
    before = sim.mem(0)["allocs"]
    for _ in range(5):
        slot.copy_(source, non_blocking=True)
        slot.mul_(2)
    assert sim.mem(0)["allocs"] == before


def test_peaks_follow_and_can_be_reset() -> None:
    """Both on the device and for pinned memory."""
    base = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    held = torch.zeros(1000, device="sim", dtype=torch.uint8)
    torch.zeros(500, device="sim", dtype=torch.uint8)
    assert sim.max_memory_allocated() - base == 1500
    sim.reset_peak_memory_stats()
    assert sim.max_memory_allocated() - base == held.nbytes


def test_pinned_bytes_are_counted_now_and_at_their_peak() -> None:
    """The other budget of an offload: page-locked host memory."""
    base = sim.mem(0)["pinned"]
    first, second = pinned(64, 64), pinned(64, 64)
    assert sim.mem(0)["pinned"] - base == 2 * SIZE
    assert sim.counters()["pin_allocs"] == 2
    del second
    assert sim.mem(0)["pinned"] - base == first.nbytes
    assert sim.mem(0)["pinned_peak"] - base == 2 * SIZE


def test_bytes_and_copies_are_counted_by_direction() -> None:
    """And pageable ones apart, because they are the slow ones."""
    source = torch.randn(64, 64)
    weight = source.to("sim")
    weight.copy_(source.pin_memory(), non_blocking=True)
    weight.clone()
    weight.cpu()
    counters = sim.counters()
    assert (counters["h2d_bytes"], counters["h2d_copies"]) == (2 * SIZE, 2)
    assert (counters["d2h_bytes"], counters["d2h_copies"]) == (SIZE, 1)
    assert (counters["d2d_bytes"], counters["d2d_copies"], counters["p2p_bytes"]) == (SIZE, 1, 0)
    assert (counters["h2d_pageable_bytes"], counters["d2h_pageable_bytes"]) == (SIZE, SIZE)


def test_host_waits_are_counted_hidden_ones_too() -> None:
    """`item()`, masks and `nonzero` stop the host as surely as `synchronize`."""
    ones = on_device(8)
    for wait, expected in (
        (lambda: ones + 1, 0),
        (lambda: ones.sum().item(), 1),
        (lambda: ones[ones > 0], 1),
        (lambda: ones.nonzero(), 1),
        (lambda: ones.cpu(), 1),
        (lambda: sim.current_stream().synchronize(), 1),
        (lambda: sim.synchronize(), 1),
        (lambda: sim.Event().query(), 0),
    ):
        before = sim.counters()["host_syncs"]
        wait()
        assert sim.counters()["host_syncs"] - before == expected


def test_operators_are_counted_by_name() -> None:
    """One call is one kernel, whatever it is made of on the CPU."""
    query = on_device(1, 2, 16, 8)
    sim.reset()
    F.scaled_dot_product_attention(query, query, query)
    query + query
    assert sim.ops() == {"aten::scaled_dot_product_attention": 1, "aten::add": 1}
    assert sim.counters()["kernels"] == 2
    assert sim.counters()["flops"] == 4 * query.numel() * 16


# ---- the virtual clock


def test_copy_and_compute_overlap_on_the_clock() -> None:
    """A copy of 1 ms behind kernels of 1 ms takes no time of its own."""
    sim.configure(flops=1e12, h2d=1e9, copy_lat=0, launch=0, kernel_min=0, hbm=1e15)
    source, ones, weight = pinned(500, 500), on_device(500, 500), on_device(500, 500)
    sim.reset()
    stream = sim.Stream()
    streamed = upload(source, stream)
    for _ in range(4):
        ones @ weight
    sim.current_stream().wait_stream(stream)
    ones @ streamed
    times = sim.times()
    assert times["total"] == pytest.approx(1.25e-3, rel=0.01)
    assert times["compute_busy"] == pytest.approx(1.25e-3, rel=0.01)
    assert times["h2d_busy"] == pytest.approx(1e-3, rel=0.01)
    sim.synchronize()


def test_two_devices_compute_side_by_side() -> None:
    """Each has engines of its own."""
    sim.configure(ndev=2, flops=1e9, launch=0, kernel_min=0)
    here, there = on_device(100, 100, device="sim:0"), on_device(100, 100, device="sim:1")
    sim.reset()
    here @ here
    there @ there
    assert sim.times()["total"] == pytest.approx(2e-3, rel=0.01)
    assert sim.times()["compute_busy"] == pytest.approx(4e-3, rel=0.01)


def test_elapsed_time_between_events_is_virtual() -> None:
    """In milliseconds, as everywhere."""
    sim.configure(flops=1e9, launch=0, kernel_min=0)
    start, end, ones = sim.Event(enable_timing=True), sim.Event(enable_timing=True), on_device(100, 100)
    start.record()
    ones @ ones
    end.record()
    assert not end.query()
    sim.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == pytest.approx(2.0, rel=0.01)


def test_elapsed_time_needs_events_made_for_it() -> None:
    """An event without timing has no time to tell."""
    start, end = sim.Event(), sim.Event()
    start.record()
    end.record()
    sim.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        start.elapsed_time(end)


def test_query_turns_true_when_the_host_gets_there() -> None:
    """Time that the host spends elsewhere brings the device forward."""
    sim.configure(flops=1e9)
    stream, ones = sim.current_stream(), on_device(100, 100)
    ones @ ones
    assert not stream.query()
    sim.advance_host(1.0)
    assert stream.query()


def test_trace_shows_each_piece_of_work(tmp_path: Path) -> None:
    """In the format of chrome://tracing."""
    sim.configure(trace=1)
    ones = on_device(64, 64)
    upload(pinned(64, 64), sim.Stream())
    ones @ ones
    sim.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events][-2:] == ["copy_h2d", "aten::mm"]
    assert {event["args"]["kind"] for event in events} == {"kernel", "h2d"}
    assert all(event["dur"] > 0 for event in events)
