"""Class-level wrappers, put on once and inert unless a handle is active: pipeline calls, and `.device` of models.

A pipeline call has a start and an end only where its class's `__call__` is wrapped: an instance's can't be, since
Python looks `__call__` up on the type. `.device` of transformers' models is the first parameter's device: the host,
while a component is streamed, and code that places inputs by it needs the execution device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

#: The execution device of every streamed model, and of the models inside it.
_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()
_MARK = "_layerwise_offload_wrapper"


def wrap_call(pipeline_class: type, scope: Callable[[Any], contextlib.AbstractContextManager[None] | None]) -> None:
    """Wraps a pipeline class's `__call__`, keeping its signature. Idempotent.

    Args:
        pipeline_class (`type`): The class.
        scope (`Callable`): Gets the pipeline, returns the context its call runs in, or None when it has no handle.
    """
    original = pipeline_class.__call__
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = scope(self)
        if context is None:
            return original(self, *args, **kwargs)
        with context:
            return original(self, *args, **kwargs)

    setattr(call, _MARK, True)
    pipeline_class.__call__ = call  # type: ignore[method-assign]


def answer_device(root: nn.Module, device: torch.device) -> None:
    """Makes `.device` of a component, and of models inside it, answer the execution device."""
    for kind in _model_classes():
        _wrap_device(kind)
    for module in root.modules():
        if isinstance(module, tuple(_model_classes())):
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


def _wrap_device(kind: type) -> None:
    original = next(base.__dict__["device"] for base in kind.__mro__ if "device" in base.__dict__)
    if getattr(original.fget, _MARK, False):
        return

    @functools.wraps(original.fget)
    def device(self: Any) -> torch.device:
        found = _devices.get(self)
        return found if found is not None else original.fget(self)

    setattr(device, _MARK, True)
    kind.device = property(device, doc=original.__doc__)  # type: ignore[attr-defined]


def attach(methods: dict[str, Any]) -> None:
    """Puts our methods on `DiffusionPipeline`. Idempotent."""
    for name, method in methods.items():
        setattr(DiffusionPipeline, name, method)
