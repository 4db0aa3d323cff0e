"""The other ways to offload a pipeline, by the rules that diffusers and accelerate follow, on a traced call. Pure.

They know no budget, so each has one peak and one time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .cost import Problem
from .hardware import Hardware
from .simulate import LATENCY
from .trace import Leaf, PassTrace, TracedComponent, Use

#: Host work that a hook adds to each group's use while the device waits for it (measured, 30 to 60 us).
HOOK = 5e-5
#: Module classes that diffusers' leaf-level group offload moves one by one; other weights stay with their parents.
LEAVES = {"Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear"}
LEAVES |= {"Embedding"}


@dataclasses.dataclass(frozen=True)
class Rival:
    """A way to offload: its peak of device memory in bytes, and the seconds of a step and of a call."""

    name: str
    peak_bytes: int
    step_seconds: float
    total_seconds: float


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Uses of one group in a row: its bytes and tensors, the compute from there to the next one, and the most bytes
    alive while it is held (`high`) and from then to the next one (`gap_high`)."""

    nbytes: int
    tensors: int
    seconds: float
    high: int
    gap_high: int


_GroupOf = Callable[[Leaf], str | None]
_PassRule = Callable[[TracedComponent, PassTrace, Hardware], tuple[float, int]]
"""Gives a pass' seconds and the most bytes alive, weights included."""


def block_of(leaf: Leaf) -> str | None:
    """The group of block-level offload: one for each block; None for what stays for the whole pass."""
    return leaf.block


def leaf_of(leaf: Leaf) -> str | None:
    """The group of leaf-level offload: one for each leaf of a class that is moved."""
    return leaf.name if leaf.kind in LEAVES else None


def _bytes_of(traced: TracedComponent, group_of: _GroupOf) -> tuple[dict[str, tuple[int, int]], int]:
    """(bytes, tensors) of each group, and the bytes that belong to none."""
    groups: dict[str, tuple[int, int]] = {}
    for leaf in traced.leaves:
        name = group_of(leaf)
        if name is not None:
            nbytes, tensors = groups.get(name, (0, 0))
            groups[name] = (nbytes + leaf.nbytes, tensors + leaf.tensors)
    return groups, traced.weights - sum(nbytes for nbytes, _ in groups.values())


def _stretches(traced: TracedComponent, one: PassTrace, hardware: Hardware, group_of: _GroupOf) -> list[_Stretch]:
    groups, _ = _bytes_of(traced, group_of)
    found: list[_Stretch] = []
    last: str | None = None
    for use in one.uses:
        name = group_of(traced.leaves[use.leaf])
        seconds = hardware.seconds(use.busy) + hardware.seconds(use.gap)
        if found and (name is None or name == last):
            found[-1] = _longer(found[-1], use, seconds, is_same=name is not None)
            continue
        last = name or last
        found.append(_Stretch(*(groups[name] if name is not None else (0, 0)), seconds, use.high, use.gap_high))
    return found


def _longer(before: _Stretch, use: Use, seconds: float, is_same: bool) -> _Stretch:
    """A stretch and another use: of the same group, which is held in between, or of one that isn't moved."""
    gap = (use.gap_high,) if is_same else (before.gap_high, use.high, use.gap_high)
    high = max(before.high, before.gap_high, use.high) if is_same else before.high
    return dataclasses.replace(before, seconds=before.seconds + seconds, high=high, gap_high=max(gap))


def streamed(group_of: _GroupOf) -> _PassRule:
    """Group offload with a stream: when a group begins, the host waits for it and starts the next one's copies, one for
    each tensor; nothing is loaded ahead for the next pass."""

    def run(traced: TracedComponent, one: PassTrace, hardware: Hardware) -> tuple[float, int]:
        line = _stretches(traced, one, hardware, group_of)
        held = _bytes_of(traced, group_of)[1]
        loads = [s.nbytes / hardware.pinned + s.tensors * LATENCY for s in line] + [0.0]
        now = hardware.seconds(one.head) + loads[0] + (held / hardware.pageable if group_of is block_of else 0.0)
        high = one.base + one.head_high
        for position, item in enumerate(line):
            ahead = line[position + 1].nbytes if position + 1 < len(line) else 0
            now += max(item.seconds, loads[position + 1]) + (HOOK if item.nbytes else 0.0)
            high = max(high, one.base + ahead + max(item.high + item.nbytes, item.gap_high))
        return now, high + held

    return run


def waiting(group_of: _GroupOf, back: bool) -> _PassRule:
    """Group offload without a stream, and sequential offload: each group is copied from pageable memory, and waited
    for, when it begins; with `back` it is copied back when it has run."""
    ways = 2 if back else 1

    def run(traced: TracedComponent, one: PassTrace, hardware: Hardware) -> tuple[float, int]:
        line = _stretches(traced, one, hardware, group_of)
        held = _bytes_of(traced, group_of)[1]
        now, high = hardware.seconds(one.head), one.base + one.head_high
        now += ways * held / hardware.pageable if group_of is block_of else 0.0
        for item in line:
            now += item.seconds + ways * (item.nbytes / hardware.pageable + item.tensors * LATENCY)
            now += HOOK if item.nbytes else 0.0
            high = max(high, one.base + max(item.high + item.nbytes, item.gap_high))
        return now, high + held

    return run


def every_leaf(leaf: Leaf) -> str | None:
    """The group of sequential offload: every module with weights."""
    return leaf.name


RULES: dict[str, _PassRule] = {
    "sequential offload": waiting(every_leaf, back=False),
    "group offload, block": waiting(block_of, back=True),
    "group offload, block, stream": streamed(block_of),
    "group offload, leaf": waiting(leaf_of, back=True),
    "group offload, leaf, stream": streamed(leaf_of),
}


def rivals(problem: Problem) -> list[Rival]:
    """Every other way to offload the traced call: resident, model offload, and the rules above."""
    found = [resident(problem), model_offload(problem)]
    found += [_by_rule(name, rule, problem) for name, rule in RULES.items()]
    return found


def _compute(problem: Problem, passes: list[tuple[str, int]]) -> float:
    return sum(
        problem.hardware.seconds(cost)
        for name, kind in passes
        if name
        for use in problem.trace.component(name).passes[kind].uses
        for cost in (use.busy, use.gap)
    )


def resident(problem: Problem) -> Rival:
    """All weights on the device."""
    weights = sum(c.weights for c in problem.trace.components)
    outside = problem.hardware.seconds(problem.trace.outside)
    step = _compute(problem, problem.trace.step_passes())
    return Rival(
        "resident", weights + problem.most_activation, step, _compute(problem, problem.trace.sequence) + outside
    )


def model_offload(problem: Problem) -> Rival:
    """One component at a time on the device: loaded when it is called after another, and copied back then."""
    order = [name for name, _ in problem.trace.sequence if name]
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    in_step = {name for name, _ in problem.trace.step_passes()}
    if len(in_step) > 1:  # they would take turns in every step: diffusers loads each once, in its own order
        turns = list(dict.fromkeys(turns))
    moved = 2 * sum(problem.trace.component(name).weights for name in turns)
    base = resident(problem)
    peak = max((c.weights + c.activation_peak for c in problem.trace.components), default=0)
    seconds = base.total_seconds + moved / problem.hardware.pageable
    return Rival("model offload", max(peak, problem.trace.outside_peak), base.step_seconds, seconds)


def _by_rule(name: str, rule: _PassRule, problem: Problem) -> Rival:
    trace, hardware = problem.trace, problem.hardware
    times: dict[tuple[str, int], float] = {}
    peak = trace.outside_peak
    total = hardware.seconds(trace.outside)
    for component in trace.components:
        for kind, one in enumerate(component.passes):
            seconds, high = rule(component, one, hardware)
            times[component.name, kind] = seconds
            total += one.count * seconds
            peak = max(peak, high)
    step = sum(times[key] for key in trace.step_passes())
    return Rival(name, peak, step, total)
