"""What is known of the order in which a component's units are used, learned anew at the end of every pass."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from .discovery import Unit
from .host import HostStore

Times = tuple[tuple[float, ...], tuple[float, ...]]


class Learned(enum.Enum):
    """What a pass showed: `NOTHING` new, another `ORDER` of known units, or `UNITS` that were never used before."""

    NOTHING = "nothing"
    ORDER = "order"
    UNITS = "units"


class Order:
    """One component's order of use.

    Attributes:
        sequence (`list[Unit]`): All units: packed ones as they lie on the host, then in the order of first use.
        uses (`list[int]`): Unit indices of a pass, with repeats.
        used (`set[int]`): Indices of units that any pass has used.
        times (`tuple`, *optional*): Measured (busy, gap) seconds of the uses.
        is_due (`bool`): Whether units were used that no plan knew of: a new plan is due.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.sequence = list(units)
        self.uses = [unit.index for unit in units]
        self.used: set[int] = set()
        self.times: Times | None = None
        self.is_due = False
        self._by_first: dict[int, list[int]] = {}

    def learn(self, record: list[int], store: HostStore) -> Learned:
        """Takes in what a pass used."""
        fresh = set(record) - self.used
        if record == self.uses and not fresh:
            self._by_first[record[0]] = self.uses
            return Learned.NOTHING
        self._by_first[record[0]] = self.uses = record
        self.times = None
        if not fresh:
            return Learned.ORDER
        self.used |= fresh
        packed = [unit.index for unit in self.sequence if store.place(unit) is not None]
        order = dict.fromkeys([*packed, *record, *(unit.index for unit in self.sequence)])
        units = {unit.index: unit for unit in self.sequence}
        self.sequence = [units[index] for index in order]
        self.is_due = True
        return Learned.UNITS

    def starts_another(self, first: int) -> bool:
        """Whether a pass that begins with this unit is known to go another way than the expected one."""
        return first in self._by_first and self._by_first[first] is not self.uses

    def take(self, first: int) -> None:
        """Expects the way that begins with this unit: a VAE's decode after its encode."""
        self.uses = self._by_first[first]
        self.times = None

    def restructure(self, units: Sequence[Unit], kept: Mapping[int, Unit]) -> None:
        """The component consists of other units now.

        Args:
            units (`Sequence[Unit]`): All of them, in registration order, which gives them their new indices.
            kept (`Mapping[int, Unit]`): Those that were there before, by their old index.
        """
        sequence = [unit for unit in self.sequence if unit.index in kept]
        uses = [kept[index] for index in self.uses if index in kept]
        used = [kept[index] for index in self.used if index in kept]
        for index, unit in enumerate(units):
            unit.index = index
        known = set(map(id, sequence))
        self.sequence = [*sequence, *(unit for unit in units if id(unit) not in known)]
        self.uses, self.used = [unit.index for unit in uses], {unit.index for unit in used}
        if not self.used:
            self.uses = [unit.index for unit in units]
        self._by_first, self.times = {}, None
