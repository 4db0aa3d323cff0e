"""Lets safetensors load tensors to `sim`: it accepts only devices it knows, so they are read to the CPU and moved."""

from __future__ import annotations

from typing import Any

import safetensors
import safetensors.torch
import torch

_original = safetensors.safe_open


def _is_sim(device: Any) -> bool:
    """Whether a device argument names a `sim` device."""
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "sim"


class SimSafeOpen:
    """Stands in for `safetensors.safe_open`; files opened for other devices are passed through."""

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> None:
        self._target = torch.device(device) if _is_sim(device) else None
        source = "cpu" if self._target is not None else device
        self._file = _original(filename, framework=framework, device=source, **options)

    def __enter__(self) -> SimSafeOpen:
        """Opens the file."""
        self._file.__enter__()
        return self

    def __exit__(self, *details: Any) -> Any:
        """Closes the file."""
        return self._file.__exit__(*details)

    def __getattr__(self, name: str) -> Any:
        """Passes on what does not load tensors."""
        return getattr(self._file, name)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor where the caller wants it."""
        return tensor if self._target is None else tensor.to(self._target)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Loads one tensor."""
        return self._move(self._file.get_tensor(name))

    def get_tensors(self, *names: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Loads several tensors."""
        tensors = self._file.get_tensors(*names, **options)
        return {name: self._move(tensor) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> Any:
        """Opens one tensor for partial reads, which have no way to another device."""
        if self._target is not None:
            raise NotImplementedError("safetensors slices cannot be read to sim: read them to the CPU")
        return self._file.get_slice(name)


def install() -> None:
    """Puts the stand-in in place. Doing it again changes nothing."""
    if safetensors.safe_open is not SimSafeOpen:
        safetensors.safe_open = safetensors.torch.safe_open = SimSafeOpen
