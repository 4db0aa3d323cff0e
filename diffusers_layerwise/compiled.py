"""Modules under torch.compile: what stands in the place of their compiled call while weights stream.

A hook inside compiled code would break its graph at every layer. So the weights of a compiled module move as one unit,
and its hook stands in front of the compiled call, which then finds plain parameters: the same objects every time, of
the same shapes, wherever their memory lies. A component that is compiled as a whole would be one unit, and nothing
would stream: it is called as it was written instead, and its repeated blocks are compiled with its options.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

#: Where `module.compile()` keeps the compiled call; torch calls it in the place of hooks and `forward`.
CALL = "_compiled_call_impl"
FORWARD = "forward"
#: Graphs of one class of blocks that are compiled on our account. torch stops at 8 by default, which suits a model that
#: was to be one graph: a VAE's blocks are of one class, and of a dozen shapes.
MOST_GRAPHS = 64

#: What `torch.compile(module)` made of a module, by that module.
_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


class Outside:
    """In the place of a compiled call: a hook before and after it, outside of the compiled region.

    Args:
        module (`nn.Module`): The compiled module.
        before (`Callable`, *optional*): What was in this place; None where the module is compiled only on our account.
        inner (`Callable`): The compiled call.
        hook (`ModelHook`, *optional*): Ours; None where the module owns nothing that moves.
        owner (`object`): Whoever put it here.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., Any] | None, inner: Callable[..., Any], hook: Any, owner: object
    ) -> None:
        self.module = module
        self.before = before
        self.inner = inner
        self.hook = hook
        self.owner = owner
        self.__wrapped__ = inner  # for whoever asks for the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the weights, runs the compiled code, and lets them go."""
        hook, module = self.hook, self.module
        if hook is None:
            return self.inner(*args, **kwargs)
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return hook.post_forward(module, self.inner(*args, **kwargs))


class Held:
    """In the place of a component's compiled code while the component streams: runs it as it was written."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.__wrapped__ = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what was compiled, uncompiled; hooks run in it."""
        return self.__wrapped__(*args, **kwargs)


# ---------------------------------------------------------------------- finding
def is_wrapper(module: object) -> bool:
    """Whether this is what `torch.compile(module)` makes of a module."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def plain(module: Any) -> Any:
    """The module inside what `torch.compile(module)` returned; anything else is returned as it is."""
    while is_wrapper(module):
        inner = module._orig_mod
        _wrappers.setdefault(inner, weakref.WeakSet()).add(module)
        module = inner
    return module


def carrier(module: nn.Module) -> nn.Module:
    """What accelerate's hook on a module was put on: the module, or what `torch.compile(module)` returned.

    The attributes of that one are the module's own, all but `forward`: the hook shows on the module, and what it put
    in the place of `forward` doesn't.
    """
    for wrapper in _wrappers.get(module, ()):
        forward = wrapper.__dict__.get(FORWARD)
        if isinstance(forward, functools.partial) and any(argument is wrapper for argument in forward.args):
            found: nn.Module = wrapper
            return found
    return module


def is_compiled(value: object) -> bool:
    """Whether torch.compile made this function; one that wraps it has its attributes, but not its identity."""
    if not hasattr(value, "_torchdynamo_orig_callable") or getattr(value, "_torchdynamo_disable", False):
        return False
    return bool(getattr(value, "_torchdynamo_wrapper_id", id(value)) == id(value))


def _entry(module: nn.Module) -> tuple[str, Any] | None:
    """The attribute through which a module's own compiled code is called, and that code."""
    for name in (CALL, FORWARD):
        value = module.__dict__.get(name)
        value = value.before if isinstance(value, Outside) else value
        value = value.compiled if isinstance(value, Held) else value
        if value is not None and (name == CALL or is_compiled(value)):
            return name, value
    return None


def _entries(root: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(module, attribute, compiled function) of all through which a component is called as compiled code."""
    for module in (root, *_wrappers.get(root, ())):
        for name, value in list(module.__dict__.items()):
            value = value.compiled if isinstance(value, Held) else value
            if (name == CALL and value is not None) or is_compiled(value):
                yield module, name, value


def is_whole(root: nn.Module) -> bool:
    """Whether a component is compiled as a whole, or through one of its methods."""
    return next(_entries(root), None) is not None


def regions(root: nn.Module, blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost modules inside a component that run as compiled code.

    Args:
        root (`nn.Module`): The component.
        blocks (`Iterable[nn.Module]`): Its repeated blocks, for when it is compiled as a whole.
    """
    chosen = {id(block) for block in blocks} if is_whole(root) else set()
    found: list[nn.Module] = []
    inside = {id(root)}
    for module in root.modules():
        if id(module) not in inside and (id(module) in chosen or _entry(module) is not None):
            found.append(module)
            inside.update(id(part) for part in module.modules())
    return tuple(found)


def is_changed(root: nn.Module, known: Iterable[nn.Module]) -> bool:
    """Whether something of a component was compiled, or isn't any more, in a way that nobody was told of.

    Args:
        root (`nn.Module`): The component.
        known (`Iterable[nn.Module]`): Its regions, which have hooks in front.
    """
    if any(not isinstance(module.__dict__[name], Held) for module, name, _ in _entries(root)):
        return True
    inside = {id(root)}
    for region in known:
        if not any(isinstance(region.__dict__.get(name), Outside) for name in (CALL, FORWARD)):
            return True
        inside.update(id(part) for part in region.modules())
    return any(id(module) not in inside and _entry(module) is not None for module in root.modules())


def uncompile(made: nn.Module) -> None:
    """Takes compiled code off a copy of a module, in which it would still be that of the original."""
    for part in list(made.modules()):
        for name, child in part._modules.items():
            part._modules[name] = plain(child)
        for name, value in list(part.__dict__.items()):
            if name == CALL or isinstance(value, (Held, Outside)) or is_compiled(value):
                del part.__dict__[name]


# ---------------------------------------------------------------------- options
def compiler_of(root: nn.Module) -> Callable[..., Any] | None:
    """What compiles a function with the options with which a component was compiled; None where it can't be had."""
    for module, _, value in _entries(root):
        context = module.__dict__.get("dynamo_ctx") if is_wrapper(module) else _enclosed(value)
        if callable(context):
            found: Callable[..., Any] = context
            return found
    return None


def _enclosed(function: Any) -> Any:
    """torch keeps the options in a closure, and no public name leads there."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "self" not in names:
        return None
    context = function.__closure__[names.index("self")].cell_contents
    return context if hasattr(context, "callback") else None


def is_set(option: str, root: nn.Module, inside: Iterable[nn.Module]) -> bool:
    """Whether any of a component's compiled code has an option of inductor set, for itself or for all code.

    Args:
        option (`str`): Such as `"triton.cudagraphs"`.
        root (`nn.Module`): The component.
        inside (`Iterable[nn.Module]`): Its regions.
    """
    functions = [value for _, _, value in _entries(root)]
    functions += [entry[1] for module in inside if (entry := _entry(module)) is not None]
    for function in functions:
        config = getattr(function, "get_compiler_config", lambda: None)()
        if isinstance(config, dict) and config.get(option):
            return True
    return False


# ---------------------------------------------------------------------- putting on, taking off
def _roomy(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that may have more graphs than torch allows by default, where `fullgraph=True` makes that an error.

    Nothing of the call has run when torch raises it.
    """

    @functools.wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":
                raise
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
            return call(*args, **kwargs)

    return inner


def put_outside(module: nn.Module, hook: Any, owner: object, compiler: Callable[..., Any] | None) -> bool:
    """Puts a hook in front of a region. `compiler` is for one that is compiled on our account.

    Returns:
        Whether it could: `torch.compile(module.forward)` of a hooked `forward` is gone with the hook.
    """
    entry = _entry(module)
    if entry is not None:
        name, before = entry
        module.__dict__[name] = Outside(module, before, before, hook, owner)
    elif compiler is not None:
        module.__dict__[CALL] = Outside(module, None, _roomy(compiler(module._call_impl)), hook, owner)
    return entry is not None or compiler is not None


def hook_outside(module: nn.Module) -> Any:
    """The hook in front of a region, or None."""
    for name in (CALL, FORWARD):
        value = module.__dict__.get(name)
        if isinstance(value, Outside):
            return value.hook
    return None


def take_off(module: nn.Module, owner: object) -> None:
    """Undoes [`put_outside`]. Idempotent."""
    for name in (CALL, FORWARD):
        value = module.__dict__.get(name)
        if isinstance(value, Outside) and value.owner is owner:
            del module.__dict__[name]
            if value.before is not None:
                module.__dict__[name] = value.before


def hold(root: nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Has a component that is compiled as a whole run as it was written. Idempotent.

    Args:
        root (`nn.Module`): The component.
        is_ours (`Callable`): Tells the `forward` that we put on a root, which may have been compiled since.
    """
    compiler, forward = compiler_of(root), root.__dict__.get(FORWARD)
    ours = getattr(forward, "_torchdynamo_orig_callable", None)
    if compiler is not None and is_compiled(forward) and is_ours(ours):
        # What was meant is the one below ours.
        root.__dict__[FORWARD], inner = ours, root.__dict__["_old_forward"]
        if not isinstance(inner, Held):
            root.__dict__["_old_forward"] = Held(compiler(inner), inner)
    for module, name, value in _entries(root):
        if not isinstance(module.__dict__[name], Held):
            module.__dict__[name] = Held(value, getattr(value, "_torchdynamo_orig_callable", root._call_impl))


def let_go(root: nn.Module) -> None:
    """Undoes [`hold`]. Idempotent."""
    for module in (root, *_wrappers.get(root, ())):
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Held):
                module.__dict__[name] = value.compiled
