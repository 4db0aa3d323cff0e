"""Which rings are worth trying for a set of components, and how each component's units are cut for one. Pure.

The largest streamed component decides the ring; the others cut their groups to fit its slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .config import Mode, parse_bytes
from .plan import ComponentSpec, cut
from .tensors import ALIGNMENT, align

MIB = 1 << 20
#: Group sizes worth trying on top of the component's own unit and layer sizes.
GROUP_SIZES = (16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
SLOT_COUNTS = (1, 2, 3, 4, 6, 8)
#: A group size below this share of the component makes so many groups that their bookkeeping shows.
FINEST = 512


@dataclasses.dataclass(frozen=True)
class RingShape:
    """A ring to try: groups are cut to `limit` bytes; where `small` is set, larger ones are resident, not streamed.

    Without `small` a group that is larger than a slot takes several.
    """

    slot_bytes: int
    count: int
    limit: int
    small: bool = False

    @property
    def largest(self) -> int | None:
        """Bytes above which a group must be resident, or None when it may take several slots."""
        return self.slot_bytes if self.small else None

    @property
    def nbytes(self) -> int:
        """Device bytes of the slab."""
        return self.slot_bytes * self.count + ALIGNMENT if self.count else 0


def runs_of(spec: ComponentSpec, limit: int) -> list[tuple[int, int]]:
    """How a component is cut: as its config says, else to the ring's limit."""
    wanted = spec.config.group_size
    if wanted == "layer":
        return cut(spec.units, None)
    return cut(spec.units, align(wanted) if isinstance(wanted, int) else limit)


def sizes_of(spec: ComponentSpec, runs: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of each group."""
    return [sum(unit.size for unit in spec.units[a:b]) for a, b in runs]


def largest_group(streamed: Sequence[ComponentSpec], limit: int) -> int:
    """Bytes of the largest group of any component, cut for a limit."""
    return max((size for s in streamed for size in sizes_of(s, runs_of(s, limit))), default=0)


def main_of(streamed: Sequence[ComponentSpec]) -> ComponentSpec:
    """The component that decides the ring."""
    return max(streamed, key=lambda s: s.size)


def smallest_ring(streamed: Sequence[ComponentSpec]) -> RingShape:
    """The smallest ring that can run: one slot for the largest group, with groups as small as the config allows, and
    the slots that an explicit prefetch asks for."""
    largest = align(largest_group(streamed, 0))
    main = main_of(streamed)
    if main.config.prefetch is None:
        return RingShape(largest, 1, largest)
    own = max(sizes_of(main, runs_of(main, 0)))
    size = align(own) if isinstance(main.config.prefetch, int) else largest
    count = _slots(main, size, largest)
    return RingShape(size, max(count, -(-largest // size)), size)


def candidates(streamed: Sequence[ComponentSpec], mode: Mode) -> Iterator[RingShape]:
    """Rings worth trying, the preferred one first; each is large enough for every component's largest group."""
    main = main_of(streamed)
    counts: tuple[int, ...] = SLOT_COUNTS
    if main.config.prefetch is not None:
        counts = (0,)
    elif mode is Mode.MEMORY:
        counts = (2, 1)
    elif mode is Mode.MANUAL:
        counts = (2, 1) if main.config.group_size == "layer" else (4, 3, 2, 1)
    for size in _slot_sizes(streamed, main, mode):
        largest = largest_group(streamed, size)
        for wanted in counts:
            count = wanted or _slots(main, size, largest)
            yield RingShape(size, max(count, -(-largest // size)), size)
            if largest > size and mode in (Mode.AUTO, Mode.SPEED):
                yield RingShape(size, count, size, small=True)
    yield smallest_ring(streamed)


def _slots(main: ComponentSpec, slot_bytes: int, largest: int) -> int:
    """Slots that an explicit prefetch asks for: of the groups or bytes ahead, and one for the group in use.

    More slots than groups would never be filled.
    """
    groups = len(runs_of(main, slot_bytes))
    if isinstance(main.config.prefetch, str):
        ahead = max(1, parse_bytes(main.config.prefetch, "config.prefetch") // slot_bytes)
    else:
        ahead = main.config.prefetch or 0
    return max(min(ahead + 1, max(groups, 1)), -(-largest // slot_bytes))


def _slot_sizes(streamed: Sequence[ComponentSpec], main: ComponentSpec, mode: Mode) -> list[int]:
    config = main.config
    unit = align(max(s.largest_layer_unit for s in streamed))
    layer = align(max(sizes_of(main, cut(main.units, None)), default=unit))
    if config.group_size == "layer":
        return [layer]
    if isinstance(config.group_size, int):
        # A module that is larger by a little shouldn't take two slots, and so halve the prefetch that was asked for.
        return [max(align(config.group_size), unit)]
    if mode is Mode.MEMORY:
        return [unit]
    default = min(max(unit, 64 * MIB), max(unit, align(main.size // 16)))
    if mode is Mode.MANUAL:
        return [default, unit]
    own = {align(unit * quarters // 4) for quarters in (1, 2, 3, 4, 6, 8)}
    own |= {layer, align(main.size // 32), align(main.size // 64)}
    found = own | {size for size in GROUP_SIZES if unit // 4 <= size <= main.size // 8}
    kept = sorted(size for size in found if size <= main.size <= size * FINEST)
    return [default, *(size for size in kept if size != default)]
