"""What activations need besides weights: bounds from the allocator's counters, remembered for each shape of a call.

The allocator's peak only ever rises, and is never reset here, since it is the user's too. It still tells something
of every pass: what was live at any time of it was at most the peak at its end, and where the peak rose, as much as that
at some time. Less the weights that were held, that bounds the activations from above and from below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .auto import Needs

#: What identifies the shape of a call: the shapes of the denoiser's inputs at its first pass.
Signature = tuple[tuple[int, ...], ...]
#: Calls of one shape that are measured: the first, and one under the plan that was made by it.
MEASURED_CALLS = 2
#: Shapes that are remembered; the ones that were seen longest ago are forgotten.
MOST_SHAPES = 64
#: Left free on top of what was measured (fragments, workspaces that vary): this share of it.
SLACK = 16


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bytes that a component's activations took: at least `lower`, at most `upper` as far as one pass can tell."""

    lower: int
    upper: int

    def merged(self, other: Bounds) -> Bounds:
        """What two passes tell together: the tighter bounds. Where they contradict, the passes differ in what they
        take, and `lower` is the one to go by."""
        return Bounds(max(self.lower, other.lower), min(self.upper, other.upper))

    def value(self, assumed: int) -> int:
        """The bytes to go by: not more than what is assumed anyway, unless that is certain."""
        return max(self.lower, min(self.upper, assumed))

    def with_slack(self) -> Bounds:
        """The same with what is left free on top of what was measured."""
        return Bounds(self.lower + self.lower // SLACK, self.upper + self.upper // SLACK)


def bounds(peak: int, rose: bool, held: tuple[int, int], foreign: int) -> Bounds:
    """What the counters say after a pass.

    Args:
        peak (`int`): The allocator's peak at the end of it.
        rose (`bool`): Whether it is higher than before.
        held (`tuple[int, int]`): The least and the most bytes of weights held during the pass.
        foreign (`int`): Bytes that were live before the call and aren't ours.

    Example:
        >>> bounds(peak=100, rose=True, held=(60, 70), foreign=10)
        Bounds(lower=20, upper=30)
    """
    least, most = held
    return Bounds(max(0, peak - most - foreign) if rose else 0, max(0, peak - least - foreign))


class Activations:
    """The bounds of every component for every shape of call. Knows no device."""

    def __init__(self) -> None:
        self._known: dict[Signature, dict[str, Bounds]] = {}
        self._calls: dict[Signature, int] = {}
        self._call: dict[str, Bounds] = {}

    def is_measured(self, signature: Signature) -> bool:
        """Whether enough calls of this shape were measured."""
        return self._calls.get(signature, 0) >= MEASURED_CALLS

    def start_call(self) -> None:
        """Nothing was seen in this call yet."""
        self._call = {}

    def add(self, name: str, found: Bounds) -> None:
        """A pass of a component was measured."""
        before = self._call.get(name)
        self._call[name] = found if before is None else before.merged(found)

    def end_call(self, signature: Signature) -> None:
        """The call went well, and had this shape."""
        if not self._call:
            return
        known = self._known.pop(signature, {})
        for name, found in self._call.items():
            known[name] = known[name].merged(found) if name in known else found
        self._known[signature] = known
        self._calls[signature] = self._calls.get(signature, 0) + 1
        while len(self._known) > MOST_SHAPES:
            oldest = next(iter(self._known))
            del self._known[oldest], self._calls[oldest]
        self._call = {}

    def forget(self, name: str) -> None:
        """A component is gone, or is another one now."""
        for known in (*self._known.values(), self._call):
            known.pop(name, None)
        self._calls.clear()

    def of(self, signature: Signature) -> Mapping[str, Bounds]:
        """The bounds for a shape. Components that weren't seen in it (a text encoder) as in the others, at most."""
        if signature not in self._known:
            return {}
        found: dict[str, Bounds] = {}
        for known in self._known.values():
            for name, own in known.items():
                most = found.get(name, own)
                found[name] = Bounds(max(most.lower, own.lower), max(most.upper, own.upper))
        return found | self._known[signature]

    def needs(self, signature: Signature, assumed: int) -> Needs | None:
        """What a call of this shape needs, with some slack; None where it was never seen.

        Args:
            signature (`Signature`): The shape.
            assumed (`int`): What is reserved by default, which nothing uncertain exceeds.
        """
        found = self.of(signature)
        if not found:
            return None
        return Needs({name: own.with_slack().value(assumed) for name, own in found.items()})
