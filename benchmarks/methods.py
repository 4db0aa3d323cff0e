"""The ways to run a model: resident, the offloads of diffusers and accelerate, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Config = dict[str, Any]


@dataclass
class Attached:
    """A method at work on a module: what to do when a use of the model ends, and how to take the method off."""

    end_use: Callable[[], None] | None = None
    remove: Callable[[], None] = lambda: None
    handle: Any = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A named way to attach: `attach(module, block_root, device)`."""

    name: str
    attach: Callable[[nn.Module, str, torch.device], Attached]
    ours: bool = False
    budget: float | None = None  # share of the weights
    residency: str = ""


def resident() -> Method:
    """Plain `module.to(device)`."""

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        module.to(device)
        return Attached()

    return Method("resident (.to)", attach)


def diffusers_group(level: str, stream: bool = True, record_stream: bool = False) -> Method:
    """diffusers' group offload, one block (or leaf) per group."""

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        from diffusers.hooks import apply_group_offloading

        target = module
        if level == "block" and block_root:
            # Only ModuleLists right under the module are found, so go down to it and keep the rest on the device.
            target = module.get_submodule(block_root)
            _place_around(module, target, device)
        apply_group_offloading(
            target, onload_device=device, offload_device=torch.device("cpu"), offload_type=f"{level}_level",
            num_blocks_per_group=1 if level == "block" else None, use_stream=stream, record_stream=record_stream,
        )  # fmt: skip
        return Attached()

    suffix = (" + stream" if stream else "") + (" + record_stream" if record_stream else "")
    return Method(f"diffusers {level}{suffix}", attach)


def _place_around(module: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Move everything outside `target` to the device."""
    inside = {id(tensor) for tensor in [*target.parameters(), *target.buffers()]}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(device)


def accelerate_sequential() -> Method:
    """accelerate's `cpu_offload`, which is what `enable_sequential_cpu_offload()` applies to each component."""

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        from accelerate import cpu_offload

        cpu_offload(module, device, offload_buffers=len(list(module.parameters())) > 0)
        return Attached()

    return Method("accelerate sequential", attach)


def accelerate_align() -> Method:
    """accelerate's AlignDevicesHook on every leaf, with nothing to offload: a hook that only moves arguments."""

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        module.to(device)
        for part in list(module.modules()):
            if not list(part.children()) and list(part.parameters()):
                add_hook_to_module(part, AlignDevicesHook(execution_device=device, offload=False))
        return Attached()

    return Method("accelerate AlignDevicesHook, no offload", attach)


def layerwise(budget: float | None = None, residency: str = "", mode: str = "auto", config: Config | None = None,
              label: str = "") -> Method:  # fmt: skip
    """Ours: `budget` is a share of the weights. The plan picks everything that `config` doesn't say."""
    options: Config = {**(config or {}), **({"residency": residency} if residency else {})}

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        from diffusers_layerwise import apply_layerwise_offload
        from models import weight_bytes

        limit = None if budget is None else round(budget * weight_bytes(module))
        handle = apply_layerwise_offload(
            module, mode=mode, onload_device=device, memory_budget=limit, config=options or None
        )
        end_use = handle.release if residency == "use" else None
        return Attached(end_use, handle.remove, handle, {"memory_budget": limit, "config": options})

    share = "" if budget is None else f" {100 * budget:g} %"
    name = label or f"ours{share}" + (f", {residency}" if residency else "")
    return Method(name, attach, True, budget, residency)


def peers() -> list[Method]:
    """The offloads that users have today."""
    return [
        diffusers_group("block"),
        diffusers_group("block", record_stream=True),
        diffusers_group("leaf"),
        diffusers_group("leaf", record_stream=True),
        accelerate_sequential(),
    ]
