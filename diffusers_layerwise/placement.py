"""Which groups become resident: so that streamed bytes keep pace with compute, then where a stall is left. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .config import Placement
from .simulate import Link, Outcome, Timeline, simulate
from .tensors import ALIGNMENT

#: Simulations that the refinement of one candidate may cost; each takes 1-3 ms for a model of FLUX's size.
REFINEMENTS = 24
#: Of the effort of reading a byte from a file, that of copying it from memory: links are some ten times as fast.
MEMORY_EFFORT = 0.1


def place(
    line: Timeline,
    sizes: Sequence[int],
    budget: int,
    how: Placement,
    most: int | None = None,
    largest: int | None = None,
) -> list[bool]:
    """Chooses resident groups within `budget` bytes by pace: what streams keeps even with compute time.

    A copy stream that runs all the time moves as many bytes as the time allows. So streamed bytes should grow, over a
    pass, in proportion to compute time: groups that are heavy for their compute (FLUX's double blocks have 2.4 times
    the bytes of single ones at equal FLOPs) become resident first.

    Args:
        line (`Timeline`): The group uses of a pass.
        sizes (`Sequence[int]`): Bytes of each group.
        budget (`int`): Bytes for resident groups, each with its alignment.
        how (`Placement`): `PREFIX` takes groups in order, `SPREAD` takes compute to be even, `STALL` uses the times.
        most (`int`, *optional*): At most this many groups.
        largest (`int`, *optional*): Groups above this many bytes become resident first, so that slots can be small.
    """
    cost = [size + ALIGNMENT for size in sizes]
    resident = [False] * len(sizes)
    if largest is not None:
        for group in (g for g in range(len(sizes)) if sizes[g] > largest):
            resident[group], budget = True, budget - cost[group]
    if how is Placement.PREFIX:
        return _fill(resident, cost, budget, range(len(sizes)), most)
    uses = [0] * len(sizes)
    for group in line.groups:
        uses[group] += 1
    for group in sorted((g for g in range(len(sizes)) if uses[g] > 1 and not resident[g]), key=lambda g: -uses[g]):
        if cost[group] <= budget and (most is None or sum(resident) < most):
            resident[group], budget = True, budget - cost[group]
    streamed = [g for g in line.groups if not resident[g]]
    total = max(1, sum(cost[g] for g in set(streamed)))
    share = max(0.0, 1 - budget / total) if most is None else 1 - min(1.0, most / max(1, len(set(streamed))))
    # What is read from a file takes longer to arrive than its bytes say.
    lag = _lags(line, _efforts(line, cost), resident, share, how)
    # The groups that would run furthest ahead of compute if they streamed become resident.
    order = sorted(set(streamed), key=lambda g: -lag[g])
    return _fill(resident, cost, budget, order, most)


def _efforts(line: Timeline, cost: Sequence[int]) -> Sequence[float]:
    """What streaming each group takes of the slowest way that any takes: seconds of reading, or else its bytes."""
    if not line.reads:
        return cost
    rate = sum(line.reads) / sum(size for seconds, size in zip(line.reads, cost, strict=True) if seconds)
    return [max(seconds, MEMORY_EFFORT * rate * size) for seconds, size in zip(line.reads, cost, strict=True)]


def _lags(line: Timeline, cost: Sequence[float], resident: list[bool], share: float, how: Placement) -> list[float]:
    """Walks a pass and marks, for each group, how far streaming it would run ahead of its share of compute."""
    even = how is Placement.SPREAD
    weight = [1.0 if even else h + g for h, g in zip(line.hold, line.gap, strict=True)]
    total_time = sum(weight) or 1.0
    total = share * sum(cost[g] for g in set(line.groups) if not resident[g])
    lag = [0.0] * len(cost)
    time, streamed = 0.0, 0.0
    for group, seconds in zip(line.groups, weight, strict=True):
        time += seconds
        if resident[group]:
            continue
        ahead = streamed + cost[group] - total * time / total_time
        if ahead > cost[group] / 2:
            lag[group] = 1 + ahead
        else:
            streamed += cost[group]
            lag[group] = ahead / (1 + abs(ahead))
    return lag


def _fill(resident: list[bool], cost: Sequence[int], budget: int, order: Sequence[int], most: int | None) -> list[bool]:
    count = sum(resident)
    for group in order:
        if most is not None and count >= most:
            break
        if not resident[group] and cost[group] <= budget:
            resident[group], budget = True, budget - cost[group]
            count += 1
    return resident


def refine(
    line: Timeline,
    sizes: Sequence[int],
    resident: list[bool],
    budget: int,
    ring: tuple[int, int],
    link: Link,
    tries: int = REFINEMENTS,
) -> tuple[list[bool], Outcome]:
    """Improves a placement by trades: the group with the longest stall becomes resident, others there stream instead.

    Every accepted trade shortens the simulated pass. Stops after `tries` simulations, or when no stall is left.
    """
    best = simulate(line, sizes, resident, *ring, link)
    tried: set[int] = set()
    fixed = {g for g in range(len(sizes)) if sizes[g] > ring[0] * ring[1]}
    for _ in range(tries):
        stalled = sorted(range(len(line.groups)), key=lambda p: -best.stalls[p])
        step = next((p for p in stalled if best.stalls[p] > 0 and line.groups[p] not in tried), None)
        if step is None or best.step <= line.compute * 1.001:
            break
        group = line.groups[step]
        tried.add(group)
        trade = _trade(line, sizes, resident, budget, group, best, fixed)
        if trade is None:
            continue
        outcome = simulate(line, sizes, trade, *ring, link)
        if outcome.step < best.step * 0.9999:
            resident, best = trade, outcome
    return resident, best


def _trade(
    line: Timeline,
    sizes: Sequence[int],
    resident: list[bool],
    budget: int,
    group: int,
    now: Outcome,
    fixed: set[int],
) -> list[bool] | None:
    """`group` resident instead of the residents (but `fixed` ones) with the longest compute around them."""
    if resident[group]:
        return None
    trade = list(resident)
    trade[group] = True
    used = sum(size + ALIGNMENT for size, kept in zip(sizes, trade, strict=True) if kept)
    slack = {g: line.hold[p] + line.gap[p] - now.stalls[p] for p, g in enumerate(line.groups)}
    for other in sorted(
        (g for g in slack if trade[g] and g != group and g not in fixed), key=lambda g: -slack[g] / sizes[g]
    ):
        if used <= budget:
            break
        trade[other] = False
        used -= sizes[other] + ALIGNMENT
    return trade if used <= budget else None
