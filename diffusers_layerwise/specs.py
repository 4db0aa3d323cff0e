"""Discovered units as a plan sees them: in execution order, with the chunk of host memory that holds each."""

from __future__ import annotations

from collections.abc import Sequence

from .discovery import Unit
from .host import HostStore
from .plan import UnitSpec

#: The chunk of units that aren't packed (yet): they don't lie in one region with packed ones.
UNPACKED = -1
#: That of units that are read from files, or through their mappings.
READ = -2


def unit_specs(sequence: Sequence[Unit], store: HostStore) -> tuple[UnitSpec, ...]:
    """Units in the order of a sequence."""
    chunks: dict[int, int] = {}
    specs = []
    for unit in sequence:
        place = store.place(unit)
        away = UNPACKED if store.tier_of(unit).takes_memory else READ
        chunk = away if place is None else chunks.setdefault(id(place.chunk), len(chunks))
        is_read = place is None and (unit.on_disk or not store.tier_of(unit).takes_memory)
        specs.append(
            UnitSpec(
                unit.name,
                unit.layer,
                unit.size,
                chunk,
                unit.resident,
                unit.on_disk,
                unit.tensors,
                is_read,
                unit.can_gather,
            )
        )
    return tuple(specs)


def positions(order: Sequence[int], sequence: Sequence[Unit]) -> tuple[int, ...]:
    """Unit indices as positions in a sequence."""
    at = {unit.index: position for position, unit in enumerate(sequence)}
    return tuple(at[index] for index in order)
