"""The runtimes' locks: in which order several are taken, and what becomes of them in a forked child."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol


class Locked(Protocol):
    """Whatever has a lock, and knows what to do when whoever held it is gone."""

    lock: threading.RLock
    turn: int

    def forget_calls(self) -> None: ...


_living: weakref.WeakSet[Locked] = weakref.WeakSet()


_turns = itertools.count()


def watch(owner: Locked) -> int:
    """Renews a lock in every child that is forked from now on, for as long as its owner lives. Returns its turn."""
    _living.add(owner)
    return next(_turns)


@contextlib.contextmanager
def all_locked(owners: Iterable[Locked]) -> Iterator[None]:
    """Takes several locks, always in the same order, so that no two threads wait for each other."""
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: owner.turn):
            stack.enter_context(owner.lock)
        yield


def _renew_locks() -> None:
    """A lock that another thread of the parent holds would stay locked in the child for ever."""
    for owner in list(_living):
        if owner.lock.acquire(blocking=False):
            # Free, or held by the thread that forked, which goes on in the child.
            owner.lock.release()
            continue
        owner.lock = threading.RLock()
        owner.forget_calls()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
