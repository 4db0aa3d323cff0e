"""The handle: the plan, the report, and the way back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from . import progress
from .errors import LayerwiseOffloadError, nearest
from .locks import all_locked
from .members import Members, governors
from .plan import OffloadPlan
from .report import Report, make_report
from .runtime import Runtime
from .slots import modules_of
from .timeline import Timeline, make_timeline

#: The attribute of a pipeline that holds its handle.
HANDLE = "_layerwise_offload"


class OffloadHandle:
    """What `enable_layerwise_offload` and `apply_layerwise_offload` return: the plan, the report, and the way back.

    As a context manager it takes layerwise offload off again at the end of the block.

    Attributes:
        plan (`OffloadPlan`): Who is resident and who streams; provisional until the first pass has shown the order.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    @property
    def _runtime(self) -> Runtime:
        return self._members.runtime

    @property
    def plan(self) -> OffloadPlan:
        """The plan in force."""
        runtime = self._runtime
        if runtime.plan.provisional != runtime.is_provisional():
            runtime.plan = dataclasses.replace(runtime.plan, provisional=runtime.is_provisional())
        if runtime.plan.host is not self._members.host.plan:
            runtime.plan = dataclasses.replace(runtime.plan, host=self._members.host.plan)
        return runtime.plan

    @property
    def _device(self) -> torch.device:
        return self._members.selection.device

    def report(self) -> Report:
        """What was moved, what is resident, hits, misses, stalls; also after `remove()`."""
        return make_report(self._runtime, self._members.notes, self._members.host)

    def timeline(self, component: str | None = None, number: int | None = None) -> Timeline:
        """What took place in a pass: computing, copying, waiting and memory over time, as text, picture or trace.

        Recorded are a component's first pass, and those under a new plan until it has settled, which is the last one
        that costs anything. Waits until the pass is over.

        Args:
            component (`str`, *optional*): Whose pass; the denoiser's when None, of several the largest one's.
            number (`int`, *optional*): Which pass, from 1; the last one that was recorded when None.

        Raises:
            ValueError: No such component, or that pass wasn't recorded (the message says which were).
            LayerwiseOffloadError: The component hasn't run yet.

        Example:
            >>> image = pipe("a fox").images[0]
            >>> pipe.layerwise_offload.timeline().save("step.html")
        """
        with self._runtime.lock:
            return make_timeline(self._runtime, component, number)

    def record_timeline(self) -> None:
        """Records the next passes of every component anew: for other sizes, and with the memory that all tensors take.

        Idempotent. That memory is looked up at most 32 times in a pass, where the device's allocator tells it.

        Example:
            >>> handle.record_timeline()
            >>> image = pipe("a fox", height=1024).images[0]
            >>> print(handle.timeline())
        """
        with self._runtime.lock:
            self._runtime.tuner.tapes.arm()

    def refresh(self, name: str | None = None) -> None:
        """Takes over what was written to a component's weights through `.data`, which no counter shows.

        What lies on the device is copied to the host, and everything is loaded anew from there. The component is also
        looked through anew, for modules that were put in without any registration.

        Args:
            name (`str`, *optional*): The component; all when None.

        Raises:
            ValueError: No such component.
        """
        names = [schedule.name for schedule in self._runtime.schedules]
        if name is not None and name not in names:
            raise ValueError(f"No component {name!r} is offloaded.{nearest(name, names)} There are {names}.")
        if self._members.is_removed:
            return
        with self._runtime.lock:
            for schedule in self._runtime.schedules:
                if name in (None, schedule.name):
                    schedule.take_edits()
                    schedule.leave()
                    schedule.is_stale = True

    def release(self) -> None:
        """Gives all device memory back; the next pass takes it again. Idempotent."""
        self._runtime.release()

    def remove(self) -> None:
        """Makes the modules ordinary again: hooks off, weights where they came from. Idempotent."""
        for pipe in self._members.pipes:
            if pipe.__dict__.get(HANDLE) is self:
                del pipe.__dict__[HANDLE]
        self._members.remove()

    def _attach(self, pipe: Any) -> None:
        """Makes this the handle of a pipeline."""
        self._members.add_pipe(pipe)
        pipe.__dict__[HANDLE] = self

    def _detach(self, pipe: Any) -> None:
        """A pipeline leaves: what only it has becomes ordinary. With the one that was enabled, all does."""
        if len(self._followers(pipe)) == len(self._members.pipes):
            self.remove()
            return
        pipe.__dict__.pop(HANDLE, None)
        self._members.drop_pipe(pipe)

    def _followers(self, pipe: Any) -> list[Any]:
        """The pipelines that go where this one goes: all, if it is the one that was enabled, else itself."""
        pipes = self._members.pipes
        return pipes if pipes and pipes[0] is pipe else [pipe]

    def _revive(self, pipes: list[Any]) -> None:
        """Governs again what it did before it was removed or a pipeline left."""
        self._members.revive(pipes)
        for pipe in pipes:
            self._attach(pipe)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of a pipeline is an ordinary pipeline, without a handle."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """So is one that comes out of a pickle."""
        return type(None), ()

    def __enter__(self) -> OffloadHandle:
        if self._members.is_removed:
            enable = "apply_layerwise_offload(module, " if self._members.is_bare else "pipe.enable_layerwise_offload("
            raise LayerwiseOffloadError(
                f"This handle has ended: its layerwise offload was taken off, or replaced by a newer call. Enable it "
                f"again: with {enable}...) as handle."
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def handle_of(pipe: Any) -> OffloadHandle | None:
    """A pipeline's handle, or None."""
    found = pipe.__dict__.get(HANDLE)
    return found if isinstance(found, OffloadHandle) else None


@contextlib.contextmanager
def calling(pipe: Any) -> Iterator[None]:
    """The call of a pipeline: a use of whatever governs a part of it begins, and ends with it.

    Locks are taken in one order, so that threads that call pipelines with modules in common don't wait for each other.
    A VAE's `decode` takes no lock itself, since nothing tells when it ends.
    """
    members = {*governors(modules_of(pipe).values()).values()}
    handle = handle_of(pipe)
    if handle is not None:
        members.add(handle._members)
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress.using(pipe, is_call=True))
        stack.enter_context(all_locked(each.runtime for each in members))
        for each in sorted(members, key=lambda each: each.runtime.turn):
            stack.enter_context(each.runtime.call())
        yield
