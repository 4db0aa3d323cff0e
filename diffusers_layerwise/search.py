"""From component specs and a budget to a plan: a search over rings and residents. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from .config import Mode, Placement, Residency, format_bytes
from .errors import named_out_of_memory
from .gather import gathered
from .placement import place, refine
from .plan import Choice, ComponentPlan, ComponentSpec, GroupPlan, OffloadPlan, cut
from .rings import MIB, RingShape, candidates, runs_of, sizes_of, smallest_ring
from .simulate import Link, simulate, timeline
from .tensors import ALIGNMENT

#: Candidates that are refined by simulation after a first ranking.
FINALISTS = 5
#: Pieces in which a component that stays whole is loaded, so that its copies overlap with its own first pass.
WHOLE_PIECE = 256 * MIB
#: The default activation reserve of a pipeline, until activations are planned or measured: a tenth, at most 2 GiB.
RESERVE_SHARE = 10
RESERVE_MOST = 2 << 30
WHAT_MUST_FIT = "the largest module and what must stay resident"
_UNLIMITED = 1 << 62


@dataclasses.dataclass(frozen=True)
class Request:
    """All that a plan depends on besides the components.

    Args:
        total (`int`, *optional*): All device bytes that may be used. None: no limit known.
        reserve (`int`, *optional*): Bytes of it for activations; None takes the default share.
        residency (`Residency`): How long resident groups stay, unless a component's config says otherwise.
        together (`Sequence[frozenset[str]]`): Components that alternate within a step share the budget.
        strict (`bool`): Explicit residents that don't fit are an error. Not so when a plan in force is made anew: then
            they are kept as far as they fit.
        device (`str`): The execution device.
    """

    mode: Mode
    total: int | None
    reserve: int | None = 0
    residency: Residency = Residency.USE
    link: Link = dataclasses.field(default_factory=Link)
    together: tuple[frozenset[str], ...] = ()
    provisional: bool = True
    strict: bool = True
    device: str = "cpu"

    @property
    def reserved(self) -> int:
        """Bytes for activations."""
        if self.reserve is not None:
            return self.reserve
        return 0 if self.total is None else min(self.total // RESERVE_SHARE, RESERVE_MOST)

    @property
    def budget(self) -> int | None:
        """Bytes for weights."""
        return None if self.total is None else self.total - self.reserved

    def total_for(self, weights: int) -> int:
        """The smallest total that leaves `weights` bytes for weights."""
        if self.reserve is not None:
            return weights + self.reserve
        return min(weights + (weights - 1) // (RESERVE_SHARE - 1), weights + RESERVE_MOST)


def smallest_peak(specs: Sequence[ComponentSpec], residency: Residency = Residency.USE) -> int:
    """The least device bytes of weights that any plan for these components takes.

    The smallest ring that their options allow, what they ask to be resident, whole components in full.

    Args:
        specs (`Sequence[ComponentSpec]`): The components.
        residency (`Residency`): How long resident groups stay where a component's config doesn't say.
    """
    specs = gathered(specs)
    streamed = _streamed(specs)
    if not streamed:
        return _set_aside(specs) + _whole_in_use(specs)
    ring = smallest_ring(_ringed(streamed))
    lasting = [s for s in streamed if _stays(s, residency) is Residency.LASTING]
    held = sum(_asked(s, ring) for s in lasting)
    in_use = max([0, *(_asked(s, ring) for s in streamed if s not in lasting)])
    return ring.nbytes + _set_aside(specs) + held + max(in_use, _whole_in_use(specs))


def make_plan(specs: Sequence[ComponentSpec], request: Request) -> OffloadPlan:
    """Makes the plan for a pipeline's components.

    Args:
        specs (`Sequence[ComponentSpec]`): The components; their `choice` and `config` are respected.
        request (`Request`): Mode, budget, link.

    Raises:
        torch.OutOfMemoryError: No plan fits the budget; the message says the smallest that works.
    """
    given, specs = specs, _settle([_as_mapped(s) for s in gathered(specs, only_asked=True)], request)
    least = smallest_peak(specs, request.residency)
    # A plan in force is only made anew: explicit residents are then kept as far as they fit.
    if request.strict and request.budget is not None and least > request.budget:
        raise _too_small(request, least, given)
    if request.mode in (Mode.AUTO, Mode.SPEED) and _all_fit(specs, request.budget):
        return _plan(specs, request, RingShape(0, 0, WHOLE_PIECE), all_resident=True)
    specs = gathered(specs)
    streamed = _streamed(specs)
    ring = _best_ring(streamed, specs, request) if streamed else RingShape(0, 0, WHOLE_PIECE)
    return _plan(specs, request, ring)


def _streamed(specs: Sequence[ComponentSpec]) -> list[ComponentSpec]:
    return [s for s in specs if s.choice is Choice.LAYERWISE and s.units]


def _ringed(streamed: Sequence[ComponentSpec]) -> list[ComponentSpec]:
    """What the ring has to be large enough for: without units that a device map keeps resident."""
    return [part for s in streamed if (part := s.streaming()).units]


def _as_mapped(spec: ComponentSpec) -> ComponentSpec:
    """A component that a device map keeps on the device as a whole is a resident one."""
    whole = spec.mapped and all(unit.resident for unit in spec.units)
    return dataclasses.replace(spec, choice=Choice.RESIDENT) if whole else spec


def _settle(specs: Sequence[ComponentSpec], request: Request) -> list[ComponentSpec]:
    """Components that nobody selected become resident when that fits the budget, else they are offloaded as a whole."""
    if request.budget is None or not any(s.unselected for s in specs):
        return list(specs)
    resident = [dataclasses.replace(s, choice=Choice.RESIDENT) if s.unselected else s for s in specs]
    return resident if smallest_peak(resident, request.residency) <= request.budget else list(specs)


def _too_small(request: Request, least: int, specs: Sequence[ComponentSpec]) -> torch.OutOfMemoryError:
    total, need = request.total or 0, request.total_for(least)
    names = ", ".join(repr(s.name) for s in _streamed(specs) if s.config.resident is not None)
    mapped = ", ".join(repr(s.name) for s in specs if s.mapped and any(unit.resident for unit in s.units))
    smaller = ", or a smaller config['activation_reserve']" if least <= total else ""
    what = f"the resident groups that config['resident'] asks for in {names}" if names else WHAT_MUST_FIT
    if mapped:
        what = f"what the device map keeps resident in {mapped}"
    return named_out_of_memory(
        f"A memory budget of {format_bytes(total)} (of which {format_bytes(request.reserved)} are reserved for "
        f"activations) can't hold {what}: the smallest budget that works is {need} bytes "
        f"({format_bytes(need)}). Pass memory_budget={need} or more{smaller}. That counts weights and what is "
        f"reserved; activations that need more come on top: plan_layerwise_offload() counts both."
    )


def _set_aside(specs: Sequence[ComponentSpec]) -> int:
    """Bytes that are held whoever runs: fixed weights of all, and whole resident components."""
    fixed = sum(s.fixed + ALIGNMENT for s in specs if s.fixed)
    return fixed + sum(_whole(s) for s in specs if s.choice is Choice.RESIDENT)


def _whole(spec: ComponentSpec) -> int:
    return spec.size + ALIGNMENT * len(cut(spec.units, WHOLE_PIECE))


def _whole_in_use(specs: Sequence[ComponentSpec]) -> int:
    return max((_whole(s) for s in specs if s.choice is Choice.OFFLOAD), default=0)


def _all_fit(specs: Sequence[ComponentSpec], budget: int | None) -> bool:
    if any(s.config.resident is not None or s.config.prefetch is not None or s.mapped for s in specs):
        return False
    if budget is None:
        return True
    layerwise = sum(_whole(s) for s in specs if s.choice is Choice.LAYERWISE)
    return layerwise + _set_aside(specs) + _whole_in_use(specs) <= budget


# ---------------------------------------------------------------------- the ring
def _best_ring(streamed: Sequence[ComponentSpec], specs: Sequence[ComponentSpec], request: Request) -> RingShape:
    ringed = _ringed(streamed)
    name = max(ringed, key=lambda s: s.size).name
    main = next(s for s in streamed if s.name == name)
    scored: list[tuple[float, int, RingShape]] = []
    for ring in candidates(ringed, request.mode):
        if not _fits(ring, streamed, specs, request):
            continue
        if request.mode in (Mode.MEMORY, Mode.MANUAL):
            return ring
        scored.append((_coarse(_score(main, ring, specs, request)), ring.nbytes, ring))
    scored.sort(key=lambda item: item[:2])
    best: tuple[float, int, RingShape] | None = None
    for score, _, ring in scored[:FINALISTS]:
        refined = _component(main, ring, specs, request).step
        step = score if refined is None else _coarse(refined)
        if best is None or (step, ring.nbytes) < best[:2]:
            best = (step, ring.nbytes, ring)
    return smallest_ring(ringed) if best is None else best[2]


def _coarse(seconds: float) -> float:
    """Six digits: of two rings that are as fast, the rounding of sums must not choose, but their size."""
    return float(f"{seconds:.6g}")


def _fits(ring: RingShape, streamed: Sequence[ComponentSpec], specs: Sequence[ComponentSpec], request: Request) -> bool:
    room = _room(specs, request, ring)
    if room is not None and room < 0:
        return False
    lasting = sum(_asked(s, ring) for s in streamed if _residency(s, request) is Residency.LASTING)
    if room is not None and lasting + _whole_in_use(specs) > room:
        return False
    for spec in streamed:
        if spec.mapped and ring.small and _forced(spec.streaming(), ring):
            return False
        share = _share(spec, specs, request, ring)
        if _asked(spec, ring) > share or (ring.small and not spec.mapped and _forced(spec, ring) > share):
            return False
    return True


def _asked(spec: ComponentSpec, ring: RingShape) -> int:
    """Device bytes that a device map or an explicit `resident` asks for: a share of all, or so many largest groups."""
    wanted = spec.config.resident
    runs = runs_of(spec, ring.limit)
    if spec.mapped:
        kept = [size + ALIGNMENT for size, own in zip(sizes_of(spec, runs), _mapped(spec, runs), strict=True) if own]
        return sum(kept)
    if wanted is None:
        return 0
    costs = sorted((size + ALIGNMENT for size in sizes_of(spec, runs)), reverse=True)
    return int(wanted * sum(costs)) if isinstance(wanted, float) else sum(costs[:wanted])


def _mapped(spec: ComponentSpec, runs: Sequence[tuple[int, int]]) -> list[bool]:
    """Which groups a device map keeps resident; no group has units of both kinds."""
    return [spec.units[start].resident is True for start, _ in runs]


def _forced(spec: ComponentSpec, ring: RingShape) -> int:
    """Device bytes of a component's groups that are too large for a ring of small slots."""
    sizes = sizes_of(spec, runs_of(spec, ring.limit))
    return sum(size + ALIGNMENT for size in sizes if size > ring.slot_bytes)


def _room(specs: Sequence[ComponentSpec], request: Request, ring: RingShape) -> int | None:
    """Bytes left for resident groups; negative when the ring and whole components don't fit."""
    if request.budget is None:
        return None
    room = request.budget - ring.nbytes - _set_aside(specs)
    return room if room >= _whole_in_use(specs) else -1


def _score(main: ComponentSpec, ring: RingShape, specs: Sequence[ComponentSpec], request: Request) -> float:
    runs = runs_of(main, ring.limit)
    sizes = sizes_of(main, runs)
    line = timeline(main, runs, request.link)
    budget = _share(main, specs, request, ring)
    free = not main.mapped
    resident = place(line, sizes, budget, Placement.STALL, None, ring.largest) if free else _mapped(main, runs)
    return simulate(line, sizes, resident, ring.slot_bytes, ring.count, request.link).step


# ---------------------------------------------------------------------- the components
def _plan(specs: Sequence[ComponentSpec], request: Request, ring: RingShape, all_resident: bool = False) -> OffloadPlan:
    if all_resident:
        planned = [_whole_plan(s, request, Residency.LASTING) for s in specs]
    else:
        planned = [_component(s, ring, specs, request) for s in specs]
    streams = any(_uses_ring(s, c) for s, c in zip(specs, planned, strict=True))
    return OffloadPlan(
        request.mode,
        tuple(planned),
        ring.slot_bytes if streams else 0,
        ring.count if streams else 0,
        request.budget,
        request.reserved,
        request.together,
        request.provisional,
        request.device,
    )


def _uses_ring(spec: ComponentSpec, component: ComponentPlan) -> bool:
    """Whether a group streams that is used: units that no pass has used so far need no ring."""
    used = set(spec.order)
    return any(not g.resident and any(u in used for u in range(g.start, g.stop)) for g in component.groups)


def _component(spec: ComponentSpec, ring: RingShape, specs: Sequence[ComponentSpec], request: Request) -> ComponentPlan:
    if spec.choice is not Choice.LAYERWISE:
        lasting = Residency.LASTING if spec.choice is Choice.RESIDENT else Residency.USE
        return _whole_plan(spec, request, lasting)
    runs = runs_of(spec, ring.limit)
    sizes = sizes_of(spec, runs)
    line = timeline(spec, runs, request.link)
    budget = _resident_budget(spec, ring, _share(spec, specs, request, ring), request)
    most = spec.config.resident if isinstance(spec.config.resident, int) else None
    if spec.mapped:
        resident = _mapped(spec, runs)
    else:
        resident = place(line, sizes, budget, spec.config.placement, most, ring.largest)
    step: float | None = None
    if spec.busy is not None and ring.count:
        shape = (ring.slot_bytes, ring.count)
        free = most is None and not spec.mapped and spec.config.placement is Placement.STALL
        if request.mode in (Mode.AUTO, Mode.SPEED) and free:
            resident, outcome = refine(line, sizes, resident, budget, shape, request.link)
            step = outcome.step
        else:
            step = simulate(line, sizes, resident, *shape, request.link).step
    groups = _groups(spec, runs, sizes, resident)
    planned = _planned(spec, groups, _residency(spec, request), step, None if step is None else line.compute)
    reads = sum(line.reads[g] for g in line.groups if not resident[g]) if line.reads else 0.0
    return dataclasses.replace(planned, read_seconds=reads)


def _planned(
    spec: ComponentSpec,
    groups: tuple[GroupPlan, ...],
    residency: Residency,
    step: float | None = None,
    compute: float | None = None,
) -> ComponentPlan:
    return ComponentPlan(
        spec.name, spec.choice, groups, spec.fixed, spec.weights, residency, step, spec.units, spec.others, compute
    )


def _residency(spec: ComponentSpec, request: Request) -> Residency:
    return _stays(spec, request.residency)


def _stays(spec: ComponentSpec, default: Residency) -> Residency:
    return spec.config.residency or (Residency.LASTING if spec.mapped else default)


def _resident_budget(spec: ComponentSpec, ring: RingShape, available: int, request: Request) -> int:
    """Bytes for this component's resident groups: its share of the room, or what its config says."""
    if spec.config.resident is not None:
        return min(available, _asked(spec, ring))
    return 0 if request.mode in (Mode.MEMORY, Mode.MANUAL) else available


def _share(spec: ComponentSpec, specs: Sequence[ComponentSpec], request: Request, ring: RingShape) -> int:
    """A component's part of the room for resident groups.

    What lasts is held at the same time as everything else, so it takes a part in proportion to its bytes. The rest
    takes turns: all that is left, unless a component alternates with others within a step.
    """
    room = _room(specs, request, ring)
    if room is None:
        return _UNLIMITED
    streamed = _streamed(specs)
    lasting = [s for s in streamed if _residency(s, request) is Residency.LASTING]
    asked = {s.name: _asked(s, ring) for s in lasting if s.config.resident is not None or s.mapped}
    # What is offloaded as a whole has to fit beside what lasts.
    left = max(0, room - sum(asked.values()) - _whole_in_use(specs))
    total = max(1, sum(s.size for s in streamed if s.name not in asked))
    parts = {s.name: asked.get(s.name, left * s.size // total) for s in lasting}
    if spec.name in parts:
        return min(room, parts[spec.name])
    room = max(0, room - sum(parts.values()))
    others = next((names for names in request.together if spec.name in names), None)
    return room // len(others) if others else room


def _whole_plan(spec: ComponentSpec, request: Request, residency: Residency) -> ComponentPlan:
    runs = cut(spec.units, WHOLE_PIECE)
    groups = _groups(spec, runs, sizes_of(spec, runs), [True] * len(runs))
    kept = Residency.USE if spec.choice is Choice.OFFLOAD else spec.config.residency or residency
    return _planned(spec, groups, kept)


def _groups(
    spec: ComponentSpec, runs: Sequence[tuple[int, int]], sizes: Sequence[int], resident: Sequence[bool]
) -> tuple[GroupPlan, ...]:
    found = []
    for (start, stop), size, kept in zip(runs, sizes, resident, strict=True):
        first, last = spec.units[start].name, spec.units[stop - 1].name
        name = first if stop - start == 1 else f"{first} .. {last}"
        found.append(GroupPlan(name, start, stop, size, kept))
    return tuple(found)


def steady_step(spec: ComponentSpec, plan: OffloadPlan, link: Link) -> float:
    """The predicted seconds of a pass under a plan that exists already, with the spec's measured times."""
    component = plan.component(spec.name)
    runs = [(group.start, group.stop) for group in component.groups]
    line = timeline(spec, runs, link)
    sizes, resident = [g.size for g in component.groups], [g.resident for g in component.groups]
    if all(resident[group] for group in line.groups):
        return line.compute
    if not plan.slots:
        return math.inf  # what streams was never used when the plan was made: it has no ring, and any other is better
    return simulate(line, sizes, resident, plan.slot_bytes, plan.slots, link).step
