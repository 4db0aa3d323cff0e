"""Which components a handle governs: those of its pipelines that were selected, also when they arrive or go later."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import adoption, conflicts, dispatched, hooks, mapping, patches
from .components import Selected, Wanted, find_wanted, may_be_module
from .config import LayerwiseOffloadConfig, Mode
from .log import get_logger
from .plan import Choice
from .runtime import Runtime
from .schedule import Schedule
from .selection import Components, select
from .slots import Slots, modules_of, named_modules, names_of, slots_of
from .terms import Terms
from .tiers import HostMemory
from .transfer import Transfer

logger = get_logger(__name__)
_serials = itertools.count()
#: All that govern something; only looked through when one of them ends, so that an older one takes over again.
_living: weakref.WeakSet[Members] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the user asked for: kept, so that it applies to what arrives later."""

    components: Components
    mode: Mode
    options: LayerwiseOffloadConfig
    device: torch.device
    terms: Terms


@dataclasses.dataclass(frozen=True)
class Change:
    """A checked change, not made yet: components that come, that go, that are placed, and other offloads in the way."""

    new: list[Wanted]
    gone: list[Schedule]
    placed: dict[str, nn.Module]
    notes: list[str]
    unplaced: list[nn.Module] = dataclasses.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.new or self.gone or self.placed or self.unplaced)


def governors(modules: Iterable[nn.Module]) -> dict[int, Members]:
    """Who governs which of these modules, by the module's id."""
    found: dict[int, Members] = {}
    for module in modules:
        for hook in hooks.hooks_of(module):
            if isinstance(hook, hooks.RootHook) and isinstance(hook.runtime.owner, Members):
                found[id(module)] = hook.runtime.owner
    return found


class Members:
    """The components of one handle, and the pipelines they come from.

    Args:
        selection (`Selection`): What the user asked for.
        bare (`nn.Module`, *optional*): A module without a pipeline.

    Attributes:
        runtime (`Runtime`): Runs them.
        notes (`list[str]`): For the report.
    """

    def __init__(self, selection: Selection, bare: nn.Module | None = None) -> None:
        self.selection = selection
        self.serial = next(_serials)
        self.notes: list[str] = []
        self.handle: Any = None
        self.is_removed = False
        self._pipes: list[weakref.ref[Any]] = []
        self._bare = None if bare is None else weakref.ref(bare)
        self._homes: dict[Schedule, adoption.Homes] = {}
        self._placed: list[nn.Module] = []
        self._answering: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._taken: list[conflicts.TakenOff] = []
        self.host = HostMemory(selection.options, selection.terms.has_calls)
        self.runtime = self._new_runtime()

    def _new_runtime(self) -> Runtime:
        runtime = Runtime(Transfer(self.selection.device), [], self.selection.terms)
        runtime.owner = self
        runtime.notes = self.notes
        runtime.restructure = functools.partial(adoption.restructure, runtime)
        runtime.host_limit = lambda: self.host.limit(self.runtime.schedules)
        return runtime

    def _settle(self, due: Schedule) -> None:
        """Before a component is packed, now that its order is known: the plan says better what streams."""
        self.host.count(self.runtime.schedules)
        others = [schedule for schedule in self.runtime.schedules if schedule is not due]
        self.host.settle([due], others, self.runtime.plan.components)

    # ------------------------------------------------------------------ pipelines
    @property
    def is_bare(self) -> bool:
        """Whether this is about a module without a pipeline."""
        return self._bare is not None

    @property
    def pipes(self) -> list[Any]:
        """The living pipelines."""
        return [pipe for ref in self._pipes if (pipe := ref()) is not None]

    def add_pipe(self, pipe: Any) -> None:
        """Counts a pipeline's components among ours. Takes effect with the next change."""
        if not any(other is pipe for other in self.pipes):
            self._pipes.append(weakref.ref(pipe))

    def forget_pipe(self, pipe: Any) -> None:
        """Undoes [`add_pipe`]; nothing of it has been taken in. Idempotent."""
        self._pipes = [ref for ref in self._pipes if ref() is not None and ref() is not pipe]

    def drop_pipe(self, pipe: Any) -> None:
        """Lets a pipeline go, and the components that only it has."""
        self.forget_pipe(pipe)
        self.make(self.examine())
        for module in modules_of(pipe).values():
            if not governors([module]):
                patches.forget_device(module)

    def _slots(self, instead: tuple[Any, str, Any] | None) -> Slots:
        taken = {schedule.name: id(schedule.component.module) for schedule in self.runtime.schedules}
        return named_modules(self.pipes, taken, instead)

    # ------------------------------------------------------------------ changes
    def examine(self, instead: tuple[Any, str, Any] | None = None, explicit: bool = False) -> Change:
        """Looks for what has to change, checks it, and changes nothing.

        Args:
            instead (`tuple`, *optional*): (pipeline, name, value): as if this had been assigned already.
            explicit (`bool`): The user's own call, which takes components over from older handles.

        Raises:
            LayerwiseOffloadError: A component named exactly can't be treated as asked.
            torch.OutOfMemoryError: The budget is too small with what arrives.
        """
        slots = self._slots(instead)
        own = {id(schedule.component.module): schedule for schedule in self.runtime.schedules}
        gone = [schedule for key, schedule in own.items() if key not in slots and self._bare is None]
        elsewhere = {} if explicit else governors(module for _, module, _ in slots.values())
        known = {*own, *elsewhere, *map(id, self._placed)}
        fresh = {name: module for key, (name, module, _) in slots.items() if key not in known}
        notes: list[str] = []
        chosen = self._chosen(slots)
        only_loaded = False
        for pipe in self.pipes:
            part = {n: m for key, (n, m, p) in slots.items() if p is pipe and n in fresh and n in chosen}
            only_loaded |= mapping.check_pipeline(pipe, part, self.selection.options, self.selection.device)
            states = conflicts.check({n: m for n, m in part.items() if chosen[n][0] is not Choice.SKIP})
            notes += [f"{name}: {state} offload replaced" for name, state in states.items()]
            chained = conflicts.has_chain(pipe)
            rest = {n: m for _, (n, m, p) in slots.items() if p is pipe and n in fresh and n not in chosen}
            for name in (n for n, m in rest.items() if chained or conflicts.is_replaceable(m)):
                del fresh[name]
        on_meta = {n for n, m in fresh.items() if conflicts.is_replaceable(m)}
        select_ = self.selection
        new = find_wanted(fresh, chosen, select_.options, select_.device, notes, on_meta, only_loaded)
        placed = {n: m for n, m in fresh.items() if n in chosen and chosen[n][0] is Choice.SKIP}
        unplaced = [module for module in self._placed if id(module) not in slots]
        if new or gone:
            kept = [s for s in self.runtime.schedules if s not in gone]
            schedules = [self._schedule(item) for item in new]
            self.runtime.plan_for([*kept, *schedules])
            self.host.check(schedules, kept)
        return Change(new, gone, placed, notes, unplaced)

    def _chosen(self, slots: Slots) -> Selected:
        """The user's selection, for names of all our pipelines; several pipelines may use one name."""
        names: dict[str, Any] = {}
        weightless: set[str] = set()
        for pipe in self.pipes:
            # Also what a pipeline that is still being made will have.
            slots_now = dict.fromkeys(names_of(pipe)) | slots_of(pipe)
            names |= {n: v for n, v in slots_now.items() if may_be_module(n, v)}
            weightless |= slots_now.keys() - names.keys()
        names |= {name.partition(" of ")[0]: module for name, module, _ in slots.values()}
        asked = self.selection
        chosen = select(asked.components, names, asked.mode, asked.options, weightless)
        bases = {name: name.partition(" of ")[0] for name, _, _ in slots.values()}
        return chosen | {name: chosen[base] for name, base in bases.items() if base in chosen}

    def adopt_bare(self, wanted: Wanted) -> None:
        """Takes a module without a pipeline in."""
        schedule = self._schedule(wanted)
        self.runtime.plan_for([schedule])
        self.host.check([schedule], [])
        self.make(Change([wanted], [], {}, []))

    def make(self, change: Change) -> None:
        """Makes a change that was examined."""
        if change.is_empty or self.is_removed:
            return
        self.notes += change.notes
        _living.add(self)
        for schedule in change.gone:
            adoption.let_go(self.runtime, schedule)
        ready = [self._ready(item) for item in change.new]
        new = [self._schedule(item) for item, _ in ready]
        kept = [s for s in self.runtime.schedules if s not in change.gone]
        self.host.settle(new, kept)
        for schedule in new:
            schedule.store.settle = functools.partial(self._settle, schedule)
        self.runtime.change(new, change.gone, self.runtime.plan_for([*kept, *new]))
        for schedule in change.gone:
            adoption.send_home(schedule, self._homes.pop(schedule, {}), self.notes)
            schedule.close()
        for schedule, (_, homes) in zip(new, ready, strict=True):
            self._homes[schedule] = homes
            adoption.install(self.runtime, schedule)
            self._answer(schedule.component.module)
        for name, module in change.placed.items():
            self._place(name, module)
        for module in change.unplaced:
            self._unplace(module)
        self._rechain()

    def _place(self, name: str, module: nn.Module) -> None:
        """Skipped components answer the execution device; nothing else is done to them."""
        self._placed.append(module)
        if dispatched.is_dispatched(module):
            self.notes.append(f"{name}: skipped as asked; accelerate runs it, as its device map says")
            return
        hooks.place(module, self.selection.device)
        self._answer(module)
        self.notes.append(f"{name}: skipped as asked; its weights stay where they are")

    def _unplace(self, module: nn.Module) -> None:
        self._placed = [other for other in self._placed if other is not module]
        hooks.remove_placed(module)
        if not governors([module]):
            patches.forget_device(module)

    def reconcile(self) -> None:
        """Takes in what our pipelines hold now and nobody governs; what can't be is noted. Idempotent."""
        if self.is_removed or not (self.pipes or self._bare):
            return
        try:
            self.make(self.examine())
        except (RuntimeError, ValueError) as error:
            self.notes.append(f"not taken over again: {error}")
            logger.warning(self.notes[-1])

    def _ready(self, item: Wanted) -> tuple[Wanted, adoption.Homes]:
        """Frees a component from other offloads and older handles, and brings its weights to the host.

        Returns:
            The component as it is then, and the devices that its tensors came from.
        """
        module = item.component.module
        taken = conflicts.take_off(module)
        if taken is not None:
            self._taken.append(taken)
        inherited: adoption.Homes = {}
        for other in {*governors(module.modules()).values()}:
            inherited |= other.give_up(module)
        if item.residence is not None and item.choice is Choice.LAYERWISE:
            self.notes.append(mapping.describe(item.component, item.residence))
        others = [m for pipe in self.pipes for m in modules_of(pipe).values()]
        item, homes = adoption.bring_to_host(
            item, self.selection.device, mapping.crosses(others, self.selection.device)
        )
        return item, inherited | homes or self._shared_home()

    def _shared_home(self) -> adoption.Homes:
        """Where all else came from, for what diffusers loads by itself (an image encoder): it would load it there."""
        places = {homes.get(adoption.ALL) for homes in self._homes.values()} if patches.is_editing() else set()
        device = places.pop() if len(places) == 1 else None
        return {} if device is None else {adoption.ALL: device}

    def _schedule(self, item: Wanted) -> Schedule:
        return adoption.make_schedule(item, self.runtime.transfer)

    def _answer(self, module: nn.Module) -> None:
        patches.answer_device(module, self.selection.device)
        self._answering.add(module)

    def _rechain(self) -> None:
        """Model offload keeps the components that aren't ours, chained in its own order."""
        for pipe in self.pipes:
            if conflicts.has_chain(pipe):
                ours = [m for m in modules_of(pipe).values() if governors([m])]
                with patches.hiding([*ours, *self._placed]):
                    conflicts.rechain(pipe)
            self.answer_for(pipe)

    @property
    def placed(self) -> list[nn.Module]:
        """Skipped components, of which only the device is answered for."""
        return list(self._placed)

    def answer_for(self, pipe: Any) -> None:
        """Makes the components that another offload holds answer the execution device too.

        But those of a `ComponentsManager`, whose hook moves a model when its `.device` is another one.
        """
        for module in modules_of(pipe).values():
            if conflicts.found(module) not in (None, "auto"):
                self._answer(module)

    # ------------------------------------------------------------------ letting go
    def give_unselected_up(self, pipe: Any) -> None:
        """Another offload was asked for explicitly: it gets what nobody selected for us."""
        modules = {id(m) for m in modules_of(pipe).values()}
        gone = [s for s in self.runtime.schedules if s.unselected and id(s.component.module) in modules]
        self.make(Change([], gone, {}, [f"{s.name}: left to model offload" for s in gone]))

    def give_up(self, module: nn.Module) -> adoption.Homes:
        """A newer handle takes a module, or what contains it: our hooks come off, its weights stay on the host.

        Returns:
            Where its weights came from.
        """
        inside = {id(part) for part in module.modules()}
        gone = [s for s in self.runtime.schedules if id(s.component.module) in inside]
        for schedule in gone:
            adoption.let_go(self.runtime, schedule)
            self.notes.append(f"{schedule.name}: taken over by a newer call of layerwise offload")
        kept = [s for s in self.runtime.schedules if s not in gone]
        self.runtime.change([], gone, self.runtime.plan_for(kept))
        homes: adoption.Homes = {}
        for schedule in gone:
            homes |= self._homes.pop(schedule, {})
            dispatched.give_back(schedule.component.module)
            schedule.close()
        return homes

    def remove(self) -> None:
        """Makes everything ordinary again, and lets older handles take over what is theirs. Idempotent."""
        if self.is_removed:
            return
        self.is_removed = True
        self.runtime.release()
        for schedule in self.runtime.schedules:
            adoption.let_go(self.runtime, schedule)
            adoption.send_home(schedule, self._homes.pop(schedule, {}), self.notes)
        self.runtime.close()
        for module in list(self._placed):
            self._unplace(module)
        for module in list(self._answering):
            if not governors([module]):
                patches.forget_device(module)
        _living.discard(self)
        self._put_back()
        for other in sorted(_living, key=lambda m: -m.serial):
            other.reconcile()

    def revive(self, pipes: list[Any]) -> None:
        """Takes in again what these pipelines hold, after [`remove`] or [`drop_pipe`]."""
        if self.is_removed:
            self.is_removed = False
            self.runtime = self._new_runtime()
        for pipe in pipes:
            self.add_pipe(pipe)
        self.make(self.examine())

    def _put_back(self) -> None:
        """A pipeline of which a part stays under another offload gets that offload back as a whole."""
        for pipe in self.pipes:
            modules = list(modules_of(pipe).values())
            if conflicts.has_chain(pipe):
                ours = [m for m in modules if governors([m])]
                with patches.hiding(ours):
                    conflicts.rechain(pipe)
                continue
            left = {conflicts.found(module) for module in modules}
            for taken in self._taken:
                if taken.state in left and taken.state != "model" and any(taken.module is m for m in modules):
                    taken.put_back()

    def move(self, device: torch.device) -> None:
        """Runs everything on another device from now on. Raises before anything has changed when that can't be."""
        terms = self.selection.terms
        selection = dataclasses.replace(self.selection, device=device, terms=terms)
        old = self.runtime
        with old.lock:
            old.release()
            items = [Wanted(s.component, s.choice, s.config, s.unselected) for s in old.schedules]
            homes = [self._homes.pop(s, {}) for s in old.schedules]
            for schedule in old.schedules:
                adoption.let_go(old, schedule)
            old.close()
            self.selection = selection
            self.runtime = self._new_runtime()
            self.make(Change(items, [], {}, [f"moved to {device} with the pipeline"]))
            for schedule, home in zip(self.runtime.schedules, homes, strict=True):
                self._homes[schedule] = home
