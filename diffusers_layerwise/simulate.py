"""The event simulation that a plan is judged by: one copy stream, one compute stream, a ring. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .plan import ComponentSpec, group_uses

#: Assumed until measured: PCIe 4.0 x16 moves about 22-25 GB/s from pinned memory; a copy costs some 10 us to start.
BANDWIDTH = 22e9
LATENCY = 1e-5
#: Assumed transfer time over compute time of a component whose compute was never measured.
RATIO = 1.5


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from host to device: bytes per second, and seconds that each copy costs on top."""

    bandwidth: float = BANDWIDTH
    latency: float = LATENCY


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Group uses of a pass with their times: `hold` from arrival to release, `gap` from release to the next use."""

    groups: tuple[int, ...]
    hold: tuple[float, ...]
    gap: tuple[float, ...]

    @property
    def compute(self) -> float:
        """Seconds of a pass without any stall."""
        return sum(self.hold) + sum(self.gap)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A simulated pass in steady state: its seconds, and the stall before each group use."""

    step: float
    stalls: tuple[float, ...]


def timeline(spec: ComponentSpec, runs: Sequence[tuple[int, int]], link: Link) -> Timeline:
    """The group uses of a component's pass with measured times, or with times guessed from bytes."""
    uses = group_uses(spec.order, runs)
    busy, gap = spec.busy, spec.gap
    if busy is None or gap is None:
        busy = tuple(spec.units[unit].size / link.bandwidth / RATIO for unit in spec.order)
        gap = (0.0,) * len(busy)
    hold = [sum(busy[a:b]) + sum(gap[a : b - 1]) for _, a, b in uses]
    return Timeline(tuple(g for g, _, _ in uses), tuple(hold), tuple(gap[b - 1] for _, _, b in uses))


class _Ring:
    """The ring's bookkeeping, as `transfer.Ring` does it: consecutive slots, first fit from a cursor."""

    def __init__(self, slot_bytes: int, count: int) -> None:
        self.slot_bytes, self.count = slot_bytes, count
        self.free_at = [0.0] * count
        self.held = [False] * count
        self.cursor = 0

    def lease(self, size: int) -> range | None:
        need = -(-size // self.slot_bytes)
        last = self.count - need
        for start in [*range(self.cursor, last + 1), *range(min(self.cursor, last + 1))]:
            if not any(self.held[start : start + need]):
                for slot in range(start, start + need):
                    self.held[slot] = True
                self.cursor = (start + need) % self.count
                return range(start, start + need)
        return None

    def give_back(self, slots: range, at: float) -> None:
        for slot in slots:
            self.held[slot] = False
            self.free_at[slot] = at


def simulate(
    line: Timeline,
    sizes: Sequence[int],
    resident: Sequence[bool],
    slot_bytes: int,
    count: int,
    link: Link,
    passes: int = 3,
) -> Outcome:
    """Runs passes over a ring and returns the last one, when wrap-around has settled.

    Args:
        line (`Timeline`): The group uses of a pass.
        sizes, resident (`Sequence`): For each group, its bytes and whether it is resident.
        slot_bytes, count (`int`): The ring.
        link (`Link`): The copy stream.
    """
    steps = len(line.groups)
    loads = [(p, g) for p in range(passes * steps) if not resident[g := line.groups[p % steps]]]
    ring = _Ring(slot_bytes, count)
    ready: dict[int, float] = {}
    leases: dict[int, range] = {}
    loaded: set[int] = set()
    cursor, copied, now, ends = 0, 0.0, 0.0, [0.0]
    stalls = [0.0] * steps

    def pump() -> None:
        nonlocal cursor, copied
        while cursor < len(loads):
            position, group = loads[cursor]
            slots = None if group in loaded else ring.lease(sizes[group])
            if slots is None:
                return
            copied = max(copied, max(ring.free_at[s] for s in slots)) + sizes[group] / link.bandwidth + link.latency
            ready[position], leases[position] = copied, slots
            loaded.add(group)
            cursor += 1

    pump()
    for position in range(passes * steps):
        step = position % steps
        group = line.groups[step]
        if not resident[group]:
            stalls[step] = max(0.0, ready[position] - now)
            now += stalls[step]
        now += line.hold[step]
        if not resident[group]:
            loaded.discard(group)
            ring.give_back(leases.pop(position), now)
            pump()
        now += line.gap[step]
        if step == steps - 1:
            ends.append(now)
    return Outcome(ends[-1] - ends[-2] if steps else 0.0, tuple(stalls))
