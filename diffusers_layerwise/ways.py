"""The ways through one component under the plan in force: courses as group uses, and what a pass that skips saves."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping

from .group import Group
from .order import MOST_COURSES


@dataclasses.dataclass(frozen=True)
class Way:
    """One course as group uses.

    `uses` are the groups with the number of unit uses after which each is done, `ends` the unit uses up to the end of
    each; `first` is the unit that begins it.
    """

    course: list[int]
    uses: list[tuple[Group, int]]
    ends: list[int]
    first: int | None

    def place(self, count: int) -> tuple[int, int]:
        """Where a pass stands in its `count`-th unit use: which group use it is, and the unit uses left in that."""
        position = bisect.bisect_left(self.ends, count)
        return position, self.ends[position] - count + 1


class Ways:
    """The known courses of one component as uses of the groups that a plan cut.

    Args:
        group_of (`Mapping[int, Group]`): The group of each unit.
    """

    def __init__(self, group_of: Mapping[int, Group]) -> None:
        self._group_of = group_of
        self._known: dict[int, Way] = {}

    def of(self, course: list[int]) -> Way:
        """A course as group uses. Units that are in no group (rows that are looked up on the host) are left out."""
        # By identity: a course is one object, and the way keeps it alive.
        if id(course) not in self._known:
            if len(self._known) > MOST_COURSES:
                self._known = {}
            groups = [self._group_of[index] for index in course if index in self._group_of]
            uses = [(group, len(list(run))) for group, run in itertools.groupby(groups)]
            first = next((index for index in course if index in self._group_of), None)
            self._known[id(course)] = Way(course, uses, list(itertools.accumulate(n for _, n in uses)), first)
        return self._known[id(course)]

    def saved(self, course: list[int], whole: list[int], loads: Mapping[Group, int]) -> tuple[int, int]:
        """What a pass that skipped a part of a whole one didn't load: (loads of streamed groups, bytes).

        Args:
            course (`list[int]`): What the pass used.
            whole (`list[int]`): What a whole one uses.
            loads (`Mapping[Group, int]`): The loads that were started for the pass, needed or not.
        """
        made = Counter(group for group, _ in self.of(course).uses)
        count = nbytes = 0
        for group, uses in Counter(group for group, _ in self.of(whole).uses).items():
            left = uses - max(made[group], loads.get(group, 0))
            if left > 0 and not group.resident:
                count, nbytes = count + left, nbytes + left * group.copy_bytes
        return count, nbytes
