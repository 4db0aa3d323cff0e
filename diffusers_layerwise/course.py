"""The course of a pass: which groups are expected in which order, how far it has come, and how far is loaded."""

from __future__ import annotations

from collections import Counter

from .demand import onload_ahead
from .group import Group, GroupState
from .transfer import Ring

#: A group use whose end isn't known from an earlier pass ends when the next group is used.
UNTIL_NEXT = 1 << 60


class Course:
    """The group uses of a pass, in the order that earlier passes showed.

    Attributes:
        expected (`list[tuple[Group, int]]`): Each group use, with the number of unit uses in it.
        position (`int`): The next one expected.
        horizon (`int`): Up to here everything is loaded or on its way.
        loads (`Counter[Group]`): Loads of streamed groups that were started for the pass, ahead of it included.
    """

    def __init__(self) -> None:
        self.expected: list[tuple[Group, int]] = []
        self.position = 0
        self.horizon = 0
        self.loads: Counter[Group] = Counter()

    def expect(self, expected: list[tuple[Group, int]]) -> None:
        """Takes another order, and starts at its beginning."""
        self.expected = expected
        self.loads.clear()
        self.rewind()

    def follow(self, expected: list[tuple[Group, int]], position: int) -> set[Group]:
        """Takes another order in the middle of a pass.

        Args:
            expected (`list[tuple[Group, int]]`): The order.
            position (`int`): Which use of it begins now.

        Returns:
            The groups that are loaded for what comes now and directly after it.
        """
        self.expected, self.position = expected, position
        self._advance(position)
        kept = self.ahead()
        self.position = position + 1
        self.horizon = max(self.horizon, self.position)
        return kept

    def rewind(self) -> None:
        """Puts the position at the start of a pass, and the horizon behind what is loaded already."""
        self.position = 0
        self._advance(0)

    def _advance(self, position: int) -> None:
        """Puts the horizon behind what is loaded from a position on, each group for one use."""
        seen: set[Group] = set()
        self.horizon = position
        for group, _ in self.expected[position:]:
            if group.state is GroupState.HOST or (not group.resident and group in seen):
                break
            seen.add(group)
            self.horizon += 1

    def ahead(self) -> set[Group]:
        """The groups that are loaded from the position on, without a gap."""
        return {group for group, _ in self.expected[self.position : self.horizon]}

    def enter(self, group: Group) -> int:
        """A group is used. Returns the unit uses after which it is done, or 0 when another one was expected."""
        expected, position = self.expected, self.position
        if position < len(expected) and expected[position][0] is group:
            self.position = position + 1
            self.horizon = max(self.horizon, self.position)
            return expected[position][1]
        return 0

    def diverge(self, group: Group) -> tuple[int, list[Group]]:
        """A group is used that isn't the next one: goes to where it is expected, or treats it as an extra one.

        Returns:
            The number of unit uses after which it is done, and the groups that were skipped.
        """
        expected, position = self.expected, self.position
        for later in range(position + 1, len(expected)):
            if expected[later][0] is group:
                self.position = later + 1
                self.horizon = max(self.horizon, self.position)
                return expected[later][1], [skipped for skipped, _ in expected[position:later]]
        return UNTIL_NEXT, []

    def reached(self, group: Group) -> None:
        """What is used now had to be loaded now."""
        self.loads[group] += 1
        self.horizon = max(self.horizon, self.position)

    def draw_back(self, position: int) -> None:
        """Groups from here on may have been dropped."""
        self.horizon = min(self.horizon, position)

    def furthest_loading(self) -> Group | None:
        """The prefetched group that would be used last; from there on nothing counts as loaded any more."""
        for position in range(min(self.horizon, len(self.expected)) - 1, self.position - 1, -1):
            group = self.expected[position][0]
            if not group.resident and group.state is GroupState.LOADING:
                self.horizon = position
                return group
        return None

    def load(self, ring: Ring | None, residents: bool = True) -> bool:
        """Queues loads from the horizon on while slots are free. Returns whether the end of the pass is reached."""
        expected, position = self.expected, self.horizon
        while position < len(expected):
            group = expected[position][0]
            if group.state is GroupState.HOST:
                if (group.resident and not residents) or not onload_ahead(group, ring):
                    break
                self.loads[group] += 1
            elif not group.resident:
                break  # loaded for an earlier use of the same pass: it is loaded again once that use is over
            position += 1
        self.horizon = position
        return position == len(expected)

    def load_next(self, following: list[tuple[Group, int]], ring: Ring | None) -> None:
        """Queues the first loads of the pass after this one, whose order is given."""
        ahead = {group for group, _ in self.expected[self.position :]}
        for group, _ in following:
            if group in ahead or (group.state is GroupState.HOST and not onload_ahead(group, ring)):
                break
