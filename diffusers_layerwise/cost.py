"""From a trace and a device's speed to what a plan is made of, and from a plan to bytes and seconds. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from . import auto
from .config import LayerwiseOffloadConfig, Mode, Placement, Residency, format_bytes
from .hardware import Hardware
from .placement import place
from .plan import Choice, ComponentSpec, OffloadPlan, UnitSpec, joined
from .rings import runs_of, sizes_of
from .search import Request, make_plan, smallest_peak, steady_step
from .simulate import simulate, timeline
from .specs import UNPACKED
from .tensors import ALIGNMENT
from .trace import PassTrace, Trace, TracedComponent

#: A step this much longer than its compute still counts as streaming for free.
FREE = 1.01


def pass_times(
    traced: TracedComponent, one: PassTrace, hardware: Hardware
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """(order, busy, gap) of a pass: the units that it uses, and the seconds of each use and of what follows it.

    Modules whose weights stay resident count with what surrounds them. What runs before the first use counts as the gap
    after the last one, as when passes are measured.
    """
    order: list[int] = []
    busy: list[float] = []
    gap: list[float] = []
    before = hardware.seconds(one.head)
    for use in one.uses:
        unit = traced.leaves[use.leaf].unit
        inside, after = hardware.seconds(use.busy), hardware.seconds(use.gap)
        if unit is not None:
            order.append(unit)
            busy.append(inside)
            gap.append(after)
        elif gap:
            gap[-1] += inside + after
        else:
            before += inside + after
    if gap:
        gap[-1] += before
    return tuple(order), tuple(busy), tuple(gap)


def component_spec(
    traced: TracedComponent,
    hardware: Hardware,
    choice: Choice = Choice.LAYERWISE,
    config: LayerwiseOffloadConfig | None = None,
    unselected: bool = False,
) -> ComponentSpec:
    """A traced component as a plan sees it: units in execution order, with the times of its largest pass.

    Without a pass (the trace failed, or the call doesn't use it): in registration order and without times.
    """
    one = traced.largest_pass
    order, busy, gap = pass_times(traced, one, hardware) if one is not None else ((), (), ())
    used = list(dict.fromkeys(order))
    sequence = used + [index for index in range(len(traced.units)) if index not in set(used)]
    at = {index: position for position, index in enumerate(sequence)}
    # What no pass uses isn't packed with what is used, so no group has units of both.
    chunks = [0] * len(used) + [UNPACKED if used else 0] * (len(sequence) - len(used))
    found = zip((traced.units[i] for i in sequence), chunks, strict=True)
    units = tuple(UnitSpec(u.name, u.layer, u.size, chunk, can_gather=u.can_gather) for u, chunk in found)
    return ComponentSpec(
        traced.name,
        units,
        tuple(at[index] for index in order) if order else tuple(range(len(units))),
        traced.fixed,
        traced.weights,
        choice,
        config or LayerwiseOffloadConfig(),
        busy if order else None,
        gap if order else None,
        unselected,
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be planned: a traced call on a device under a mode.

    Args:
        reserve (`int`, *optional*): Bytes for activations, where the user says; else they come from the trace.
        policy (`Policy`, *optional*): What mode `"auto"` goes by.
    """

    trace: Trace
    specs: tuple[ComponentSpec, ...]
    hardware: Hardware
    mode: Mode
    residency: Residency = Residency.USE
    reserve: int | None = None
    policy: auto.Policy | None = None

    @property
    def together(self) -> tuple[frozenset[str], ...]:
        """Components that alternate, within a step or elsewhere (text encoders of two prompts), as when they run."""
        names = {s.name for s in self.specs if s.choice is Choice.LAYERWISE and s.units}
        names = {name for name in names if self._stays(name) is Residency.USE}
        sharing = alternating([name for name, _ in self.trace.sequence if name in names])
        step = frozenset(name for name, _ in self.trace.step_passes())
        found: set[frozenset[str]] = set()
        for sharers in [*sharing, step]:
            found = joined(found, sharers) if len(sharers) > 1 else found
        return tuple(sorted(found, key=sorted))

    def _stays(self, name: str) -> Residency:
        config = next(s.config for s in self.specs if s.name == name)
        return config.residency or self.residency

    @property
    def main(self) -> ComponentSpec | None:
        """The largest component that streams, or that would."""
        return max(
            (s for s in self.specs if s.choice is Choice.LAYERWISE and s.units), key=lambda s: s.size, default=None
        )

    def activation(self, name: str) -> int:
        """The activation peak of a component's passes."""
        return self.trace.component(name).activation_peak

    @property
    def most_activation(self) -> int:
        """The most bytes of activations at any time."""
        return max([self.trace.outside_peak, *(c.activation_peak for c in self.trace.components)])

    @property
    def needs(self) -> auto.Needs:
        """What activations need, component by component."""
        return auto.Needs({c.name: c.activation_peak for c in self.trace.components}, self.trace.outside_peak)

    def plan(self, request: Request) -> OffloadPlan:
        """The plan for a request, as the mode and the profile have it."""
        return auto.carry_out(auto.decide(self.specs, request, self.policy), self.specs, request)

    def request(self, total: int | None, reserve: int, mode: Mode | None = None) -> Request:
        """The search's request."""
        shape = (self.residency, self.hardware.link, self.together)
        return Request(mode or self.mode, total, reserve, *shape, provisional=False)


def alternating(passes: Iterable[str]) -> list[frozenset[str]]:
    """Pairs of components of which each ends the other's use in one call.

    Args:
        passes (`Iterable[str]`): Whose passes begin, in order.

    Example:
        >>> [sorted(pair) for pair in alternating(["clip", "t5", "clip", "unet", "vae"])]
        [['clip', 't5']]
    """
    holder: str | None = None
    ended: set[str] = set()
    found: list[frozenset[str]] = []
    for name in passes:
        if holder not in (None, name):
            assert holder is not None
            ended.add(holder)
            if name in ended:
                found.append(frozenset([name, holder]))
        holder = name
    return found


# ---------------------------------------------------------------------- bytes
def total_peak(plan: OffloadPlan, problem: Problem) -> tuple[int, str]:
    """(bytes, where): the most device memory of a call, weights and activations, and the component at which it is."""
    return auto.total_peak(plan, problem.needs)


def smallest_budget(problem: Problem) -> tuple[int, str]:
    """(bytes, where): the smallest budget that any plan runs in, and the component that decides it."""
    least = smallest_peak(problem.specs, problem.residency)
    plan = make_plan(problem.specs, problem.request(least, 0))
    peak, where = total_peak(plan, problem)
    if problem.reserve is not None:
        return least + problem.reserve, where
    return max(peak, least), where


def solve(problem: Problem, total: int | None) -> OffloadPlan:
    """The plan for a budget, with room for activations as they are traced.

    Raises:
        torch.OutOfMemoryError: The budget is too small; the message says the smallest that works.
    """
    if total is None:
        return make_plan(problem.specs, problem.request(None, problem.reserve or 0))
    least, where = smallest_budget(problem)
    if total < least:
        raise too_small(problem, total, least, where)
    if problem.reserve is not None:
        return problem.plan(problem.request(total, problem.reserve))
    return auto.with_room(problem.specs, problem.request(total, 0), problem.needs, problem.plan)


def too_small(problem: Problem, total: int, least: int, where: str) -> torch.OutOfMemoryError:
    """The error for a budget below the smallest."""
    tiled = problem.trace.tiled.get(where)
    hint = f" pipe.{where}.enable_tiling() lowers that to {format_bytes(tiled.peak)}." if tiled else ""
    needs = problem.activation(where) if where != "the pipeline" else problem.trace.outside_peak
    return torch.OutOfMemoryError(
        f"A memory budget of {format_bytes(total)} is too small for this call: at {where!r}, activations take "
        f"{format_bytes(needs)} beside the weights that must be on the device. The smallest budget that works is "
        f"{least} bytes ({format_bytes(least)}). Pass memory_budget={least} or more, or a smaller size or "
        f"batch.{hint}"
    )


def resident_budget(problem: Problem) -> int:
    """The budget from which on everything is resident."""
    specs = [s if s.choice is Choice.SKIP else dataclasses.replace(s, choice=Choice.RESIDENT) for s in problem.specs]
    return smallest_peak(specs, problem.residency) + problem.most_activation


# ---------------------------------------------------------------------- seconds
@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of one component under a plan: a pass in steady state, the first pass of a call, all passes, compute alone."""

    step: float
    first: float
    call: float
    compute: float


def component_seconds(
    traced: TracedComponent, spec: ComponentSpec, plan: OffloadPlan, hardware: Hardware
) -> Seconds | None:
    """Times of a component's passes; None where none was traced.

    In the first pass of a call resident groups are loaded as well, unless they last: it takes at least as long as all
    bytes take over the link. The other passes are simulated.
    """
    if spec.busy is None:
        return None
    part = plan.component(spec.name)
    used = set(spec.order)
    needed = sum(g.size for g in part.groups if not used.isdisjoint(range(g.start, g.stop)))
    read = sum(unit.size for position, unit in enumerate(part.units) if unit.is_read and position in used)
    loads = (
        max(needed / hardware.pinned, read / hardware.disk)
        if part.residency is Residency.USE or part.streamed_bytes
        else 0.0
    )
    steps: list[tuple[int, float, float]] = []
    sequence = {unit.name: position for position, unit in enumerate(spec.units)}
    for one in traced.passes:
        order, busy, gap = pass_times(traced, one, hardware)
        if not order:
            seconds = hardware.seconds(one.cost)
            steps.append((one.count, seconds, seconds))
            continue
        places = tuple(sequence[traced.units[unit].name] for unit in order)
        line = dataclasses.replace(spec, order=places, busy=busy, gap=gap)
        steps.append((one.count, steady_step(line, plan, hardware.link), sum(busy) + sum(gap)))
    largest = max(steps, key=lambda item: item[2])
    first = max(steps[0][1], loads)
    call = sum(count * step for count, step, _ in steps) - steps[0][1] + first
    return Seconds(largest[1], first, call, sum(count * compute for count, _, compute in steps))


def step_seconds(problem: Problem, plan: OffloadPlan) -> tuple[float, float] | None:
    """(seconds, compute) of one step of the pipeline: its passes between two steps of the scheduler."""
    passes = problem.trace.step_passes()
    seconds = compute = 0.0
    specs = {spec.name: spec for spec in problem.specs}
    for name, kind in passes:
        traced, spec = problem.trace.component(name), specs.get(name)
        if spec is None:
            continue
        order, busy, gap = pass_times(traced, traced.passes[kind], problem.hardware)
        if not order:
            continue
        at = {unit.name: position for position, unit in enumerate(spec.units)}
        places = tuple(at[traced.units[unit].name] for unit in order)
        line = dataclasses.replace(spec, order=places, busy=busy, gap=gap)
        seconds += steady_step(line, plan, problem.hardware.link)
        compute += sum(busy) + sum(gap)
    return (seconds, compute) if seconds else None


def free_budget(problem: Problem, plan: OffloadPlan) -> int | None:
    """About the smallest budget at which streaming costs nothing: a step takes its compute. None where there is none.

    Found by halving, for the plan's ring and some common ones, with residents chosen by pace, then for the plans
    themselves, which have more to hold (several denoisers, a profile's residents).
    """
    main = problem.main
    if main is None or main.busy is None:
        return None
    usual = min(max(main.largest_layer_unit // 2, 16 << 20), 64 << 20, max(1, main.size // 8))
    rings = {(usual, 4), (usual, 8), (main.largest_layer_unit, 4)}
    rings |= {(plan.slot_bytes, plan.slots)} if plan.slots else set()
    least = min(_free_weights(main, slot, count, problem.hardware) for slot, count in rings)
    needed = least + sum(spec.fixed for spec in problem.specs) + problem.activation(main.name)
    low, high = max(needed, smallest_budget(problem)[0]), resident_budget(problem)
    if low >= high or _is_free(problem, low):
        return min(low, high)
    if not _is_free(problem, high):
        return None
    while high - low > high // 64:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_free(problem, middle) else (middle, high)
    return high


def _is_free(problem: Problem, budget: int) -> bool:
    step = step_seconds(problem, solve(problem, budget))
    return step is None or step[0] <= FREE * step[1]


def _free_weights(main: ComponentSpec, slot: int, slots: int, hardware: Hardware) -> int:
    """The fewest bytes for a ring and residents with which a pass takes its compute."""
    runs = runs_of(main, slot)
    sizes = sizes_of(main, runs)
    line = timeline(main, runs, hardware.link)
    count = max(slots, -(-max(sizes) // slot))
    low, high = 0, sum(sizes) + ALIGNMENT * len(sizes)
    while high - low > max(ALIGNMENT, sum(sizes) // 256):
        middle = (low + high) // 2
        resident = place(line, sizes, middle, Placement.STALL)
        step = simulate(line, sizes, resident, slot, count, hardware.link).step
        low, high = (low, middle) if step <= FREE * line.compute else (middle, high)
    return high + slot * count


def all_seconds(problem: Problem, plan: OffloadPlan) -> Mapping[str, Seconds | None]:
    """The times of every component."""
    specs = {spec.name: spec for spec in problem.specs}
    return {
        c.name: component_seconds(c, specs[c.name], plan, problem.hardware)
        for c in problem.trace.components
        if c.name in specs
    }
