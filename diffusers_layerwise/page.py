"""Pure: a pass as an SVG picture, and as one HTML page that needs nothing else, to be zoomed and pointed at."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from .config import format_bytes
from .lanes import Lanes, MemorySample, Span, short, ticks

WIDTH, HEIGHT = 1200, 466
LEFT, RIGHT = 96, 1176
#: Top and bottom of each lane.
COMPUTE, COPIES, MEMORY = (112, 156), (176, 220), (250, 420)
#: A wait's label: how far it is from the next one, and the letters of a name in it.
LABEL_WIDTH, LABEL_LETTERS = 124, 19
#: Width of a letter in a bar, and of the narrowest bar that has a name.
CHARACTER, ROOM = 6.3, 60

#: Units across a lane: a lane is stretched to the picture's width, and zoomed by showing a part of it.
UNITS = 100_000.0


def svg(lanes: Lanes) -> str:
    """The picture alone."""
    inside = [
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="28">{html.escape(lanes.title)}</text>',
        *_legend(lanes),
        *_names(),
        f'<g class="scale">{"".join(_scale(lanes))}</g>',
        _lane(COMPUTE, _bars(lanes, lanes.others, ("gap",)) + _bars(lanes, lanes.compute, ("run", "run2"))),
        _lane(COMPUTE, _bars(lanes, lanes.stalls, ("stall",), "waiting for ")),
        _lane(COPIES, _bars(lanes, lanes.copies, ("copy", "copy2"))),
        *_memory(lanes),
        f'<g class="ink">{"".join(_ink(lanes))}</g>',
        f'<line class="hair" y1="{COMPUTE[0]}" y2="{MEMORY[1]}" style="display:none"/>',
    ]
    style = f"<style>{_asset('page.css')}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tl" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" '
        f'role="img" aria-label="{html.escape(lanes.title)}">{style}{"".join(inside)}</svg>'
    )


def page(lanes: Lanes, text: str) -> str:
    """One self-contained HTML page: the picture with its script, and a text below."""
    box = "position:absolute;pointer-events:none;background:#24292f;color:#fff;font:12px system-ui,sans-serif;"
    body = (
        f'<div style="position:relative;max-width:1600px;margin:auto">{svg(lanes)}'
        f'<div class="tooltip" style="display:none;{box}padding:5px 8px;border-radius:5px;white-space:pre"></div>'
        f'<script type="application/json" class="data">{_data(lanes)}</script>'
        f"<script>{_asset('page.js')}</script></div>"
    )
    look = (
        "body{margin:12px;background:#fff;color:#1f2328}"
        "pre{font:12px ui-monospace,monospace;max-width:1600px;margin:12px auto;white-space:pre-wrap}"
        "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(lanes.title)}</title><style>{look}</style></head><body>{body}"
        f"<pre>{html.escape(text)}\n\nWheel: zoom. Drag: move. Double click: all.</pre></body></html>\n"
    )


def framed(content: str) -> str:
    """A page for a notebook's cell, where its styles and script are its own."""
    return f'<iframe srcdoc="{html.escape(content)}" style="width:100%;height:640px;border:0"></iframe>'


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(lanes: Lanes) -> str:
    def plain(spans: Iterable[Span]) -> list[tuple[float, float, str]]:
        return [(span.start, span.stop, span.name) for span in spans]

    found = {
        "x": (LEFT, RIGHT),
        "width": WIDTH,
        "units": UNITS,
        "top": COMPUTE[0],
        "bottom": MEMORY[1],
        "character": CHARACTER,
        "room": ROOM,
        "middle": {"compute": _middle(COMPUTE), "copies": _middle(COPIES)},
        "letters": LABEL_LETTERS,
        "apart": LABEL_WIDTH,
        "seconds": lanes.seconds or 1.0,  # as the picture is scaled
        "compute": plain(lanes.compute),
        "copies": plain(lanes.copies),
        "stalls": plain(lanes.stalls),
        "memory": [(m.at, m.weights, m.held, m.allocated) for m in lanes.memory],
    }
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _middle(lane: tuple[int, int]) -> int:
    return (lane[0] + lane[1]) // 2 + 4


def _x(lanes: Lanes, seconds: float) -> float:
    return LEFT + seconds / (lanes.seconds or 1.0) * (RIGHT - LEFT)


def _lane(lane: tuple[int, int], inside: str, high: float = 1.0) -> str:
    """A part of the picture that is stretched: `UNITS` across, `high` down."""
    place = f'x="{LEFT}" y="{lane[0]}" width="{RIGHT - LEFT}" height="{lane[1] - lane[0]}"'
    return f'<svg class="lane" {place} viewBox="0 0 {UNITS} {high}" preserveAspectRatio="none">{inside}</svg>'


def _bars(lanes: Lanes, spans: Sequence[Span], classes: Sequence[str], verb: str = "") -> str:
    scale = UNITS / (lanes.seconds or 1.0)
    found = []
    for index, span in enumerate(spans):
        start, width = span.start * scale, span.seconds * scale
        size = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
        tip = f"{verb}{span.name}: {span.seconds * 1e3:.3f} ms from {span.start * 1e3:.3f} ms{size}"
        found.append(
            f'<rect class="{classes[index % len(classes)]}" x="{start:.2f}" width="{width:.2f}" height="1">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
    return "".join(found)


def _names() -> list[str]:
    rows = [("computing", _middle(COMPUTE)), ("copying", _middle(COPIES)), ("memory", MEMORY[0] - 8)]
    return [f'<text x="{LEFT - 12}" y="{y}" text-anchor="end">{name}</text>' for name, y in rows]


def _legend(lanes: Lanes) -> list[str]:
    entries = [
        ("run", "groups of layers"),
        ("gap", "other work, or none"),
        ("stall", "waiting for a copy"),
        ("copy", "copies"),
    ]
    entries += [("mem", "weights there or arriving"), ("held", "held for weights")]
    entries += [("all", "all tensors")] if any(m.allocated is not None for m in lanes.memory) else []
    entries += [("budget", "budget")] if _shows_budget(lanes) else []
    found, x = [], float(LEFT)
    for kind, text in entries:
        if kind in ("held", "all", "budget"):
            found.append(f'<path class="{kind}" d="M{x} 52h14"/>')
        else:
            found.append(f'<rect class="{kind}" x="{x}" y="46" width="14" height="12"/>')
        found.append(f'<text class="dim" x="{x + 19}" y="56">{text}</text>')
        x += 34 + 6.0 * len(text)
    return found


def _most(lanes: Lanes) -> int:
    return max([1, *(max(m.held, m.weights, m.allocated or 0) for m in lanes.memory)])


def top_of(lanes: Lanes) -> int:
    """The most bytes that the memory's axis shows."""
    return max(_most(lanes), lanes.budget or 0) if _shows_budget(lanes) else _most(lanes)


def _shows_budget(lanes: Lanes) -> bool:
    """Whether a line for the budget leaves the rest of the picture readable."""
    return lanes.budget is not None and lanes.budget <= 3 * _most(lanes)


def byte_ticks(most: int) -> list[tuple[float, str]]:
    """Round numbers of bytes up to `most`, and how they are written."""
    unit, size = next((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if most >= s)
    return [(tick * size, f"{tick:g} {unit}") for tick in ticks(most / size, 5)]


def _memory(lanes: Lanes) -> list[str]:
    most = top_of(lanes) * 1.06
    scale = UNITS / (lanes.seconds or 1.0)
    found = []
    for at, text in byte_ticks(top_of(lanes)):
        y = MEMORY[1] - at / most * (MEMORY[1] - MEMORY[0])
        found.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(f'<text class="dim" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')

    def stairs(values: Iterable[tuple[MemorySample, int]]) -> str:
        points = [(sample.at * scale, 1 - value / most) for sample, value in values]
        if not points:
            return ""
        steps = "".join(f"H{x:.2f}V{y:.5f}" for x, y in points[1:])
        return f"M{points[0][0]:.2f} {points[0][1]:.5f}{steps}H{UNITS}"

    weights = stairs((m, m.weights) for m in lanes.memory)
    inside = f'<path class="mem" d="{weights}V1H0Z"/>' if weights else ""
    inside += f'<path class="held" d="{stairs((m, m.held) for m in lanes.memory)}"/>'
    tensors = stairs((m, m.allocated) for m in lanes.memory if m.allocated is not None)
    inside += f'<path class="all" d="{tensors}"/>' if tensors else ""
    if _shows_budget(lanes):
        inside += f'<path class="budget" d="M0 {1 - (lanes.budget or 0) / most:.5f}H{UNITS}"/>'
    return [*found, _lane(MEMORY, inside)]


def _scale(lanes: Lanes) -> Iterable[str]:
    """The axis of time, beneath everything."""
    for tick in ticks(lanes.seconds * 1e3):
        x = _x(lanes, tick / 1e3)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{COMPUTE[0]}" y2="{MEMORY[1]}"/>'
        yield f'<text class="dim" x="{x:.1f}" y="{MEMORY[1] + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text class="dim" x="{RIGHT}" y="{MEMORY[1] + 34}" text-anchor="end">milliseconds</text>'


def _ink(lanes: Lanes) -> Iterable[str]:
    """Text over what is stretched: names in bars that have room, and the longest waits."""
    for lane, spans in ((COMPUTE, lanes.compute), (COPIES, lanes.copies)):
        for span in spans:
            left, right = max(float(LEFT), _x(lanes, span.start)), min(float(RIGHT), _x(lanes, span.stop))
            if right - left > ROOM:
                name = html.escape(short(span.name, int((right - left - 8) / CHARACTER)))
                x = (left + right) / 2
                yield f'<text class="in" x="{x:.1f}" y="{_middle(lane)}" text-anchor="middle">{name}</text>'
    yield from _waits(lanes)


def _waits(lanes: Lanes) -> Iterable[str]:
    """The longest waits by name, as far as there is room for them above the lane."""
    taken: list[float] = []
    for span in sorted(lanes.stalls, key=lambda span: -span.seconds):
        at = _x(lanes, (span.start + span.stop) / 2)
        x = min(RIGHT - LABEL_WIDTH / 2, max(LEFT + LABEL_WIDTH / 2, at))
        if any(abs(other - x) < LABEL_WIDTH for other in taken):
            continue
        taken.append(x)
        name, y = html.escape(short(span.name, LABEL_LETTERS)), COMPUTE[0] - 26
        yield f'<text class="wait" x="{x:.1f}" y="{y}" text-anchor="middle">{name}</text>'
        yield f'<text class="wait" x="{x:.1f}" y="{y + 13}" text-anchor="middle">{span.seconds * 1e3:.2f} ms</text>'
        yield f'<line class="lead" x1="{x:.1f}" x2="{at:.1f}" y1="{y + 16}" y2="{COMPUTE[0]}"/>'
