"""What a plan is: which groups exist, who is resident, how large the ring is, and the peak that follows. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from .config import LayerwiseOffloadConfig, Mode, Residency, format_bytes
from .device_maps import CPU, DISK, device_value, shortest
from .hostmemory import HostPlan
from .tensors import ALIGNMENT


class Choice(str, enum.Enum):
    """What becomes of a component.

    `LAYERWISE`: streamed group by group, with as many resident groups as the plan gives it.
    `RESIDENT`: all of it on the device, lasting.
    `OFFLOAD`: all of it on the device while it is in use.
    `SKIP`: its weights are never moved.
    """

    LAYERWISE = "layerwise"
    RESIDENT = "resident"
    OFFLOAD = "offload"
    SKIP = "skip"


@dataclasses.dataclass(frozen=True)
class UnitSpec:
    """A unit as a plan sees it: its bytes in a region, its layer, and the chunk of host memory that holds it.

    `resident` is what a device map says (None: the plan decides), `on_disk` whether its host copy is a view of a file,
    `tensors` the names of its parameters, `is_read` whether it is read from its file for each load. `can_gather`: it is
    an embedding table whose rows the host can look up; `gathered` are its bytes where it does, and `size` is 0.
    """

    name: str
    layer: str | None
    size: int
    chunk: int = 0
    resident: bool | None = None
    on_disk: bool = False
    tensors: tuple[str, ...] = ()
    is_read: bool = False
    can_gather: bool = False
    gathered: int = 0


@dataclasses.dataclass(frozen=True)
class ComponentSpec:
    """A component as a plan sees it.

    Args:
        units (`tuple[UnitSpec]`): In execution order where that is known, else in registration order.
        order (`tuple[int]`): Positions in `units`, one for each use in a pass, with repeats.
        busy (`tuple[float]`, *optional*): For each use, seconds from its weights' arrival to its module's end.
        gap (`tuple[float]`, *optional*): For each use, seconds from there to the next use's start.
        unselected (`bool`): The user didn't name it: resident when it fits, else offloaded as a whole.
        others (`tuple[tuple[str, str | None]]`): Names of tensors that no unit holds, each with the device it stays on
            if that is a further accelerator.
    """

    name: str
    units: tuple[UnitSpec, ...]
    order: tuple[int, ...]
    fixed: int
    weights: int
    choice: Choice = Choice.LAYERWISE
    config: LayerwiseOffloadConfig = dataclasses.field(default_factory=LayerwiseOffloadConfig)
    busy: tuple[float, ...] | None = None
    gap: tuple[float, ...] | None = None
    unselected: bool = False
    others: tuple[tuple[str, str | None], ...] = ()

    @property
    def mapped(self) -> bool:
        """Whether a device map says who is resident."""
        return self.choice is Choice.LAYERWISE and any(unit.resident is not None for unit in self.units)

    def streaming(self) -> ComponentSpec:
        """This component without what a device map keeps resident: what needs a ring."""
        if not self.mapped:
            return self
        units: list[UnitSpec] = []
        gaps = 0
        for unit in self.units:
            if unit.resident:
                gaps += 1
            else:
                # A gap ends a group, as the end of a chunk does.
                units.append(dataclasses.replace(unit, chunk=unit.chunk + (gaps << 32)))
        return dataclasses.replace(self, units=tuple(units))

    @property
    def size(self) -> int:
        """Bytes of all units in a region."""
        return sum(unit.size for unit in self.units)

    @property
    def largest_unit(self) -> int:
        """Bytes of the largest unit."""
        return max((unit.size for unit in self.units), default=0)

    @property
    def largest_layer_unit(self) -> int:
        """Bytes of the largest unit inside a repeated layer; of the largest unit when nothing repeats."""
        return max((u.size for u in self.units if u.layer is not None), default=self.largest_unit)


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One group: units `start` to `stop` in execution order."""

    name: str
    start: int
    stop: int
    size: int
    resident: bool


@dataclasses.dataclass(frozen=True)
class ComponentPlan:
    """What a plan gives one component. Bytes, and in `step` the predicted seconds of a pass, if times are known.

    `compute` is what they would be without any wait, `read_seconds` what reading from files alone takes of a pass.
    """

    name: str
    choice: Choice
    groups: tuple[GroupPlan, ...]
    fixed: int
    weights: int
    residency: Residency
    step: float | None = None
    units: tuple[UnitSpec, ...] = ()
    others: tuple[tuple[str, str | None], ...] = ()
    compute: float | None = None
    read_seconds: float = 0.0

    def places(self, device: str) -> dict[str, int | str]:
        """Each tensor, and where it is: the device's index, `"cpu"` or `"disk"` (see [`OffloadPlan.device_map`])."""
        found = {name: device_value(away or device) for name, away in self.others}
        stays = self.choice is not Choice.OFFLOAD
        for group in self.groups:
            for unit in self.units[group.start : group.stop]:
                streamed: int | str = DISK if unit.on_disk else CPU
                value = device_value(device) if group.resident and stays and not unit.gathered else streamed
                found.update(dict.fromkeys(unit.tensors, value))
        return found

    def layers(self) -> tuple[int, int]:
        """(how many layers are resident as a whole, how many there are); where nothing repeats, units."""
        repeated = any(unit.layer is not None for unit in self.units)
        found: dict[str, bool] = {}
        for group in self.groups:
            for unit in self.units[group.start : group.stop]:
                name = unit.layer if repeated else unit.name
                if name is not None:
                    found[name] = found.get(name, True) and group.resident
        return sum(found.values()), len(found)

    @property
    def resident_bytes(self) -> int:
        """Device bytes of resident groups, each in a buffer of its own."""
        return sum(group.size + ALIGNMENT for group in self.groups if group.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the groups that are loaded for each pass."""
        return sum(group.size for group in self.groups if not group.resident)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of embedding tables that stay on the host."""
        return sum(unit.gathered for unit in self.units)

    @property
    def read_bytes(self) -> int:
        """Bytes that each pass reads from checkpoint files."""
        streamed = (unit for g in self.groups if not g.resident for unit in self.units[g.start : g.stop])
        return sum(unit.size for unit in streamed if unit.is_read)

    @property
    def fixed_bytes(self) -> int:
        """Device bytes of buffers and small weights while the component is in use."""
        return self.fixed + ALIGNMENT if self.fixed else 0

    @property
    def largest_streamed(self) -> int:
        """Bytes of the largest streamed group."""
        return max((group.size for group in self.groups if not group.resident), default=0)


def joined(sets: Iterable[frozenset[str]], names: frozenset[str]) -> set[frozenset[str]]:
    """Sets of components that share a budget, with another one: those that it has a member in common with become one.

    Example:
        >>> [sorted(each) for each in joined([frozenset("ab")], frozenset("bc"))]
        [['a', 'b', 'c']]
    """
    common = [each for each in sets if each & names]
    return (set(sets) - set(common)) | {names.union(*common)}


@dataclasses.dataclass(frozen=True)
class OffloadPlan:
    """Who is resident, who streams, and the peak of weight bytes on the device.

    Args:
        slot_bytes, slots (`int`): The ring that all components share.
        budget (`int`, *optional*): Device bytes for weights (the activation reserve already taken off).
        together (`tuple[frozenset[str]]`): Sets of components that alternate within a step and so share the budget.
        host (`HostPlan`, *optional*): In which tier each host copy lies, and the host memory that follows.
        provisional (`bool`): True until the execution order and the device's free memory are known.

    Example:
        >>> print(pipe.layerwise_offload.plan)
    """

    mode: Mode
    components: tuple[ComponentPlan, ...]
    slot_bytes: int
    slots: int
    budget: int | None = None
    reserve: int = 0
    together: tuple[frozenset[str], ...] = ()
    provisional: bool = True
    device: str = CPU
    host: HostPlan | None = None

    def device_map(self, name: str) -> dict[str, int | str]:
        """The plan of one component as a device map that `accelerate.dispatch_model` takes, as short as possible.

        Resident and small weights have the device's index, streamed ones `"cpu"`, or `"disk"` where they are streamed
        from a file. A component that is moved as a whole for each use is `"cpu"` but for its small weights.

        Args:
            name (`str`): The component.

        Raises:
            KeyError: There is no such component.

        Example:
            >>> accelerate.dispatch_model(copy, handle.plan.device_map("transformer"))
        """
        return shortest(self.component(name).places(self.device))

    @property
    def ring_bytes(self) -> int:
        """Device bytes of the ring."""
        return self.slot_bytes * self.slots + ALIGNMENT if self.slots else 0

    @property
    def peak_bytes(self) -> int:
        """Peak of weight bytes on the device.

        ring + all fixed + lasting resident groups + the largest set of resident groups in use at one time.
        """
        lasting = sum(c.resident_bytes for c in self.components if c.residency is Residency.LASTING)
        return self.ring_bytes + sum(c.fixed_bytes for c in self.components) + lasting + self._in_use()

    def _in_use(self) -> int:
        using = {c.name: c.resident_bytes for c in self.components if c.residency is Residency.USE}
        alone = list(using.values())
        shared = [sum(using.get(name, 0) for name in names) for names in self.together]
        return max([0, *alone, *shared])

    def component(self, name: str) -> ComponentPlan:
        """The plan of one component.

        Raises:
            KeyError: There is no such component.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def __str__(self) -> str:
        head = f"plan: mode {self.mode.value}, peak {format_bytes(self.peak_bytes)} of weights"
        if self.budget is not None:
            head += f" of {format_bytes(self.budget)}"
        if self.slots:
            head += f", ring of {self.slots} slots of {format_bytes(self.slot_bytes)}"
        lines = [head + (" (provisional)" if self.provisional else ""), *map(_line, self.components)]
        return "\n".join([*lines, *([] if self.host is None else [str(self.host)])])


def _line(component: ComponentPlan) -> str:
    resident = sum(group.resident for group in component.groups)
    text = f"  {component.name}: {component.choice.value}, {format_bytes(component.weights)}"
    text += f", {len(component.groups)} groups"
    text += f", {resident} resident, {len(component.groups) - resident} streamed"
    kept, layers = component.layers()
    if layers and 0 < resident < len(component.groups):
        text += f" ({kept} of {layers} layers resident)"
    if component.gathered_bytes:
        text += f", {format_bytes(component.gathered_bytes)} of embeddings looked up on the host"
    if component.read_bytes:
        text += f", {format_bytes(component.read_bytes)} read from files in {component.read_seconds:.3f} s a pass"
    return text + (f", {component.step * 1e3:.2f} ms a pass predicted" if component.step is not None else "")


def cut(units: Sequence[UnitSpec], limit: int | None) -> list[tuple[int, int]]:
    """Cuts units into runs of at most `limit` bytes, or (with None) into layers. A larger unit is a run of its own.

    Runs don't cross a chunk of host memory, since a group is one copy, nor the bounds of what a device map keeps
    resident.

    Example:
        >>> cut([UnitSpec("a", None, 3), UnitSpec("b", None, 3), UnitSpec("c", None, 9)], 6)
        [(0, 2), (2, 3)]
    """
    runs: list[tuple[int, int]] = []
    start, size = 0, 0
    for index, unit in enumerate(units):
        before = units[index - 1] if index > start else None
        if before is not None:
            same = unit.layer is not None and unit.layer == before.layer
            full = not same if limit is None else size + unit.size > limit
            if full or unit.chunk != before.chunk or unit.resident != before.resident:
                runs.append((start, index))
                start, size = index, 0
        size += unit.size
    if units:
        runs.append((start, len(units)))
    return runs


def group_uses(order: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Folds an order of unit uses into group uses: (group, first position, end position in `order`)."""
    group_of = {unit: g for g, (start, stop) in enumerate(runs) for unit in range(start, stop)}
    uses: list[tuple[int, int, int]] = []
    for position, unit in enumerate(order):
        group = group_of[unit]
        if uses and uses[-1][0] == group:
            uses[-1] = (group, uses[-1][1], position + 1)
        else:
            uses.append((group, position, position + 1))
    return uses
