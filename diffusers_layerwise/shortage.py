"""Device memory ran out: what idle components hold is given up, the plan becomes smaller, and the error says it all.

A smaller plan stays in force: where memory was short once it will be again, and a failed allocation is slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from . import platform
from .config import format_bytes
from .demand import any_loaded
from .errors import is_named, named_out_of_memory
from .plan import ComponentSpec, OffloadPlan
from .schedule import Schedule
from .search import Request, smallest_peak
from .transfer import Account, Ring, Transfer


class Owner(Protocol):
    """What a runtime is to this module."""

    transfer: Transfer
    schedules: list[Schedule]
    ring: Ring | None
    plan: OffloadPlan
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Planning:
    """How a runtime plans: what was asked for (strictly or not), the plan as it would be made now, and adopting one."""

    request: Callable[[bool], Request]
    make: Callable[[], OffloadPlan]
    adopt: Callable[[OffloadPlan, Sequence[Schedule]], None]


@dataclasses.dataclass(frozen=True)
class Held:
    """Device bytes of weights at one moment, and the component in use."""

    device: torch.device
    component: str | None
    module: Any
    total: int
    ring: int
    fixed: int

    @property
    def resident(self) -> int:
        """Bytes of resident groups."""
        return self.total - self.ring - self.fixed


def smaller_limit(least: int, peak: int, fits: int) -> int | None:
    """The bytes that the next plan may take when one of `peak` bytes was too large and `fits` bytes were not.

    None when there is no smaller plan.

    Example:
        >>> smaller_limit(least=10, peak=100, fits=60), smaller_limit(10, 100, 0), smaller_limit(10, 10, 0)
        (60, 10, None)
    """
    return max(least, min(fits, peak - 1)) if peak > least else None


def explanation(held: Held, peak: int, smaller: int | None, need: int) -> str:
    """The text of the error: which memory, whose, what was held, the smallest budget for weights, what to call next.

    Args:
        held (`Held`): What was held when it ran out.
        peak (`int`): The peak of weight bytes by the plan that was in force.
        smaller (`int`, *optional*): By the one in force now; None when there is no smaller one.
        need (`int`): The smallest memory budget that works for the weights.
    """
    where = f"in {held.component!r}" if held.component is not None else "outside of all components"
    parts = f"ring {format_bytes(held.ring)}, resident groups {format_bytes(held.resident)}"
    text = (
        f"The device memory of {held.device} ran out {where} (not host memory). Layerwise offload held "
        f"{format_bytes(held.total)} of weights there ({parts}, small weights and buffers {format_bytes(held.fixed)}) "
        f"by a plan of at most {format_bytes(peak)}; the rest is activations and what else lies on the device. "
    )
    if smaller is None:
        text += f"That plan is the smallest; it takes memory_budget={need} ({format_bytes(need)}). "
    else:
        text += (
            f"The plan was made smaller, at most {format_bytes(smaller)}: call again. For weights the smallest budget "
            f"that works is {need} bytes ({format_bytes(need)}): pass a lower memory_budget=... from there on, or "
            f'mode="memory". '
        )
    if hasattr(held.module, "enable_tiling"):
        return text + f"Tiles need less for activations: {_tiling(held.component)}."
    return text + "A smaller resolution, batch or number of frames needs less for activations."


def _tiling(component: str | None) -> str:
    return "pipe.enable_vae_tiling() (pipe.vae.enable_tiling())" if component == "vae" else "enable_tiling() of it"


class Shortage:
    """What one runtime does when device memory is short.

    Args:
        owner (`Owner`): The runtime.
        planning (`Planning`): How it plans.

    Attributes:
        limit (`int`, *optional*): Bytes of weights that a plan may take, whatever the budget says.
    """

    def __init__(self, owner: Owner, planning: Planning) -> None:
        self.owner = owner
        self.planning = planning
        self.limit: int | None = None
        self._fits: int | None = None
        self._note: str | None = None

    # ------------------------------------------------------------------ the plan
    def limited(self, request: Request, specs: Sequence[ComponentSpec]) -> Request:
        """A request within the limit. Explicit residents are then kept as far as they fit."""
        if self.limit is None:
            return request
        total = request.total_for(max(self.limit, _least(specs, request)))
        if request.total is not None:
            total = min(total, request.total)
        return dataclasses.replace(request, total=total, strict=False)

    def settle(self, fits: int | None = None) -> bool:
        """Adopts a smaller plan where memory was short since the last time. Nothing may be in use.

        Args:
            fits (`int`, *optional*): Bytes of weights that there is room for, when memory is known to be short.

        Returns:
            Whether there is a new plan.
        """
        fits = self._fits if fits is None else fits
        self._fits = None
        if fits is None:
            return False
        owner, before = self.owner, self.limit
        peak = owner.plan.peak_bytes
        self.limit = smaller_limit(self._least(), peak, fits)
        plan = self.planning.make() if self.limit is not None else owner.plan
        if plan.peak_bytes >= peak:
            self.limit = before
            return False
        for schedule in owner.schedules:
            # First: what the larger plan holds isn't the smaller one's peak.
            schedule.drop_all()
        self.planning.adopt(plan, owner.schedules)
        self._say(peak, plan.peak_bytes)
        return True

    def within_less(self, take: Callable[[], None]) -> None:
        """Takes memory before a pass begins; under the smallest plan when the one in force has no room for it."""
        try:
            take()
        except torch.OutOfMemoryError:
            if not self.settle(fits=0):
                raise
            take()

    def _least(self) -> int:
        return _least([schedule.spec() for schedule in self.owner.schedules], self.planning.request(False))

    def _say(self, peak: int, now: int) -> None:
        notes = self.owner.notes
        if self._note in notes:
            notes.remove(self._note)
        self._note = (
            f"the device memory of {self.owner.transfer.device} ran short: the plan for weights was made smaller, from "
            f"{format_bytes(peak)} to {format_bytes(now)}; a memory_budget chooses one beforehand"
        )
        notes.append(self._note)

    # ------------------------------------------------------------------ an allocation of ours failed
    def relieve(self, account: Account | None) -> None:
        """Gives up what can be loaded again, but for the component in use and the one that memory is wanted for.

        May be called wherever device memory is allocated: groups that are dropped are loaded when they are used.
        """
        owner = self.owner
        held = owner.transfer.held_bytes
        self._fits = held if self._fits is None else min(held, self._fits)
        for schedule in owner.schedules:
            if not schedule.is_open and (schedule.account is not account or not any_loaded(schedule.groups)):
                schedule.drop_all()
        if owner.ring is not None and not any(s.is_open or any_loaded(s.groups) for s in owner.schedules):
            owner.ring.close()
        platform.empty_cache(owner.transfer.device)

    # ------------------------------------------------------------------ any allocation failed
    def held(self) -> Held:
        """What is held now; to be asked before anything is given up."""
        owner = self.owner
        schedule = next((s for s in owner.schedules if s.is_open), None)
        name, module = (None, None) if schedule is None else (schedule.name, schedule.component.module)
        slab = owner.ring.slab if owner.ring is not None else None
        fixed = sum(s.fixed.held_bytes for s in owner.schedules if s.fixed is not None)
        total = owner.transfer.held_bytes
        return Held(owner.transfer.device, name, module, total, 0 if slab is None else slab.numel(), fixed)

    def shed(self) -> bool:
        """Adopts the smallest plan, since nobody knows how much is missing. Returns whether it is smaller."""
        found = self.settle(fits=0)
        platform.empty_cache(self.owner.transfer.device)
        return found

    def named(self, held: Held, peak: int, is_smaller: bool) -> torch.OutOfMemoryError:
        """The error for what was held; `peak` is the former plan's."""
        need = self.planning.request(False).total_for(self._least())
        now = self.owner.plan.peak_bytes
        return named_out_of_memory(explanation(held, peak, now if is_smaller else None, need))

    def explain(self, error: BaseException, held: Held) -> None:
        """Raises an error that says it all in place of a bare out-of-memory, after everything was recovered."""
        if not isinstance(error, torch.OutOfMemoryError) or is_named(error):
            return
        peak = self.owner.plan.peak_bytes
        raise self.named(held, peak, self.shed()) from error


def _least(specs: Sequence[ComponentSpec], request: Request) -> int:
    """The peak of the smallest plan, without the residents that a config asks for."""
    bare = [dataclasses.replace(s, config=dataclasses.replace(s.config, resident=None)) for s in specs]
    return smallest_peak(bare, request.residency)
