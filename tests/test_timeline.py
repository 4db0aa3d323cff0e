"""Timelines: exact on the virtual clock, true on the wall clock, and files that other programs can read."""

from __future__ import annotations

import dataclasses
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

import factory
import models
import test_checkpoint_files
from diffusers_layerwise import LayerwiseOffloadError, OffloadHandle, platform
from diffusers_layerwise.lanes import Load, MemorySample, Span, Use, gaps, memory_over_time, merged, short, ticks
from diffusers_layerwise.timeline import Timeline
from factory import CASES
from models import run, stream

Meter = Callable[[Callable[[], Any]], tuple[Any, dict[str, int]]]
#: Every kernel takes one millisecond, and a block's copy seven.
GROUP = 4352
CLOCK = {"flops": 1e18, "hbm": 1e18, "kernel_min": 1e-3, "launch": 0.0, "query": 0.0, "copy_lat": 0.0}
CLOCK |= {"h2d": GROUP / 7e-3, "d2h": 1e18}


def milliseconds(spans: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    """Spans in milliseconds, with the digits that the clock keeps."""
    return [(span.name, round(span.start * 1e3, 6), round(span.stop * 1e3, 6)) for span in spans]


@dataclasses.dataclass
class Idle:
    """A module whose passes begin when everything before them is over, copies included."""

    module: models.Chain
    handle: OffloadHandle
    synchronize: Callable[[], None]

    def run(self, count: int) -> None:
        """So many passes."""
        x = models.numbers(2, models.WIDTH).to("sim")
        with torch.no_grad():
            for _ in range(count):
                self.synchronize()
                self.module(x)
        self.synchronize()


@pytest.fixture
def idle(sim: ModuleType) -> Idle:
    """Four equal blocks in a ring of two slots, after five passes."""
    sim.configure(**CLOCK)
    module = models.make(models.Chain)
    found = Idle(module, stream(module), sim.synchronize)
    found.handle.record_timeline()
    found.run(5)
    return found


@pytest.fixture
def chain(idle: Idle) -> OffloadHandle:
    """Its handle."""
    return idle.handle


# ---- on the virtual clock
def test_spans_are_those_that_can_be_worked_out(chain: OffloadHandle) -> None:
    """A block's linear layer takes 1 ms, what follows it 2 ms, a copy 7 ms, and blocks 0 and 1 are there.

    Block 2's copy starts when block 0 is done with, at 1 ms, and block 3's when that one is over, at 8 ms.
    """
    timeline = chain.timeline()
    assert milliseconds(timeline.compute) == [
        ("blocks.0.lin", 0.0, 1.0),
        ("blocks.1.lin", 3.0, 4.0),
        ("blocks.2.lin", 8.0, 9.0),
        ("blocks.3.lin", 15.0, 16.0),
    ]
    assert milliseconds(timeline.stalls) == [("blocks.2.lin", 6.0, 8.0), ("blocks.3.lin", 11.0, 15.0)]
    # Block 0's copy is for the next pass; block 1's begins after this one.
    assert milliseconds(timeline.copies) == [
        ("blocks.2.lin", 1.0, 8.0),
        ("blocks.3.lin", 8.0, 15.0),
        ("blocks.0.lin", 15.0, 22.0),
    ]
    assert [(a, b) for _, a, b in milliseconds(timeline.others)] == [(1, 3), (4, 6), (9, 11), (16, 18)]
    assert {span.nbytes for span in (*timeline.compute, *timeline.copies)} == {GROUP}
    assert (timeline.seconds, timeline.copying) == (pytest.approx(18e-3), pytest.approx(17e-3))


def test_stalls_are_the_stall_of_the_report_and_the_pass_is_the_one_that_it_measured(chain: OffloadHandle) -> None:
    timeline, (part,) = chain.timeline(), chain.report().components
    assert timeline.stall == pytest.approx(6e-3)
    assert part.stall == pytest.approx(timeline.stall)
    assert part.step_measured == pytest.approx(timeline.seconds)
    assert timeline.is_steady
    assert (timeline.component, timeline.device) == ("Chain", "sim:0")


def test_memory_is_what_lies_in_the_slots(chain: OffloadHandle) -> None:
    timeline = chain.timeline()
    seen = [(round(m.at * 1e3, 6), m.weights // GROUP) for m in timeline.memory]
    changes = [seen[0], *(b for a, b in pairwise(seen) if a[1] != b[1])]
    # 0 and 1; 2 takes the place of 0 at once; 1 leaves; 3 comes; 2 leaves; 0 comes for the next pass; 3 leaves.
    assert changes == [(0.0, 2), (4.0, 1), (8.0, 2), (9.0, 1), (15.0, 2), (16.0, 1)]
    assert {m.held for m in timeline.memory} == {chain.plan.peak_bytes}
    assert all(m.allocated is not None and m.allocated > m.held for m in timeline.memory)


def test_a_copy_that_is_under_way_when_the_pass_begins_starts_before_it(sim: ModuleType) -> None:
    sim.configure(**CLOCK)
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH).to("sim")
    handle = stream(module)
    with torch.no_grad():
        for _ in range(5):
            module(x)  # nobody waits in between
    timeline = handle.timeline()
    first = timeline.copies[0]
    assert first.start < 0 < first.stop
    assert all(a.stop <= b.start + 1e-12 for a, b in pairwise(timeline.copies))
    assert min(e["ts"] for e in timeline.to_trace()["traceEvents"] if "ts" in e) == 0.0


def test_recording_waits_for_nothing_and_ends_by_itself(sim: ModuleType, meter: Meter) -> None:
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH).to("sim")
    with torch.no_grad():
        handle = stream(module)
        for _ in range(6):
            module(x)
        assert handle._runtime.transfer.tape is None
        _, plain = meter(lambda: module(x))
        handle.record_timeline()
        for _ in range(2):
            _, recorded = meter(lambda: module(x))
            assert recorded == plain
        module(x)
    assert handle._runtime.transfer.tape is None
    assert (handle.timeline().number, handle.timeline().is_steady) == (9, True)


def test_memory_of_all_tensors_is_looked_up_only_when_somebody_wants_to_see_it(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[torch.device] = []
    found = platform.memory_counters
    monkeypatch.setattr(platform, "memory_counters", lambda device: looks.append(device) or found(device))
    module, x = models.make(models.MlpStack, 30), models.numbers(2, models.WIDTH)
    handle = stream(module)
    for _ in range(5):
        run(module, x)
    assert looks == []
    assert {m.allocated for m in handle.timeline().memory} == {None}
    handle.record_timeline()
    for _ in range(4):
        run(module, x)
    assert len(handle.timeline().compute) > 32
    assert 2 < len(looks) <= 2 * (32 + 1)


def test_asking_waits_for_the_pass(sim: ModuleType) -> None:
    sim.configure(**CLOCK)
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH).to("sim")
    handle = stream(module)
    with torch.no_grad():
        module(x)
        module(x)
    before = sim.counters()["host_syncs"]
    assert handle.timeline().seconds > 0
    assert sim.counters()["host_syncs"] > before, "a device's marks can't be read before they are past"
    assert not handle.timeline().is_steady


def test_images_are_the_same_whether_they_are_recorded_or_not(sim: ModuleType) -> None:
    module, x = models.make(models.SkipUNet), models.numbers(2, models.WIDTH)
    expected = run(module, x)
    handle = stream(module, mode="speed", share=0.5)
    for _ in range(8):
        handle.record_timeline()
        assert torch.equal(run(module, x), expected)
        handle.timeline()


# ---- elsewhere, and for pipelines
@pytest.mark.parametrize("tier", ["pageable", pytest.param("file", marks=test_checkpoint_files.linux_only)])
def test_on_a_cpu_spans_are_of_the_wall_clock(tier: str, tmp_path: Path) -> None:
    module = test_checkpoint_files.chain(tmp_path)
    handle = stream(module, device="cpu", config={"host": tier})
    for _ in range(6):
        run(module, test_checkpoint_files.x())
    timeline, (part,) = handle.timeline(), handle.report().components
    assert {span.name for span in timeline.copies} <= {span.name for span in timeline.compute}
    assert all(0 < span.seconds < 60 for span in timeline.copies)
    lane = sorted([*timeline.compute, *timeline.stalls], key=lambda span: span.start)
    assert lane[0].start >= 0
    assert lane[-1].stop <= timeline.seconds
    assert all(a.stop <= b.start for a, b in pairwise(lane))
    assert sum(span.seconds for span in (*lane, *timeline.others)) == pytest.approx(timeline.seconds)
    assert part.stall == pytest.approx(timeline.stall)
    assert len(timeline.compute) == len(handle.plan.components[0].groups)
    assert "all tensors" not in str(timeline)


def test_a_pipeline_shows_its_denoiser_and_each_of_its_components(sim: ModuleType) -> None:
    pipe = CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("flux", pipe)
    assert handle.timeline().component == "transformer"
    for component in handle.report().components:
        if component.passes:
            timeline = handle.timeline(component=component.name)
            assert (timeline.component, len(timeline.compute) > 0) == (component.name, True)
    for _ in range(2):
        factory.run("flux", pipe)
    assert handle.timeline().is_steady
    before = handle.report().components[-1].stall
    handle.remove()
    assert handle.timeline().stall == pytest.approx(before)


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_recording_a_vae_that_only_decodes_ends_by_itself_too(sim: ModuleType, mode: str) -> None:
    """Its passes have no end but that of their call."""
    pipe = CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    schedule = next(each for each in handle._runtime.schedules if each.name == "vae")
    seen: list[tuple[object, object]] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: seen.append((schedule.timer, schedule.tape)))
    for _ in range(6):
        factory.run("flux", pipe)
    assert None not in seen[0]
    assert seen[-1] == (None, None), "it is still timed and recorded"
    timeline = handle.timeline(component="vae")
    assert timeline.number < 6
    # One that is resident has nothing to show once its first passes are over.
    assert timeline.is_steady == (mode == "memory")


def test_a_component_that_is_resident_is_one_span(sim: ModuleType) -> None:
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    handle = stream(module, mode="speed")
    for _ in range(5):
        run(module, x)
    timeline = handle.timeline()
    assert [(s.name, s.start, s.stop) for s in timeline.compute] == [("Chain", 0.0, timeline.seconds)]
    assert (timeline.copies, timeline.stalls, timeline.stall) == ((), (), 0.0)
    assert "no wait for copies" in str(timeline)


def test_the_first_pass_is_kept_and_others_can_be_asked_for(idle: Idle) -> None:
    chain = idle.handle
    assert chain.timeline(number=1).number == 1
    assert not chain.timeline(number=1).is_steady
    settled = chain.timeline().number
    with pytest.raises(ValueError, match=rf"Pass 5 of 'Chain' wasn't recorded; there are \[1, {settled}\]"):
        chain.timeline(number=5)
    chain.record_timeline()
    idle.run(2)
    assert chain.timeline().number == 7
    assert chain.timeline().stall == pytest.approx(6e-3)


def test_what_cannot_be_shown_is_refused_by_name(sim: ModuleType) -> None:
    handle = stream(models.make(models.Chain))
    with pytest.raises(LayerwiseOffloadError, match=r"No pass of 'Chain' has been recorded.*Run the pipeline"):
        handle.timeline()
    with pytest.raises(ValueError, match=r"No component 'vae' is offloaded; there are \['Chain'\]"):
        handle.timeline(component="vae")


def test_a_pass_that_an_exception_cuts_short_is_not_recorded(sim: ModuleType) -> None:
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    handle = stream(module)
    with pytest.raises(IndexError):
        run(module, x, order=[0, 1, 9])
    with pytest.raises(LayerwiseOffloadError, match="hasn't run to its end"):
        handle.timeline()
    run(module, x)
    assert len(handle.timeline().compute) == 4


# ---- files
class Page(HTMLParser):
    """Collects tags, and what their attributes point at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Void elements have no end."""
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<rect/>`."""

    def handle_endtag(self, tag: str) -> None:
        """Tags must be nested."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Scripts apart."""
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def test_the_page_is_whole_and_needs_nothing_else(chain: OffloadHandle, tmp_path: Path) -> None:
    timeline = chain.timeline()
    text = timeline.save(tmp_path / "step.html").read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.links == []
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    data, script = page.scripts
    assert [name for _, _, name in json.loads(data)["stalls"]] == ["blocks.2.lin", "blocks.3.lin"]
    assert "wheel" in script
    for words in (timeline.title, "milliseconds", "waiting for a copy", "blocks.3.lin", "4.00 ms", str(timeline)):
        assert words in page.text
    assert "prefers-color-scheme: dark" in page.text


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    name = '</script><b a="x">&'
    spans = (Span(name, 0.0, 1.0),)
    timeline = Timeline(name, "cpu", 1, True, 1.0, spans, spans, (Span(name, 0.0, 0.5),), (), None)
    page = Page()
    page.feed(timeline.save(tmp_path / "step.html").read_text())
    assert page.open == []
    assert name in page.text
    assert timeline._repr_html_().count("<") == 2


def test_names_with_dollars_are_no_formulas_in_the_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = r"$\frac$"
    timeline = Timeline(name, "cpu", 1, True, 1.0, (Span(name, 0.0, 0.5),), (), (Span(name, 0.5, 1.0),), (), None)
    assert timeline.save(tmp_path / "step.png").stat().st_size > 1000


def test_the_png_s_legend_names_what_is_there_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    named: list[list[str]] = []
    legend = axes.Axes.legend
    monkeypatch.setattr(
        axes.Axes,
        "legend",
        lambda axis, **how: (named.append(axis.get_legend_handles_labels()[1]), legend(axis, **how)),
    )
    Timeline("x", "cpu", 1, True, 1.0, (Span("x", 0.0, 1.0),), (), (), (), None).save(tmp_path / "step.png")
    assert named == [["groups of layers"]]


def test_a_pass_without_length_makes_a_page_that_divides_by_nothing(tmp_path: Path) -> None:
    timeline = Timeline("x", "cpu", 1, True, 0.0, (Span("x", 0.0, 0.0),), (), (), (MemorySample(0, 1, 1, None),), None)
    page = Page()
    page.feed(timeline.save(tmp_path / "step.html").read_text())
    assert json.loads(page.scripts[0])["seconds"] > 0, "the script divides by it"
    assert "nan" not in timeline.save(tmp_path / "step.svg").read_text().lower()


def test_the_svg_is_well_formed_and_shows_every_span(chain: OffloadHandle, tmp_path: Path) -> None:
    timeline = chain.timeline()
    root = ET.parse(timeline.save(tmp_path / "step.svg")).getroot()
    bars = [rect.get("class") for lane in root.iter() if lane.get("class") == "lane" for rect in lane]
    count = {kind: sum(bar in (kind, f"{kind}2") for bar in bars) for kind in ("run", "copy", "stall", "gap")}
    assert count == {"run": 4, "copy": 3, "stall": 2, "gap": 4}


def test_the_png_is_a_picture(chain: OffloadHandle, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Image.open(chain.timeline().save(tmp_path / "step.PNG")) as picture:
        assert picture.size[0] > 1000
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    assert {(0xD1, 0x24, 0x2F), (0x2F, 0x6D, 0xB3), (0x1A, 0x7F, 0x5A)} <= colours


def test_without_matplotlib_the_other_kinds_are_named(
    chain: OffloadHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LayerwiseOffloadError, match=r"step.png needs matplotlib: pip install.*\[plot\].*step.html"):
        chain.timeline().save(tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()


@pytest.mark.parametrize("name", ["step.gif", "step", "step.htm"])
def test_other_suffixes_are_refused_by_name(chain: OffloadHandle, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"saved as one of \.html, \.svg, \.png, \.json.*got .*step"):
        chain.timeline().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_chromes_format(chain: OffloadHandle, tmp_path: Path) -> None:
    timeline = chain.timeline()
    trace = json.loads(timeline.save(tmp_path / "step.json").read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "f"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
    complete = [(e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert ("waiting", "blocks.3.lin", 11000.0, 4000.0) in complete
    assert ("copying", "blocks.2.lin", 1000.0, 7000.0) in complete
    assert ("computing", "blocks.2.lin", 8000.0, 1000.0) in complete
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert threads == {"computing": 1, "copying": 2, "waiting": 3}
    flows = [(e["ph"], e["id"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert flows == [("s", 0, 2, 1000.0), ("f", 0, 1, 8000.0), ("s", 1, 2, 8000.0), ("f", 1, 1, 15000.0)]
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert len(counters) == len(timeline.memory)
    assert all(set(values) == {"weights", "held for weights", "all tensors"} for values in counters)


def test_the_text_has_the_main_facts(chain: OffloadHandle) -> None:
    lines = str(chain.timeline()).splitlines()
    number = chain.timeline().number
    assert lines[0] == f"Chain on sim:0, pass {number}: 18.00 ms, 6.00 ms of it waiting for copies"
    assert lines[1].split() == "computing 4.00 ms in 4 spans, 22.2% of the pass".split()
    assert lines[3].split() == "waiting 6.00 ms in 2 spans, 33.3% of the pass".split()
    assert lines[-2:] == ["  4.00 ms for blocks.3.lin, at 11.00 ms", "  2.00 ms for blocks.2.lin, at 6.00 ms"]


def test_thousands_of_groups_make_a_picture_of_few_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = tuple(Span(f"blocks.{i}", i * 1e-3, (i + 0.9) * 1e-3, 1 << 20) for i in range(4000))
    waits = tuple(Span(f"blocks.{i}", (i + 0.9) * 1e-3, (i + 1) * 1e-3) for i in range(4000))
    samples = tuple(MemorySample(i * 1e-3, i << 20, 4 << 30, None) for i in range(4000))
    timeline = Timeline("transformer", "cuda:0", 5, True, 4.0, runs, runs, waits, samples, 8 << 30)
    assert len(merged(runs, 4.0 / 1500)) < 10
    for kind in ("png", "svg", "html"):
        assert timeline.save(tmp_path / f"step.{kind}").stat().st_size < 5_000_000
    labels = (tmp_path / "step.svg").read_text().count('class="lead"')
    assert 0 < labels < 12


# ---- pure parts
def test_neighbours_that_cannot_be_told_apart_are_one() -> None:
    spans = [Span("a", 0, 0.1, 1), Span("b", 0.1, 0.2, 2), Span("c", 0.9, 3.0, 4), Span("d", 3.0, 3.1, 8)]
    assert [span.name for span in merged(spans, 0.5)] == ["a and 1 more", "c", "d"]
    assert sum(span.nbytes for span in merged(spans, 0.5)) == 15
    assert merged(spans, 0.0) == spans
    assert merged([], 1.0) == []


def test_gaps_and_spans_together_are_the_pass() -> None:
    assert [(s.start, s.stop) for s in gaps([Span("a", 1, 2), Span("b", 2, 3)], 4)] == [(0.0, 1), (3, 4)]
    assert [(s.start, s.stop) for s in gaps([], 4)] == [(0.0, 4)]
    assert gaps([Span("a", 0, 4)], 4) == ()


def test_memory_counts_a_use_whose_copy_was_not_recorded_from_the_beginning() -> None:
    use = Use("a", 5, True, 1.0, 1.0, 2.0, 110, None)
    late = Load(Span("b", 3.0, 9.0, 7), True)
    found = memory_over_time([use], [late], 110, 200, 100, 4.0)
    assert [(m.at, m.weights, m.held, m.allocated) for m in found] == [
        (0.0, 15, 110, 200),
        (1.0, 15, 110, 200),
        (2.0, 10, 110, 200),
        (3.0, 17, 110, 200),
        (4.0, 17, 110, 200),
    ]


@pytest.mark.parametrize("end", [1e-7, 0.87, 1.0, 12.4, 5e3])
def test_ticks_are_few_round_and_inside(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0.0
    assert 4 <= len(found) <= 11
    assert found[-1] <= end * (1 + 1e-9)
    assert ticks(0.0) == [0.0]


@pytest.mark.parametrize("most", [8, 12, 20, 60])
def test_short_names_keep_their_end_and_their_length(most: int) -> None:
    name = "transformer_blocks.12.attn.to_q .. transformer_blocks.13.ff"
    assert len(short(name, most)) <= most
    assert most > 58 or short(name, most).endswith("to_q")


@pytest.mark.gpu
def test_spans_are_of_device_events_on_a_gpu(tmp_path: Path) -> None:
    module, x = models.make(models.MlpStack, 8, 512), models.numbers(64, 512)
    handle = stream(module, device="cuda")
    for _ in range(6):
        run(module, x)
    timeline, (part,) = handle.timeline(), handle.report().components
    lane = sorted([*timeline.compute, *timeline.stalls], key=lambda span: span.start)
    assert all(a.stop <= b.start + 1e-6 for a, b in pairwise(lane))
    assert all(a.stop <= b.start + 1e-6 for a, b in pairwise(timeline.copies))
    assert part.stall == pytest.approx(timeline.stall)
    timeline.save(tmp_path / "step.html")
