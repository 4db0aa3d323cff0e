"""The mutants: one wait, record, slot check or order rule of the engine removed at a time.

Each is a file of the package, the text to replace (exactly one occurrence), its replacement, and what it breaks. Where
two rules guard the same, both are removed.

Three are left out, since another rule has the same effect. Recording the free event of only the first of a group's
slots: the copy stream works in order and fills that slot first. Taking a plan that was cut short as adopted: the
component whose order caused it is learned again in the next pass, which adopts everything. Closing a call on a stream
that isn't behind its last pass: a caller who changes streams in between has to order them for its own results.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change that must not go unnoticed."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        """What is replaced by what."""
        return ((self.old, self.new), *self.also)


MUTANTS = [
    Mutant(
        "events are recorded on the current device's stream, whichever that is",
        "transfer.py",
        "            event.record(torch.accelerator.current_stream(self.device))\n\n    def wait",
        "            event.record()\n\n    def wait",
    ),
    Mutant(
        "copy does not wait for the slot's free event",
        "transfer.py",
        "                self.copy_stream.wait_event(event)\n\n    def record_ready",
        "                pass\n\n    def record_ready",
    ),
    Mutant(
        "ready event is not recorded behind the copy",
        "transfer.py",
        "            lease.ready.record(self.copy_stream)\n",
        "            pass\n",
    ),
    Mutant(
        "ready event of a queued copy is not recorded",
        "transfer.py",
        "                done.record(self.copy_stream)\n",
        "                pass\n",
    ),
    Mutant(
        "ready event is recorded in front of the copy",
        "transfer.py",
        "            for target, source in copies:\n"
        "                target.copy_(source, non_blocking=True)\n"
        "            if done is not None:\n"
        "                done.record(self.copy_stream)\n",
        "            if done is not None:\n"
        "                done.record(self.copy_stream)\n"
        "            for target, source in copies:\n"
        "                target.copy_(source, non_blocking=True)\n",
    ),
    Mutant(
        "the layer's stream waits for nothing",
        "transfer.py",
        "            torch.accelerator.current_stream(self.device).wait_event(event)\n",
        "            pass\n",
    ),
    Mutant(
        "a recorded pass is read before it is over",
        "transfer.py",
        "            mark.synchronize()\n",
        "            pass\n",
    ),
    Mutant(
        "the group's ready event is not awaited",
        "group.py",
        "        transfer.wait(lease.ready)\n",
        "",
    ),
    Mutant(
        "free events are never recorded",
        "transfer.py",
        "            event.record(torch.accelerator.current_stream(self.device))\n\n    def wait",
        "            pass\n\n    def wait",
    ),
    Mutant(
        "a used slot is given back without recording its free event",
        "transfer.py",
        "            if used:\n                self.transfer.mark(slot.free)\n",
        "",
    ),
    Mutant(
        "only the first of a group's slots is waited for",
        "transfer.py",
        "slots[0].ready, [slot.free for slot in slots])",
        "slots[0].ready, [slots[0].free])",
    ),
    Mutant(
        "a slot in use is lent again",
        "transfer.py",
        "            if all(slot.holder is None for slot in lease.slots):\n",
        "            if True:\n",
    ),
    Mutant(
        "the slab is filled before its memory's previous owner is done",
        "transfer.py",
        "        for slot in self.slots:\n            self.transfer.mark(slot.free)\n",
        "",
    ),
    Mutant(
        "a resident buffer is filled before its memory's previous owner is done",
        "transfer.py",
        "        self.mark(after)\n        lease = Lease(",
        "        lease = Lease(",
    ),
    Mutant(
        "a resident buffer is freed while its copy is running",
        "transfer.py",
        "        order_before_free(lease, self.stream(), [lease.ready])\n",
        "",
        (("        self.wait(lease.ready)\n        account", "        account"),),
    ),
    Mutant(
        "the slab is freed while copies are running",
        "transfer.py",
        "            self.transfer.wait(slot.ready)\n",
        "            pass\n",
    ),
    Mutant(
        "the link is measured over slots in use",
        "transfer.py",
        "            if slot.free is not None:\n                self.transfer.copy_stream.wait_event(slot.free)\n",
        "            pass\n",
    ),
    Mutant(
        "an edit made while the copy was queued is lost",
        "group.py",
        "        if binding.is_touched():\n",
        "        if False:\n",
    ),
    Mutant(
        "an edit made on the device is lost",
        "group.py",
        "                binding.keep_edits(lease)\n",
        "                pass\n",
    ),
    Mutant(
        "a replaced parameter is not noticed",
        "group.py",
        "        if binding.is_edited():\n",
        "        if False:\n",
    ),
    Mutant(
        "a replaced parameter's loaded copy is used once more",
        "schedule.py",
        "            if group.state is not GroupState.HOST and group.outdated():\n",
        "            if False:\n",
    ),
    Mutant(
        "parameters keep pointing at the slot after their group was released",
        "group.py",
        "            binding.point_home()\n",
        "            pass\n",
    ),
    Mutant(
        "a group is released before its last unit ran",
        "schedule.py",
        "        if self._remaining == 0:\n",
        "        if self._remaining <= 1:\n",
    ),
    Mutant(
        "a used group is never released",
        "schedule.py",
        "        if group is not None and not group.resident:\n",
        "        if False:\n",
    ),
    Mutant(
        "groups that a known course skips keep their slots",
        "schedule.py",
        "        for group in others:\n            self._drop(group)\n",
        "",
    ),
    Mutant(
        "a pass that skips layers takes the place of the whole one",
        "order.py",
        "        whole = course if fresh else self.whole(course) or course\n",
        "        whole = course\n",
    ),
    Mutant(
        "a pass that skips layers is measured like a whole one",
        "fitting.py",
        "        if schedule.skips_layers():\n",
        "        if False:\n",
    ),
    Mutant(
        "a group used twice in a pass is not loaded again for its second use",
        "course.py",
        "            elif not group.resident:\n",
        "            elif False:\n",
    ),
    Mutant(
        "the pass does not wrap round to its first groups",
        "schedule.py",
        "        if successor is self and self.is_open:\n",
        "        if False:\n",
    ),
    Mutant(
        "prefetch stops at the group in use",
        "course.py",
        "            self.horizon = max(self.horizon, self.position)\n            return expected[position][1]\n",
        "            self.horizon = len(expected)\n            return expected[position][1]\n",
    ),
    Mutant(
        "skipped groups keep their slots",
        "schedule.py",
        "            self._keep(set(self.groups) - set(skipped))\n",
        "            pass\n",
    ),
    Mutant(
        "the order is never relearned",
        "order.py",
        "        self._history.append(number)\n",
        "",
    ),
    Mutant(
        "a pass on another stream is not ordered behind what was loaded",
        "runtime.py",
        "            self.transfer.wait(event)\n        self._stream = stream\n",
        "        self._stream = stream\n",
    ),
    Mutant(
        "another component's prefetched groups keep the ring",
        "schedule.py",
        "        for group in found:\n            self._drop(group)\n",
        "",
    ),
    Mutant(
        "an exception leaves the group in use on the device",
        "runtime.py",
        "            schedule.recover()\n",
        "            pass\n",
    ),
    Mutant(
        "a pass cut short by an exception is learned as an order",
        "schedule.py",
        "        self.record = []\n        self.timer = self.tape = None\n        self.end_pass()\n",
        "        self.end_pass()\n",
    ),
    Mutant(
        "idle components keep their residents",
        "sharing.py",
        "                is_due = self._evict(other, schedule) or is_due\n",
        "                pass\n",
    ),
    Mutant(
        "units are packed with their bytes at another place than planned",
        "host.py",
        "            places[unit] = Place(chunk, offset, unit.size)\n",
        "            places[unit] = Place(chunk, max(256, offset - 256), unit.size)\n",
    ),
    Mutant(
        "gradients are not refused",
        "hooks.py",
        "    if asked or any(entry.held.requires_grad for entry in weights):\n",
        "    if False:\n",
    ),
    Mutant(
        "views start at offset 0",
        "transfer.py",
        "        offset = ALIGNMENT + start * self.slot_bytes\n",
        "        offset = start * self.slot_bytes\n",
    ),
    Mutant(
        "a unit has its place before its bytes are there",
        "host.py",
        "            for extent in unit.extents:\n"
        "                move_extent(extent, chunk.buffer, offset + extent.shift(self.device))\n"
        "                offset += extent.size\n"
        "            advance",
        "            self._places.update(places)\n"
        "            for extent in unit.extents:\n"
        "                move_extent(extent, chunk.buffer, offset + extent.shift(self.device))\n"
        "                offset += extent.size\n"
        "            advance",
    ),
    Mutant(
        "a removed handle goes on",
        "runtime.py",
        "        self.is_closed = True\n"
        "        self._ahead.stop()\n"
        "        for schedule in self.schedules:\n"
        "            schedule.close()\n",
        "        pass\n",
    ),
    Mutant(
        "weights are rewritten while they are on their way",
        "switches.py",
        "            runtime.transfer.finish()  # a group may have been on its way, and its host copy is written now\n",
        "",
    ),
]
