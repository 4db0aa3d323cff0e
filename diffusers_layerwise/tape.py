"""The marks of one recorded pass: each use of a group, each copy, and the memory held meanwhile. Read once past.

Marks are points in time as the transfer makes them: on a device timing events, which the host doesn't wait for. A pass
that isn't recorded has no tape, and costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Times in a pass that the device's allocator is asked.
MOST_LOOKS = 32


@dataclasses.dataclass
class Copying:
    """A group's copy to the device: marks on the copy stream. `in_ring`: to slots, not to memory of its own."""

    name: str
    nbytes: int
    in_ring: bool
    start: Any
    stop: Any = None


@dataclasses.dataclass
class Using:
    """A use of a group: marks on the caller's stream when it is asked for, is there (None: it was), and is done with.

    `held` are the bytes of weights on the device then, `allocated` those of all tensors, where that was looked up.
    """

    name: str
    nbytes: int
    in_ring: bool
    before: Any
    held: int
    allocated: int | None
    start: Any = None
    stop: Any = None


class Tape:
    """One pass of one component.

    Args:
        number (`int`): Which pass of the component it is, from 1.
        mark (`Callable`): Makes a mark on the caller's stream.
        held (`Callable`): Bytes of weights on the device.
        allocated (`Callable`): Bytes of all tensors there; None where that isn't looked up.
        ring_bytes (`int`): Those of the ring, whether its slots are in use or not.
        uses (`int`): How many uses of groups are expected.
        earlier (`Sequence[Copying]`): Copies that were queued before, which may still be under way.
    """

    def __init__(
        self,
        number: int,
        mark: Callable[[], Any],
        held: Callable[[], int],
        allocated: Callable[[], int | None],
        ring_bytes: int,
        uses: int,
        earlier: Sequence[Copying],
    ) -> None:
        self.number = number
        self.ring_bytes = ring_bytes
        self.is_steady = False
        self.earlier = earlier
        self.copies: list[Copying] = []
        self.uses: list[Using] = []
        self.end: Any = None
        self._mark, self._held, self._allocated = mark, held, allocated
        self._stride = max(1, -(-uses // MOST_LOOKS))
        self.begin: Any = mark()
        self.held_before, self.allocated_before = held(), allocated()

    def copy(self, name: str, nbytes: int, in_ring: bool, start: Any) -> Copying:
        """A copy is queued behind its start mark; whoever queues it adds the other mark."""
        self.copies.append(Copying(name, nbytes, in_ring, start))
        return self.copies[-1]

    def before(self, name: str, nbytes: int, in_ring: bool) -> None:
        """A group is about to be used."""
        look = len(self.uses) % self._stride == 0
        allocated = self._allocated() if look else None
        self.uses.append(Using(name, nbytes, in_ring, self._mark(), self._held(), allocated))

    def start(self) -> None:
        """It had to be waited for, and is there."""
        self.uses[-1].start = self._mark()

    def stop(self) -> None:
        """It is done with. Does nothing the second time."""
        if self.uses and self.uses[-1].stop is None:
            self.uses[-1].stop = self._mark()

    def finish(self, has_end: bool) -> None:
        """The pass is over; one that was entered without a forward (a VAE's `decode`) has no end that can be told."""
        self.stop()
        if has_end:
            self.end = self._mark()

    @property
    def last(self) -> Any:
        """The mark at which the pass is over; None where it never was anything."""
        return self.end if self.end is not None else (self.uses[-1].stop if self.uses else None)

    def closing(self) -> Iterator[Any]:
        """The marks that are past when all are: the pass's own end, and that of the last copy."""
        yield self.last
        copies = [copying for copying in self.copies if copying.stop is not None]
        yield from (copying.stop for copying in copies[-1:])
