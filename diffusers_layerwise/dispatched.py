"""Modules dispatched by accelerate: what their hooks say, taking them over, and giving them back as they were.

Nothing is moved here. A weight that accelerate keeps on the host or on disk is put back on its module where it lies; a
module that runs on a further accelerator keeps its hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import find_device, named_module_tensors, send_to_device
from torch import nn

from . import platform
from .hooks import hooks_of
from .inputs import move_inputs
from .residence import Home, Residence, named_tensors
from .tensors import plain_tensors, why_not_movable
from .weights_maps import Source


@dataclasses.dataclass(eq=False)
class Weight:
    """A weight that a hook holds back: its module, its placeholder there, its values, and what takes its place."""

    owner: nn.Module
    name: str
    placeholder: torch.Tensor
    source: Source
    stand_in: torch.Tensor

    @property
    def slots(self) -> dict[str, Any]:
        """The owner's parameters or buffers, whichever this is one of."""
        found: dict[str, Any] = self.owner._buffers if self.name in self.owner._buffers else self.owner._parameters
        return found


class MoveHook(ModelHook):  # type: ignore[misc]
    """Where accelerate had a hook: inputs that come from a further accelerator go to the execution device."""

    def __init__(self, device: torch.device, skip_keys: str | list[str] | None) -> None:
        self.execution_device = device
        self.skip_keys = skip_keys

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves the inputs."""
        return move_inputs(args, self.execution_device), move_inputs(kwargs, self.execution_device, self.skip_keys)


class Dispatch:
    """What accelerate made of a module: read without changing anything.

    Args:
        module (`nn.Module`): A module that [`is_dispatched`].

    Raises:
        LayerwiseOffloadError: A weight can't be read where it was offloaded to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights: list[Weight] = []
        self.hooks: list[tuple[nn.Module, ModelHook]] = []
        self.wrappers: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self.returns: AlignDevicesHook | None = None
        self._read(module)
        self._files.clear()
        found = [Home(t, t.device) for _, t in named_tensors(module) if not t.is_meta]
        self.homes = {id(home.tensor): home for home in found}
        for weight in self.weights:
            home = self.homes.get(id(weight.stand_in)) or Home(
                weight.stand_in, torch.device("cpu"), weight.source.on_disk
            )
            self.homes[id(weight.placeholder)] = self.homes[id(weight.stand_in)] = home

    def _read(self, module: nn.Module) -> None:
        tied: dict[tuple[Any, ...], torch.Tensor] = {}
        held = {id(tensor) for _, tensor in named_tensors(module)}
        for owner in module.modules():
            for hook in align_hooks(owner):
                if not hook.offload:
                    continue
                tensors = named_module_tensors(owner, hook.offload_buffers, hook.place_submodules, True)
                for path, placeholder in tensors:
                    # What is quantised can't be streamed, and making it from its values would quantise it anew.
                    if placeholder.is_meta and why_not_movable(placeholder, allow_meta=True) is None:
                        self._add(owner, path, placeholder, hook, tied, held)

    def _add(
        self,
        root: nn.Module,
        path: str,
        placeholder: torch.Tensor,
        hook: AlignDevicesHook,
        tied: dict[tuple[Any, ...], torch.Tensor],
        held: set[int],
    ) -> None:
        below, _, name = path.rpartition(".")
        source = Source(hook.weights_map, path, self._files)
        view = source.view(placeholder)
        # Placeholders of tied weights are objects of their own; what they stand for shares memory.
        key = (view.data_ptr(), view.shape, view.stride(), view.dtype)
        on_device = [t for t in (hook.tied_params_map or {}).get(view.data_ptr(), {}).values() if id(t) in held]
        stand_in = tied.get(key) if not on_device else on_device[0]
        if stand_in is None:
            stand_in = _stand_in(placeholder, view)
            tied[key] = stand_in
        self.weights.append(Weight(root.get_submodule(below), name, placeholder, source, stand_in))

    # ------------------------------------------------------------------ taking over
    def take(self, module: nn.Module, device: torch.device, crossing: bool) -> None:
        """Puts real tensors on the modules and takes accelerate's hooks off those that run on the execution device."""
        residence = Residence(self.homes, device)
        crossing = crossing or next(residence.elsewhere(module), None) is not None
        before = dict(module.__dict__)
        self.returns = next((hook for hook in align_hooks(module) if hook.io_same_device), None)
        for part in list(module.modules()):
            aligned = align_hooks(part)
            away = next(residence.elsewhere(part), None) is not None
            if part is not module and (not aligned or (away and any(_runs_elsewhere(h, device) for h in aligned))):
                continue
            self._unhook(part, device if crossing and part is not module and aligned else None)
        self.wrappers = {k: v for k, v in before.items() if k not in module.__dict__ and not k.startswith("_")}
        self.wrappers.pop("forward", None)
        for weight in self.weights:
            weight.slots[weight.name] = weight.stand_in
            weight.source.follow(weight.stand_in)

    def _unhook(self, part: nn.Module, move_to: torch.device | None) -> None:
        hook = part.__dict__.get("_hf_hook")
        if hook is None:
            return
        self.hooks.append((part, hook))
        others = [h for h in _flat(hook) if not isinstance(h, AlignDevicesHook)]
        skip_keys = next((h.skip_keys for h in align_hooks(part)), None)
        _detach(part)
        for other in [*([] if move_to is None else [MoveHook(move_to, skip_keys)]), *others]:
            add_hook_to_module(part, other, append=True)

    def give_back(self, module: nn.Module) -> None:
        """Undoes [`Dispatch.take`]: what was edited meanwhile is what accelerate's weights maps have now."""
        with plain_tensors():
            for weight in self.weights:
                current = weight.slots.get(weight.name)
                if current is None:
                    continue
                weight.source.give_back(current)
                weight.slots[weight.name] = _placeholder(weight.placeholder, current)
            self._send_home()
        for part, hook in self.hooks:
            known = {id(h) for h in _flat(hook)}
            now = [h for outer in hooks_of(part) for h in _flat(outer)]
            later = [h for h in now if not isinstance(h, MoveHook) and id(h) not in known]
            _detach(part)
            _attach(part, hook)
            for other in later:
                add_hook_to_module(part, other, append=True)
        module.__dict__.update(self.wrappers)

    def _send_home(self) -> None:
        """Puts weights where their hooks expect them, also ones that were replaced meanwhile."""
        away = [(home.tensor, home.device) for home in self.homes.values() if home.device.type != "cpu"]
        for part, whole in self.hooks:
            for hook in _flat(whole):
                device = _device(hook.execution_device) if isinstance(hook, AlignDevicesHook) else None
                if device is not None and not hook.offload:
                    own = [*part._parameters.values(), *part._buffers.values()]
                    away += [(tensor, device) for tensor in own if tensor is not None]
        # What doesn't fit stays on the host; the handle has noted it.
        with contextlib.suppress(torch.OutOfMemoryError):
            for tensor, device in away:
                if tensor.device != device and not tensor.is_meta:
                    tensor.data = tensor.data.to(device)


#: The attribute of a module that was taken over and not given back yet. No table of our own: a `Dispatch` refers to its
#: module, and would keep it alive there.
TAKEN = "_layerwise_dispatch"


def _taken(module: nn.Module) -> Dispatch | None:
    return module.__dict__.get(TAKEN)


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """accelerate's device hooks of one module, also chained ones."""
    hook = module.__dict__.get("_hf_hook")
    return [h for h in _flat(hook) if isinstance(h, AlignDevicesHook)] if hook is not None else []


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate dispatched a module by a device map, also when it has been taken over since.

    A map whose hooks were removed is none, except for one that needs none, with all weights on the one device it names.
    """
    if _taken(module) is not None:
        return True
    device_map = getattr(module, "hf_device_map", None)
    if not isinstance(device_map, dict) or not device_map:
        return False
    hooks = [hook for part in module.modules() for hook in align_hooks(part)]
    if not hooks:
        places = {tensor.device for _, tensor in named_tensors(module)}
        return len(device_map) == 1 and len(places) == 1 and places.pop().type not in ("cpu", "meta")
    if not any(hook.offload for hook in hooks):
        return True
    # Offload hooks that no map asks for are those of sequential offload, put on after the map was reset.
    return any(str(value) in ("cpu", "disk") for value in device_map.values())


def dispatch_of(module: nn.Module) -> Dispatch:
    """What accelerate made of a dispatched module, as read when it was taken over, or now."""
    return _taken(module) or Dispatch(module)


def take(module: nn.Module, device: torch.device, crossing: bool = False) -> bool:
    """Takes a module over from accelerate. Returns False for one that isn't dispatched.

    Args:
        module (`nn.Module`): A component.
        device (`torch.device`): The execution device.
        crossing (`bool`): Tensors from a further accelerator may reach its modules, as they may where part of it is.
    """
    # Still taken over where somebody removed all hooks since: from the beginning, then.
    give_back(module)
    if not is_dispatched(module):
        return False
    dispatch = Dispatch(module)
    module.__dict__[TAKEN] = dispatch
    dispatch.take(module, device, crossing)
    return True


def return_outputs(module: nn.Module) -> None:
    """Makes a taken-over component's output go to where its input was, where accelerate's hook had it so.

    The wrapper goes with the hooks: removing those restores the `forward` from before them.
    """
    dispatch = _taken(module)
    if dispatch is None or dispatch.returns is None:
        return
    forward, skip_keys = module.forward, dispatch.returns.skip_keys

    @functools.wraps(forward)
    def returning(*args: Any, **kwargs: Any) -> Any:
        device = find_device([args, kwargs])
        output = forward(*args, **kwargs)
        return output if device is None else send_to_device(output, device, skip_keys=skip_keys)

    module.forward = returning


def give_back(module: nn.Module) -> None:
    """Undoes [`take`], after all other hooks were removed and the weights sent home. Idempotent."""
    dispatch = module.__dict__.pop(TAKEN, None)
    if dispatch is not None:
        dispatch.give_back(module)


def forget(module: nn.Module) -> None:
    """Leaves a module as it is, where somebody removed its hooks and so the map with them. Idempotent."""
    module.__dict__.pop(TAKEN, None)


def main_device(module: nn.Module) -> torch.device | None:
    """The accelerator that runs a dispatched module but for what is mapped to others: that of its root's hook."""
    root = next((hook for part, hook in dispatch_of(module).hooks if part is module), None)
    aligned = align_hooks(module) if root is None else [h for h in _flat(root) if isinstance(h, AlignDevicesHook)]
    return next((device for hook in aligned if (device := _device(hook.execution_device)) is not None), None)


def accelerators(module: nn.Module) -> Iterator[tuple[torch.device, int]]:
    """The accelerators on which a dispatched module's weights are used, each with the bytes of one of them."""
    dispatch = dispatch_of(module)
    hooks = dict(dispatch.hooks)
    hooked = bool(hooks) or any(align_hooks(part) for part in module.modules())
    if not hooked:
        yield from ((home.device, home.tensor.numel() * home.tensor.element_size()) for home in dispatch.homes.values())
    for part in module.modules():
        aligned = [h for h in _flat(hooks[part]) if isinstance(h, AlignDevicesHook)] if part in hooks else []
        for hook in aligned or align_hooks(part):
            for tensor in [*part._parameters.values(), *part._buffers.values()]:
                device = _device(hook.execution_device)
                if tensor is not None and device is not None:
                    yield device, tensor.numel() * tensor.element_size()


def _device(value: int | str | torch.device | None) -> torch.device | None:
    """A hook's execution device with its index; None for the host."""
    if value is None:
        return None
    found = torch.device(value)
    return platform.indexed(found) if found.type not in ("cpu", "meta") else None


def _runs_elsewhere(hook: AlignDevicesHook, device: torch.device) -> bool:
    found = _device(hook.execution_device)
    return not hook.offload and found is not None and found != device


def _flat(hook: ModelHook) -> list[ModelHook]:
    if isinstance(hook, SequentialHook):
        return [inner for outer in hook.hooks for inner in _flat(outer)]
    return [hook]


def _stand_in(placeholder: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    if not isinstance(placeholder, nn.Parameter):
        return view
    found = type(placeholder)(view, requires_grad=placeholder.requires_grad)
    found.__dict__.update(placeholder.__dict__)
    return found


def _placeholder(old: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """The placeholder from before, or another one where the weight has another shape or type by now."""
    if (old.shape, old.dtype, old.requires_grad) == (current.shape, current.dtype, current.requires_grad):
        return old
    return _stand_in(current, current.detach().to("meta"))


def _detach(module: nn.Module) -> None:
    """Takes a module's hooks off without running their `detach_hook`, which would load or copy its weights."""
    if "_hf_hook" not in module.__dict__:
        return
    add_hook_to_module(module, ModelHook())
    remove_hook_from_module(module)
    forward = module.__dict__.get("forward")
    if getattr(forward, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]


def _attach(module: nn.Module, hook: ModelHook) -> None:
    """Puts hooks on without running their `init_hook`: the weights are where it would put them."""
    hook.init_hook = lambda given: given
    try:
        add_hook_to_module(module, hook)
    finally:
        del hook.init_hook
