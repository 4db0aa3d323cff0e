"""What is known of the order in which a component's units are used, learned anew at the end of every pass.

Passes may take turns: with a cache, one runs every layer and the next ones skip most of them. Each way through the
component that was seen is a course. Plans and packing go by the whole one; what came before tells which comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .discovery import Unit
from .host import HostStore

Times = tuple[tuple[float, ...], tuple[float, ...]]
#: Courses that are remembered; with one more, all but the whole one are seen anew.
MOST_COURSES = 64
#: Passes that are remembered, and how many of them a prediction looks at.
MOST_PASSES, MOST_CONTEXT = 512, 64
#: Stands for the beginning of a call in the history of passes.
CALL = 255


def skips(course: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a pass is another one with some units left out altogether, and the rest in the same order.

    Example:
        >>> skips([0, 3], [0, 1, 2, 3]), skips([0, 3, 1], [0, 1, 2, 3]), skips([0, 1], [0, 1, 0, 1])
        (True, False, False)
    """
    if not set(course) < set(whole):
        return False
    rest = iter(whole)
    return all(any(unit == other for other in rest) for unit in course)


def following(history: bytes) -> int | None:
    """What comes next: what came after the longest stretch of the past that is like the latest one.

    Where that stretch was followed by several things, it is what came last, as long as that is one of them, else the
    one that is most recent. None where nothing is like the latest.

    Example:
        >>> following(bytes([0, 1, 1, 0, 1])), following(bytes([0, 1, 0])), following(bytes([0, 1]))
        (1, 1, None)
    """
    for length in range(min(MOST_CONTEXT, len(history) - 1), 0, -1):
        latest = history[-length:]
        at = history.rfind(latest, 0, len(history) - 1)
        if at < 0:
            continue
        again = latest + latest[-1:]
        return latest[-1] if again in history else history[at + length]
    return None


class Order:
    """One component's order of use.

    Attributes:
        sequence (`list[Unit]`): All units: packed ones as they lie on the host, then in the order of first use.
        uses (`list[int]`): Unit indices of a whole pass, with repeats: what plans are made for.
        used (`set[int]`): Indices of units that any pass has used.
        times (`tuple`, *optional*): Measured (busy, gap) seconds of the uses.
        is_due (`bool`): Whether units were used that no plan knew of: a new plan is due.
        courses (`list[list[int]]`): Every way through the component that a pass took, as unit indices with repeats.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.sequence = list(units)
        self.uses = [unit.index for unit in units]
        self.used: set[int] = set()
        self.times: Times | None = None
        self.is_due = False
        self._forget_courses()

    def _forget_courses(self) -> None:
        self.courses: list[list[int]] = []
        self._wholes: dict[int, list[int] | None] = {}
        self._history = bytearray()

    # ------------------------------------------------------------------ learning
    def learn(self, record: list[int], store: HostStore) -> list[int]:
        """Takes in what a pass used. One that skips a part of a known course changes nothing that plans go by.

        Returns:
            Its course: the same object for passes that were equal.
        """
        fresh = set(record) - self.used
        course = self._note(record)
        whole = course if fresh else self.whole(course) or course
        if whole != self.uses:
            self.uses, self.times = whole, None
        if fresh:
            self.used |= fresh
            packed = [unit.index for unit in self.sequence if store.place(unit) is not None]
            order = dict.fromkeys([*packed, *course, *(unit.index for unit in self.sequence)])
            units = {unit.index: unit for unit in self.sequence}
            self.sequence = [units[index] for index in order]
            self.is_due = True
        return course

    def _note(self, record: list[int]) -> list[int]:
        """Writes a pass into the history. Returns its course."""
        if record not in self.courses:
            if len(self.courses) == MOST_COURSES:
                whole = self.whole(record)
                self._forget_courses()
                self.courses += [whole] if whole is not None else []
            self.courses.append(record)
            self._wholes = {}
        number = self.courses.index(record)
        self._history.append(number)
        del self._history[:-MOST_PASSES]
        return self.courses[number]

    def whole(self, course: list[int]) -> list[int] | None:
        """The longest known course of which one skips a part; None where it is whole itself.

        Args:
            course (`list[int]`): Unit indices with repeats.
        """
        number = self.courses.index(course) if course in self.courses else -1
        if number in self._wholes:
            return self._wholes[number]
        # What the plan has left on the host since isn't recorded any more: that is no skipping.
        gathered = {unit.index for unit in self.sequence if unit.is_gathered}
        whole, most = None, 0
        for other in self.courses:
            moved = [index for index in other if index not in gathered]
            if len(moved) >= most and skips(course, moved):
                whole, most = other, len(moved)
        if number >= 0:
            self._wholes[number] = whole
        return whole

    # ------------------------------------------------------------------ what comes next
    def start_call(self) -> None:
        """A call begins: what came at the beginning of earlier ones comes again."""
        if self._history and self._history[-1] != CALL:
            self._history.append(CALL)

    def expected(self, running: list[int] | None = None) -> list[int]:
        """The course that the next pass takes, as far as the earlier ones tell.

        Args:
            running (`list[int]`, *optional*): The course of a pass that hasn't ended: the one after it is meant.
        """
        if len(self.courses) < 2:
            return self.uses
        history = bytes(self._history)
        if running is not None and running in self.courses:
            history += bytes([self.courses.index(running)])
        last = next((number for number in reversed(history) if number != CALL), None)
        found = following(history)
        if found == CALL:
            found = following(history + bytes([CALL]))
        found = last if found is None or found == CALL else found
        return self.uses if found is None else self.courses[found]

    def matching(self, record: list[int]) -> list[int] | None:
        """The course that begins as a pass did so far: the one that was taken most recently, if there is any."""
        count = len(record)
        known = {n for n, course in enumerate(self.courses) if course[:count] == record}
        found = next((number for number in reversed(self._history) if number in known), None)
        return None if found is None else self.courses[found]

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
        self.times = None
        self._forget_courses()
