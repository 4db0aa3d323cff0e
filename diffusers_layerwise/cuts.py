"""What a plan sees of one component, and the groups that it cuts of it."""

from __future__ import annotations

from .config import LayerwiseOffloadConfig
from .discovery import Component, Unit
from .group import Group
from .host import HostStore
from .order import Order
from .plan import Choice, ComponentPlan, ComponentSpec
from .specs import positions, unit_specs
from .transfer import Account, Transfer


def spec_of(
    component: Component,
    order: Order,
    store: HostStore,
    choice: Choice,
    config: LayerwiseOffloadConfig,
    unselected: bool,
) -> ComponentSpec:
    """A component as a plan sees it: units in execution order, with measured times if there are any."""
    busy, gap = order.times if order.times is not None else (None, None)
    return ComponentSpec(
        component.name,
        unit_specs(order.sequence, store),
        positions(order.uses, order.sequence),
        component.fixed_size,
        component.weights,
        choice,
        config,
        busy,
        gap,
        unselected,
        component.others,
    )


def take_over(old: Component, new: Component, order: Order, store: HostStore) -> None:
    """A component's structure has changed: units whose tensors are the same keep their place and what is known of them.

    Args:
        old (`Component`): What it was.
        new (`Component`): What discovery finds now; its units are replaced by the old ones that stay.
        order (`Order`): What is known of its passes.
        store (`HostStore`): Its host copy, which the units that are gone leave.
    """
    before = {unit.contents(): unit for unit in old.units}
    kept: dict[int, Unit] = {}
    for position, unit in enumerate(new.units):
        same = before.pop(unit.contents(), None)
        if same is not None:
            kept[same.index] = new.units[position] = same
            same.name, same.layer, same.triggers = unit.name, unit.layer, unit.triggers
    for gone in before.values():
        store.move_out(gone)
    order.restructure(new.units, kept)


def cut(plan: ComponentPlan, order: Order, store: HostStore, transfer: Transfer, account: Account) -> list[Group]:
    """The groups of a component, in execution order. Marks the units that the plan leaves on the host.

    Until the execution order has been seen each unit is a streamed group of its own, unless all are resident.

    Args:
        plan (`ComponentPlan`): What becomes of it.
        order (`Order`): Its units.
        store (`HostStore`): Their host copy.
        transfer (`Transfer`): The device.
        account (`Account`): The component's counters.
    """
    tables = {unit.name for unit in plan.units if unit.gathered}
    for unit in order.sequence:
        unit.is_gathered = unit.name in tables
    if order.used or all(group.resident for group in plan.groups):
        cuts = [(g.name, g.start, g.stop, g.resident) for g in plan.groups]
    else:
        cuts = [(unit.name, i, i + 1, False) for i, unit in enumerate(order.sequence)]
    groups = []
    for name, start, stop, resident in cuts:
        units = [unit for unit in order.sequence[start:stop] if not unit.is_gathered]
        if units:
            groups.append(Group(f"{plan.name}.{name}", units, store, transfer, account, resident))
    return groups
