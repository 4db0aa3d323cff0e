"""One component is taken under layerwise offload, and given back: hooks on and off, weights to the host and home."""

from __future__ import annotations

import torch

from . import dispatched, hooks, mapping, patches, progress, reader
from .components import Wanted, refuse_unmovable, renewed, to_host
from .config import HostTier
from .host import HostStore
from .log import get_logger
from .moves import guard_moves, release_moves
from .parts import settle
from .runtime import Runtime
from .schedule import Schedule
from .tensors import plain_data, plain_tensors
from .tiers import held
from .transfer import Transfer

logger = get_logger(__name__)
#: The device that each tensor came from, by its id; none for those that were on the host. `ALL` stands for the whole
#: component, where all of it was on one device: what is put in later goes there too.
Homes = dict[int, torch.device]
ALL = 0


def make_schedule(item: Wanted, transfer: Transfer) -> Schedule:
    """A schedule for a component. Touches nothing."""
    default = HostTier.PINNED if transfer.is_async else HostTier.PAGEABLE
    asked = item.config.host
    # What is read from files gets its tier once it was found there.
    store = HostStore(
        transfer.device, asked if asked is not None and asked.takes_memory else default, item.component.name
    )
    return Schedule(item.component, store, transfer, item.choice, item.config, item.unselected)


def bring_to_host(item: Wanted, device: torch.device, crossing: bool) -> tuple[Wanted, Homes]:
    """Takes a component over from accelerate's device hooks, and moves what is on a device to the host.

    Returns:
        The component as it is then, and where its tensors came from.
    """
    if item.residence is not None:
        dispatched.take(item.component.module, device, crossing)
    item = renewed(item, device)
    homes = to_host(item.component)
    if homes and len({*homes.values()}) == 1 and all(id(e.tensor) in homes for e in item.component.entries()):
        homes[ALL] = next(iter(homes.values()))
    # Host copies of what was on a device are new memory: look again.
    return renewed(item, device) if homes else item, homes


def install(runtime: Runtime, schedule: Schedule) -> None:
    """Puts our hooks on a component whose weights are on the host."""
    hooks.install(runtime, schedule)
    dispatched.return_outputs(schedule.component.module)
    guard_moves(runtime, schedule)


def restructure(runtime: Runtime, schedule: Schedule) -> None:
    """Looks a component through anew after its structure has changed; everything of it must be offloaded."""
    device = runtime.transfer.device
    residence = mapping.residence(schedule.name, schedule.component.module, device, schedule.config)
    item = renewed(Wanted(schedule.component, schedule.choice, schedule.config, residence=residence), device)
    refuse_unmovable(item.component, device)
    if to_host(item.component):
        # Put in while on the device. Its host copy is new memory: look again.
        item = renewed(item, device)
    hooks.reinstall(runtime, schedule, item.component)


def let_go(runtime: Runtime, schedule: Schedule) -> None:
    """Takes our hooks off a component and makes its host copy ordinary memory."""
    with runtime.lock:
        runtime.recover()
        schedule.is_closed = True  # from here on nothing is packed
        schedule.leave()
    module = schedule.component.module
    if not any(isinstance(hook, hooks.RootHook) for hook in hooks.hooks_of(module)):
        # Somebody has taken all hooks off: there is nothing to give back to.
        dispatched.forget(module)
    hooks.uninstall(schedule)
    release_moves(module)
    patches.forget_device(module)
    schedule.renew()
    schedule.store.held_at_end = held(schedule)
    schedule.store.release()
    reader.release(schedule.store)


def send_home(schedule: Schedule, homes: Homes, notes: list[str]) -> None:
    """Weights go back to where they came from: a device, or accelerate's hooks.

    Where that doesn't fit on the device they stay on the host, with a note.
    """
    _to_devices(schedule, homes, notes)
    dispatched.give_back(schedule.component.module)


def _to_devices(schedule: Schedule, homes: Homes, notes: list[str]) -> None:
    component = schedule.component
    if schedule.is_stale and ALL in homes:
        # An adapter was put in, and no call has looked the component through since.
        item = Wanted(component, schedule.choice, schedule.config)
        component = renewed(item, schedule.transfer.device).component
    due = [(entry, homes.get(id(entry.tensor), homes.get(ALL))) for entry in component.entries()]
    total = sum(entry.host.nbytes for entry, device in due if device is not None)
    with plain_tensors(), progress.bar(f"{schedule.name}: moving back", total) as advance:
        for entry, device in due:
            if device is None:
                continue
            try:
                entry.tensor.data = plain_data(entry.tensor).to(device)
                advance(entry.host.nbytes)
            except torch.OutOfMemoryError:
                notes.append(f"{schedule.name} doesn't fit on {device} and stays on the CPU")
                logger.warning(notes[-1])
                break
        settle(entry.held for entry in component.entries())
