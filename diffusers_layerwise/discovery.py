"""One component: which modules move as a unit, which layer each unit belongs to, and what stays resident.

A unit is the smallest set of parameters that has one trigger: a module that owns parameters and has no descendant that
owns any. Groups (see `plan.py`) are runs of units. Parameters that a module with such descendants owns itself have no
trigger of their own (their owner runs around other units), so they stay resident while the component is in use, as do
buffers, small units, and modules whose weights a parent reads without calling them (see `reads.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from .adapters import adapter_modules, is_tuner, tuners
from .casting import casts, casts_inside
from .compiled import is_whole, regions
from .config import Adapters
from .errors import WrongLayersError
from .parts import entries_of
from .reads import weights_read, weights_read_by
from .residence import Residence, named_tensors
from .tensors import Entry, Extent, collect_extents

#: A unit is small when it has at most 1/64 of the largest unit's bytes, and all small ones together at most 0.5 % of
#: the component's. Relative, so that a model of a few kilobytes streams like one of 20 GB. More would keep light layers
#: resident that stream for free: SDXL at 25 % of its weights took 1 % longer with 2 %.
SMALL_UNIT = 64
SMALL_TOTAL = 0.005

#: Adapters are resident by default when they have at most this share of their component's bytes.
ADAPTERS_SHARE = 1 / 16

_registered: dict[type[nn.Module], tuple[str, ...]] = {}


@dataclasses.dataclass(eq=False)
class Unit:
    """Parameters that move together because one module's call reads them.

    `triggers` are the modules whose `forward` needs the unit (several when modules share all their parameters).
    `layer` is the innermost repeated block that holds it, or None. `resident` is what a device map says, if any.
    `tensors` are the names of its parameters, tied ones under each name. `is_gathered`: the plan leaves it on the host,
    where its rows are looked up (see [`can_gather`]).
    """

    index: int
    name: str
    layer: str | None
    triggers: list[nn.Module]
    extents: list[Extent]
    resident: bool | None = None
    tensors: tuple[str, ...] = ()
    is_gathered: bool = False

    @property
    def can_gather(self) -> bool:
        """Whether it is an embedding table that nothing reads but the lookup of rows in it, which the host can do."""
        entries = [entry for extent in self.extents for entry in extent.entries]
        if len(self.triggers) != 1 or len(entries) != 1 or len(entries[0].owners) != 1:
            return False
        module = self.triggers[0]
        plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        return plain and entries[0].owners[0] == (module, "weight") and module.max_norm is None

    @property
    def on_disk(self) -> bool:
        """Whether the host copy of any of it is a view of a file."""
        return any(entry.on_disk for extent in self.extents for entry in extent.entries)

    @property
    def size(self) -> int:
        """Bytes in a region, each tensor aligned."""
        return sum(extent.size for extent in self.extents)

    def contents(self) -> tuple[tuple[int, int, int], ...]:
        """Identity, address and bytes of each tensor, to tell whether another unit holds the same."""
        entries = [entry for extent in self.extents for entry in extent.entries]
        return tuple((id(e.tensor), e.host.data_ptr(), e.host.numel() * e.host.element_size()) for e in entries)


@dataclasses.dataclass(eq=False)
class Component:
    """What discovery found in one module: units in registration order, and what stays resident while it is in use.

    `fixed` are the extents of buffers, small units and parameters owned by modules around units; `weights` counts the
    bytes of all parameters (not aligned, tied ones once); `unmovable` says what can't be streamed and why. `others` are
    the names of all that is in no unit, with the device of what stays on a further accelerator; `tuners` are the layers
    that adapters wrap, `regions` the modules that run as compiled code.
    """

    name: str
    module: nn.Module
    units: list[Unit]
    fixed: list[Extent]
    layers: list[str]
    weights: int
    unmovable: list[str]
    others: tuple[tuple[str, str | None], ...] = ()
    tuners: tuple[nn.Module, ...] = ()
    regions: tuple[nn.Module, ...] = ()

    @property
    def fixed_size(self) -> int:
        """Bytes in a region of all that stays resident."""
        return sum(extent.size for extent in self.fixed)

    @property
    def streamable(self) -> int:
        """Bytes in a region of all units."""
        return sum(unit.size for unit in self.units)

    def entries(self) -> Iterator[Entry]:
        """Every parameter and buffer once."""
        for extent in [*self.fixed, *(e for unit in self.units for e in unit.extents)]:
            yield from extent.entries


def register_layers(module_class: type[nn.Module], names: Sequence[str]) -> None:
    """Overrides discovery for a class: the named children move as one unit each.

    Args:
        module_class (`type`): The class whose instances are meant (subclasses included).
        names (`Sequence[str]`): Dotted names below it. A `ModuleList`, `ModuleDict` or `Sequential` stands for each of
            its elements; any other module for itself. The parent, or the module's own `forward`, must call them as
            modules. `[]` makes the class itself one unit.

    Raises:
        TypeError: `module_class` is no `nn.Module` class, or a name is no string.

    Example:
        >>> register_layers(MyTransformer, ["blocks", "head"])
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"register_layers needs an nn.Module class, got {module_class!r}.")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"register_layers needs a list of dotted names, got {names!r}.")
    _registered[module_class] = tuple(names)


def discover(
    module: nn.Module,
    name: str,
    allow_meta: bool = False,
    residence: Residence | None = None,
    adapters: Adapters | None = None,
) -> Component:
    """Finds a component's units, layers and fixed tensors. Reads shapes and pointers only; moves nothing.

    Args:
        module (`nn.Module`): The component.
        name (`str`): Its name in the pipeline, for messages.
        allow_meta (`bool`): Take meta tensors too: for planning, before the weights are there.
        residence (`Residence`, *optional*): What a device map says; what stays on a further accelerator is left out.
        adapters (`Adapters`, *optional*): Whether adapters' weights are resident; by their share when it is None.

    Raises:
        LayerwiseOffloadError: A name given to [`register_layers`] doesn't exist.
    """
    layers = dict(find_layers(module))
    compiled = regions(module, _blocks(module, layers) if is_whole(module) else ())
    roots = _unit_roots(module, compiled)
    paths = {id(m): path for path, m in module.named_modules()}
    entries, unmovable = _entries(module, allow_meta, residence)
    weights = sum(e.host.numel() * e.host.element_size() for e in entries if not e.is_buffer)
    homes = _homes(
        entries, roots, _read_directly(module, compiled) | _resident_adapters(module, entries, weights, adapters)
    )
    units: list[Unit] = []
    loose = list(homes.pop(None, []))
    for root in roots:
        held = homes.pop(id(root), [])
        if held:
            path = paths[id(root)]
            units.append(Unit(len(units), path, _layer_of(path, layers), [root], collect_extents(held)))
    _share_triggers(units, roots, entries)
    small = _small(units)
    loose += [entry for unit in units if unit in small for extent in unit.extents for entry in extent.entries]
    units = [unit for unit in units if unit not in small]
    for index, unit in enumerate(units):
        unit.index = index
    others = _name_tensors(module, units, residence)
    fixed, worn, named = collect_extents(loose), tuners(module), sorted(layers.values())
    return Component(name, module, units, fixed, named, weights, unmovable, others, worn, compiled)


def _name_tensors(
    module: nn.Module, units: list[Unit], residence: Residence | None
) -> tuple[tuple[str, str | None], ...]:
    """Gives units the names of their tensors and what a device map says of them; returns what is in no unit."""
    unit_of = {id(e.held): unit for unit in units for extent in unit.extents for e in extent.entries}
    others: list[tuple[str, str | None]] = []
    names: dict[Unit, list[str]] = {unit: [] for unit in units}
    for name, held in named_tensors(module, persistent=True):
        away = residence is not None and residence.is_elsewhere(held)
        unit = unit_of.get(id(held if residence is None else residence.of(held).tensor))
        if away or unit is None:
            others.append((name, str(held.device) if away else None))
        else:
            names[unit].append(name)
    for unit in units:
        unit.tensors = tuple(names[unit])
        if residence is not None:
            # A module that is split between device and host streams: resident, it would take more than the map gives.
            unit.resident = all(residence.is_resident(e.held) for extent in unit.extents for e in extent.entries)
    return tuple(others)


def find_layers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (path, layer name) for every block of every repeated stack, at any depth.

    A stack is a `ModuleList`, `ModuleDict` or `Sequential` in which at least two elements are of one class, own
    parameters and have children: `Sequential(Linear, SiLU, Linear)` is no stack.
    """
    for path, stack in module.named_modules():
        if not isinstance(stack, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        blocks = [(n, m) for n, m in stack.named_children() if _owns(m) and next(m.children(), None) is not None]
        kinds = Counter(type(m) for _, m in blocks)
        for child, block in blocks:
            if kinds[type(block)] >= 2 or len(blocks) >= 3:
                full = f"{path}.{child}" if path else child
                yield full, full


def _blocks(module: nn.Module, layers: dict[str, str]) -> list[nn.Module]:
    """The blocks to compile in the place of a whole model: those that diffusers would, else the innermost layers."""
    names = getattr(type(module), "_repeated_blocks", None)
    if names:
        return [part for part in module.modules() if type(part).__name__ in names]
    inner = {path for path in layers if not any(other.startswith(f"{path}.") for other in layers)}
    return [part for path, part in module.named_modules() if path in inner]


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _unit_roots(module: nn.Module, compiled: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that trigger units, in registration order, each once. No hook runs inside compiled code."""
    roots: list[nn.Module] = []
    seen: set[int] = set()
    whole = {id(region) for region in compiled}

    def visit(m: nn.Module) -> None:
        if id(m) in seen or not _owns(m):
            return
        seen.add(id(m))
        named = [] if id(m) in whole else _registered_children(m)
        if named == [] or _is_one_unit(m):
            roots.append(m)
            seen.update(id(child) for child in m.modules())
            return
        for child in named or []:
            if id(child) not in seen:
                roots.append(child)
                seen.update(id(grandchild) for grandchild in child.modules())
        for child in m.children():
            visit(child)

    visit(module)
    order = {id(m): position for position, m in enumerate(module.modules())}
    return sorted(roots, key=lambda m: order[id(m)])


def _is_one_unit(module: nn.Module) -> bool:
    """Whether a module's whole subtree must move as one: nothing below owns parameters, or it reads its children's.

    `nn.MultiheadAttention` passes `out_proj.weight` to a function without calling `out_proj`. A parametrised or
    weight-normed module has pre-hooks of its own that read the raw weights before any hook on `forward`. An adapter may
    read the weight of the layer that it wraps after that has run (DoRA).
    """
    if isinstance(module, nn.MultiheadAttention) or is_tuner(module) or casts(module):
        return True
    if hasattr(module, "parametrizations"):
        return True
    return bool(module._parameters) and not any(_owns(child) for child in module.children())


def _resident_adapters(module: nn.Module, entries: list[Entry], weights: int, adapters: Adapters | None) -> set[int]:
    """Ids of the modules whose weights are adapters' and stay resident."""
    found = adapter_modules(module)
    if adapters is None:
        of_adapters = [e for e in entries if id(e.owners[0][0]) in found]
        size = sum(e.host.numel() * e.host.element_size() for e in of_adapters)
        adapters = Adapters.RESIDENT if size <= ADAPTERS_SHARE * weights else Adapters.STREAMED
    return found if adapters is Adapters.RESIDENT else set()


def _registered_children(module: nn.Module) -> list[nn.Module] | None:
    for kind in type(module).__mro__:
        if kind in _registered:
            found: list[nn.Module] = []
            for name in _registered[kind]:
                try:
                    child = module.get_submodule(name)
                except AttributeError as error:
                    raise WrongLayersError(
                        f"register_layers({kind.__name__}, ...) names {name!r}, which {type(module).__name__} doesn't "
                        f"have. Its children are {[n for n, _ in module.named_children()]}."
                    ) from error
                stack = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
                found += [m for m in (child.children() if stack else [child]) if _owns(m)]
            return found
    return None


def _entries(module: nn.Module, allow_meta: bool, residence: Residence | None) -> tuple[list[Entry], list[str]]:
    """Every parameter and buffer once, with all its owners; and what can't be moved, by name and reason."""
    found: dict[int, list[Entry]] = {}
    unmovable: list[str] = []
    for path, owner in module.named_modules():
        for held, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for name, tensor in held.items():
                if tensor is None or (residence is not None and residence.is_elsewhere(tensor)):
                    continue
                home = None if residence is None else residence.of(tensor)
                tensor = tensor if home is None else home.tensor
                if id(tensor) in found:
                    for entry in found[id(tensor)][:1]:
                        entry.owners.append((owner, name))  # one list for all parts of a parameter
                    continue
                full = f"{path}.{name}" if path else name
                on_disk = home is not None and home.on_disk
                entries, reason = entries_of(tensor, [(owner, name)], full, is_buffer, on_disk, allow_meta)
                if reason is not None:
                    unmovable.append(f"{full} {reason}")
                found[id(tensor)] = entries
    unique = {id(entry.tensor): entry for entries in found.values() for entry in entries}
    return list(unique.values()), unmovable


def _read_directly(module: nn.Module, compiled: Sequence[nn.Module]) -> set[int]:
    """Ids of the modules whose weights another module reads without calling them."""
    found: set[int] = set()
    within = {id(part) for region in compiled for part in region.modules()}
    for parent in module.modules():
        if id(parent) in within or _is_one_unit(parent):
            continue
        for name in weights_read(type(parent)) | weights_read_by(getattr(parent, "processor", None)):
            child = parent._modules.get(name)
            stack = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            found.update(id(m) for m in (child.children() if stack and child is not None else [child]))
    return found


def _homes(entries: list[Entry], roots: list[nn.Module], resident: set[int]) -> dict[int | None, list[Entry]]:
    """The unit root that each entry belongs to; None for what stays resident.

    That is: buffers, loose parameters, those of modules in `resident`, and ones that layers share.

    A parameter that several unit roots hold belongs to the first one when none of them holds anything else (an
    embedding and its tied head); else it stays resident, since loading either unit would have to load both.
    """
    root_of: dict[int, int] = {}
    for root in roots:
        for module in root.modules():
            root_of.setdefault(id(module), id(root))
    whole = {id(e.held): e for e in entries if not e.is_buffer}
    count = Counter(root_of.get(id(e.owners[0][0])) for e in whole.values())
    homes: dict[int | None, list[Entry]] = {}
    for entry in entries:
        holders = {root_of.get(id(module)) for module, _ in entry.owners}
        first = root_of.get(id(entry.owners[0][0]))
        if not resident.isdisjoint(id(owner) for owner, _ in entry.owners):
            first = None
        others = holders - {first}
        alone = not others or (None not in holders and count[first] == 1 and not any(count[o] for o in others))
        homes.setdefault(first if alone and not entry.is_buffer else None, []).append(entry)
    return homes


def _share_triggers(units: list[Unit], roots: list[nn.Module], entries: list[Entry]) -> None:
    """Adds to each unit the other roots that hold its parameters: tied weights have one unit and several triggers."""
    unit_of = {id(e): unit for unit in units for extent in unit.extents for e in extent.entries}
    root_of = {id(m): root for root in roots for m in root.modules()}
    for entry in entries:
        unit = unit_of.get(id(entry))
        for module, _ in entry.owners if unit is not None else []:
            root = root_of.get(id(module))
            if unit is not None and root is not None and root not in unit.triggers:
                unit.triggers.append(root)


def _layer_of(path: str, layers: dict[str, str]) -> str | None:
    while path:
        if path in layers:
            return layers[path]
        path = path.rpartition(".")[0]
    return None


def _small(units: list[Unit]) -> set[Unit]:
    largest = max((unit.size for unit in units), default=0)
    budget = SMALL_TOTAL * sum(unit.size for unit in units)
    small: set[Unit] = set()
    # What is cast in each pass isn't what was loaded afterwards: its hook sees to that.
    for unit in sorted((u for u in units if not any(map(casts_inside, u.triggers))), key=lambda u: u.size):
        budget -= unit.size
        if unit.size * SMALL_UNIT > largest or budget < 0:
            break
        small.add(unit)
    return small
