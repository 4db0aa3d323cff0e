"""What a pipeline's call does, without a device and without weights: who is called, how often, with which work.

A [`Trace`] has, for each pass of each component, the use of every module with weights in order: its cost, what follows
it, and the most bytes of activations alive meanwhile. It is plain data and can be stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .flops import Cost, total

#: Raised when the stored form changes.
VERSION = 2


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A module that owns weights.

    Args:
        name (`str`): Its path in the component.
        kind (`str`): Its class, for instance `"Linear"`.
        tensors (`int`): How many parameters it has.
        nbytes (`int`): Their bytes.
        unit (`int`, *optional*): The unit that its use needs; None when its weights stay resident.
        block (`str`, *optional*): The element of a top-level `ModuleList` or `Sequential` that it is in.
    """

    name: str
    kind: str
    tensors: int
    nbytes: int
    unit: int | None
    block: str | None


@dataclasses.dataclass(frozen=True)
class TracedUnit:
    """A unit: its name, layer, and bytes in a region."""

    name: str
    layer: str | None
    size: int


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a leaf in a pass.

    `busy` is the cost of its module, `gap` of what runs from there to the next use. `high` and `gap_high` are the most
    bytes alive meanwhile, counted from those alive when the pass began.
    """

    leaf: int
    busy: Cost
    gap: Cost
    high: int
    gap_high: int


@dataclasses.dataclass
class PassTrace:
    """One kind of pass of a component, and how often it happens in a call.

    `base` are the bytes alive when it begins (the most of any), `head` and `head_high` what runs before the first use.
    """

    uses: tuple[Use, ...]
    head: Cost
    head_high: int
    base: int
    count: int = 1

    @property
    def cost(self) -> Cost:
        """The work of one pass."""
        return total([self.head, *(u.busy for u in self.uses), *(u.gap for u in self.uses)])

    @property
    def peak(self) -> int:
        """The most bytes of activations alive in it."""
        return self.base + max([self.head_high, *(max(u.high, u.gap_high) for u in self.uses)])


@dataclasses.dataclass
class TracedComponent:
    """One component: its weights, and the kinds of its passes in the order of their first one.

    `fixed` and `weights` are as in `discovery.Component`; `error` says why it, or the call at this component, could
    not be traced.
    """

    name: str
    kind: str
    weights: int
    fixed: int
    units: tuple[TracedUnit, ...]
    leaves: tuple[Leaf, ...]
    passes: list[PassTrace] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def calls(self) -> int:
        """Passes in a call."""
        return sum(p.count for p in self.passes)

    @property
    def activation_peak(self) -> int:
        """The most bytes of activations alive in any pass."""
        return max((p.peak for p in self.passes), default=0)

    @property
    def flops(self) -> int:
        """FLOPs of all passes of a call."""
        return sum(p.count * p.cost.flops for p in self.passes)

    @property
    def largest_pass(self) -> PassTrace | None:
        """The pass with the most work, by which a plan is made."""
        return max(self.passes, key=lambda p: (p.cost.flops, len(p.uses)), default=None)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a VAE takes with tiling: the most bytes of activations alive, and the FLOPs of its passes of a call."""

    peak: int
    flops: int


@dataclasses.dataclass
class Trace:
    """A pipeline's call.

    Args:
        pipeline (`str`): The pipeline's class.
        components (`list[TracedComponent]`): In the pipeline's order.
        sequence (`list[tuple[str, int]]`): Each pass in order, as a component's name and its kind of pass; a step of
            the scheduler is `("", 0)`.
        outside (`Cost`), `outside_peak` (`int`): What runs outside of components: its work, and the most bytes alive.
        error (`str`, *optional*): Why the call could not be traced to its end.
        tiled (`dict[str, Tiles]`): What a VAE takes with tiling, where without it its activations are the most of all.
        notes (`list[str]`): What was assumed.
    """

    pipeline: str
    components: list[TracedComponent]
    sequence: list[tuple[str, int]]
    outside: Cost
    outside_peak: int
    error: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    tiled: dict[str, Tiles] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the scheduler."""
        return sum(not name for name, _ in self.sequence)

    def component(self, name: str) -> TracedComponent:
        """One component.

        Raises:
            KeyError: There is no such component.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def step_passes(self) -> list[tuple[str, int]]:
        """The passes of one step: those between the last two steps of the scheduler that have passes between them.

        Without two steps: the pass before the only one, else one pass of each component that is called most often.
        """
        marks = [i for i, (name, _) in enumerate(self.sequence) if not name]
        for first, last in zip(reversed(marks[:-1]), reversed(marks[1:]), strict=True):
            if last > first + 1:
                return self.sequence[first + 1 : last]
        if marks and marks[0]:
            return self.sequence[marks[0] - 1 : marks[0]]
        most = max((c.calls for c in self.components), default=0)
        return [(c.name, 0) for c in self.components if most and c.calls == most]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "version": VERSION,
            "pipeline": self.pipeline,
            "components": [_component_dict(c) for c in self.components],
            "sequence": [list(item) for item in self.sequence],
            "outside": self.outside.to_list(),
            "outside_peak": self.outside_peak,
            "error": self.error,
            "notes": self.notes,
            "tiled": {name: list(dataclasses.astuple(tiles)) for name, tiles in self.tiled.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trace:
        """The inverse of [`to_dict`].

        Raises:
            ValueError: It is of another version.
        """
        if values.get("version") != VERSION:
            raise ValueError(f"a trace of version {VERSION} was expected, got {values.get('version')!r}.")
        return cls(
            values["pipeline"],
            [_component(c) for c in values["components"]],
            [(str(name), int(kind)) for name, kind in values["sequence"]],
            Cost.from_list(values["outside"]),
            values["outside_peak"],
            values["error"],
            list(values["notes"]),
            {name: Tiles(*numbers) for name, numbers in values["tiled"].items()},
        )

    def with_tiles(self) -> Trace:
        """The same call with tiling, where that lowers the peak: its activations and its work, in the order without."""
        parts = [_in_tiles(c, self.tiled[c.name]) if c.name in self.tiled else c for c in self.components]
        return dataclasses.replace(self, components=parts, tiled={})


def _in_tiles(component: TracedComponent, tiles: Tiles) -> TracedComponent:
    more = tiles.flops / max(1, component.flops)

    def smaller(one: PassTrace) -> PassTrace:
        most = max(0, tiles.peak - one.base)
        uses = tuple(
            Use(u.leaf, u.busy.scaled(more), u.gap.scaled(more), min(u.high, most), min(u.gap_high, most))
            for u in one.uses
        )
        return PassTrace(uses, one.head.scaled(more), min(one.head_high, most), one.base, one.count)

    return dataclasses.replace(component, passes=[smaller(one) for one in component.passes])


def _component_dict(component: TracedComponent) -> dict[str, Any]:
    return {
        "name": component.name,
        "kind": component.kind,
        "weights": component.weights,
        "fixed": component.fixed,
        "units": [list(dataclasses.astuple(u)) for u in component.units],
        "leaves": [list(dataclasses.astuple(leaf)) for leaf in component.leaves],
        "passes": [
            [[_use_list(u) for u in p.uses], p.head.to_list(), p.head_high, p.base, p.count] for p in component.passes
        ],
        "error": component.error,
    }


def _use_list(use: Use) -> list[Any]:
    return [use.leaf, use.busy.to_list(), use.gap.to_list(), use.high, use.gap_high]


def _component(values: dict[str, Any]) -> TracedComponent:
    passes = [
        PassTrace(tuple(map(_use, uses)), Cost.from_list(head), *numbers) for uses, head, *numbers in values["passes"]
    ]
    units = tuple(TracedUnit(*u) for u in values["units"])
    leaves = tuple(Leaf(*leaf) for leaf in values["leaves"])
    sizes = (values["weights"], values["fixed"])
    return TracedComponent(values["name"], values["kind"], *sizes, units, leaves, passes, values["error"])


def _use(values: Sequence[Any]) -> Use:
    return Use(values[0], Cost.from_list(values[1]), Cost.from_list(values[2]), values[3], values[4])
