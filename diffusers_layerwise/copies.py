"""Copies and pickles of offloaded modules: ordinary modules on the CPU, with memory of their own.

`copy.deepcopy` and every pickler look `__deepcopy__` and `__reduce_ex__` up on the instance, so attributes there are
enough, and they go with the hooks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from torch import nn

from .compiled import Held, Outside
from .parts import STATES, find, settle, shells_of, twins
from .tensors import plain_data, plain_tensors

IsOwn = Callable[[object], bool]
#: Orders a copy behind a running call, in another thread or on another stream.
Guard = Callable[[], contextlib.AbstractContextManager[None]]
_ATTRIBUTES = ("__deepcopy__", "__reduce_ex__")
#: Further attributes that we put on a component's root: its own moves, and what accelerate made of it.
_OURS = ("_apply", "_layerwise_dispatch")
#: Attributes that accelerate puts on a hooked module.
_HOOKED = ("_hf_hook", "_old_forward", "forward")
_TENSORS = (torch.Tensor, nn.Parameter)


class PickledTensor:
    """Stands for a tensor in a pickle: the same object for the same tensor, so that ties survive.

    The values are copied only when they are written. A view of a packed chunk would be written with all of the chunk.
    """

    def __init__(self, tensor: torch.Tensor, guard: Guard) -> None:
        self.tensor = tensor
        self.guard = guard

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied: Any = own_copy(self.tensor, self.guard)
        return copied.__reduce_ex__(protocol)


#: A pickler keeps alive what it has written, so an entry lives as long as the pickles that need it.
_pickled: weakref.WeakValueDictionary[int, PickledTensor] = weakref.WeakValueDictionary()


def own_copy(tensor: torch.Tensor, guard: Guard) -> torch.Tensor:
    """A tensor with the same values, strides, kind and attributes, and memory of its own on the CPU."""
    with guard(), plain_tensors():
        values = tensor.detach().to("cpu", copy=True)
        fresh = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    fresh.requires_grad_(tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    return fresh


def _quantised(module: nn.Module) -> list[torch.Tensor]:
    held = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in held if tensor is not None and type(tensor) not in _TENSORS]


@contextlib.contextmanager
def _on_own_memory(module: nn.Module, guard: Guard | None) -> Iterator[None]:
    """While quantised weights of one module are copied, their tensors lie on the host, each in memory of its own."""
    held = _quantised(module)
    if guard is None or not held:
        yield
        return
    with guard(), plain_tensors():
        parts = {id(part.tensor): part.tensor for tensor in held for part in find(tensor, module)}
        before = [(tensor, plain_data(tensor)) for tensor in parts.values()]
        own: dict[Any, torch.Tensor] = {}
        for tensor, data in before:
            # Two tensors may be one and the same memory (bitsandbytes' `CB`), and stay so.
            key = (data.data_ptr(), data.shape, data.dtype)
            tensor.data = own.setdefault(key, data.to("cpu", copy=True))
        settle(iter(held))
        try:
            yield
        finally:
            for tensor, data in before:
                tensor.data = data
            settle(iter(held))


def _own_quantised(tensor: Any) -> Any:
    """A quantised tensor like this one with memory of its own; its own class's way where there is no other."""
    shells, parts = shells_of(tensor), find(tensor)
    with plain_tensors():
        if shells:
            fresh = twins(shells, {id(part.tensor): plain_data(part.tensor).clone() for part in parts})[-1]
            return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
        if len(parts) == 1:
            values = plain_data(tensor).clone()
            fresh = torch.Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
            fresh.__dict__.update(tensor.__dict__)
            return fresh
        return copy.deepcopy(tensor)


def make_copyable(root: nn.Module, is_own: IsOwn, guard: Guard | None = None) -> None:
    """Makes copies of a module and of any module inside it ordinary ones.

    Args:
        root (`nn.Module`): A component, whose hooks are on.
        is_own (`Callable`): Whether an accelerate hook is ours, and so stays behind.
        guard (`Callable`, *optional*): The context in which weights are read; None for a module whose weights never
            move: they are copied as those of any module.
    """
    for module in root.modules():
        module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module, is_own, guard)
        module.__dict__["__reduce_ex__"] = functools.partial(_reduce, module, is_own, guard)


def forget_copyable(module: nn.Module) -> None:
    """Undoes [`make_copyable`] for one module. Idempotent."""
    for name in _ATTRIBUTES:
        found = module.__dict__.get(name)
        if isinstance(found, functools.partial) and found.func in (_deepcopy, _reduce):
            del module.__dict__[name]


def _split_hooks(module: nn.Module, is_own: IsOwn) -> tuple[list[ModelHook], list[ModelHook]]:
    """Our hooks and everybody else's."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        return [], []
    hooks = list(hook.hooks) if isinstance(hook, SequentialHook) else [hook]
    return [h for h in hooks if is_own(h)], [h for h in hooks if not is_own(h)]


def _ordinary(module: nn.Module, is_own: IsOwn) -> tuple[nn.Module, list[ModelHook]]:
    """The module as it would be without any accelerate hook (its tensors and children are shared); others' hooks."""
    state = {
        name: value
        for name, value in module.__dict__.items()
        # Compiled code belongs to the module that was compiled; torch leaves it behind too.
        if name not in (*_ATTRIBUTES, *_OURS) and not isinstance(value, (Held, Outside))
    }
    own, others = _split_hooks(module, is_own)
    if own:
        for name in _HOOKED:
            state.pop(name, None)
        forward = module.__dict__.get("_old_forward")
        is_inherited = isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward
        if not is_inherited and not isinstance(forward, Held):
            state["forward"] = forward
        # A pre-hook of ours; the tables of flags that go with it need no cleaning.
        handles = {handle.id for hook in own if (handle := getattr(hook, "_handle", None)) is not None}
        kept = {key: hook for key, hook in module._forward_pre_hooks.items() if key not in handles}
        state["_forward_pre_hooks"] = type(module._forward_pre_hooks)(kept)
    plain: nn.Module = object.__new__(type(module))
    plain.__dict__.update(state)
    return plain, others if own else []


def _hook_again(module: nn.Module, hooks: list[ModelHook]) -> None:
    """Puts others' hooks on without running their `init_hook`, which may move weights."""
    if hooks:
        add_hook_to_module(module, ModelHook())
        module.__dict__["_hf_hook"] = hooks[0] if len(hooks) == 1 else SequentialHook(*hooks)


def _deepcopy(module: nn.Module, is_own: IsOwn, guard: Guard | None, memo: dict[int, Any]) -> nn.Module:
    plain, hooks = _ordinary(module, is_own)
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if guard is not None and tensor is not None and type(tensor) in _TENSORS and id(tensor) not in memo:
            memo[id(tensor)] = own_copy(tensor, guard)
    with _on_own_memory(module, guard):
        for tensor in _quantised(module) if guard is not None else []:
            if id(tensor) not in memo and (shells_of(tensor) or len(find(tensor)) == 1):
                memo[id(tensor)] = _own_quantised(tensor)
        twin = _twin(module, plain, memo)
    _hook_again(twin, copy.deepcopy(hooks, memo))
    return twin


def _twin(module: nn.Module, plain: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copier = getattr(type(module), "__deepcopy__", None)
    twin: Any
    if copier is not None:
        # A class with a way of its own, such as one that torch made for a parametrised module.
        twin = memo[id(module)] = copier(plain, memo)
    else:
        made, arguments, *rest = _reduced(plain, 4)
        # Known before the state is copied, which may refer to the module.
        twin = memo[id(module)] = made(*copy.deepcopy(arguments, memo))
        for state in rest[:1]:  # none where `torch.compile(module)` was put around a module
            twin.__setstate__(copy.deepcopy(state, memo))
    copied: nn.Module = twin
    return copied


def _reduce(module: nn.Module, is_own: IsOwn, guard: Guard | None, protocol: Any) -> Any:
    plain, hooks = _ordinary(module, is_own)
    with _on_own_memory(module, guard):
        for table in ("_parameters", "_buffers"):
            plain.__dict__[table] = type(module.__dict__[table])(
                (name, _stand_in(tensor, guard)) for name, tensor in module.__dict__[table].items()
            )
        for name in STATES if guard is not None and _quantised(module) else ():
            if name in plain.__dict__:
                plain.__dict__[name] = copy.deepcopy(plain.__dict__[name])
    reduced = _reduced(plain, protocol)
    if not hooks:
        return reduced  # can be read where this package isn't
    made, arguments, state, *_ = reduced
    return made, arguments, {"state": state, "hooks": hooks}, None, None, _restore


def _reduced(module: nn.Module, protocol: Any) -> Any:
    return module.__reduce_ex__(protocol)


def _restore(module: Any, pickled: dict[str, Any]) -> None:
    module.__setstate__(pickled["state"])
    _hook_again(module, pickled["hooks"])


def _stand_in(tensor: torch.Tensor | None, guard: Guard | None) -> Any:
    if tensor is None or guard is None:
        return tensor
    if type(tensor) not in _TENSORS:
        return _own_quantised(tensor)
    return _pickled.setdefault(id(tensor), PickledTensor(tensor, guard))
