"""The accelerate hooks: one at each component's root, one at each unit's module. No tensor code here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from . import compiled
from .attempt import Attempt, let_go
from .casting import casts_inside
from .copies import forget_copyable, make_copyable
from .discovery import Component, Unit
from .errors import LayerwiseOffloadError, how_to_end, is_named
from .inputs import move_inputs, requires_grad
from .ranks import is_initialized, refuse_wrapped
from .runtime import Runtime
from .schedule import Schedule
from .watch import unwatch, watch

HOST = torch.device("cpu")
_GUARD = "_layerwise_guard"


class RootHook(ModelHook):  # type: ignore[misc]
    """At a component's root: a pass begins, inputs go to the execution device, the pass ends.

    `execution_device` (with its index) is what diffusers looks for. `pre_forward` works without inputs and without a
    matching `post_forward`: diffusers' `apply_forward_hook` calls it so for a VAE's `encode` and `decode`.
    """

    def __init__(self, runtime: Runtime, schedule: Schedule, device: torch.device) -> None:
        self.runtime = runtime
        self.schedule = schedule
        self.execution_device = device
        self.look_up()

    def look_up(self) -> None:
        """Finds the units that the root itself triggers: a component may be a single module."""
        component = self.schedule.component
        self.units = [unit for unit in component.units if component.module in unit.triggers]
        self.parts = list(component.module.named_modules())

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begins a pass and moves the inputs, once, here; blocks get them where they are."""
        refuse_training(self.schedule, args, kwargs)
        if is_initialized():
            refuse_wrapped(self.schedule.name, module, self.parts)  # sharded since: nothing else tells
        self.runtime.fitting.see(self.schedule, (args, kwargs))
        self.runtime.begin_pass(self.schedule)
        # A VAE's `encode` and `decode` come here without their inputs, which the first unit then moves.
        self.schedule.has_inputs = bool(args or kwargs)
        for unit in self.units:
            self.schedule.use(unit)
        skip = getattr(module, "_skip_keys", None)
        return move_inputs(args, self.execution_device), move_inputs(kwargs, self.execution_device, skip)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Ends the pass."""
        for unit in self.units:
            self.schedule.done(unit)
        self.runtime.end_pass(self.schedule)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Gives the weights back to the host; whoever removes this hook finds an ordinary module."""
        self.runtime.recover()
        self.schedule.leave()
        return module


class UnitHook(ModelHook):  # type: ignore[misc]
    """At a module that owns weights: they are awaited before it runs, and released after."""

    def __init__(self, schedule: Schedule, unit: Unit, device: torch.device) -> None:
        self.schedule = schedule
        self.unit = unit
        self.execution_device = device
        self._use, self._done = schedule.use, schedule.done

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Waits, on the device, for the unit's group.

        Where the component wasn't entered through its forward, its inputs may still be on the host.
        """
        schedule = self.schedule
        if self.unit.is_gathered:
            return move_inputs(args, HOST), move_inputs(kwargs, HOST)
        if not schedule.has_inputs:
            refuse_training(schedule, args, kwargs, self.unit)
        if not schedule.is_settled:
            self._use(self.unit)
        return (args, kwargs) if schedule.has_inputs else self._moved(args, kwargs)

    def _moved(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return move_inputs(args, self.execution_device), move_inputs(kwargs, self.execution_device)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Tells the schedule that the unit was used; moves the rows of a table that stays on the host."""
        if self.unit.is_gathered:
            return move_inputs(output, self.execution_device)
        if not self.schedule.is_settled:
            self._done(self.unit)
        return output


class CastingUnitHook(UnitHook):
    """For a module under diffusers' layerwise casting, which leaves weights in memory of its own: the same values."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Points the weights back at what was loaded: the casts are dropped, and nothing looks edited."""
        self.schedule.point_again(self.unit)
        return super().post_forward(module, output)


class EarlyUnitHook(UnitHook):
    """For a module with pre-hooks of its own that read its weights (`weight_norm`): a pre-hook before all of them.

    accelerate's hooks replace `forward`, and pre-hooks run before that.
    """

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Puts the trigger in front of the module's own pre-hooks."""
        names = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        self._derived = {n: v for n, v in module.__dict__.items() if n in names and isinstance(v, torch.Tensor)}
        self._handle = module.register_forward_pre_hook(lambda _m, _args: self.schedule.use(self.unit), prepend=True)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights are there: the pre-hook has seen to that."""
        if not self.schedule.has_inputs:
            refuse_training(self.schedule, args, kwargs, self.unit)
        return (args, kwargs) if self.schedule.has_inputs else self._moved(args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Releases the unit, and puts back the host's derived weight: the pre-hook makes a new one every time."""
        module.__dict__.update(self._derived)
        return super().post_forward(module, output)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Removes the pre-hook."""
        self._handle.remove()
        return module


class PlacedHook(ModelHook):  # type: ignore[misc]
    """At a skipped component's root: says where it runs, and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device


def place(module: nn.Module, device: torch.device) -> None:
    """Hooks a component whose weights are where they should be."""
    add_hook_to_module(module, PlacedHook(device), append=True)
    make_copyable(module, _is_own)


def remove_placed(module: nn.Module) -> None:
    """Undoes [`place`]. Idempotent."""
    _remove(module, lambda hook: isinstance(hook, PlacedHook))
    for part in module.modules():
        # A newer handle may have hooks there, which copies must leave behind too.
        if not any(_is_own(hook) for hook in hooks_of(module)):
            forget_copyable(part)


def _is_own(hook: object) -> bool:
    return isinstance(hook, (RootHook, UnitHook, PlacedHook))


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """All accelerate hooks of one module, and ours in front of its compiled call."""
    hook, outside = module.__dict__.get("_hf_hook"), compiled.hook_outside(module)
    found = list(hook.hooks) if isinstance(hook, SequentialHook) else [hook]
    return [each for each in (*found, outside) if each is not None]


def own_schedule(module: nn.Module) -> Schedule | None:
    """The schedule of our hook on one module, if there is one."""
    found = [hook.schedule for hook in hooks_of(module) if isinstance(hook, (RootHook, UnitHook))]
    return found[0] if found else None


def outer_component(module: nn.Module) -> str | None:
    """The name of the component under layerwise offload that a module is a part of, without being all of it."""
    inside = {id(part) for part in module.modules()}
    for part in module.modules():
        for own in hooks_of(part):
            if isinstance(own, (RootHook, UnitHook)) and id(own.schedule.component.module) not in inside:
                return own.schedule.name
    return None


def refuse_training(schedule: Schedule, args: Any, kwargs: Any, unit: Unit | None = None) -> None:
    """Raises when a graph would be built, whose backward would read slots that hold other weights by then.

    Train mode is refused too: it is an accident without gradients (dropout in a sample), and training with them.

    Args:
        schedule (`Schedule`): The component.
        args: What it, or the unit's module, is called with.
        kwargs: The same by name.
        unit (`Unit`, *optional*): The unit that is called by itself, whose weights then count.

    Raises:
        LayerwiseOffloadError: The component is in train mode, or gradients are enabled and something requires them.
    """
    if schedule.component.module.training:
        raise LayerwiseOffloadError(
            f"{schedule.name!r} streams its layers and is in train mode. Put it into eval mode (.eval()), or "
            f"{_to_train(schedule)}"
        )
    if not torch.is_grad_enabled():
        return
    asked = requires_grad(args) or requires_grad(kwargs)
    weights = schedule.component.entries() if unit is None else (e for x in unit.extents for e in x.entries)
    if asked or any(entry.held.requires_grad for entry in weights):
        what = "an input" if asked else "its weights"
        raise LayerwiseOffloadError(
            f"{schedule.name!r} streams its layers and was called with gradients enabled while {what} require them; a "
            f"backward pass would read memory that holds other layers by then. Call it under torch.no_grad() or "
            f"torch.inference_mode(), or {_to_train(schedule)}"
        )


def _to_train(schedule: Schedule) -> str:
    roots = [hook for hook in hooks_of(schedule.component.module) if isinstance(hook, RootHook)]
    is_bare = any(hook.schedule is schedule and not hook.runtime.terms.has_calls for hook in roots)
    return f"take layerwise offload off first ({how_to_end(is_bare)}) to train."


def install(runtime: Runtime, schedule: Schedule) -> None:
    """Hooks a component's root and units, behind hooks that are there already."""
    root = schedule.component.module
    _install_units(runtime, schedule)
    add_hook_to_module(root, RootHook(runtime, schedule, runtime.transfer.device), append=True)
    # accelerate chains hooks in one that has no device, and diffusers asks the outermost one.
    outermost = root.__dict__["_hf_hook"]
    outermost.execution_device = runtime.transfer.device
    root.forward = _guarded(root.forward, runtime, schedule)
    make_copyable(root, _is_own, runtime.reading)
    watch(root, schedule)


def _install_units(runtime: Runtime, schedule: Schedule) -> None:
    component, device = schedule.component, runtime.transfer.device
    compiler = compiled.compiler_of(component.module)
    compiled.hold(component.module, is_guarded)
    regions, without = set(component.regions), set(component.regions)
    for unit in component.units:
        for module in unit.triggers:
            if module is component.module:
                continue
            kind = EarlyUnitHook if module._forward_pre_hooks and module not in regions else UnitHook
            kind = CastingUnitHook if casts_inside(module) else kind
            hook = kind(schedule, unit, device)
            without.discard(module)
            if module not in regions or not compiled.put_outside(module, hook, schedule, compiler):
                regions.discard(module)
                add_hook_to_module(module, hook, append=True)
    for module in without:
        compiled.put_outside(module, None, schedule, compiler)
    component.regions = tuple(region for region in component.regions if region in regions)
    note = (
        f"{schedule.name}: compiled as a whole; while its weights stream it runs as written, and {len(regions)} blocks "
        f"of it are compiled instead"
    )
    if compiler is not None and note not in runtime.notes:
        runtime.notes.append(note)


def reinstall(runtime: Runtime, schedule: Schedule, component: Component) -> None:
    """Hooks the units of a component whose structure has changed; the root's hook, which may be running, stays."""
    old = schedule.component.module
    for module in {*unwatch(schedule), *(m for unit in schedule.component.units for m in unit.triggers)}:
        forget_copyable(module)
        if module is not old:
            remove_own(module, schedule)
    schedule.rebuild(component)
    _install_units(runtime, schedule)
    for hook in hooks_of(old):
        if isinstance(hook, RootHook) and hook.schedule is schedule:
            hook.look_up()
    make_copyable(old, _is_own, runtime.reading)
    watch(old, schedule)


def _guarded(forward: Callable[..., Any], runtime: Runtime, schedule: Schedule) -> Callable[..., Any]:
    """A root's `forward`, one thread at a time, that leaves everything in order when it raises.

    accelerate calls no `post_forward` then. Out of device memory, it is repeated once under a smaller plan.
    """

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with runtime.lock:
            attempt = Attempt(schedule.component.module, runtime.transfer.device, (args, kwargs))
            try:
                return forward(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                _prepare_again(runtime, schedule, attempt, error)
            except BaseException:
                runtime.recover()
                raise
            # Not within the clause above, whose error would keep the failed forward's activations.
            try:
                return forward(*args, **kwargs)
            except BaseException as error:
                held = runtime.shortage.held()
                runtime.recover()
                runtime.shortage.explain(error, held)
                raise

    # Compiled code around it stops here: it could trace neither locks nor streams. One function further out, since
    # `torch.compile(module.forward)` looks through what is disabled.
    opaque: Callable[..., Any] = torch.compiler.disable(guarded)  # type: ignore[no-untyped-call]

    @functools.wraps(forward)
    def entrance(*args: Any, **kwargs: Any) -> Any:
        return opaque(*args, **kwargs)

    setattr(entrance, _GUARD, True)
    return entrance


def is_guarded(forward: object) -> bool:
    """Whether this is what [`install`] made of a root's `forward`."""
    return getattr(forward, _GUARD, False) is True


def _prepare_again(runtime: Runtime, schedule: Schedule, attempt: Attempt, error: BaseException) -> None:
    """After a forward ran out of device memory: makes the plan smaller and everything as it was before it.

    Raises:
        torch.OutOfMemoryError: Nothing can be given up, or the forward can't be repeated. The next one has more room.
    """
    if is_named(error):
        runtime.recover()
        raise error
    held, peak = runtime.shortage.held(), runtime.plan.peak_bytes
    is_repeatable = attempt.is_repeatable() and not (schedule.fixed is not None and schedule.fixed.is_touched())
    let_go(error)
    runtime.recover()
    is_smaller = runtime.shortage.shed()
    if not (is_repeatable and is_smaller):
        raise runtime.shortage.named(held, peak, is_smaller) from error
    attempt.rewind()


def uninstall(schedule: Schedule) -> None:
    """Takes this schedule's hooks off, wherever they still are, and leaves everybody else's. Idempotent."""
    root = schedule.component.module
    watched = unwatch(schedule)
    remove_own(root, schedule)
    for module in {*watched, *root.modules(), *(m for unit in schedule.component.units for m in unit.triggers)}:
        remove_own(module, schedule)
        forget_copyable(module)
    compiled.let_go(root)


def remove_own(module: nn.Module, schedule: Schedule) -> None:
    """Removes our hook from one module, keeping other hooks that were chained with it."""
    compiled.take_off(module, schedule)
    _remove(module, lambda hook: isinstance(hook, (RootHook, UnitHook)) and hook.schedule is schedule)


def _remove(module: nn.Module, is_own: Callable[[object], bool]) -> None:
    hook = module.__dict__.get("_hf_hook")
    if is_own(hook):
        remove_hook_from_module(module)
    elif isinstance(hook, SequentialHook) and any(is_own(h) for h in hook.hooks):
        others = [h for h in hook.hooks if not is_own(h)]
        remove_hook_from_module(module)
        for other in others:
            add_hook_to_module(module, other, append=True)
    forward = module.__dict__.get("forward")
    if getattr(forward, "__func__", None) is type(module).forward and "_hf_hook" not in module.__dict__:
        # accelerate restores the method as an instance attribute; an ordinary module has none.
        del module.__dict__["forward"]
