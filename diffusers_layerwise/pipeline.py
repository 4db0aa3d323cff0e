"""Putting it on and taking it off: pipelines, bare modules, and the handle that both return."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import nn

from . import conflicts, patches, platform
from .config import HostTier, LayerwiseOffloadConfig, Mode, Residency, parse_bytes, read_mode
from .discovery import Component, discover
from .errors import LayerwiseOffloadError
from .hooks import install, uninstall
from .host import HostStore
from .plan import Choice, OffloadPlan
from .report import Report, make_report
from .runtime import Runtime, Terms
from .schedule import Schedule
from .selection import Components, select
from .transfer import Transfer, plain_tensors

logger = logging.get_logger(__name__)

_HANDLE = "_layerwise_offload"


class OffloadHandle:
    """What `enable_layerwise_offload` and `apply_layerwise_offload` return: the plan, the report, and the way back.

    As a context manager it takes layerwise offload off again at the end of the block.

    Attributes:
        plan (`OffloadPlan`): Who is resident and who streams; provisional until the first pass has shown the order.
    """

    def __init__(self, runtime: Runtime, homes: dict[str, dict[int, torch.device]], notes: list[str]) -> None:
        self._runtime = runtime
        self._homes = homes
        self._notes = notes
        self._owner: DiffusionPipeline | None = None
        self._removed = False

    @property
    def plan(self) -> OffloadPlan:
        """The plan in force."""
        return self._runtime.plan

    def report(self) -> Report:
        """What was moved, what is resident, hits, misses, stalls; also after `remove()`."""
        return make_report(self._runtime, self._notes)

    def refresh(self, name: str | None = None) -> None:
        """Reads a component's weights anew after an edit through `.data`, which no counter shows.

        Args:
            name (`str`, *optional*): The component; all when None.

        Raises:
            ValueError: No such component.
        """
        names = [schedule.name for schedule in self._runtime.schedules]
        if name is not None and name not in names:
            raise ValueError(f"No component {name!r} is offloaded; there are {names}.")
        for schedule in self._runtime.schedules:
            if name in (None, schedule.name):
                schedule.leave()

    def release(self) -> None:
        """Gives all device memory back; the next pass takes it again. Idempotent."""
        self._runtime.release()

    def remove(self) -> None:
        """Makes the modules ordinary again: hooks off, weights where they came from. Idempotent."""
        if self._removed:
            return
        self._removed = True
        self._runtime.release()
        for schedule in self._runtime.schedules:
            uninstall(schedule)
            patches.forget_device(schedule.component.module)
            schedule.renew()
            schedule.store.release()
            self._send_home(schedule)
        if self._owner is not None:
            self._owner.__dict__.pop(_HANDLE, None)

    def _send_home(self, schedule: Schedule) -> None:
        """Weights that came from a device go back there; where that doesn't fit they stay on the host, with a note."""
        homes = self._homes[schedule.name]
        with plain_tensors():
            for entry in schedule.component.entries():
                device = homes.get(id(entry.tensor))
                if device is None:
                    continue
                try:
                    entry.tensor.data = entry.tensor.data.to(device)
                except torch.OutOfMemoryError:
                    note = f"{schedule.name} doesn't fit on {device} and stays on the CPU"
                    self._notes.append(note)
                    logger.warning(note)
                    return

    def call(self) -> contextlib.AbstractContextManager[None]:
        """The context of one pipeline call."""
        return self._runtime.call()

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """One component as selected, checked."""

    component: Component
    choice: Choice
    config: LayerwiseOffloadConfig


def enable_layerwise_offload(
    pipe: DiffusionPipeline,
    components: Components = None,
    mode: str | Mode = "auto",
    *,
    onload_device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
    config: LayerwiseOffloadConfig | dict[str, Any] | None = None,
) -> OffloadHandle:
    """Streams a pipeline's components layer by layer. Also `pipe.enable_layerwise_offload(...)`.

    Results are bit-identical to the pipeline resident on the same device. Calling it again replaces the earlier call.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.
        components (`str`, `list` or `dict`, *optional*): Names (`"transformer"`), groups (`"all"`, `"dit"`,
            `"default"`, `"text_encoder"`, `"image_encoder"`, `"vae"`), exclusions (`"!vae"`); as a dict, name to
            `"layerwise"`, `"resident"`, `"offload"`, `"skip"` or options. None: all of them. What isn't selected is
            resident when it fits, else offloaded as a whole.
        mode (`str`): `"auto"`, `"memory"`, `"speed"` or `"manual"`, see [`Mode`].
        onload_device (`torch.device`, *optional*): The execution device; the accelerator by default, else the CPU.
        memory_budget (`int` or `str`, *optional*): Device bytes for weights, ring and activations (`"8GiB"`). None
            reads the free memory at the first call.
        config (`LayerwiseOffloadConfig` or `dict`, *optional*): Options for all components.

    Returns:
        `OffloadHandle`

    Raises:
        TypeError, ValueError: Bad arguments; nothing was changed.
        LayerwiseOffloadError: A named component can't be streamed, or another offload is in the way.
        torch.OutOfMemoryError: The budget is below the smallest that works (which the message says).

    Example:
        >>> handle = pipe.enable_layerwise_offload(memory_budget="8GiB")
        >>> image = pipe("a fox").images[0]
        >>> print(handle.report())
    """
    if not isinstance(pipe, DiffusionPipeline):
        raise TypeError(f"enable_layerwise_offload needs a DiffusionPipeline, got {type(pipe).__name__}.")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    device = _device(onload_device)
    signature = {name: value for name, value in pipe.components.items() if _may_be_module(pipe, name, value)}
    modules = {name: value for name, value in signature.items() if isinstance(value, nn.Module)}
    chosen = select(components, signature, chosen_mode, options)
    replaced = conflicts.check(pipe, {n: modules[n] for n in modules if n in chosen})
    terms = Terms(chosen_mode, budget, options.activation_reserve, options.residency or Residency.USE, True)
    _runtime(_wanted(modules, chosen, options, [], set(replaced)), device, terms)
    # All checks have passed: from here on things change.
    before = pipe.__dict__.get(_HANDLE)
    if before is not None:
        before.remove()
    if replaced:
        conflicts.replace(pipe)
    notes = [f"{name}: {what}" for name, what in replaced.items()]
    handle = _start(_wanted(modules, chosen, options, notes, set()), device, terms, notes)
    handle._owner = pipe
    pipe.__dict__[_HANDLE] = handle
    patches.wrap_call(type(pipe), _scope)
    return handle


def apply_layerwise_offload(
    module: nn.Module,
    mode: str | Mode = "auto",
    *,
    onload_device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
    config: LayerwiseOffloadConfig | dict[str, Any] | None = None,
) -> OffloadHandle:
    """Streams any module layer by layer. The budget is its weights and ring; residents stay until `handle.release()`.

    Args:
        module (`nn.Module`): The module, called under `torch.no_grad()` or `torch.inference_mode()`.
        mode, onload_device, memory_budget, config: As for [`enable_layerwise_offload`].

    Returns:
        `OffloadHandle`

    Raises:
        TypeError, ValueError: Bad arguments; nothing was changed.
        LayerwiseOffloadError: The module has nothing to stream, or another offload is in the way.
        torch.OutOfMemoryError: The budget is below the smallest that works (which the message says).

    Example:
        >>> handle = apply_layerwise_offload(transformer, "memory", onload_device="cuda")
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"apply_layerwise_offload needs an nn.Module, got {type(module).__name__}.")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    device = _device(onload_device)
    name = type(module).__name__
    conflicts.refuse_hooked(name, module)
    component = _checked(name, module)
    terms = Terms(chosen_mode, budget, options.activation_reserve or 0, options.residency or Residency.LASTING, False)
    return _start([_Wanted(component, Choice.LAYERWISE, options)], device, terms, [])


def disable_layerwise_offload(pipe: DiffusionPipeline) -> None:
    """Makes a pipeline ordinary again. Also `pipe.disable_layerwise_offload()`. Idempotent."""
    handle = pipe.__dict__.get(_HANDLE)
    if handle is not None:
        handle.remove()


def _start(wanted: list[_Wanted], device: torch.device, terms: Terms, notes: list[str]) -> OffloadHandle:
    """Makes the runtime (which checks the budget), and only then touches the modules."""
    runtime = _runtime(wanted, device, terms)
    homes: dict[str, dict[int, torch.device]] = {}
    moved = False
    for item in wanted:
        homes[item.component.name] = _to_host(item.component)
        moved = moved or bool(homes[item.component.name])
    if moved:
        # The host copies are new memory: look again.
        fresh = [dataclasses.replace(w, component=discover(w.component.module, w.component.name)) for w in wanted]
        runtime = _runtime(fresh, device, terms)
    for schedule in runtime.schedules:
        install(runtime, schedule)
        patches.answer_device(schedule.component.module, device)
    return OffloadHandle(runtime, homes, notes)


def _runtime(wanted: list[_Wanted], device: torch.device, terms: Terms) -> Runtime:
    transfer = Transfer(device)
    schedules = []
    for item in wanted:
        default = HostTier.PINNED if transfer.is_async else HostTier.PAGEABLE
        store = HostStore(device, item.config.host or default)
        schedules.append(Schedule(item.component, store, transfer, item.choice, item.config))
    return Runtime(transfer, schedules, terms)


def _wanted(
    modules: dict[str, nn.Module],
    chosen: dict[str, tuple[Choice, LayerwiseOffloadConfig, bool]],
    options: LayerwiseOffloadConfig,
    notes: list[str],
    on_meta: set[str],
) -> list[_Wanted]:
    """The components to hook: selected ones, then the rest as whole components.

    `on_meta` names those whose weights another offload still holds back: they are checked by shape.
    """
    wanted: list[_Wanted] = []
    seen: set[int] = set()
    for name, module in modules.items():
        if id(module) in seen or next(module.parameters(), None) is None:
            continue
        seen.add(id(module))
        choice, config, exact = chosen.get(name, (Choice.OFFLOAD, options, False))
        try:
            wanted.append(_Wanted(_checked(name, module, name in on_meta), choice, config))
        except LayerwiseOffloadError as error:
            if exact:
                raise
            notes.append(f"{name}: skipped: {error}")
    return wanted


def _checked(name: str, module: nn.Module, on_meta: bool = False) -> Component:
    """A component, or an error that says why it can't be streamed."""
    component = discover(module, name, on_meta)
    if not component.weights and not component.unmovable:
        raise LayerwiseOffloadError(
            f"{name!r} ({type(module).__name__}) has no parameters, so there is nothing to stream. Leave it out."
        )
    if component.unmovable:
        more = f" and {len(component.unmovable) - 1} more" if len(component.unmovable) > 1 else ""
        meta = any("meta device" in reason for reason in component.unmovable)
        remedy = "Load its weights first (from_pretrained, load_state_dict)." if meta else "Leave it out of components."
        raise LayerwiseOffloadError(f"{name!r} can't be streamed: {component.unmovable[0]}{more}. {remedy}")
    return component


def _to_host(component: Component) -> dict[int, torch.device]:
    """Moves weights that lie on a device to the CPU; says where each came from."""
    homes: dict[int, torch.device] = {}
    with plain_tensors():
        for entry in component.entries():
            if entry.tensor.device.type != "cpu":
                homes[id(entry.tensor)] = entry.tensor.device
                entry.tensor.data = entry.tensor.data.to("cpu")
    return homes


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return platform.default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"onload_device must be a device such as 'cuda' or 'cpu', got {device!r}: {error}") from error
    if found.type == "meta":
        raise ValueError("onload_device can't be 'meta': nothing can be computed there.")
    return platform.indexed(found)


def _may_be_module(pipe: DiffusionPipeline, name: str, value: Any) -> bool:
    """Whether a name in the pipeline's signature can hold a module: it does, or it is empty and of no other kind."""
    if value is not None:
        return isinstance(value, nn.Module)
    kinds = ("tokenizer", "scheduler", "feature_extractor", "processor", "image_processor", "watermark")
    return not any(kind in name for kind in kinds)


def _scope(pipe: Any) -> contextlib.AbstractContextManager[None] | None:
    handle = pipe.__dict__.get(_HANDLE)
    return None if handle is None else handle.call()


def attach_methods() -> None:
    """Puts the methods on `DiffusionPipeline`: called at import; initialises no device."""
    patches.attach(
        {
            "enable_layerwise_offload": enable_layerwise_offload,
            "disable_layerwise_offload": disable_layerwise_offload,
            "layerwise_offload": property(lambda pipe: pipe.__dict__.get(_HANDLE), doc="The handle, or None."),
        }
    )


__all__ = [
    "OffloadHandle",
    "apply_layerwise_offload",
    "attach_methods",
    "disable_layerwise_offload",
    "enable_layerwise_offload",
]
