"""Pure: what takes place in a pass, as spans of time on lanes and memory over time, and what a picture can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that takes time, from `start` to `stop` in seconds after the pass began, with the bytes it is about."""

    name: str
    start: float
    stop: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class MemorySample:
    """Device memory from `at` (seconds) on, in bytes.

    `weights` that are there or arriving; `held` for weights, empty ring slots included; `allocated` to all tensors,
    None where that isn't known.
    """

    at: float
    weights: int
    held: int
    allocated: int | None


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a group in seconds after the pass began, with what a tape says of that moment (see `tape.Using`)."""

    name: str
    nbytes: int
    in_ring: bool
    before: float
    start: float
    stop: float
    held: int
    allocated: int | None


@dataclasses.dataclass(frozen=True)
class Load:
    """A copy to the device; `in_ring`: to slots, which it leaves when its group was used."""

    span: Span
    in_ring: bool


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One pass of one component. Times in seconds after it began, sizes in bytes.

    Args:
        component (`str`): Whose pass it is.
        device (`str`): Where it ran.
        number (`int`): Which of the component's passes, from 1.
        is_steady (`bool`): Whether the plan that it ran under had settled. In the first passes the order of groups is
            learned and residents are loaded.
        seconds (`float`): How long it took.
        compute (`tuple[Span]`): The groups that ran, each from its weights' arrival to its end.
        copies (`tuple[Span]`): Copies to the device. Those that were under way when the pass began start before 0;
            those for the next pass end after it.
        stalls (`tuple[Span]`): Waits for a group that hadn't arrived when it was needed, named after it.
        memory (`tuple[MemorySample]`): The device's memory over time.
        budget (`int`, *optional*): Bytes of device memory that may be used.
    """

    component: str
    device: str
    number: int
    is_steady: bool
    seconds: float
    compute: tuple[Span, ...]
    copies: tuple[Span, ...]
    stalls: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    budget: int | None

    @property
    def stall(self) -> float:
        """Seconds in which the computation waited for copies."""
        return sum((span.seconds for span in self.stalls), 0.0)

    @property
    def others(self) -> tuple[Span, ...]:
        """What is neither a group's run nor a wait: other work of the component, or nothing at all."""
        return gaps(sorted([*self.compute, *self.stalls], key=lambda span: span.start), self.seconds)

    @property
    def copying(self) -> float:
        """Seconds of the pass in which copies were under way."""
        return sum(span.seconds for span in clipped(self.copies, self.seconds))

    @property
    def title(self) -> str:
        """What it is, in one line."""
        waits = f"{self.stall * 1e3:.2f} ms of it waiting for copies" if self.stalls else "no wait for copies"
        early = "" if self.is_steady else " (before its plan had settled)"
        return f"{self.component} on {self.device}, pass {self.number}{early}: {self.seconds * 1e3:.2f} ms, {waits}"


def memory_over_time(
    uses: Sequence[Use], loads: Sequence[Load], held: int, allocated: int | None, ring_bytes: int, end: float
) -> tuple[MemorySample, ...]:
    """What device memory holds, at each moment at which that changes or was looked up.

    A ring slot holds weights from the start of the copy into it to the end of the use, or to the end of the pass where
    the next one uses them.

    Args:
        uses (`Sequence[Use]`): In order.
        loads (`Sequence[Load]`): In order, also those that came before the pass for uses in it.
        held (`int`): Bytes held for weights at the beginning.
        allocated (`int`, *optional*): Bytes of all tensors then.
        ring_bytes (`int`): Those of the ring, part of `held`.
        end (`float`): When the pass is over.
    """
    changes: list[tuple[float, int]] = []
    waiting = [load for load in loads if load.in_ring]
    for use in uses:
        if not use.in_ring:
            continue
        load = next((each for each in waiting if each.span.name == use.name), None)
        if load is not None:
            waiting.remove(load)
        # Without a load it came before anything was recorded.
        changes += [(0.0 if load is None else max(0.0, load.span.start), use.nbytes), (use.stop, -use.nbytes)]
    changes += [(max(0.0, load.span.start), load.span.nbytes) for load in waiting]
    looks = {use.before: (use.held, use.allocated) for use in uses}
    moments = sorted({0.0, end, *looks, *(at for at, _ in changes)})
    changes.sort()
    found: list[MemorySample] = []
    filled, position = 0, 0
    for at in (moment for moment in moments if moment <= end):
        while position < len(changes) and changes[position][0] <= at:
            filled += changes[position][1]
            position += 1
        if at in looks:
            held = looks[at][0]
            allocated = allocated if looks[at][1] is None else looks[at][1]
        found.append(MemorySample(at, max(0, held - ring_bytes) + filled, held, allocated))
    return tuple(found)


def gaps(spans: Sequence[Span], end: float) -> tuple[Span, ...]:
    """What is left of a pass between spans in order: other work of the component, or nothing at all."""
    found: list[Span] = []
    at = 0.0
    for span in spans:
        if span.start > at:
            found.append(Span("between groups", at, span.start))
        at = max(at, span.stop)
    return (*found, *([Span("between groups", at, end)] if end > at else []))


def merged(spans: Sequence[Span], finest: float) -> list[Span]:
    """Spans that can be told apart: neighbours that are shorter than `finest` seconds, or nearer, become one.

    Args:
        spans (`Sequence[Span]`): In order, none over another.
        finest (`float`): What a pixel stands for.

    Example:
        >>> merged([Span("a", 0, 0.1), Span("b", 0.1, 0.2), Span("c", 0.9, 3)], 0.5)
        [Span(name='a and 1 more', start=0, stop=0.2, nbytes=0), Span(name='c', start=0.9, stop=3, nbytes=0)]
    """
    runs: list[list[Span]] = []
    for span in spans:
        last = runs[-1][-1] if runs else None
        if last is not None and span.start - last.stop < finest and max(span.seconds, last.seconds) < finest:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [
        run[0]
        if len(run) == 1
        else Span(
            f"{run[0].name} and {len(run) - 1} more", run[0].start, run[-1].stop, sum(span.nbytes for span in run)
        )
        for run in runs
    ]


def clipped(spans: Sequence[Span], end: float) -> list[Span]:
    """Spans as far as they lie within a pass: a copy may begin before it, and end after it."""
    inside = [dataclasses.replace(s, start=max(0.0, s.start), stop=min(end, s.stop)) for s in spans]
    return [span for span in inside if span.stop > span.start]


def longest(spans: Sequence[Span], count: int, apart: float = 0.0) -> list[Span]:
    """The longest spans, in order of time, whose starts are at least so many seconds apart: what gets a label."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: -span.seconds):
        if len(found) < count and all(abs(span.start - other.start) >= apart for other in found):
            found.append(span)
    return sorted(found, key=lambda span: span.start)


def ticks(end: float, most: int = 10) -> list[float]:
    """Round numbers from 0 to `end`, at most about so many.

    Example:
        >>> ticks(0.87, 6)
        [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if end <= 0:
        return [0.0]
    step = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if end / (step * factor) <= most:
                return [round(n * step * factor, 12) for n in range(int(end / (step * factor) + 1e-9) + 1)]
        step *= 10


def short(name: str, most: int = 28) -> str:
    """A group's name in so many letters: its first module, and of that the end, where names differ.

    Example:
        >>> short("blocks.5.attn.to_q .. blocks.6.ff", 40), short("blocks.5.attn.to_q .. blocks.6.ff", 12)
        ('blocks.5.attn.to_q .. blocks.6.ff', '..attn.to_q')
    """
    if len(name) <= most:
        return name
    first = name.partition(" .. ")[0]
    return first if len(first) <= most else ".." + first[len(first) - most + 2 :].lstrip(".")
