"""The plain tensors that a parameter consists of: itself, or those inside a quantised or sharded one, by probing.

Two kinds of such parameters exist. A *shell* has no memory of its own and says by `__tensor_flatten__` which tensors it
wraps (torchao, optimum-quanto; a DTensor, whose shard is one). Others have memory, and further tensors hang on their
attributes, or on attributes of their module (bitsandbytes; GGUF has none). What moves is always the memory of plain
tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .tensors import Entry, plain_data, why_not_movable

#: Attributes of modules in which quantised layers keep what belongs to their weight (bitsandbytes, HQQ).
STATES = ("state", "quant_state", "meta")
_PLAIN = (torch.Tensor, nn.Parameter, *([nn.Buffer] if hasattr(nn, "Buffer") else []))
#: Attributes are followed this deep: `weight.quant_state.state2.absmax`.
_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Found:
    """A plain tensor, and the object and attribute (or dict and key) that hold it; `holder` is None for the outermost.

    `path`: its name below the parameter, with a leading dot.
    """

    tensor: torch.Tensor
    holder: Any = None
    key: str = ""
    path: str = ""


def is_shell(tensor: object) -> bool:
    """Whether a tensor only wraps others."""
    return type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__")


def inner_names(shell: Any) -> list[str]:
    """Attributes of a shell that hold its tensors. What else it names (a DTensor its mesh) goes along as it is."""
    return [name for name in shell.__tensor_flatten__()[0] if isinstance(getattr(shell, name), torch.Tensor)]


def shells_of(tensor: Any) -> list[Any]:
    """All shells of a parameter, the innermost first."""
    if not is_shell(tensor):
        return []
    inside = [shell for name in inner_names(tensor) for shell in shells_of(getattr(tensor, name))]
    return [*inside, tensor]


def find(tensor: torch.Tensor, module: nn.Module | None = None) -> list[Found]:
    """The plain tensors of one parameter or buffer, the one with its own memory first.

    Args:
        tensor (`torch.Tensor`): What a module holds.
        module (`nn.Module`, *optional*): That module, whose [`STATES`] are looked through for a quantised weight.
    """
    found: dict[int, Found] = {}
    _find(Found(tensor), found)
    if module is not None and (type(tensor) not in _PLAIN or not _can_require_grad(tensor)):
        for name in STATES:
            value = module.__dict__.get(name)
            if value is not None and not isinstance(value, torch.Tensor):
                _look(value, f".{name}", found, {id(module)}, _DEPTH)
    return list(found.values())


def _can_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _find(here: Found, found: dict[int, Found]) -> None:
    tensor = here.tensor
    if id(tensor) in found:
        return
    if is_shell(tensor):
        for name in inner_names(tensor):
            _find(Found(getattr(tensor, name), tensor, name, f"{here.path}.{name}"), found)
        return
    found[id(tensor)] = here
    if type(tensor) not in _PLAIN:
        _look(tensor, here.path, found, set(), _DEPTH)


def _look(value: Any, path: str, found: dict[int, Found], seen: set[int], depth: int) -> None:
    """Tensors that hang on an object's attributes; modules and classes are somebody else's."""
    if id(value) in seen or isinstance(value, (nn.Module, type)):
        return
    seen.add(id(value))
    items = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    for name, item in list(items.items()) if isinstance(items, dict) else []:
        if not isinstance(name, str):
            continue
        if isinstance(item, torch.Tensor):
            _find(Found(item, value, name, f"{path}.{name}"), found)
        elif depth and (isinstance(item, dict) or hasattr(item, "__dict__")):
            _look(item, f"{path}.{name}", found, seen, depth - 1)


def entries_of(
    tensor: torch.Tensor,
    owners: list[tuple[nn.Module, str]],
    name: str,
    is_buffer: bool = False,
    on_disk: bool = False,
    allow_meta: bool = False,
) -> tuple[list[Entry], str | None]:
    """The entries of one parameter or buffer, or why it can't be moved.

    Args:
        tensor (`torch.Tensor`): What the modules hold.
        owners (`list`): The modules that hold it, and under which name.
        name (`str`): Its full name, for messages.
        is_buffer (`bool`): Whether it is a buffer.
        on_disk (`bool`): Whether its memory is a view of a file.
        allow_meta (`bool`): Take meta tensors too.
    """
    entries: list[Entry] = []
    for part in find(tensor, owners[0][0]):
        reason = why_not_movable(part.tensor, allow_meta)
        if reason is None and part.holder is not None and is_shell(part.holder):
            reason = _why_not_shell(part.holder)
        if reason is not None:
            return [], reason if part.holder is None else f"has an inner tensor {part.path[1:]!r} that {reason}"
        outer = None if part.tensor is tensor else tensor
        entries.append(
            Entry(
                part.tensor,
                owners,
                name + part.path,
                plain_data(part.tensor),
                is_buffer,
                on_disk,
                part.holder,
                part.key,
                outer,
                part.path,
            )
        )
    return entries, None


def _why_not_shell(shell: Any) -> str | None:
    """A shell must be one that can be made anew around moved tensors: that is how it comes to say another device."""
    if shell.layout is not torch.strided:
        return f"has layout {shell.layout}"
    try:
        twin = rebuilt(shell, {name: getattr(shell, name) for name in inner_names(shell)})
    except Exception as error:
        return f"is {_full_name(shell)}'s, which can't be made anew around moved tensors ({error})"
    if (type(twin), twin.shape, twin.dtype) != (type(shell), shell.shape, shell.dtype):
        return f"is {_full_name(shell)}'s, which turns into {_full_name(twin)} when it is made anew"
    return None


def _full_name(tensor: object) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


# ---------------------------------------------------------------------- shells
def rebuilt(shell: Any, inner: dict[str, Any]) -> Any:
    """A shell like this one around other inner tensors."""
    names, context = shell.__tensor_flatten__()
    known = {name: inner[name] if name in inner else getattr(shell, name) for name in names}
    with torch.inference_mode(False), torch.no_grad():
        return type(shell).__tensor_unflatten__(known, context, shell.size(), shell.stride())


def twins(shells: Sequence[Any], moved: dict[int, torch.Tensor]) -> list[Any]:
    """A twin of each shell around moved inner tensors.

    Args:
        shells (`Sequence[torch.Tensor]`): As [`shells_of`] gives them.
        moved (`dict[int, torch.Tensor]`): What is to stand for each inner tensor, by the `id` of that.
    """
    known: dict[int, Any] = dict(moved)
    for shell in shells:
        inner = {name: known[id(getattr(shell, name))] for name in inner_names(shell)}
        known[id(shell)] = rebuilt(shell, inner)
    return [known[id(shell)] for shell in shells]


def pose(shells: Sequence[Any], as_twins: Sequence[Any]) -> None:
    """Makes shells say the device of their twins. What they hold, and the objects themselves, stay."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        for shell, twin in zip(shells, as_twins, strict=True):
            shell.data = twin


def settle(tensors: Iterator[torch.Tensor]) -> None:
    """Makes shells say the device that their inner tensors are on now."""
    for tensor in tensors:
        found = shells_of(tensor)
        pose(found, twins(found, {id(part.tensor): part.tensor for part in find(tensor)}))


def made_for_its_device(tensor: Any, device: torch.device) -> bool:
    """Whether a shell's inner tensors are laid out for the kind of device they are on, so that another can't read them.

    Such a shell turns into another class when it is moved.
    """
    if not is_shell(tensor) or tensor.device.type == device.type:
        return False
    try:
        return type(tensor.to("meta")) is not type(tensor)
    except Exception:
        return False
