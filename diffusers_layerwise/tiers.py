"""Host tiers of a handle's components: what stays in its files, what is held in memory, and what that takes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import checkpoints, shared
from .config import HostTier, LayerwiseOffloadConfig, format_bytes
from .discovery import Unit
from .errors import LayerwiseOffloadError
from .files import can_tell_edits
from .hostmemory import (
    STEPS,
    HostItem,
    HostPlan,
    assign_tiers,
    automatic_budget,
    available_memory,
    local_processes,
)
from .plan import ComponentPlan
from .reader import staging_bytes
from .schedule import Schedule
from .selection import is_denoiser
from .staging import most_bytes

HOW_TO_LOAD = (
    "Load it with from_pretrained from safetensors files, with the dtype that they have and without moving it, or name "
    "the file or folder in config.checkpoint"
)


class HostMemory:
    """Decides the host tiers of one handle's components, and counts what they take.

    Args:
        options (`LayerwiseOffloadConfig`): The handle's options; its budget counts.
        has_calls (`bool`): A pipeline, whose components differ in how often they are used.

    Attributes:
        plan (`HostPlan`, *optional*): What was decided last.
        peak (`int`): The most bytes of host memory that weights and staging took, as far as was looked.
    """

    def __init__(self, options: LayerwiseOffloadConfig, has_calls: bool) -> None:
        self.asked = options.host_memory_budget
        self.has_calls = has_calls
        self.plan: HostPlan | None = None
        self.peak = 0

    # ------------------------------------------------------------------ before anything is touched
    def check(self, new: Sequence[Schedule], kept: Sequence[Schedule]) -> None:
        """Looks whether components can be treated as asked. Touches nothing.

        Raises:
            LayerwiseOffloadError: None of a component's weights is in a file though its config says so, or the weights
                that are in no file are more than the budget.
        """
        explicit = isinstance(self.asked, int)
        needed = 0
        for schedule in new:
            tier = schedule.config.host
            if tier is HostTier.SHARED:
                needed += self._check_shared(schedule)
                continue
            is_read = tier is not None and not tier.takes_memory
            if not (is_read or explicit) or any(entry.host.is_meta for entry in schedule.component.entries()):
                continue
            found = checkpoints.search(schedule.component, schedule.config.checkpoint)
            if is_read and tier is not None and schedule.component.units and not found.findings:
                raise _not_in_files(schedule, tier, found.folders)
            reason = checkpoints.why_unreadable(found) if is_read else None
            if reason is not None and tier is not None:
                raise LayerwiseOffloadError(
                    f"config.host={tier.value!r} for {schedule.name!r}, but {reason}. Make it readable, or leave "
                    f"config.host out."
                )
            needed += found.missing if tier is None or is_read else schedule.component.streamable
        if isinstance(self.asked, int):
            needed += sum(count for each in kept for tier, count in held(each).items() if HostTier(tier).takes_memory)
            if needed > self.asked:
                raise LayerwiseOffloadError(
                    f"config.host_memory_budget is {format_bytes(self.asked)}, but {format_bytes(needed)} of weights "
                    f"have to be held in host memory, because they are in no file or their config.host says so. "
                    f"{HOW_TO_LOAD}, or raise the budget."
                )

    def _check_shared(self, schedule: Schedule) -> int:
        reason = shared.why_impossible()
        if reason is not None:
            raise LayerwiseOffloadError(f"config.host='shared' for {schedule.name!r}, but {reason}.")
        return part_of_shared(schedule.component.streamable)

    # ------------------------------------------------------------------ deciding
    def open(self, schedule: Schedule) -> None:
        """Finds a component's weights in their files where its config asks for that; everything must be offloaded."""
        tier = schedule.config.host
        if tier is None or tier.takes_memory or schedule.store.table is not None:
            return
        if tier is HostTier.FILE and not can_tell_edits():
            schedule.store.notes.append("read through the memory map, since this system doesn't tell what was edited")
            tier = HostTier.MAPPED
        schedule.store.tier = tier
        if tier is HostTier.SHARED:
            self._share(schedule)
        else:
            self._open(schedule)

    def _share(self, schedule: Schedule) -> None:
        """What is a map of a checkpoint is shared already, by the page cache; the rest gets one copy for all ranks."""
        store, component = schedule.store, schedule.component
        found = checkpoints.mapped(component)
        store.table, _ = checkpoints.take(component, found)
        left, reason = shared.share(component, store.table)
        if left:
            why = f", because there is no shared copy: {reason}" if reason is not None else ""
            store.notes.append(f"{format_bytes(left)} of weights are this rank's own and stay in its host memory{why}")

    def _open(self, schedule: Schedule) -> None:
        store = schedule.store
        if store.table is not None:
            return
        found = checkpoints.search(schedule.component, schedule.config.checkpoint)
        store.table, left = checkpoints.take(schedule.component, found)
        if left:
            store.notes.append(
                f"{format_bytes(left)} of weights are in no checkpoint file with the same bytes and stay in host memory"
            )

    def settle(self, due: Sequence[Schedule], others: Sequence[Schedule], plans: Sequence[ComponentPlan] = ()) -> None:
        """Decides the tiers of components whose groups are about to be made; everything of them must be offloaded.

        Args:
            due (`Sequence[Schedule]`): These.
            others (`Sequence[Schedule]`): The handle's others, whose tiers stay.
            plans (`Sequence[ComponentPlan]`): Who is resident, so far.
        """
        for schedule in due:
            self.open(schedule)
        budget = self._budget([*due, *others])
        total = sum(schedule.component.streamable for schedule in [*due, *others])
        if budget is not None and total > budget:
            for schedule in due:
                # Only before its groups exist: they keep what they looked up.
                if schedule.config.host is None and not schedule.groups:
                    self._open(schedule)
        is_async = any(schedule.transfer.is_async for schedule in due)
        kept = HostTier.PINNED if is_async else HostTier.PAGEABLE
        read = HostTier.FILE if can_tell_edits() else HostTier.MAPPED
        residents = {(plan.name, name) for plan in plans for name in _resident(plan)}
        items = [item for schedule in due for item in self._items(schedule, residents)]
        items += [_item_of(schedule, unit, tier) for schedule in others for unit, tier in _tiers(schedule)]
        limit = budget
        if budget is not None:
            small = sum(schedule.component.fixed_size for schedule in [*due, *others])
            budget = max(0, budget - small - most_bytes(is_async))
        self.plan = dataclasses.replace(assign_tiers(items, budget, kept, read), limit=limit)
        for schedule in due:
            if schedule.config.host is None and schedule.store.table is not None:
                for unit in schedule.component.units:
                    schedule.store.tiers[unit] = self.plan.tiers[schedule.name, unit.index]

    def limit(self, schedules: Sequence[Schedule]) -> int | None:
        """Bytes that a CPU execution device may use, where the weights are more than the host's memory; else None."""
        budget = self._budget(schedules)
        total = sum(schedule.component.streamable for schedule in schedules)
        return None if budget is None or total <= budget else max(1, budget - most_bytes(False))

    def _items(self, schedule: Schedule, residents: set[tuple[str, str]]) -> Iterator[HostItem]:
        uses = STEPS if not self.has_calls or is_denoiser(schedule.name) else 1
        for unit, tier in _tiers(schedule):
            is_fixed = schedule.config.host is not None or schedule.store.place(unit) is not None
            often = 1 if (schedule.name, unit.name) in residents else uses
            from_file = schedule.store.table is not None and _is_in_files(schedule, unit)
            yield HostItem(schedule.name, unit.index, unit.size, often, from_file, tier if is_fixed else None)

    def _budget(self, schedules: Sequence[Schedule]) -> int | None:
        if self.asked is None or isinstance(self.asked, int):
            return self.asked
        found = automatic_budget(available_memory(), local_processes())
        if found is None:
            return None
        # What weights hold already is no longer free, and is theirs to use.
        total = sum(schedule.component.streamable for schedule in schedules)
        if total <= found:
            return found
        owned = 0
        for schedule in schedules:
            in_files = sum(f.extent.nbytes for f in checkpoints.search(schedule.component).findings if f.mapping)
            owned += max(0, schedule.component.streamable - in_files)
        return found + owned

    # ------------------------------------------------------------------ counting
    def count(self, schedules: Iterable[Schedule]) -> int:
        """Bytes of host memory that weights and staging take now, what is shared in parts; remembers the peak."""
        by_tier: Counter[str] = Counter()
        for each in schedules:
            by_tier.update(held(each))
        found = staging_bytes() + part_of_shared(by_tier[HostTier.SHARED.value])
        found += sum(count for tier, count in by_tier.items() if HostTier(tier).takes_memory)
        self.peak = max(self.peak, found)
        return found


def part_of_shared(count: int) -> int:
    """This rank's part of bytes that all ranks of this host share."""
    return -(-count // local_processes())


def main_tier(schedule: Schedule) -> str:
    """The tier that most of a component's units are meant for."""
    count: Counter[str] = Counter()
    for unit, tier in _tiers(schedule):
        count[tier.value] += unit.size
    return count.most_common(1)[0][0] if count else schedule.store.tier.value


def held(schedule: Schedule) -> dict[str, int]:
    """Bytes of a component's host copy by tier, as they lie now, or when it was let go; aligned."""
    if schedule.store.held_at_end is not None:
        return schedule.store.held_at_end
    count: Counter[str] = Counter()
    for unit in schedule.units_and_fixed():
        place = schedule.store.place(unit)
        if place is not None:
            count["pinned" if place.chunk.pinned else "pageable"] += unit.size
            continue
        tier = schedule.store.tier_of(unit)
        for extent in unit.extents:
            if _located(schedule, extent.source.data_ptr(), extent.nbytes):
                count[(HostTier.MAPPED if tier.takes_memory else tier).value] += extent.size
            else:
                count["mapped" if any(entry.on_disk for entry in extent.entries) else "pageable"] += extent.size
    return dict(count)


def _located(schedule: Schedule, pointer: int, count: int) -> bool:
    table = schedule.store.table
    return table is not None and table.locate(pointer, count) is not None


def _is_in_files(schedule: Schedule, unit: Unit) -> bool:
    return all(_located(schedule, extent.source.data_ptr(), extent.nbytes) for extent in unit.extents)


def _tiers(schedule: Schedule) -> Iterator[tuple[Unit, HostTier]]:
    """Each unit with the tier it is in, or will be once it is packed."""
    for unit in schedule.component.units:
        tier = schedule.store.tier_of(unit)
        if not tier.takes_memory and not _is_in_files(schedule, unit):
            tier = HostTier.PAGEABLE
        yield unit, HostTier.MAPPED if unit.on_disk else tier


def _item_of(schedule: Schedule, unit: Unit, tier: HostTier) -> HostItem:
    return HostItem(schedule.name, unit.index, unit.size, tier=tier)


def _resident(plan: ComponentPlan) -> Iterator[str]:
    for group in plan.groups:
        if group.resident:
            yield from (unit.name for unit in plan.units[group.start : group.stop])


def _not_in_files(schedule: Schedule, tier: HostTier, folders: Sequence[Path]) -> LayerwiseOffloadError:
    where = f" (looked in {', '.join(map(str, folders))})" if folders else ""
    return LayerwiseOffloadError(
        f"config.host={tier.value!r} for {schedule.name!r}, but none of its weights is in a checkpoint file with the "
        f"same type and shape{where}. {HOW_TO_LOAD}, or leave config.host out."
    )
