"""What took place in one pass, for `handle.timeline()`: as text, picture, page and trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import format_bytes
from .errors import LayerwiseOffloadError, nearest
from .figure import draw
from .lanes import Lanes, Load, Span, Use, clipped, longest, memory_over_time
from .page import framed, page, svg
from .runtime import Runtime
from .schedule import Schedule
from .selection import is_denoiser
from .tape import Tape

SUFFIXES = (".html", ".svg", ".png", ".json")
#: Lanes of a trace, by thread number.
THREADS = ((1, "computing"), (2, "copying"), (3, "waiting"))


class Timeline(Lanes):
    """One pass: when each group computed, was copied, was waited for, and what device memory held.

    Attributes:
        component, device, number, is_steady, seconds, compute, copies, stalls, memory, budget: See [`Lanes`]: times in
            seconds after the pass began, sizes in bytes.

    Example:
        >>> timeline = pipe.layerwise_offload.timeline()
        >>> print(timeline)
        >>> timeline.save("step.html")
    """

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a file of the kind that its suffix names.

        `.html` is one page that needs nothing else, with zoom and details of what is pointed at; `.svg` the same
        picture; `.png` one by matplotlib (`pip install 'diffusers-layerwise[plot]'`); `.json` a trace for Perfetto
        (ui.perfetto.dev) or chrome://tracing.

        Args:
            path (`str` or `os.PathLike`): Where to.

        Returns:
            `Path`: The file.

        Raises:
            ValueError: Another suffix.
            LayerwiseOffloadError: A `.png` is asked for, and matplotlib isn't installed.

        Example:
            >>> timeline.save("step.json")
        """
        target = Path(path)
        kind = target.suffix.lower()
        if kind not in SUFFIXES:
            raise ValueError(
                f"A timeline is saved as one of {', '.join(SUFFIXES)}, by the file's suffix; got {str(path)!r}."
                f"{nearest(kind, list(SUFFIXES))}"
            )
        if kind == ".png":
            draw(self, target)
        else:
            texts: dict[str, Callable[[], str]] = {
                ".html": lambda: page(self, str(self)),
                ".svg": lambda: svg(self),
                ".json": lambda: json.dumps(self.to_trace()),
            }
            target.write_text(texts[kind](), encoding="utf-8")
        return target

    def to_trace(self) -> dict[str, Any]:
        """The pass as Chrome's trace events, which Perfetto reads: times in microseconds from 0, sizes in bytes.

        Example:
            >>> timeline.to_trace()["traceEvents"][0]["name"]
            'process_name'
        """
        return {"displayTimeUnit": "ms", "traceEvents": list(_events(self))}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return framed(page(self, str(self)))

    def __str__(self) -> str:
        lines = [self.title, f"  computing  {_in_words(self.compute, self.seconds)}"]
        copies = clipped(self.copies, self.seconds)
        speed = sum(span.nbytes for span in self.copies) / (sum(span.seconds for span in self.copies) or 1.0)
        lines.append(
            f"  copying    {_in_words(copies, self.seconds)}"
            + (f", {format_bytes(sum(s.nbytes for s in self.copies))} at {speed / 1e9:.2f} GB/s" if copies else "")
        )
        lines.append(f"  waiting    {_in_words(self.stalls, self.seconds)}")
        if self.memory:
            text = f"  memory     weights at most {format_bytes(max(m.weights for m in self.memory))}"
            text += f" in {format_bytes(max(m.held for m in self.memory))}"
            tensors = [m.allocated for m in self.memory if m.allocated is not None]
            text += f", all tensors {format_bytes(max(tensors))} where looked up" if tensors else ""
            lines.append(text + (f", budget {format_bytes(self.budget)}" if self.budget is not None else ""))
        waits = sorted(longest(self.stalls, 3), key=lambda span: -span.seconds)
        lines += [f"  {s.seconds * 1e3:.2f} ms for {s.name}, at {s.start * 1e3:.2f} ms" for s in waits]
        return "\n".join(lines)


def _in_words(spans: Sequence[Span], seconds: float) -> str:
    spent = sum(span.seconds for span in spans)
    return f"{spent * 1e3:.2f} ms in {len(spans)} spans, {spent / (seconds or 1.0):.1%} of the pass"


# ---------------------------------------------------------------------- a trace
def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    # Copies may have begun before the pass; a trace begins at 0.
    first = min([0.0, *(span.start for span in timeline.copies)])

    def at(seconds: float) -> float:
        return round((seconds - first) * 1e6, 3)

    yield {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": timeline.title}}
    for thread, name in THREADS:
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}}
    for (thread, kind), spans in zip(THREADS, (timeline.compute, timeline.copies, timeline.stalls), strict=True):
        for span in spans:
            yield {
                "name": span.name,
                "cat": kind,
                "ph": "X",
                "pid": 1,
                "tid": thread,
                "ts": at(span.start),
                "dur": round(span.seconds * 1e6, 3),
                "args": {"bytes": span.nbytes},
            }
    for number, (copy, use) in enumerate(_pairs(timeline)):
        flow = {"name": "weights", "cat": "weights", "id": number, "pid": 1}
        yield {**flow, "ph": "s", "tid": 2, "ts": at(copy.start)}
        yield {**flow, "ph": "f", "bp": "e", "tid": 1, "ts": at(use.start)}
    for sample in timeline.memory:
        values = {"weights": sample.weights, "held for weights": sample.held}
        if sample.allocated is not None:
            values["all tensors"] = sample.allocated
        yield {"name": "memory", "ph": "C", "pid": 1, "tid": 0, "ts": at(sample.at), "args": values}


def _pairs(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """Each copy with the use that it was for."""
    waiting = list(timeline.copies)
    for use in timeline.compute:
        copy = next((each for each in waiting if each.name == use.name and each.start <= use.start), None)
        if copy is not None:
            waiting.remove(copy)
            yield copy, use


# ---------------------------------------------------------------------- from what was recorded
def make_timeline(runtime: Runtime, component: str | None, number: int | None) -> Timeline:
    """The recorded pass that is asked for; waits until it is over.

    Args:
        runtime (`Runtime`): Whose.
        component (`str`, *optional*): The denoiser when None; of several the largest.
        number (`int`, *optional*): Which pass; the last recorded one when None.

    Raises:
        ValueError: No such component, or that pass wasn't recorded.
        LayerwiseOffloadError: No pass of it was.
    """
    schedule = _chosen(runtime, component)
    if runtime.transfer.is_elsewhere:
        raise LayerwiseOffloadError(
            f"The passes of {schedule.name!r} were recorded in the process that this one was forked from, and their "
            f"times can't be read here. Call timeline() there."
        )
    tapes = runtime.tuner.tapes.of(schedule)
    if not tapes:
        raise LayerwiseOffloadError(
            f"No pass of {schedule.name!r} has been recorded, because it hasn't run to its end since layerwise offload "
            f"was enabled. Run the pipeline, then call timeline() again."
        )
    found = tapes[-1] if number is None else next((tape for tape in tapes if tape.number == number), None)
    if found is None:
        raise ValueError(
            f"Pass {number!r} of {schedule.name!r} wasn't recorded; there are {[tape.number for tape in tapes]}. Call "
            f"handle.record_timeline() before the passes that you want to see."
        )
    return _read(runtime, schedule, found)


def _chosen(runtime: Runtime, component: str | None) -> Schedule:
    names = {schedule.name: schedule for schedule in runtime.schedules}
    if component is not None:
        if component not in names:
            raise ValueError(f"No component {component!r} is offloaded; there are {list(names)}.")
        return names[component]
    recorded = [schedule for schedule in names.values() if runtime.tuner.tapes.of(schedule)] or list(names.values())
    if not recorded:
        raise LayerwiseOffloadError("This handle governs no component any more, so there is no pass to show.")
    return max(recorded, key=lambda each: (is_denoiser(each.name), each.component.weights))


def _read(runtime: Runtime, schedule: Schedule, tape: Tape) -> Timeline:
    transfer = runtime.transfer
    for mark in tape.closing():
        transfer.await_mark(mark)

    def at(mark: Any) -> float:
        return transfer.seconds(tape.begin, mark)

    own = f"{schedule.name}."
    end = at(tape.last)
    uses = []
    for use in tape.uses:
        before, start = at(use.before), at(use.before if use.start is None else use.start)
        stop = start if use.stop is None else at(use.stop)
        name = use.name.removeprefix(own)
        uses.append(Use(name, use.nbytes, use.in_ring, before, start, stop, use.held, use.allocated))
    loads = [
        Load(Span(copy.name.removeprefix(own), at(copy.start), at(copy.stop), copy.nbytes), copy.in_ring)
        for copy in (*tape.earlier, *tape.copies)
        if copy.stop is not None and transfer.is_past(copy.stop)
    ]
    loads = [load for load in loads if load.span.start < end]
    memory = memory_over_time(uses, _needed(loads, uses), tape.held_before, tape.allocated_before, tape.ring_bytes, end)
    plan = runtime.plan
    return Timeline(
        schedule.name,
        str(transfer.device),
        tape.number,
        tape.is_steady,
        end,
        # All of it on the device: nothing is done for its groups, and nothing is known of them.
        tuple(Span(use.name, use.start, use.stop, use.nbytes) for use in uses)
        or (Span(schedule.name, 0.0, end, schedule.component.weights),),
        tuple(load.span for load in loads if load.span.stop > 0),
        tuple(Span(use.name, use.before, use.start, use.nbytes) for use in uses if use.start > use.before),
        memory,
        None if plan.budget is None else plan.budget + plan.reserve,
    )


def _needed(loads: Sequence[Load], uses: Sequence[Use]) -> list[Load]:
    """Loads of this pass, and of those before it the ones that were for it: what lies in the ring when it begins.

    Of a group that was loaded several times before, only the last load can still be there, and only if the first thing
    that happens to the group in the pass is its use.
    """
    early = {load.span.name: load for load in loads if load.span.stop <= 0}
    inside = [load for load in loads if load.span.stop > 0]
    found = []
    for name, load in early.items():
        first_use = next((use.start for use in uses if use.name == name), None)
        first_load = next((each.span.start for each in inside if each.span.name == name), None)
        if first_use is not None and (first_load is None or first_use < first_load):
            found.append(load)
    return [*found, *inside]
