"""A component's own `.to()`, `.half()`, `.cuda()`: what they mean while it is under layerwise offload.

All of them go through `nn.Module._apply`, which gets an instance attribute at the component's root. A change of dtype
is made on the host copy. A move to the execution device changes nothing, since that is where it runs; a move to the CPU
gives its device memory back. A move to any other device is refused: the pipeline moves as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .errors import LayerwiseOffloadError, how_to_end
from .patches import is_editing, is_hiding
from .runtime import Runtime
from .schedule import Schedule
from .tensors import plain_tensors

Convert = Callable[[torch.Tensor], torch.Tensor]


def guard_moves(runtime: Runtime, schedule: Schedule) -> None:
    """Gives a component's root its `_apply`. Idempotent."""
    module = schedule.component.module
    module.__dict__["_apply"] = functools.partial(_apply, runtime, schedule)


def release_moves(module: nn.Module) -> None:
    """Undoes [`guard_moves`]. Idempotent."""
    module.__dict__.pop("_apply", None)


def _apply(runtime: Runtime, schedule: Schedule, convert: Convert, recurse: bool = True) -> nn.Module:
    module = schedule.component.module
    if is_hiding() and not is_editing():
        # A loader's own conversions (an adapter to its layer's dtype) are meant for it.
        return module
    with runtime.lock, plain_tensors():
        device, dtype = _asked(convert)
        if device.type != "cpu" and device != runtime.transfer.device:
            raise LayerwiseOffloadError(
                f"{schedule.name!r} is under layerwise offload on {runtime.transfer.device} and can't be moved to "
                f"{device} by itself. {_how_to_move(runtime, device)}"
            )
        schedule.leave()
        addresses = _addresses(schedule)
        if device.type == "cpu":
            type(module)._apply(module, convert, recurse)  # type: ignore[no-untyped-call]
        elif dtype is not None:
            type(module)._apply(module, functools.partial(_cast, dtype), recurse)  # type: ignore[no-untyped-call]
        schedule.is_stale = schedule.is_stale or addresses != _addresses(schedule)
    return module


def _how_to_move(runtime: Runtime, device: torch.device) -> str:
    is_bare = not runtime.terms.has_calls
    whole = "" if is_bare else f"Move the pipeline (pipe.to({str(device)!r})), or take layerwise offload off first "
    return f"{whole or 'Take layerwise offload off first '}({how_to_end(is_bare)})."


def _asked(convert: Convert) -> tuple[torch.device, torch.dtype | None]:
    """What a conversion asks for, tried on two small tensors: the device, and the dtype if it gives both the same."""
    single, half = convert(torch.zeros(1)), convert(torch.zeros(1, dtype=torch.float16))
    return single.device, single.dtype if single.dtype == half.dtype else None


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _addresses(schedule: Schedule) -> list[Any]:
    return [(entry.tensor.data_ptr(), entry.tensor.dtype) for entry in schedule.component.entries()]
