"""Weights that accelerate keeps for its hooks: read without a copy, mapped where they are files, and written back."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from safetensors import safe_open

from .errors import LayerwiseOffloadError
from .tensors import raw_bytes, span


class Source:
    """One weight in a hook's `weights_map`.

    Args:
        weights_map (`Mapping[str, torch.Tensor]`): The hook's map.
        name (`str`): The weight's name in it.
        files (`dict[str, Any]`): Opened files by name, for all weights of a module: each is mapped once.
    """

    def __init__(self, weights_map: Mapping[str, torch.Tensor], name: str, files: dict[str, Any]) -> None:
        prefix, self._data = "", weights_map
        if isinstance(weights_map, PrefixedDataset):
            prefix, self._data = weights_map.prefix, weights_map.dataset
        self.key = f"{prefix}{name}"
        loader = self._data if isinstance(self._data, OffloadedWeightsLoader) else None
        self._loader: Any = loader
        self._files = files
        self.on_disk = loader is not None and self.key not in loader.state_dict and self.key in loader.index

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """The weight on the host: the tensor in the map, or a private view of its file, read as it is used.

        Args:
            like (`torch.Tensor`): The placeholder that the module holds; the weight has its type.

        Raises:
            LayerwiseOffloadError: The file is gone, or holds another type than the module computes with.
        """
        if not self.on_disk and self.key not in self._entries():
            raise LayerwiseOffloadError(
                f"accelerate has no values for {self.key}, so it couldn't run the module either. Give dispatch_model "
                f"the weights (state_dict=model.state_dict()) where a map puts everything on 'cpu'."
            )
        found = self._mapped(self._files) if self.on_disk else self._data[self.key].detach().to("cpu")
        if found.dtype == like.dtype and found.shape == like.shape:
            return found
        if self.on_disk or found.shape != like.shape:
            raise LayerwiseOffloadError(
                f"{self.key} is {found.dtype} {tuple(found.shape)} in {self._file()}, but the module wants "
                f"{like.dtype} {tuple(like.shape)}, so it can't be streamed from there. Load the model with "
                f"dtype={found.dtype}, or map it to 'cpu' instead of 'disk'."
            )
        return found.to(like.dtype)

    def follow(self, tensor: torch.Tensor) -> None:
        """Makes the map hold the object that the module holds, so that host memory has the weight once."""
        if not self.on_disk:
            self._entries()[self.key] = tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """Makes the map answer a tensor's values; a file that still has them is left to answer itself."""
        values = tensor.detach().to("cpu")
        if not self.on_disk or not self._has(values):
            self._entries()[self.key] = values

    def _entries(self) -> MutableMapping[str, torch.Tensor]:
        found: Any = self._data if self._loader is None else self._loader.state_dict
        return found  # type: ignore[no-any-return]

    def _has(self, values: torch.Tensor) -> bool:
        """Whether the file holds exactly these values: edits of a private view stay in memory, and leave no mark."""
        try:
            # Mapped anew: a view that is shared with the module would show its edits.
            stored = self._mapped({})
        except (LayerwiseOffloadError, OSError, RuntimeError):
            return False
        if (stored.dtype, stored.shape, stored.stride()) != (values.dtype, values.shape, values.stride()):
            return False
        count = span(stored)
        return torch.equal(raw_bytes(stored, count), raw_bytes(values, count))

    def _info(self) -> Mapping[str, Any]:
        info: Mapping[str, Any] = self._loader.index[self.key]
        return info

    def _file(self) -> str:
        if not self.on_disk:
            return "accelerate's weights map"
        return str(self._info().get("safetensors_file") or Path(self._loader.save_folder) / f"{self.key}.dat")

    def _mapped(self, files: dict[str, Any]) -> torch.Tensor:
        file, info = self._file(), self._info()
        if not os.path.isfile(file):
            raise LayerwiseOffloadError(
                f"{self.key} is mapped to 'disk', but {file} doesn't exist any more. Keep the offload folder for as "
                f"long as the model is used, and load the model anew."
            )
        if info.get("safetensors_file") is not None:
            if file not in files:
                files[file] = safe_open(file, framework="pt", device="cpu")
            found: torch.Tensor = files[file].get_tensor(info.get("weight_name", self.key))
            return found
        dtype: torch.dtype = getattr(torch, info["dtype"])
        shape = tuple(info["shape"])
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        if not count:
            return torch.empty(shape, dtype=dtype)
        # Not shared: a page that is written becomes this process's own, and the file stays as it is.
        return torch.from_file(file, shared=False, size=count, dtype=torch.uint8).view(dtype).reshape(shape)
