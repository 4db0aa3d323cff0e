"""diffusers' other switches beside ours: what each of them does to a pipeline that is under layerwise offload.

Each function wraps one method: it gets the original, bound, then the pipeline and the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import compiled, patches, platform
from .errors import LayerwiseOffloadError
from .handle import OffloadHandle, calling, handle_of
from .hooks import RootHook, hooks_of, is_guarded
from .locks import all_locked
from .members import Members, governors
from .reads import weights_read_by
from .schedule import Schedule
from .slots import modules_of, names_of
from .watch import touch

Original = Callable[..., Any]

#: Methods of pipelines and models that rewrite weights or modules: they find, and leave, everything on the host.
EDITORS = """
    load_lora_weights fuse_lora unfuse_lora unload_lora_weights set_adapters delete_adapters enable_lora disable_lora
    load_lora_adapter unload_lora load_textual_inversion unload_textual_inversion load_ip_adapter unload_ip_adapter
    fuse_qkv_projections unfuse_qkv_projections load_attn_procs enable_freeu disable_freeu add_adapter load_adapter
    set_adapter delete_adapter disable_adapters enable_adapters enable_lora_hotswap enable_layerwise_casting
""".split()

#: Methods of models that swap attention processors, which may have weights of their own or read those of their layers.
SWAPPERS = ("set_attn_processor", "set_default_attn_processor")


def governed(pipe: Any) -> dict[str, nn.Module]:
    """The components of a pipeline that any handle governs."""
    modules = modules_of(pipe)
    found = governors(modules.values())
    return {name: module for name, module in modules.items() if id(module) in found}


# ---------------------------------------------------------------------- calls and assignments
def call(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """`pipe(...)`: a use begins and ends with it."""
    with calling(pipe):
        return original(*args, **kwargs)


def assign(original: Original, pipe: Any, name: str, value: Any) -> None:
    """`pipe.name = value`: a component arrives, is swapped, or goes.

    Everything is checked before the assignment, which then takes place, and takes effect at once.
    """
    handle = handle_of(pipe)
    if handle is None:
        original(name, value)
        if isinstance(value, nn.Module):
            _join(pipe, compiled.plain(value))
        return
    old = pipe.__dict__.get(name)
    if old is value or not (isinstance(value, nn.Module) or isinstance(old, nn.Module)) or name not in names_of(pipe):
        original(name, value)
        return
    members = handle._members
    change = members.examine(instead=(pipe, name, value))
    original(name, value)
    members.make(change)
    wrap_models([compiled.plain(value)])
    if compiled.is_wrapper(value):
        _compiled_anew(compiled.plain(value))


def _join(pipe: Any, module: nn.Module) -> None:
    """A pipeline made of another one's components belongs to the handle that governs them."""
    members = governors([module]).get(id(module))
    if members is None or not members.selection.terms.has_calls or not isinstance(members.handle, OffloadHandle):
        return
    members.add_pipe(pipe)
    try:
        change = members.examine()
    except BaseException:
        members.forget_pipe(pipe)
        raise
    members.handle._attach(pipe)
    wrap(type(pipe))
    members.make(change)
    wrap_models(modules_of(pipe).values())


# ---------------------------------------------------------------------- other offloads
def model_offload(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """`enable_model_cpu_offload()`: chains what isn't layerwise; also at the end of each call, to begin anew."""
    ours = governed(pipe)
    if patches.is_hiding() or not ours:
        return original(*args, **kwargs)
    for members in {*governors(ours.values()).values()}:
        members.give_unselected_up(pipe)
    ours = governed(pipe)
    with patches.hiding([*ours.values(), *_placed(pipe)]):
        result = original(*args, **kwargs)
    handle = handle_of(pipe)
    if handle is not None:
        handle._members.answer_for(pipe)
    return result


def _placed(pipe: Any) -> list[nn.Module]:
    handle = handle_of(pipe)
    return [] if handle is None else handle._members.placed


def refuse(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """`enable_sequential_cpu_offload()` and `enable_group_offload()` after ours: refused, nothing is changed."""
    ours = [name for name in governed(pipe) if name not in _words(kwargs.get("exclude_modules"))]
    if ours and not patches.is_hiding():
        name = original.func.__name__ if hasattr(original, "func") else "this offload"
        raise LayerwiseOffloadError(
            f"{', '.join(map(repr, ours))} of this pipeline are under layerwise offload, and {name}() would move the "
            f"same weights. Call pipe.disable_layerwise_offload() first."
        )
    return original(*args, **kwargs)


def refuse_model(original: Original, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`model.enable_group_offload()` on a component of ours: refused."""
    if id(model) in governors([model]):
        raise LayerwiseOffloadError(
            f"This {type(model).__name__} is under layerwise offload, and group offload would move the same weights. "
            f"Call disable_layerwise_offload() (or handle.remove()) first."
        )
    return original(*args, **kwargs)


def _words(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value or ()


def take_all_off(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """`remove_all_hooks()` and `reset_device_map()`: ours are hooks too, so layerwise offload ends in good order."""
    while not patches.is_hiding() and (found := governors(governed(pipe).values())):
        # The newest first; an older handle then takes over, and is next.
        max(found.values(), key=lambda members: members.serial).handle.remove()
    return original(*args, **kwargs)


def auto_offload(original: Original, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """`ComponentsManager.enable_auto_cpu_offload()`: manages what isn't ours."""
    modules = [c for c in manager.components.values() if isinstance(c, nn.Module)]
    found = governors(modules)
    if not found:
        return original(*args, **kwargs)
    every = manager.components
    ours = [m for m in modules if id(m) in found]
    manager.components = type(every)((k, c) for k, c in every.items() if id(c) not in found)
    try:
        with patches.hiding(ours):
            return original(*args, **kwargs)
    finally:
        manager.components = every


# ---------------------------------------------------------------------- compilation
def compile_module(original: Original, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`module.compile()`, which `compile_repeated_blocks()` calls too: the component is looked through anew."""
    original(*args, **kwargs)
    _compiled_anew(module)


def _compiled_anew(module: nn.Module) -> None:
    touch(module)
    if any(isinstance(hook, RootHook) for hook in hooks_of(module)):
        # At once: the next call would already trace into our hooks.
        compiled.hold(module, is_guarded)


# ---------------------------------------------------------------------- devices
def move(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """`pipe.to(device)` runs the pipeline there from now on; `pipe.to(dtype)` converts the host copies."""
    handle = handle_of(pipe)
    device = None if handle is None or patches.is_hiding() else _device_in([*args, *kwargs.values()])
    if handle is None or device is None or device == handle._device:
        return original(*args, **kwargs)
    platform.refuse_absent(device, f"{type(pipe).__name__}.to({str(device)!r}) can't be done")
    before = handle._device
    handle._members.move(device)
    try:
        return original(*args, **kwargs)
    except BaseException:
        handle._members.move(before)
        raise


def _device_in(values: Iterable[Any]) -> torch.device | None:
    for value in values:
        if isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
            return platform.indexed(torch.device(value))
    return None


def device(original: Original, pipe: Any) -> torch.device:
    """`pipe.device` and `pipe._execution_device`: where it computes."""
    handle = handle_of(pipe)
    if handle is not None and patches.is_editing():
        return torch.device("cpu")
    found: torch.device = original() if handle is None else handle._device
    return found


# ---------------------------------------------------------------------- edits
def edit(original: Original, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that rewrites weights: everything of ours that lies on the device goes to the host before it."""
    modules = [target] if isinstance(target, nn.Module) else list(modules_of(target).values())
    with _on_host(governors(modules).values()):
        return original(*args, **kwargs)


def load(original: Original, pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """A loader that is an edit, and takes accelerate's offloads off for as long as it runs.

    It takes the hooks of every component that it sees, ours among them, and puts back only the other offload.
    """
    ours = governed(pipe).values()

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with patches.hiding(ours):
            return original(*args, **kwargs)

    return edit(unseen, pipe, *args, **kwargs)


@contextlib.contextmanager
def _on_host(members: Iterable[Members]) -> Iterator[None]:
    runtimes = {each.runtime for each in members}
    with all_locked(runtimes):
        for runtime in runtimes:
            runtime.release()
            runtime.transfer.finish()  # a group may have been on its way, and its host copy is written now
        schedules = [schedule for runtime in runtimes for schedule in runtime.schedules]
        with _noticing(schedules), patches.editing():
            yield


@contextlib.contextmanager
def _noticing(schedules: Sequence[Schedule]) -> Iterator[None]:
    """What is taken out of a module (an adapter that is deleted), or grows in place (the table of an encoder that gets
    new tokens), is told to nobody: looks for it."""
    before = [_parts(schedule.component.module) for schedule in schedules]
    try:
        yield
    finally:
        for schedule, parts in zip(schedules, before, strict=True):
            schedule.is_stale = schedule.is_stale or parts != _parts(schedule.component.module)


def _parts(module: nn.Module) -> list[object]:
    """The modules and parameters, with the elements of each, and what attention processors read."""
    read = [weights_read_by(getattr(part, "processor", None)) for part in module.modules()]
    return [*map(id, module.modules()), *((id(p), p.numel()) for p in module.parameters()), *read]


def swap(original: Original, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`set_attn_processor()`: weights stay where they are, but a processor's own may come and go."""
    found = governors([model])
    schedules = [schedule for members in found.values() for schedule in members.runtime.schedules]
    with all_locked({members.runtime for members in found.values()}), _noticing(schedules):
        return original(*args, **kwargs)


def wrap(kind: type) -> None:
    """Puts all wrappers on a pipeline class and what it inherits from. Idempotent; inert for pipelines without us."""
    for name, around in _PIPELINE.items():
        patches.wrap_method(kind, name, around)
    patches.wrap_property(kind, "components", patches.without_hidden)
    patches.wrap_property(kind, "device", device)
    patches.wrap_property(kind, "_execution_device", device)
    for name in EDITORS:
        patches.wrap_method(kind, name, edit)


def wrap_models(modules: Iterable[Any]) -> None:
    """Puts the wrappers on the classes of models that edit themselves, and on what compiles a module. Idempotent."""
    patches.wrap_method(nn.Module, "compile", compile_module)
    for kind in {type(module) for module in modules if isinstance(module, nn.Module)}:
        patches.wrap_method(kind, "enable_group_offload", refuse_model)
        for name in EDITORS:
            patches.wrap_method(kind, name, edit)
        for name in SWAPPERS:
            patches.wrap_method(kind, name, swap)


def wrap_manager() -> None:
    """Puts the wrapper on diffusers' `ComponentsManager`. Idempotent."""
    with contextlib.suppress(ImportError):
        from diffusers import ComponentsManager

        patches.wrap_method(ComponentsManager, "enable_auto_cpu_offload", auto_offload)


_PIPELINE: dict[str, Callable[..., Any]] = {
    "__call__": call,
    "__setattr__": assign,
    "to": move,
    "load_lora_weights": load,
    "load_textual_inversion": load,
    "enable_model_cpu_offload": model_offload,
    "enable_sequential_cpu_offload": refuse,
    "enable_group_offload": refuse,
    "remove_all_hooks": take_all_off,
    "reset_device_map": take_all_off,
}
