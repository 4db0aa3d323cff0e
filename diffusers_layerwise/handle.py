"""The handle: the plan, the report, and the way back."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import nn

from . import patches
from .hooks import RootHook, calling, hooks_of, remove_placed, uninstall
from .plan import OffloadPlan
from .report import Report, make_report
from .runtime import Runtime
from .schedule import Schedule
from .transfer import plain_tensors

logger = logging.get_logger(__name__)

#: The attribute of a pipeline that holds its handle.
HANDLE = "_layerwise_offload"


class OffloadHandle:
    """What `enable_layerwise_offload` and `apply_layerwise_offload` return: the plan, the report, and the way back.

    As a context manager it takes layerwise offload off again at the end of the block.

    Attributes:
        plan (`OffloadPlan`): Who is resident and who streams; provisional until the first pass has shown the order.
    """

    def __init__(
        self,
        runtime: Runtime,
        homes: dict[str, dict[int, torch.device]],
        notes: list[str],
    ) -> None:
        self._runtime = runtime
        self._placed: list[nn.Module] = []
        self._homes = homes
        self._notes = notes
        self._owner: DiffusionPipeline | None = None
        self._removed = False

    @property
    def plan(self) -> OffloadPlan:
        """The plan in force."""
        runtime = self._runtime
        if runtime.plan.provisional != runtime.is_provisional():
            runtime.plan = dataclasses.replace(runtime.plan, provisional=runtime.is_provisional())
        return runtime.plan

    def report(self) -> Report:
        """What was moved, what is resident, hits, misses, stalls; also after `remove()`."""
        return make_report(self._runtime, self._notes)

    def refresh(self, name: str | None = None) -> None:
        """Takes over what was written to a component's weights through `.data`, which no counter shows.

        What lies on the device is copied to the host, and everything is loaded anew from there.

        Args:
            name (`str`, *optional*): The component; all when None.

        Raises:
            ValueError: No such component.
        """
        names = [schedule.name for schedule in self._runtime.schedules]
        if name is not None and name not in names:
            raise ValueError(f"No component {name!r} is offloaded; there are {names}.")
        if self._removed:
            return
        for schedule in self._runtime.schedules:
            if name in (None, schedule.name):
                schedule.take_edits()
                schedule.leave()

    def release(self) -> None:
        """Gives all device memory back; the next pass takes it again. Idempotent."""
        self._runtime.release()

    def remove(self) -> None:
        """Makes the modules ordinary again: hooks off, weights where they came from. Idempotent."""
        if self._removed:
            return
        self._removed = True
        self._runtime.release()
        for schedule in self._runtime.schedules:
            uninstall(schedule)
            patches.forget_device(schedule.component.module)
            schedule.renew()
            schedule.store.release()
            self._send_home(schedule)
        self._runtime.close()
        for module in self._placed:
            remove_placed(module)
            patches.forget_device(module)
        if self._owner is not None and self._owner.__dict__.get(HANDLE) is self:
            del self._owner.__dict__[HANDLE]

    def _send_home(self, schedule: Schedule) -> None:
        """Weights that came from a device go back there; where that doesn't fit they stay on the host, with a note."""
        homes = self._homes[schedule.name]
        with plain_tensors():
            for entry in schedule.component.entries():
                device = homes.get(id(entry.tensor))
                if device is None:
                    continue
                try:
                    entry.tensor.data = entry.tensor.data.to(device)
                except torch.OutOfMemoryError:
                    note = f"{schedule.name} doesn't fit on {device} and stays on the CPU"
                    self._notes.append(note)
                    logger.warning(note)
                    return

    def _belongs_to(self, pipe: DiffusionPipeline) -> None:
        """Makes this the handle of a pipeline."""
        self._owner = pipe
        pipe.__dict__[HANDLE] = self

    def _call(self) -> contextlib.AbstractContextManager[None]:
        """The context of one pipeline call."""
        return calling(self._runtime, vars(self._owner).values() if self._owner is not None else [])

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of a pipeline is an ordinary pipeline, without a handle."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """So is one that comes out of a pickle."""
        return type(None), ()

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def take_over(module: nn.Module) -> bool:
    """Takes a module, and what is in it, from handles that stream it: the newest call governs.

    Returns whether there were any. Their other components go on as before.
    """
    found = False
    for part in list(module.modules()):
        for hook in [h for h in hooks_of(part) if isinstance(h, RootHook)]:
            schedule = hook.schedule
            hook.runtime.give_up(schedule)
            uninstall(schedule)
            patches.forget_device(part)
            schedule.renew()
            schedule.store.release()
            schedule.close()
            found = True
    return found
