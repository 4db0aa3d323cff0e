"""From component specs and a budget to a plan: a search over group size, slots and residents. Pure.

The largest streamed component decides the ring; the others cut their groups to fit its slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from .config import Mode, Placement, Residency, format_bytes, parse_bytes
from .placement import place, refine
from .plan import Choice, ComponentPlan, ComponentSpec, GroupPlan, OffloadPlan, cut
from .simulate import Link, Timeline, simulate, timeline
from .tensors import ALIGNMENT, align

MIB = 1 << 20
#: Group sizes worth trying on top of the component's own unit and layer sizes.
GROUP_SIZES = (16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
SLOT_COUNTS = (1, 2, 3, 4, 6, 8)
#: Candidates that are refined by simulation after a first ranking.
FINALISTS = 3
#: Pieces in which a component that stays whole is loaded, so that its copies overlap with its own first pass.
WHOLE_PIECE = 256 * MIB


@dataclasses.dataclass(frozen=True)
class Request:
    """All that a plan depends on besides the components.

    Args:
        budget (`int`, *optional*): Device bytes for weights, the reserve taken off already. None: no limit known.
        residency (`Residency`): How long resident groups stay, unless a component's config says otherwise.
        together (`Sequence[frozenset[str]]`): Components that alternate within a step share the budget.
    """

    mode: Mode
    budget: int | None
    reserve: int = 0
    residency: Residency = Residency.USE
    link: Link = dataclasses.field(default_factory=Link)
    together: tuple[frozenset[str], ...] = ()
    provisional: bool = True


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A ring to try: groups are cut to `limit` bytes; where `small` is set, larger ones are resident, not streamed."""

    slot_bytes: int
    count: int
    limit: int | None
    small: bool = False

    @property
    def largest(self) -> int | None:
        """Bytes above which a group must be resident, or None when it may take several slots."""
        return self.slot_bytes if self.small else None

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count + ALIGNMENT if self.count else 0


def smallest_peak(specs: Sequence[ComponentSpec], request: Request) -> int:
    """The least device bytes that any plan for these components takes: one slot for the largest unit, nothing resident.

    Whole components (`resident`, `offload`) count in full.
    """
    streamed = [s for s in specs if s.choice is Choice.LAYERWISE]
    unit = max((s.largest_unit for s in streamed), default=0)
    ring = align(unit) + ALIGNMENT if unit else 0
    return ring + _set_aside(specs) + _whole_in_use(specs)


def make_plan(specs: Sequence[ComponentSpec], request: Request) -> OffloadPlan:
    """Makes the plan for a pipeline's components.

    Args:
        specs (`Sequence[ComponentSpec]`): The components; their `choice` and `config` are respected.
        request (`Request`): Mode, budget, link.

    Raises:
        torch.OutOfMemoryError: No plan fits the budget; the message says the smallest that works.
    """
    budget = request.budget
    least = smallest_peak(specs, request)
    if budget is not None and least > budget:
        raise torch.OutOfMemoryError(
            f"A memory budget of {format_bytes(budget + request.reserve)} (of which {format_bytes(request.reserve)} "
            f"are reserved for activations) can't hold the largest module and what must stay resident: the smallest "
            f"budget that works is {least + request.reserve} bytes ({format_bytes(least + request.reserve)}). Pass "
            f"memory_budget={least + request.reserve} or more, or a smaller config['activation_reserve']."
        )
    if request.mode in (Mode.AUTO, Mode.SPEED) and _all_fit(specs, budget):
        return _plan(specs, request, _Ring(0, 0, WHOLE_PIECE), all_resident=True)
    streamed = [s for s in specs if s.choice is Choice.LAYERWISE and s.units]
    if not streamed:
        return _plan(specs, request, _Ring(0, 0, WHOLE_PIECE))
    main = max(streamed, key=lambda s: s.size)
    ring = _best_ring(main, streamed, specs, request)
    return _plan(specs, request, ring)


def _set_aside(specs: Sequence[ComponentSpec]) -> int:
    """Bytes that are held whoever runs: fixed weights of all, and whole resident components."""
    fixed = sum(s.fixed + ALIGNMENT for s in specs if s.fixed and s.choice is not Choice.SKIP)
    return fixed + sum(_whole(s) for s in specs if s.choice is Choice.RESIDENT)


def _whole(spec: ComponentSpec) -> int:
    runs = cut(spec.units, WHOLE_PIECE)
    return spec.size + ALIGNMENT * len(runs)


def _whole_in_use(specs: Sequence[ComponentSpec]) -> int:
    return max((_whole(s) for s in specs if s.choice is Choice.OFFLOAD), default=0)


def _all_fit(specs: Sequence[ComponentSpec], budget: int | None) -> bool:
    if any(s.config.resident is not None or s.config.prefetch is not None for s in specs):
        return False
    if budget is None:
        return True
    layerwise = sum(_whole(s) for s in specs if s.choice is Choice.LAYERWISE)
    return layerwise + _set_aside(specs) + _whole_in_use(specs) <= budget


# ---------------------------------------------------------------------- the ring
def _best_ring(
    main: ComponentSpec, streamed: Sequence[ComponentSpec], specs: Sequence[ComponentSpec], request: Request
) -> _Ring:
    scored: list[tuple[float, int, _Ring]] = []
    fallback: _Ring | None = None
    for ring in _candidates(main, streamed, request):
        room = _room(specs, request, ring)
        if room is not None and room < 0:
            continue
        if ring.small and any(_forced(s, ring) > _share(s, room, request) for s in streamed):
            continue
        if request.mode in (Mode.MEMORY, Mode.MANUAL):
            return ring
        fallback = fallback or ring
        step = _score(main, ring, room, request)
        scored.append((step, ring.nbytes, ring))
    scored.sort(key=lambda item: item[:2])
    best: tuple[float, int, _Ring] | None = None
    for _, _, ring in scored[:FINALISTS]:
        step = _component(main, ring, _room(specs, request, ring), request).step or 0.0
        if best is None or (step, ring.nbytes) < best[:2]:
            best = (step, ring.nbytes, ring)
    if best is not None:
        return best[2]
    largest = align(max(s.largest_unit for s in streamed))
    return fallback or _Ring(largest, 1, largest)


def _candidates(main: ComponentSpec, streamed: Sequence[ComponentSpec], request: Request) -> Iterator[_Ring]:
    """Rings worth trying, the preferred one first; each is large enough for every component's largest group."""
    config = main.config
    unit = max(s.largest_layer_unit for s in streamed)
    sizes = _slot_sizes(main, unit, request)
    counts: tuple[int, ...] = SLOT_COUNTS
    if config.prefetch is not None:
        counts = (0,)
    elif request.mode is Mode.MEMORY:
        counts = (2, 1)
    elif request.mode is Mode.MANUAL:
        counts = (2,) if config.group_size == "layer" else (4,)
    for size, limit in sizes:
        for wanted in counts:
            count = wanted or _ahead(config.prefetch, size) + 1
            largest = max(b for s in streamed for b in _sizes(s, cut(s.units, limit)))
            yield _Ring(size, max(count, -(-largest // size)), limit)
            if largest > size and request.mode in (Mode.AUTO, Mode.SPEED):
                yield _Ring(size, count, limit, small=True)
    if request.mode is not Mode.MANUAL:
        largest = align(max(s.largest_unit for s in streamed))
        yield _Ring(largest, 1, largest)


def _ahead(prefetch: int | str | None, slot_bytes: int) -> int:
    """Slots beyond the one in use: a number of groups, or as many as the bytes take."""
    if isinstance(prefetch, str):
        return max(1, parse_bytes(prefetch, "config.prefetch") // slot_bytes)
    return prefetch or 0


def _slot_sizes(main: ComponentSpec, unit: int, request: Request) -> list[tuple[int, int | None]]:
    """(slot bytes, cut limit) pairs."""
    config = main.config
    layer = max(_sizes(main, cut(main.units, None)), default=unit)
    if config.group_size == "layer":
        return [(align(layer), None)]
    if isinstance(config.group_size, int):
        return [(align(config.group_size), align(config.group_size))]
    if request.mode is Mode.MEMORY:
        return [(align(unit), align(unit))]
    default = min(max(align(unit), 64 * MIB), max(align(unit), align(main.size // 16)))
    if request.mode is Mode.MANUAL:
        return [(default, default)]
    own = {align(unit), align(unit // 2), align(unit // 4), align(2 * unit)}
    own |= {align(main.size // 32), align(main.size // 64)}
    fitting = {size for size in GROUP_SIZES if unit // 4 <= size <= main.size // 8}
    found = sorted(size for size in own | fitting | {align(layer)} if size <= main.size)
    found = [size for size in found if size * 512 >= main.size] or found
    return [(size, size) for size in [default, *(size for size in found if size != default)]]


def _forced(spec: ComponentSpec, ring: _Ring) -> int:
    """Device bytes of a component's groups that are too large for a ring of small slots."""
    sizes = _sizes(spec, cut(spec.units, ring.limit))
    return sum(size + ALIGNMENT for size in sizes if size > ring.slot_bytes)


def _room(specs: Sequence[ComponentSpec], request: Request, ring: _Ring) -> int | None:
    """Bytes left for resident groups of the components in use; negative when the ring doesn't fit."""
    if request.budget is None:
        return None
    room = request.budget - ring.nbytes - _set_aside(specs)
    return room if room >= _whole_in_use(specs) else -1


def _score(main: ComponentSpec, ring: _Ring, room: int | None, request: Request) -> float:
    runs = cut(main.units, ring.limit)
    sizes = _sizes(main, runs)
    line = timeline(main, runs, request.link)
    resident = place(line, sizes, _share(main, room, request), Placement.STALL, None, ring.largest)
    return simulate(line, sizes, resident, ring.slot_bytes, ring.count, request.link).step


# ---------------------------------------------------------------------- the components
def _plan(specs: Sequence[ComponentSpec], request: Request, ring: _Ring, all_resident: bool = False) -> OffloadPlan:
    room = _room(specs, request, ring)
    if all_resident:
        planned = [_whole_plan(s, request, Residency.LASTING) for s in specs]
    else:
        planned = [_component(s, ring, room, request) for s in specs]
    streams = any(c.largest_streamed for c in planned)
    return OffloadPlan(
        request.mode,
        tuple(planned),
        ring.slot_bytes if streams else 0,
        ring.count if streams else 0,
        request.budget,
        request.reserve,
        request.together,
        request.provisional,
    )


def _component(spec: ComponentSpec, ring: _Ring, room: int | None, request: Request) -> ComponentPlan:
    if spec.choice is Choice.SKIP:
        return ComponentPlan(spec.name, spec.choice, (), 0, spec.weights, request.residency)
    if spec.choice is not Choice.LAYERWISE:
        lasting = Residency.LASTING if spec.choice is Choice.RESIDENT else Residency.USE
        return _whole_plan(spec, request, lasting)
    limit = ring.limit if spec.config.group_size != "layer" else None
    runs = cut(spec.units, limit)
    sizes = _sizes(spec, runs)
    line = timeline(spec, runs, request.link)
    budget = _resident_budget(spec, sizes, room, request)
    most = spec.config.resident if isinstance(spec.config.resident, int) else None
    resident = place(line, sizes, budget, spec.config.placement, most, ring.largest)
    step: float | None = None
    if spec.busy is not None:
        step = simulate(line, sizes, resident, ring.slot_bytes, ring.count, request.link).step
        if request.mode in (Mode.AUTO, Mode.SPEED) and spec.config.placement is Placement.STALL:
            shape = (ring.slot_bytes, ring.count)
            resident, outcome = refine(line, sizes, resident, budget, shape, request.link)
            step = outcome.step
    return ComponentPlan(
        spec.name, spec.choice, _groups(spec, runs, resident), spec.fixed, spec.weights, _residency(spec, request), step
    )


def _residency(spec: ComponentSpec, request: Request) -> Residency:
    return spec.config.residency or request.residency


def _resident_budget(spec: ComponentSpec, sizes: Sequence[int], room: int | None, request: Request) -> int:
    """Bytes for this component's resident groups: its share of the room, or what its config says."""
    available = _share(spec, room, request)
    wanted = spec.config.resident
    if wanted is None:
        return 0 if request.mode in (Mode.MEMORY, Mode.MANUAL) else available
    if isinstance(wanted, float):
        return min(available, int(wanted * sum(size + ALIGNMENT for size in sizes)))
    return available


def _share(spec: ComponentSpec, room: int | None, request: Request) -> int:
    """A component's part of the room: all of it, unless it alternates with others within a step."""
    if room is None:
        return 1 << 62
    others = next((names for names in request.together if spec.name in names), None)
    return room // len(others) if others else room


def _whole_plan(spec: ComponentSpec, request: Request, residency: Residency) -> ComponentPlan:
    if spec.choice is Choice.SKIP:
        return ComponentPlan(spec.name, spec.choice, (), 0, spec.weights, residency)
    runs = cut(spec.units, WHOLE_PIECE)
    groups = _groups(spec, runs, [True] * len(runs))
    kept = spec.config.residency or residency
    return ComponentPlan(spec.name, spec.choice, groups, spec.fixed, spec.weights, kept)


def _sizes(spec: ComponentSpec, runs: Sequence[tuple[int, int]]) -> list[int]:
    return [sum(unit.size for unit in spec.units[a:b]) for a, b in runs]


def _groups(spec: ComponentSpec, runs: Sequence[tuple[int, int]], resident: Sequence[bool]) -> tuple[GroupPlan, ...]:
    found = []
    for (start, stop), size, kept in zip(runs, _sizes(spec, runs), resident, strict=True):
        first, last = spec.units[start].name, spec.units[stop - 1].name
        name = first if stop - start == 1 else f"{first} .. {last}"
        found.append(GroupPlan(name, start, stop, size, kept))
    return tuple(found)


def steady_step(spec: ComponentSpec, plan: OffloadPlan, link: Link) -> float:
    """The predicted seconds of a pass under a plan that exists already, with the spec's measured times."""
    component = plan.component(spec.name)
    runs = [(group.start, group.stop) for group in component.groups]
    line: Timeline = timeline(spec, runs, link)
    sizes, resident = [g.size for g in component.groups], [g.resident for g in component.groups]
    if all(resident):
        return line.compute
    return simulate(line, sizes, resident, plan.slot_bytes, plan.slots, link).step
