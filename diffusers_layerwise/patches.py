"""Class-level wrappers, put on once and inert unless a handle is active: pipeline calls, `.device`, other switches.

A pipeline call has a start and an end only where its class's `__call__` is wrapped: an instance's can't be, since
Python looks `__call__` up on the type. `.device` of transformers' models is the first parameter's device: the host,
while a component is streamed, and code that places inputs by it needs the execution device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

from .compiled import plain

#: Gets the original, bound to the instance, then the instance and the arguments of the call.
Around = Callable[..., Any]

#: The execution device of every streamed model, and of the models inside it.
_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()
_hidden: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("hidden", default=frozenset())
_edited: contextvars.ContextVar[bool] = contextvars.ContextVar("edited", default=False)
_MARK = "_layerwise_offload_wrapper"


# ---------------------------------------------------------------------- methods
def wrap_method(kind: type, name: str, around: Around) -> None:
    """Wraps a method of a class, and of its bases that define it, keeping the signature. Idempotent.

    Args:
        kind (`type`): The class.
        name (`str`): The method.
        around (`Callable`): Called as `around(original, self, *args, **kwargs)`, with `original` bound.
    """
    for base in kind.__mro__:
        original = base.__dict__.get(name)
        if base is object or original is None or getattr(original, _MARK, False) or not callable(original):
            continue
        setattr(base, name, _wrapped(original, around))
    if name in object.__dict__ and getattr(kind, name) is getattr(object, name):
        # `ModularPipeline` has `object`'s `__setattr__`, which can't be replaced there.
        root = next(base for base in kind.__mro__ if base in pipeline_classes())
        setattr(root, name, _wrapped(getattr(object, name), around))


def _wrapped(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper


def wrap_property(kind: type, name: str, around: Callable[[Callable[[], Any], Any], Any]) -> None:
    """Wraps a property that a class, or the base it inherits it from, defines. Idempotent.

    Args:
        kind (`type`): The class.
        name (`str`): The property.
        around (`Callable`): Called as `around(original, self)`, with `original` bound.
    """
    for base in kind.__mro__:
        original = base.__dict__.get(name)
        if not isinstance(original, property) or getattr(original.fget, _MARK, False):
            continue
        fget = _wrapped(original.fget, around)  # type: ignore[arg-type]
        setattr(base, name, property(fget, original.fset, original.fdel, original.__doc__))


def attach(kinds: Iterable[type], methods: dict[str, Any]) -> None:
    """Puts our methods on pipeline classes. Idempotent."""
    for kind in kinds:
        for name, method in methods.items():
            setattr(kind, name, method)


def pipeline_classes() -> list[type]:
    """The classes that all pipelines derive from: `DiffusionPipeline`, and where diffusers has it `ModularPipeline`."""
    classes: list[type] = [DiffusionPipeline]
    with contextlib.suppress(ImportError):
        from diffusers import ModularPipeline

        classes.append(ModularPipeline)
    return classes


def loaded_pipelines() -> list[type]:
    """Every pipeline class there is so far."""
    found, waiting = [], pipeline_classes()
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            waiting += kind.__subclasses__()
    return found


# ---------------------------------------------------------------------- hiding
@contextlib.contextmanager
def hiding(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While another switch of diffusers runs: it doesn't see these modules, and can't move them."""
    token = _hidden.set(_hidden.get() | {id(module) for module in modules})
    try:
        yield
    finally:
        _hidden.reset(token)


def is_hidden(module: object) -> bool:
    """Whether a module is kept out of sight at the moment."""
    return id(plain(module)) in _hidden.get()


def is_hiding() -> bool:
    """Whether another switch of diffusers is running beside ours."""
    return bool(_hidden.get())


def without_hidden(original: Callable[[], dict[str, Any]], pipe: Any) -> dict[str, Any]:
    """Wraps `pipe.components`."""
    found = original()
    return {name: value for name, value in found.items() if not is_hidden(value)} if is_hiding() else found


# ---------------------------------------------------------------------- devices
def answer_device(root: nn.Module, device: torch.device) -> None:
    """Makes `.device` of a component, and of models inside it, answer the execution device."""
    kinds = _model_classes()
    for kind in kinds:
        wrap_property(kind, "device", _device)
    for module in root.modules():
        if isinstance(module, tuple(kinds)):
            _devices[module] = device


def forget_device(root: nn.Module) -> None:
    """Undoes [`answer_device`]. Idempotent."""
    for module in root.modules():
        _devices.pop(module, None)


def _model_classes() -> list[type]:
    classes: list[type] = [ModelMixin]
    with contextlib.suppress(ImportError):
        from transformers import PreTrainedModel

        classes.append(PreTrainedModel)
    return classes


def _device(original: Callable[[], torch.device], model: Any) -> torch.device:
    found = None if is_editing() else _devices.get(model)
    return found if found is not None else original()


@contextlib.contextmanager
def editing() -> Iterator[None]:
    """While weights are rewritten on the host, `.device` says so: loaders put there what they load."""
    token = _edited.set(True)
    try:
        yield
    finally:
        _edited.reset(token)


def is_editing() -> bool:
    """Whether weights are being rewritten on the host in this thread."""
    return _edited.get()
