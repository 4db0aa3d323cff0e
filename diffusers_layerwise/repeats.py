"""Calls that were seen before: what two calls have in common, and what they leave behind, as shapes to make it from."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .fake import META, FakeDevice
from .live import rounded

_PLAIN = (int, str, bool, type(None), torch.dtype, torch.device)
#: Entries of a module's `__dict__` that say nothing of what a call does.
_BOOKKEEPING = ("hooks", "_parameters", "_buffers", "_modules")


@dataclasses.dataclass(frozen=True)
class Ghost:
    """A tensor's shape, of which new ones can be made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        """A new tensor of this shape on the fake device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


def call_key(device: FakeDevice, name: str, entry: str, args: Any, kwargs: Any) -> Any:
    """What two calls have in common when one's work tells the other's; None for a call that can't be compared.

    Shapes and options, the values of masks and token ids, not those of floating point inputs: a timestep changes
    nothing of the work.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found: list[Any] = [name, entry, str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device.type))
            if not leaf.is_floating_point() and leaf.dim() > 1:
                value = device.twins.of(leaf)
                found.append(None if value is None else tuple(value.flatten().tolist()))
        elif isinstance(leaf, float):
            found.append("float")
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf).__name__, leaf))
        else:
            return None
    return tuple(found)


def is_replayable(device: FakeDevice, result: Any) -> bool:
    """Whether a result is shapes alone, so that another can be made without running anything."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            if not leaf.is_meta or device.twins.of(leaf) is not None:
                return False
        elif not isinstance(leaf, (*_PLAIN, float)):
            return False
    return True


def shape_of(result: Any) -> Any:
    """A result with shapes in place of its tensors."""

    def ghost(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Ghost(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)

    return pytree.tree_map(ghost, result)


def bytes_of(result: Any) -> int:
    """Bytes alive for a result, as they are counted: each tensor's memory once."""
    tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_meta)
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(map(rounded, storages.values()))


def made(shape: Any) -> Any:
    """A result again, from its shapes."""
    return pytree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, Ghost) else leaf, shape)


def own(value: Any) -> Any:
    """An argument that a call may use up: a generator's copy."""
    if isinstance(value, list):
        return [own(item) for item in value]
    return value.clone_state() if isinstance(value, torch.Generator) else value


# ---------------------------------------------------------------------- what a call leaves behind
def tensors_of(args: Any) -> Iterator[torch.Tensor]:
    """The fake tensors in nested arguments."""
    return (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.is_meta)


class Given:
    """The tensors that a call was given, without keeping them alive.

    Args:
        args (`Any`): Nested arguments.
    """

    def __init__(self, args: Any) -> None:
        self.dtypes = [tensor.dtype for tensor in tensors_of(args)]
        self._storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors_of(args)]

    def alive(self) -> dict[int, int]:
        """The places of those whose memory is still in use, by that memory."""
        found = {}
        for place, ref in enumerate(self._storages):
            storage = ref()
            if storage is not None:
                found[storage._cdata] = place
        return found


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor in the memory of one that the call was given."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class Leavings:
    """A call's result, and what lists that it was given hold after it (feature caches of video VAEs).

    Args:
        result (`Any`): With shapes in place of tensors.
        lists (`tuple`): The content of each list among the arguments, likewise.
        needs (`frozenset[int]`): The tensors among the arguments, by place, whose memory they are in.
    """

    result: Any
    lists: tuple[list[Any], ...]
    needs: frozenset[int]

    @classmethod
    def of(cls, device: FakeDevice, result: Any, given: Given, lists: list[list[Any]]) -> Leavings | None:
        """What a call left behind; None where that is more than shapes.

        Args:
            given (`Given`): The tensors among its arguments, as they were before it ran.
            lists (`list[list]`): The lists among its arguments.
        """
        seen = given.alive()
        fresh: set[int] = set()
        needs: set[int] = set()

        def ghost(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape, stride = tuple(leaf.shape), tuple(leaf.stride())
            key = leaf.untyped_storage()._cdata
            if key in seen and given.dtypes[seen[key]] == leaf.dtype:
                needs.add(seen[key])
                return _Place(seen[key], shape, stride, int(leaf.storage_offset()))
            if key in seen or key in fresh or leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size():
                raise _NotShapesAlone  # a part of a tensor, or the same memory twice: its bytes would be miscounted
            fresh.add(key)
            return Ghost(shape, stride, leaf.dtype)

        values = (result, [list(items) for items in lists])
        known = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        new = [t for t in known if t.untyped_storage()._cdata not in seen]
        if not is_replayable(device, [result, new]):
            return None
        try:
            frozen = pytree.tree_map(ghost, values)
        except _NotShapesAlone:
            return None
        return cls(frozen[0], tuple(frozen[1]), frozenset(needs))

    def leave(self, args: Any, lists: list[list[Any]]) -> Any:
        """Fills the lists among a call's arguments as the earlier one did; returns its result."""
        # The others aren't held: what the call put out of a list ended within it.
        held = {i: tensor for i, tensor in enumerate(tensors_of(args)) if i in self.needs}

        def thaw(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return torch.as_strided(held[leaf.index], leaf.shape, leaf.stride, leaf.offset)
            return leaf.made() if isinstance(leaf, Ghost) else leaf

        for items, frozen in zip(lists, self.lists, strict=True):
            for place, entry in enumerate(frozen):
                value = pytree.tree_map(thaw, entry)
                if place < len(items):
                    items[place] = value  # one by one: the entry before it ends as it did in the call
                else:
                    items.append(value)
            del items[len(frozen) :]
        return pytree.tree_map(thaw, self.result)


class _NotShapesAlone(Exception):
    pass


def lists_in(value: Any) -> Iterator[list[Any]]:
    """The lists in nested arguments, from the outside inwards, which a call may change."""
    if isinstance(value, list):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from lists_in(item)


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Which plain attributes a module's parts have: what a call changes here, a repeated one would change too."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in part.__dict__.items():
            if not name.endswith(_BOOKKEEPING):
                sized = isinstance(value, (list, dict, set))
                found.append((name, id(value), len(value) if sized else None))
    return tuple(found)
