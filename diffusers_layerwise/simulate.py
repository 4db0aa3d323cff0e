"""The event simulation that a plan is judged by: one copy stream, one compute stream, a ring. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .plan import ComponentSpec, group_uses

#: Assumed until measured: PCIe 4.0 x16 moves about 22-25 GB/s from pinned memory; a copy costs some 10 us to start.
BANDWIDTH = 22e9
LATENCY = 1e-5
#: Assumed until measured: what a common NVMe disk gives to one reader, and what each read costs on top.
DISK = 2e9
SEEK = 2e-4
#: Assumed transfer time over compute time of a component whose compute was never measured.
RATIO = 1.5


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from host to device: bytes per second, and seconds that each copy costs on top.

    `disk` and `seek` are the same of the way from a file to the host.
    """

    bandwidth: float = BANDWIDTH
    latency: float = LATENCY
    disk: float = DISK
    seek: float = SEEK

    def read_seconds(self, count: int) -> float:
        """Seconds of reading so many bytes of a group from its files; 0 where none are read."""
        return count / self.disk + self.seek if count else 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Group uses of a pass with their times: `hold` from arrival to release, `gap` from release to the next use.

    `reads` are seconds of reading each group from its files, by group; empty where all of them are in memory.
    """

    groups: tuple[int, ...]
    hold: tuple[float, ...]
    gap: tuple[float, ...]
    reads: tuple[float, ...] = ()

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
    reads = tuple(link.read_seconds(sum(u.size for u in spec.units[a:b] if u.is_read)) for a, b in runs)
    after = tuple(gap[b - 1] for _, _, b in uses)
    return Timeline(tuple(g for g, _, _ in uses), tuple(hold), after, reads if any(reads) else ())


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


class _Ways:
    """Copies on the link, and reads from files before some of them: a queue of their own."""

    def __init__(self, link: Link, reads: Sequence[float]) -> None:
        self._link, self._reads = link, reads
        self._copied = self._read = 0.0

    def load(self, group: int, size: int, free: float, now: float) -> float:
        """When a group arrives that is asked for now, and whose slots are free at `free`."""
        self._copied = max(self._copied, free) + size / self._link.bandwidth + self._link.latency
        if not self._reads or not self._reads[group]:
            return self._copied
        self._read = max(self._read, now) + self._reads[group]
        return max(self._copied, self._read)


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

    Reads from files are a queue of their own: what lies in memory doesn't wait for it. What has no bytes on the device
    (an embedding table that stays on the host) isn't loaded.

    Args:
        line (`Timeline`): The group uses of a pass.
        sizes, resident (`Sequence`): For each group, its bytes and whether it is resident.
        slot_bytes, count (`int`): The ring.
        link (`Link`): The copy stream.
    """
    steps = len(line.groups)
    resident = [kept or not size for kept, size in zip(resident, sizes, strict=True)]
    loads = [(p, g) for p in range(passes * steps) if not resident[g := line.groups[p % steps]]]
    ring = _Ring(slot_bytes, count)
    ready: dict[int, float] = {}
    leases: dict[int, range] = {}
    loaded: set[int] = set()
    ways, cursor, now, ends = _Ways(link, line.reads), 0, 0.0, [0.0]
    stalls = [0.0] * steps

    def pump() -> None:
        nonlocal cursor
        while cursor < len(loads):
            position, group = loads[cursor]
            slots = None if group in loaded else ring.lease(sizes[group])
            if slots is None:
                return
            ready[position] = ways.load(group, sizes[group], max(ring.free_at[s] for s in slots), now)
            leases[position] = slots
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
