"""Passes that skip layers among passes that don't: what is loaded and dropped, what plans go by, what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

import models
from diffusers_layerwise import OffloadHandle
from diffusers_layerwise.order import following, skips
from models import run, stream
from test_engine import STREAMING, events, misses

WHOLE, SHORT, MIDDLE = (0, 1, 2, 3, 4, 5), (0, 5), (0, 1, 4, 5)
PATTERNS: dict[str, list[Sequence[int]]] = {
    "every other pass": [WHOLE, SHORT],
    "two of three": [WHOLE, SHORT, SHORT],
    "warm-up, then one in four": [WHOLE, WHOLE, WHOLE, SHORT, SHORT, SHORT],
    "two ways to skip": [WHOLE, SHORT, MIDDLE, SHORT],
    "the first layers": [WHOLE, (3, 4, 5)],
    "the last layers": [WHOLE, (0, 1)],
}


def chain_of_six() -> models.Chain:
    return models.make(models.Chain, 6)


def learned(handle: OffloadHandle, chain: models.Chain, x: torch.Tensor, orders: Sequence[Sequence[int]]) -> None:
    """Passes until times are measured and the plan stays, then those given."""
    for _ in range(6):
        run(chain, x)
    for order in orders:
        run(chain, x, order=order)


# ---------------------------------------------------------------------- what comes next
@pytest.mark.parametrize("way", STREAMING)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_whole_and_skipping_passes_is_foreseen(pattern: str, way: str, sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    orders = PATTERNS[pattern]
    expected = {tuple(order): run(chain, x, order=order) for order in orders}
    handle = stream(chain, **STREAMING[way])
    learned(handle, chain, x, orders * 3)
    before = handle.report().components[0]
    for order in orders * 2:
        assert torch.equal(run(chain, x, order=order), expected[tuple(order)])
    after = handle.report().components[0]
    assert (after.misses, after.dropped) == (before.misses, before.dropped)
    assert after.peak_seen <= after.peak_predicted


@pytest.mark.parametrize("way", STREAMING)
def test_passes_that_nobody_can_foresee_are_right(way: str, sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    generator = torch.Generator().manual_seed(0)
    handle = stream(chain, **STREAMING[way])
    plain = chain_of_six()
    run(chain, x)
    for _ in range(40):
        order = [i for i in range(6) if torch.rand(1, generator=generator) < 0.6]
        assert torch.equal(run(chain, x, order=order), run(plain, x, order=order))
    report = handle.report()
    assert report.peak_seen <= report.peak_predicted
    handle.release()
    assert handle._runtime.transfer.held_bytes == 0


@pytest.mark.parametrize("history", ["", "0", "01", "0123"])
def test_where_nothing_was_like_this_nothing_is_foretold(history: str) -> None:
    assert following(bytes(map(int, history))) is None


@pytest.mark.parametrize(
    ("history", "comes"),
    [("00", 0), ("0101", 0), ("001101", 1), ("0111011101", 1), ("0111011", 1), ("01110111", 0), ("000011110000", 1)],
)
def test_the_past_that_is_most_like_the_present_tells_what_comes(history: str, comes: int) -> None:
    assert following(bytes(map(int, history))) == comes


def test_a_pass_skips_when_it_leaves_units_out_and_keeps_the_order() -> None:
    assert skips([0, 5], [0, 1, 5])
    assert skips([], [0])
    assert not skips([0, 1], [0, 1])
    assert not skips([5, 0], [0, 1, 5]), "another order"
    assert not skips([0, 1, 0, 1], [0, 1, 0, 1, 0, 1]), "fewer tiles: no unit is left out"
    assert not skips([0, 2], [0, 1]), "another branch"


# ---------------------------------------------------------------------- where the passes part
def test_a_whole_pass_that_was_expected_loads_no_more_of_what_is_skipped_once_they_part(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [SHORT, *[WHOLE] * 4])
    seen = events(handle, lambda: run(chain, x, order=SHORT))
    # Block 1 was on its way before the pass, block 2 from block 0's end on: both are dropped, and nothing follows.
    assert seen[:6] == ["ready 0", "free 0", "load 2", "free 1", "free 2", "load 5"]
    assert not {"ready 1", "ready 2", "load 3", "load 4"} & set(seen)


def test_a_skipping_pass_that_was_expected_goes_on_whole_with_one_miss(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [SHORT] * 4)
    before = misses(handle)
    seen = events(handle, lambda: run(chain, x, order=WHOLE))
    assert misses(handle) == before + 1
    # All that was expected was loaded, so block 0 was on its way again for the pass after this one.
    assert [e for e in seen if e.startswith("load")][:6] == [f"load {i}" for i in (0, 1, 2, 3, 4, 5)]


def test_a_new_way_to_skip_waits_for_no_skipped_layer(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [])
    seen = events(handle, lambda: run(chain, x, order=(0, 3, 5)))
    assert [e for e in seen if e.startswith("ready")] == ["ready 0", "ready 3", "ready 5"]


def test_a_pass_that_ends_early_starts_no_more_of_the_rest(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [])
    seen = events(handle, lambda: run(chain, x, order=(0, 1)))
    assert [e for e in seen if e.startswith("load")] == ["load 2", "load 3", "load 0", "load 1"]
    assert [e for e in seen if e.startswith("free")] == ["free 0", "free 1", "free 2", "free 3"]


# ---------------------------------------------------------------------- what plans go by
@pytest.mark.parametrize("way", ["memory", "speed_40"])
def test_skipping_passes_leave_plan_packing_and_measurements_alone(way: str, sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain, **STREAMING[way])
    learned(handle, chain, x, [])
    schedule = handle._runtime.schedules[0]
    before = (
        handle.plan,
        list(schedule.groups),
        list(schedule.order.uses),
        schedule.order.times,
        [schedule.store.place(unit) for unit in schedule.component.units],
        handle.report().components[0].step_measured,
    )
    for order in [SHORT, MIDDLE, SHORT, WHOLE] * 3:
        run(chain, x, order=order)
    after = (
        handle.plan,
        list(schedule.groups),
        list(schedule.order.uses),
        schedule.order.times,
        [schedule.store.place(unit) for unit in schedule.component.units],
        handle.report().components[0].step_measured,
    )
    assert before == after
    assert schedule.order.times is not None


def test_the_time_of_a_pass_is_that_of_a_whole_one(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    for _ in range(2):
        run(chain, x)
    for _ in range(3):
        run(chain, x, order=SHORT)
    assert handle.report().components[0].step_measured is None
    schedule = handle._runtime.schedules[0]
    for _ in range(3):
        run(chain, x)
    assert handle.report().components[0].step_measured is not None
    assert len(schedule.order.times[0]) == len(WHOLE)


def test_a_whole_pass_after_skipping_ones_makes_the_plan(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    for order in [SHORT, SHORT, WHOLE, WHOLE]:
        run(chain, x, order=order)
    assert len(handle._runtime.schedules[0].order.uses) == len(WHOLE)
    run(chain, x)
    before = misses(handle)
    run(chain, x)
    assert misses(handle) == before


# ---------------------------------------------------------------------- what was saved
def test_saved_bytes_are_those_of_the_groups_that_a_whole_pass_loads_beyond(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [WHOLE, SHORT] * 4)
    before = handle.report().components[0]
    for order in [WHOLE, SHORT] * 5:
        run(chain, x, order=order)
    after = handle.report().components[0]
    block = handle.plan.components[0].groups[0].size
    assert (after.skipped_loads - before.skipped_loads) == 5 * 4
    assert (after.skipped_bytes - before.skipped_bytes) == 5 * 4 * block
    assert after.moved_bytes - before.moved_bytes == 5 * (6 + 2) * block


def test_what_was_loaded_and_then_skipped_is_not_saved(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [])
    run(chain, x, order=SHORT)  # blocks 1 and 2 of the four were on their way
    assert handle.report().components[0].skipped_loads == 2


@pytest.mark.parametrize("orders", [[WHOLE], [(0, 1, 2), (0, 3, 5)], [(0, 1, 0, 1), (0, 1)], [WHOLE, WHOLE[::-1]]])
def test_passes_that_go_another_way_or_repeat_less_save_nothing(orders: list[Sequence[int]], sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    for order in orders * 3:
        run(chain, x, order=order)
    assert handle.report().components[0].skipped_bytes == 0
    assert "skipped layers" not in str(handle.report())


def test_resident_layers_that_are_skipped_save_nothing(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain, mode="manual", config={"resident": 1.0})
    for order in [WHOLE, SHORT] * 4:
        run(chain, x, order=order)
    assert handle.report().components[0].skipped_bytes == 0


def test_the_printed_report_says_what_was_saved(sim: ModuleType) -> None:
    chain, x = chain_of_six(), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    learned(handle, chain, x, [SHORT])
    (line,) = [line for line in str(handle.report()).splitlines() if "skipped" in line]
    assert line == "skipped layers saved 8.50 KiB of loads; Chain 8.50 KiB"
