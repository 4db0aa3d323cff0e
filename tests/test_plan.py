"""Plans: groups, peaks, the simulated pass, who is resident, and the search. Pure functions, worked out by hand."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from diffusers_layerwise import LayerwiseOffloadConfig, placement, search
from diffusers_layerwise.config import Mode, Placement, Residency
from diffusers_layerwise.placement import place
from diffusers_layerwise.plan import (
    Choice,
    ComponentPlan,
    ComponentSpec,
    GroupPlan,
    OffloadPlan,
    UnitSpec,
    cut,
    group_uses,
)
from diffusers_layerwise.search import Request, make_plan, smallest_peak, steady_step
from diffusers_layerwise.simulate import Link, Timeline, simulate, timeline
from diffusers_layerwise.tensors import ALIGNMENT

MIB = 1 << 20
A = ALIGNMENT
LINK = Link(22e9, 1e-5)


def units(*sizes: int, layer: str | None = None, chunk: int = 0) -> list[UnitSpec]:
    return [UnitSpec(f"u{i}", layer, size, chunk) for i, size in enumerate(sizes)]


def component(name: str, layers: list[tuple[list[int], float]], ratio: float = 1.5, **fields: Any) -> ComponentSpec:
    """Layers of (unit sizes, work); `ratio` is the time of moving all of it over the time of computing with it."""
    found = [UnitSpec(f"{i}.{j}", str(i), size) for i, (sizes, _) in enumerate(layers) for j, size in enumerate(sizes)]
    work = [work * size / sum(sizes) for sizes, work in layers for size in sizes]
    total = sum(unit.size for unit in found)
    busy = tuple(w / sum(work) * total / LINK.bandwidth / ratio for w in work)
    order = tuple(range(len(found)))
    return ComponentSpec(name, tuple(found), order, 0, total, busy=busy, gap=(0.0,) * len(busy), **fields)


SHAPES = {
    "uniform": [([12 * MIB] * 4, 1.0)] * 40,
    # Double blocks have 2.4 times the bytes of single ones at equal work.
    "flux_like": [([54 * MIB, 54 * MIB, 72 * MIB, 72 * MIB, 72 * MIB], 1.0)] * 19
    + [([54 * MIB, 63 * MIB, 18 * MIB], 1.0)] * 38,
    # Few bytes and much work outside, many bytes and little work in the middle.
    "unet_like": [([2 * MIB] * 6, 3.0)] * 4
    + [([8 * MIB] * 10, 1.5)] * 6
    + [([32 * MIB] * 12, 1.0)] * 8
    + [([8 * MIB] * 10, 1.5)] * 6
    + [([2 * MIB] * 6, 3.0)] * 4,
}


# ---- groups


def test_units_are_cut_into_runs_up_to_the_limit() -> None:
    assert cut([], 6) == []
    assert cut(units(3, 3, 9), 6) == [(0, 2), (2, 3)]
    assert cut(units(3, 3, 3), 6) == [(0, 2), (2, 3)]
    assert cut(units(9, 1, 1), 6) == [(0, 1), (1, 3)]
    assert cut(units(1, 1, 1), 100) == [(0, 3)]


def test_without_a_limit_units_are_cut_into_layers() -> None:
    mixed = [UnitSpec("a", None, 1), UnitSpec("b", None, 1), *units(5, 5, layer="0"), *units(5, layer="1")]
    assert cut(mixed, None) == [(0, 1), (1, 2), (2, 4), (4, 5)]


def test_a_run_does_not_cross_a_chunk_of_host_memory() -> None:
    assert cut([*units(1, 1, layer="0"), *units(1, layer="0", chunk=1)], 100) == [(0, 2), (2, 3)]
    assert cut([*units(1, 1, layer="0"), *units(1, layer="0", chunk=1)], None) == [(0, 2), (2, 3)]


def test_uses_of_units_fold_into_uses_of_groups() -> None:
    runs = [(0, 2), (2, 3)]
    assert group_uses([0, 1, 2], runs) == [(0, 0, 2), (1, 2, 3)]
    assert group_uses([0, 1, 0, 2, 1], runs) == [(0, 0, 3), (1, 3, 4), (0, 4, 5)]
    assert group_uses([], runs) == []


def test_times_of_units_fold_into_times_of_groups() -> None:
    spec = ComponentSpec("c", tuple(units(4, 4, 8)), (0, 1, 2), 0, 16, busy=(1.0, 2.0, 4.0), gap=(0.5, 0.25, 0.125))
    line = timeline(spec, [(0, 2), (2, 3)], LINK)
    assert line == Timeline((0, 1), (3.5, 4.0), (0.25, 0.125))
    assert line.compute == 7.875


def test_times_that_were_not_measured_follow_the_bytes() -> None:
    spec = ComponentSpec("c", tuple(units(4, 4, 8)), (0, 1, 2), 0, 16)
    line = timeline(spec, [(0, 2), (2, 3)], Link(16.0, 0.0))
    assert line.hold[0] == pytest.approx(line.hold[1])
    assert line.compute == pytest.approx(1 / 1.5)


# ---- the peak


def part(name: str, resident: list[int], streamed: list[int], residency: Residency, fixed: int = 0) -> ComponentPlan:
    sizes = [(size, True) for size in resident] + [(size, False) for size in streamed]
    groups = tuple(GroupPlan(f"g{i}", i, i + 1, size, kept) for i, (size, kept) in enumerate(sizes))
    return ComponentPlan(name, Choice.LAYERWISE, groups, fixed, sum(size for size, _ in sizes) + fixed, residency)


def test_the_peak_is_ring_and_fixed_and_lasting_and_the_largest_use() -> None:
    parts = (
        part("a", [1000, 2000], [500], Residency.USE, fixed=100),
        part("b", [2500], [700], Residency.USE),
        part("c", [4000], [], Residency.LASTING, fixed=50),
    )
    plan = OffloadPlan(Mode.AUTO, parts, slot_bytes=1024, slots=3)
    assert [p.resident_bytes for p in parts] == [3000 + 2 * A, 2500 + A, 4000 + A]
    assert [p.fixed_bytes for p in parts] == [100 + A, 0, 50 + A]
    assert [p.streamed_bytes for p in parts] == [500, 700, 0]
    assert [p.largest_streamed for p in parts] == [500, 700, 0]
    assert plan.ring_bytes == 3 * 1024 + A
    assert plan.peak_bytes == (3 * 1024 + A) + (100 + A + 50 + A) + (4000 + A) + (3000 + 2 * A)
    alternating = dataclasses.replace(plan, together=(frozenset("ab"),))
    assert alternating.peak_bytes == plan.peak_bytes + 2500 + A
    assert plan.component("b") is parts[1]
    with pytest.raises(KeyError):
        plan.component("d")


def test_a_plan_without_streams_has_no_ring() -> None:
    plan = OffloadPlan(Mode.AUTO, (part("a", [1000], [], Residency.LASTING),), slot_bytes=0, slots=0)
    assert plan.ring_bytes == 0
    assert plan.peak_bytes == 1000 + A


# ---- the simulated pass: one second per 100 bytes

SECOND = Link(100.0, 0.0)


def run(sizes: list[int], groups: str, hold: float, slots: int, resident: str = "", gap: float = 0.0) -> Any:
    order = tuple("abc".index(letter) for letter in groups)
    line = Timeline(order, (hold,) * len(order), (gap,) * len(order))
    kept = ["abc"[i] in resident for i in range(len(sizes))]
    return simulate(line, sizes, kept, 100, slots, SECOND)


@pytest.mark.parametrize(
    ("sizes", "groups", "hold", "slots", "resident", "step", "stalls"),
    [
        # Two slots, compute as slow as copies: one group is copied while another computes.
        ([100] * 3, "abc", 1.0, 2, "", 3.0, (0.0, 0.0, 0.0)),
        # One slot: copy and compute take turns.
        ([100] * 3, "abc", 1.0, 1, "", 6.0, (1.0, 1.0, 1.0)),
        # Compute-bound: copies hide.
        ([100] * 3, "abc", 2.0, 2, "", 6.0, (0.0, 0.0, 0.0)),
        # Everything resident.
        ([100] * 3, "abc", 1.0, 2, "abc", 3.0, (0.0, 0.0, 0.0)),
        # Half-second groups: the link sets the pace, each group waits for its copy.
        ([100] * 3, "abc", 0.5, 2, "", 3.0, (0.5, 0.5, 0.5)),
        # a is copied behind c's compute, b waits half a second longer.
        ([100] * 3, "abc", 0.5, 2, "c", 2.0, (0.0, 0.5, 0.0)),
        # b takes both slots: it waits for a to be done, and a for b.
        ([100, 200], "ab", 1.0, 2, "", 5.0, (1.0, 2.0)),
        # a is loaded for each of its uses, into the slot that it isn't using.
        ([100, 100], "aba", 1.0, 2, "", 3.0, (0.0, 0.0, 0.0)),
    ],
)
def test_a_pass_takes_what_the_hand_works_out(
    sizes: list[int], groups: str, hold: float, slots: int, resident: str, step: float, stalls: tuple[float, ...]
) -> None:
    outcome = run(sizes, groups, hold, slots, resident)
    assert outcome.step == pytest.approx(step)
    assert outcome.stalls == pytest.approx(stalls)


def test_time_between_groups_hides_copies_and_latency_adds_to_each() -> None:
    assert run([100] * 3, "abc", 1.0, 1, gap=1.0).step == pytest.approx(6.0)
    line = Timeline((0, 1, 2), (0.5,) * 3, (0.0,) * 3)
    assert simulate(line, [100] * 3, [False] * 3, 100, 2, Link(100.0, 0.25)).step == pytest.approx(3.75)


@pytest.mark.parametrize(
    ("reads", "hold", "slots", "step"),
    [
        # All from a disk at half the link's pace: the disk sets it, copies and compute hide behind it.
        ((2.0, 2.0, 2.0), 1.0, 2, 6.0),
        # With one slot, reading and computing take turns.
        ((2.0, 2.0, 2.0), 1.0, 1, 9.0),
        # Compute-bound: reads hide.
        ((2.0, 2.0, 2.0), 3.0, 2, 9.0),
        # One group from the disk: the others' copies don't wait for its read.
        ((0.0, 0.0, 2.0), 1.0, 3, 3.0),
    ],
)
def test_reads_from_a_disk_are_a_queue_of_their_own(
    reads: tuple[float, ...], hold: float, slots: int, step: float
) -> None:
    line = Timeline((0, 1, 2), (hold,) * 3, (0.0,) * 3, reads)
    assert simulate(line, [100] * 3, [False] * 3, 100, slots, SECOND).step == pytest.approx(step)


def from_disk(spec: ComponentSpec, read: Callable[[int], bool]) -> ComponentSpec:
    """The same component with some units in files."""
    return dataclasses.replace(
        spec, units=tuple(dataclasses.replace(u, is_read=read(i)) for i, u in enumerate(spec.units))
    )


def test_a_plan_keeps_what_comes_from_a_slow_disk_and_reads_ahead_of_the_rest() -> None:
    size = 64 * MIB
    flat = tuple(UnitSpec(f"u{i}", str(i), size) for i in range(24))
    spec = ComponentSpec("a", flat, tuple(range(24)), 0, 24 * size, busy=(0.01,) * 24, gap=(0.0,) * 24)
    request = Request(Mode.SPEED, 12 * size, 0, link=Link(22e9, 1e-5, 2e9))
    plans = [make_plan([from_disk(spec, read)], request) for read in (lambda _: False, lambda i: i % 2, lambda _: True)]
    nothing, half, everything = (plan.components[0] for plan in plans)
    assert nothing.step is not None
    assert half.step is not None
    assert everything.step is not None
    assert nothing.step < half.step < everything.step
    # Most of what is resident would have to be read.
    kept = [unit for g in half.groups if g.resident for unit in half.units[g.start : g.stop]]
    assert sum(unit.is_read for unit in kept) > len(kept) / 2
    assert everything.step == pytest.approx(everything.read_seconds, rel=0.05)
    assert everything.read_bytes == everything.streamed_bytes
    assert "read from files in" in str(plans[2])
    assert (nothing.read_bytes, nothing.read_seconds) == (0, 0.0)


# ---- placement


def flat(count: int) -> Timeline:
    return Timeline(tuple(range(count)), (1.0,) * count, (0.0,) * count)


def kept(line: Timeline, sizes: list[int], budget: int, how: Placement, most: int | None = None) -> list[int]:
    return [i for i, resident in enumerate(place(line, sizes, budget, how, most)) if resident]


def test_a_prefix_is_the_first_groups() -> None:
    assert kept(flat(8), [100] * 8, 3 * (100 + A), Placement.PREFIX) == [0, 1, 2]
    assert kept(flat(8), [100] * 8, 3 * (100 + A) - 1, Placement.PREFIX) == [0, 1]
    assert kept(flat(8), [100] * 8, 1 << 40, Placement.PREFIX, most=2) == [0, 1]


@pytest.mark.parametrize("how", list(Placement))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 0.99, 1.0])
def test_the_budget_is_kept_and_used(how: Placement, share: float) -> None:
    rng = random.Random(1)
    sizes = [rng.choice([100, 500, 2000]) for _ in range(40)]
    line = Timeline(tuple(range(40)), tuple(rng.random() for _ in sizes), (0.0,) * 40)
    total = sum(size + A for size in sizes)
    budget = int(share * total)
    found = kept(line, sizes, budget, how)
    used = sum(sizes[i] + A for i in found)
    assert used <= budget
    left = [sizes[i] + A for i in range(40) if i not in found]
    assert not left or used + min(left) > budget


@pytest.mark.parametrize("how", [Placement.SPREAD, Placement.STALL])
def test_even_groups_are_spread_evenly(how: Placement) -> None:
    for count in (3, 6):
        found = kept(flat(12), [100] * 12, count * (100 + A), how)
        gaps = {b - a for a, b in zip(found, [*found[1:], found[0] + 12], strict=True)}
        assert len(found) == count
        assert gaps == {12 // count}


@pytest.mark.parametrize("how", list(Placement))
@pytest.mark.parametrize("most", [0, 1, 5, 11, 12, 50])
def test_a_count_is_kept_exactly(how: Placement, most: int) -> None:
    assert len(kept(flat(12), [100] * 12, 1 << 40, how, most)) == min(most, 12)


def test_what_streams_keeps_pace_with_compute() -> None:
    """The first half has four times the bytes at equal work: its groups become resident, and hardly any other."""
    sizes = [4000] * 10 + [1000] * 10
    found = kept(flat(20), sizes, 6 * (4000 + A), Placement.STALL)
    assert sum(i < 10 for i in found) >= 5
    assert found != [0, 1, 2, 3, 4, 5]


def test_a_group_that_is_used_often_in_a_pass_becomes_resident_first() -> None:
    line = Timeline((0, 1, 2, 1, 3, 1), (1.0,) * 6, (0.0,) * 6)
    assert kept(line, [100] * 4, 100 + A, Placement.STALL) == [1]


# ---- the search


def plan_of(specs: list[ComponentSpec], mode: Mode, budget: int | None) -> OffloadPlan:
    return make_plan(specs, Request(mode, budget, link=LINK))


@pytest.mark.parametrize("ratio", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ninths", [[0, 4, 9], pytest.param(range(10), marks=pytest.mark.slow)], ids=["few", "all"])
def test_auto_is_within_the_budget_and_never_slower_than_the_other_modes(
    ninths: Sequence[int], shape: str, ratio: float
) -> None:
    """Budgets from the smallest that works to one for everything."""
    spec = component(shape, SHAPES[shape], ratio)
    least = smallest_peak([spec])
    for ninth in ninths:
        budget = least + (spec.size + 4096 - least) * ninth // 9
        plans = {mode: plan_of([spec], mode, budget) for mode in (Mode.AUTO, Mode.MEMORY, Mode.SPEED)}
        assert all(plan.peak_bytes <= budget for plan in plans.values())
        steps = {mode: steady_step(spec, plan, LINK) for mode, plan in plans.items()}
        assert steps[Mode.AUTO] <= 1.0001 * min(steps.values()), (ninth, steps)
        bound = max(sum(spec.busy or ()), (spec.size - plans[Mode.AUTO].peak_bytes) / LINK.bandwidth)
        assert steps[Mode.AUTO] >= 0.999 * bound


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.SPEED])
def test_everything_is_resident_exactly_when_it_fits(mode: Mode) -> None:
    specs = [component("a", SHAPES["uniform"]), component("b", [([MIB] * 4, 1.0)] * 8)]
    all_of_it = plan_of(specs, mode, None)
    assert all_of_it.slots == 0
    assert all(group.resident for part in all_of_it.components for group in part.groups)
    assert {part.residency for part in all_of_it.components} == {Residency.LASTING}
    assert plan_of(specs, mode, all_of_it.peak_bytes).slots == 0
    in_turn = plan_of(specs, mode, all_of_it.peak_bytes - 1)
    assert {part.residency for part in in_turn.components} == {Residency.USE}
    assert in_turn.peak_bytes < all_of_it.peak_bytes
    alone = plan_of(specs[:1], mode, None).peak_bytes
    assert plan_of(specs[:1], mode, alone).slots == 0
    assert plan_of(specs[:1], mode, alone - 1).slots > 0


def test_memory_mode_keeps_nothing_and_has_two_slots_of_the_largest_unit() -> None:
    plan = plan_of([component("a", SHAPES["flux_like"])], Mode.MEMORY, None)
    assert (plan.slots, plan.slot_bytes) == (2, 72 * MIB)
    assert plan.peak_bytes == 2 * 72 * MIB + A
    assert not any(group.resident for group in plan.components[0].groups)


MOST = [Choice.LAYERWISE] * 4 + [Choice.RESIDENT]
ANY = [*MOST, Choice.OFFLOAD]


def random_specs(rng: random.Random, choices: list[Choice], explicit: bool, **config: Any) -> list[ComponentSpec]:
    """Some components; `explicit`: one of them says how much of it is resident."""
    found = []
    for index in range(rng.choice([1, 1, 2, 3])):
        layers = [
            ([A * rng.choice([1, 4, 16, 64, 64, 256])] * rng.randint(1, 3), 1.0) for _ in range(rng.randint(1, 5))
        ]
        choice = Choice.LAYERWISE if explicit and not index else rng.choice(choices)
        own = {"resident": rng.choice([0, 1, 3, 0.3, 1.0])} if explicit and not index else {}
        spec = component(f"c{index}", layers, choice=choice, config=LayerwiseOffloadConfig(**config, **own))
        found.append(dataclasses.replace(spec, fixed=rng.choice([0, 3 * A])))
    return found


def fits(plan: OffloadPlan, budget: int | None) -> bool:
    """Whether a plan takes no more than its budget, and no group more than the ring."""
    largest = max(part.largest_streamed for part in plan.components)
    return (budget is None or plan.peak_bytes <= budget) and largest <= plan.slots * plan.slot_bytes


def named(error: torch.OutOfMemoryError) -> int:
    """The budget that the message says."""
    return int(re.search(r"smallest budget that works is (\d+) bytes", str(error))[1])


def check_random_plans(choices: list[Choice] = MOST, **config: Any) -> None:
    """The smallest peak works, one byte less doesn't, and every plan fits."""
    rng = random.Random(0)
    for _ in range(60):
        specs = random_specs(rng, choices, explicit=False, **config)
        least = smallest_peak(specs)
        for mode in Mode:
            for budget in (least, least + 50 * A, 2 * least, None):
                assert fits(plan_of(specs, mode, budget), budget)
            with pytest.raises(torch.OutOfMemoryError, match=f"smallest budget that works is {least} bytes"):
                plan_of(specs, mode, least - 1)


@pytest.mark.parametrize(
    "config",
    [{}, {"group_size": "layer"}, {"group_size": 5000}, {"prefetch": 2}, {"prefetch": "1KiB"}, {"prefetch": 0}],
    ids=str,
)
def test_the_smallest_peak_works_and_one_byte_less_does_not(config: dict[str, Any]) -> None:
    check_random_plans(**config)


def test_lasting_residents_of_all_components_fit_the_budget_together() -> None:
    check_random_plans(residency="lasting")


@pytest.mark.parametrize("config", [{}, {"residency": "lasting"}], ids=str)
def test_components_offloaded_as_a_whole_fit_the_budget_too(config: dict[str, Any]) -> None:
    check_random_plans(ANY, **config)


def test_components_offloaded_as_a_whole_fit_the_budget_in_the_modes_that_stream() -> None:
    rng = random.Random(0)
    for _ in range(60):
        specs = random_specs(rng, ANY, explicit=False)
        least = smallest_peak(specs)
        for mode in (Mode.MEMORY, Mode.MANUAL):
            assert all(fits(plan_of(specs, mode, budget), budget) for budget in (least, 2 * least, None))


def explicit_residents_are_kept(mode: Mode, **config: Any) -> None:
    """At any budget, or the one that the refusal names."""
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(**config))
    for tenth in range(1, 10):
        budget = spec.size * tenth // 10
        try:
            plan = plan_of([spec], mode, budget)
        except torch.OutOfMemoryError as error:
            budget, message = named(error), str(error)
            plan = plan_of([spec], mode, budget)
        assert budget == spec.size * tenth // 10 or "that config['resident'] asks for in 'a'" in message
        assert sum(group.resident for group in plan.components[0].groups) == config["resident"]
        assert fits(plan, budget)


@pytest.mark.parametrize("count", [0, 1, 10, 20])
@pytest.mark.parametrize("mode", list(Mode))
def test_explicit_residents_are_kept_or_refused_with_a_budget_that_works(mode: Mode, count: int) -> None:
    explicit_residents_are_kept(mode, resident=count, prefetch=1, group_size="48MiB")


@pytest.mark.parametrize("count", [1, 10, 20])
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.MEMORY, Mode.SPEED])
def test_explicit_residents_are_kept_or_refused_without_a_prefetch_too(mode: Mode, count: int) -> None:
    explicit_residents_are_kept(mode, resident=count, group_size="48MiB")


@pytest.mark.parametrize("count", [1, 10, 20])
def test_explicit_residents_come_before_a_deeper_ring_that_nobody_asked_for(count: int) -> None:
    explicit_residents_are_kept(Mode.MANUAL, resident=count, group_size="48MiB")


def test_explicit_residents_of_any_components_are_kept_or_refused_with_a_budget_that_works() -> None:
    rng = random.Random(0)
    for _ in range(60):
        specs = random_specs(rng, ANY, explicit=True)
        for mode in Mode:
            budget = smallest_peak(specs)
            try:
                plan = plan_of(specs, mode, budget)
            except torch.OutOfMemoryError as error:
                budget = named(error)
                plan = plan_of(specs, mode, budget)
            assert fits(plan, budget)


def test_everything_resident_by_name_works_at_the_budget_that_the_refusal_names() -> None:
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(resident=1.0))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        plan_of([spec], Mode.MANUAL, spec.size // 2)
    assert plan_of([spec], Mode.MANUAL, named(caught.value)).component("a").streamed_bytes == 0


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.SPEED])
def test_explicit_residents_of_one_component_leave_the_others_to_the_mode(mode: Mode) -> None:
    small = component("small", [([MIB] * 4, 1.0)] * 8, config=LayerwiseOffloadConfig(resident=2))
    plan = plan_of([component("large", SHAPES["uniform"]), small], mode, component("", SHAPES["uniform"]).size // 2)
    groups = plan.component("small").groups  # few, where the large component's slots hold most of the small one
    assert sum(group.resident for group in groups) == min(2, len(groups))


def test_explicit_residents_next_to_a_unit_that_is_larger_than_a_slot() -> None:
    layers = [([A * 256], 1.0), ([A * 16] * 3, 1.0), ([A] * 3, 1.0), ([A * 16], 1.0)]
    spec = dataclasses.replace(component("a", layers, config=LayerwiseOffloadConfig(resident=0.3)), fixed=3 * A)
    budget = 2 * smallest_peak([spec])
    assert fits(plan_of([spec], Mode.AUTO, budget), budget)


@pytest.mark.parametrize("mode", list(Mode))
def test_what_nobody_selected_is_resident_when_it_fits_and_else_offloaded_as_a_whole(mode: Mode) -> None:
    main = component("main", SHAPES["uniform"])
    rest = [
        dataclasses.replace(component(name, [([4 * MIB] * 4, 1.0)] * 4), choice=Choice.OFFLOAD, unselected=True)
        for name in ("b", "c")
    ]
    asked = dataclasses.replace(rest[0], name="d", unselected=False)
    specs = [main, *rest, asked]
    resident = [dataclasses.replace(spec, choice=Choice.RESIDENT) for spec in rest]
    enough = smallest_peak([main, *resident, asked])
    plan = plan_of(specs, mode, enough)
    assert [plan.component(name).choice for name in "bcd"] == [Choice.RESIDENT, Choice.RESIDENT, Choice.OFFLOAD]
    assert plan.component("b").residency is Residency.LASTING
    plan = plan_of(specs, mode, enough - 1)
    assert [plan.component(name).choice for name in "bcd"] == [Choice.OFFLOAD] * 3
    assert plan.component("b").residency is Residency.USE


@pytest.mark.parametrize("reserve", [None, 0, 1000, 3 << 30])
@pytest.mark.parametrize("weights", [1, 8, 9, 10, 4096, 123_456_789, 18 << 30, 200 << 30])
def test_the_total_for_some_weights_is_the_smallest_that_leaves_them_room(weights: int, reserve: int | None) -> None:
    total = Request(Mode.AUTO, 1, reserve).total_for(weights)
    assert Request(Mode.AUTO, total, reserve).budget >= weights
    assert Request(Mode.AUTO, total - 2, reserve).budget < weights


def test_the_total_for_some_weights_is_the_smallest_to_the_byte() -> None:
    total = Request(Mode.AUTO, 1, None).total_for(9_000)
    assert Request(Mode.AUTO, total - 1, None).budget < 9_000


def test_the_default_reserve_is_a_tenth_and_at_most_two_gibibytes() -> None:
    for total, reserve in ((1000, 100), (8 << 30, (8 << 30) // 10), (80 << 30, 2 << 30)):
        request = Request(Mode.AUTO, total, None)
        assert (request.reserved, request.budget) == (reserve, total - reserve)
    assert Request(Mode.AUTO, None, None).budget is None
    assert Request(Mode.AUTO, 1000, 0).budget == 1000


def test_prefetch_sets_the_number_of_slots() -> None:
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(prefetch=3))
    for mode in Mode:
        assert plan_of([spec], mode, spec.size // 2).slots == 4


def test_no_more_slots_than_groups() -> None:
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(prefetch=1000))
    assert plan_of([spec], Mode.MANUAL, None).ring_bytes < 2 * spec.size


def test_an_explicit_prefetch_that_does_not_fit_is_an_error() -> None:
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(prefetch=8, group_size="12MiB"))
    with pytest.raises(torch.OutOfMemoryError, match="can't hold") as caught:
        plan_of([spec], Mode.MANUAL, 40 * MIB)
    plan = plan_of([spec], Mode.MANUAL, named(caught.value))
    assert (plan.slots, plan.peak_bytes) == (9, named(caught.value))


@pytest.mark.parametrize(("ahead", "slots"), [("1MiB", 2), ("12MiB", 2), ("24MiB", 3), ("40MiB", 4), ("1GiB", 40)])
@pytest.mark.parametrize("mode", [Mode.MEMORY, Mode.MANUAL])
def test_prefetch_as_a_size_is_the_bytes_ahead(ahead: str, slots: int, mode: Mode) -> None:
    spec = component("a", [([12 * MIB], 1.0)] * 40, config=LayerwiseOffloadConfig(prefetch=ahead, group_size="12MiB"))
    assert plan_of([spec], mode, None).slots == slots


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_is_a_share_of_the_bytes(share: float) -> None:
    spec = component("a", SHAPES["uniform"], config=LayerwiseOffloadConfig(resident=share))
    part = plan_of([spec], Mode.MANUAL, None).components[0]
    assert part.resident_bytes <= share * (spec.size + A * len(part.groups))
    assert part.resident_bytes >= share * spec.size - max(group.size for group in part.groups)


def test_a_large_model_is_planned_with_a_bounded_number_of_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 units: each simulation takes some milliseconds, so that the count bounds the time."""
    spec = component("large", [([8 * MIB] * 10, 1.0)] * 60)
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[1]))
        return simulate(*args, **kwargs)

    monkeypatch.setattr(search, "simulate", counted)
    monkeypatch.setattr(placement, "simulate", counted)
    for share in (0.05, 0.3, 0.8):
        calls.clear()
        plan_of([spec], Mode.AUTO, int(share * spec.size))
        assert 0 < len(calls) <= 300
        assert max(calls) <= 600


def test_a_plan_can_be_printed() -> None:
    specs = [component("transformer", SHAPES["uniform"]), component("vae", [([MIB] * 4, 1.0)] * 2)]
    text = str(plan_of(specs, Mode.AUTO, specs[0].size // 2))
    assert text.splitlines()[0].startswith("plan: mode auto, peak ")
    assert text.splitlines()[0].endswith(" (provisional)")
    assert "ring of " in text
    assert "  transformer: layerwise, 1.88 GiB" in text
    assert "resident" in text
    assert "ms a pass predicted" in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["transformer", "vae"]
