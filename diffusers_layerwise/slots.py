"""The components of pipelines by name: of one, also while it is being made, and of several with names in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from .compiled import plain

#: Modules by their id: a name that no other one has, the module, and the pipeline that it was found in.
Slots = dict[int, tuple[str, nn.Module, Any]]


def slots_of(pipe: Any) -> dict[str, Any]:
    """A pipeline's component names and what they hold, also while it is still being made."""
    try:
        return dict(pipe.components)
    except (AttributeError, ValueError):
        return {name: pipe.__dict__[name] for name in names_of(pipe) if name in pipe.__dict__}


def names_of(pipe: Any) -> list[str]:
    """The names of the components that a pipeline may have."""
    specs = getattr(pipe, "_component_specs", None)
    return list(specs) if specs is not None else sorted(pipe._get_signature_keys(pipe)[0])


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """A pipeline's modules by name; what `torch.compile(module)` made of one counts as that module."""
    return {name: plain(value) for name, value in slots_of(pipe).items() if isinstance(value, nn.Module)}


def named_modules(pipes: Sequence[Any], taken: dict[str, int], instead: tuple[Any, str, Any] | None = None) -> Slots:
    """Every module of several pipelines once.

    Args:
        pipes (`Sequence`): The pipelines.
        taken (`dict[str, int]`): Names in use, with the ids of their modules; they keep them.
        instead (`tuple`, *optional*): (pipeline, name, value): as if this had been assigned already.
    """
    found: Slots = {}
    taken = dict(taken)
    for pipe in pipes:
        modules = modules_of(pipe)
        if instead is not None and instead[0] is pipe:
            modules = {n: m for n, m in modules.items() if n != instead[1]}
            if isinstance(instead[2], nn.Module):
                modules[instead[1]] = plain(instead[2])
        for name, module in modules.items():
            if id(module) in found:
                continue
            if taken.setdefault(name, id(module)) != id(module) and _is_held(taken[name], pipes, pipe):
                name = _unique(f"{name} of {type(pipe).__name__}", taken, id(module))
            found[id(module)] = (name, module, pipe)
    return found


def _is_held(module_id: int, pipes: Sequence[Any], but: Any) -> bool:
    """Whether another pipeline holds a module, so that its name is taken."""
    return any(id(m) == module_id for pipe in pipes if pipe is not but for m in modules_of(pipe).values())


def _unique(name: str, taken: dict[str, int], module_id: int) -> str:
    """A name that no other module has; the same one every time."""
    for number in itertools.count(2):
        if taken.setdefault(name, module_id) == module_id:
            break
        name = f"{name.partition(' #')[0]} #{number}"
    return name
