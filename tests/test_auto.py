"""`mode="auto"` on the simulated device: plans follow what is free and what activations need, from call to call."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline

import factory
from diffusers_layerwise import OffloadHandle, OffloadProfile, auto, fitting, platform, profiles, register_profile
from diffusers_layerwise.activations import MEASURED_CALLS, Activations, Bounds, bounds
from diffusers_layerwise.auto import Needs
from diffusers_layerwise.config import Mode
from diffusers_layerwise.plan import Choice
from diffusers_layerwise.platform import StreamingDefault, memory_counters, streaming_default

LARGE = {"height": 64, "width": 64}
SMALL: dict[str, int] = {}
OFF = StreamingDefault(False, "it isn't proved there")


@functools.cache
def resident(**size: int) -> torch.Tensor:
    """What the pipeline gives that is wholly on the device."""
    return factory.run("flux", factory.CASES["flux"].build().to("sim"), **size)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    resident.cache_clear()


@pytest.fixture(autouse=True)
def _plain_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flux without a profile of its own, so that numbers here depend on this page alone."""
    monkeypatch.setattr(profiles, "_registered", {FluxPipeline: OffloadProfile(keep_resident_min_free_gib=None)})


@pytest.fixture
def pipe(sim: ModuleType) -> DiffusionPipeline:
    """A pipeline of 1.8 MiB."""
    resident()
    resident(**LARGE)
    # What earlier pipelines held would be free in the middle of a test.
    gc.collect()
    sim.reset()
    return factory.CASES["flux"].build()


def weights_of(pipe: DiffusionPipeline) -> int:
    return sum(p.numel() * p.element_size() for m in factory.modules_of(pipe).values() for p in m.parameters())


def enable(pipe: DiffusionPipeline, **options: Any) -> OffloadHandle:
    return pipe.enable_layerwise_offload(onload_device="sim", **options)


def run(pipe: DiffusionPipeline, sim: ModuleType, **size: int) -> int:
    """One call, which has to be exact. Returns the most device memory that it took."""
    before = sim.mem(0)["allocated"]
    # As a user might, between calls.
    sim.reset_peak_memory_stats()
    held = pipe.layerwise_offload._runtime.transfer.held_bytes
    assert torch.equal(factory.run("flux", pipe, **size), resident(**size))
    return sim.mem(0)["peak"] - (before - held)


def kept(handle: OffloadHandle) -> int:
    """Bytes of resident groups."""
    return sum(component.resident_bytes for component in handle.plan.components)


# ---- room for activations


@pytest.mark.parametrize("percent", [45, 60, 100, 140])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_weights_and_activations_stay_within_the_budget_once_these_were_measured(
    size: dict[str, int], percent: int, pipe: DiffusionPipeline, sim: ModuleType
) -> None:
    budget = weights_of(pipe) * percent // 100
    handle = enable(pipe, memory_budget=budget)
    peaks = [run(pipe, sim, **size) for _ in range(4)]
    needed = max(part.activation_peak or 0 for part in handle.report().components)
    if needed + handle.plan.peak_bytes <= budget:
        assert max(peaks[1:]) <= budget
        assert handle.plan.peak_bytes + handle.plan.reserve <= budget
    else:
        assert not kept(handle), "there is nothing more to give up"


def test_memory_that_activations_do_not_need_goes_to_residents(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    sim.configure(h2d=1e8)  # so slow that every resident counts
    budget = weights_of(pipe) * 8 // 10
    handle = enable(pipe, memory_budget=budget, config={"residency": "lasting"})
    run(pipe, sim)
    first = handle.plan
    before = kept(handle)
    assert first.reserve == budget // 10, "the default, before anything was measured"
    assert run(pipe, sim) <= budget
    assert handle.plan.reserve < first.reserve
    assert kept(handle) > before


def test_a_plan_that_fits_and_would_be_as_fast_is_left_alone(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    """Everything is resident by turns, so that less reserve gains nothing, and no group is cut anew."""
    handle = enable(pipe, memory_budget=weights_of(pipe) * 9 // 10, config={"residency": "use"})
    for _ in range(3):
        run(pipe, sim)
    adopted: list[object] = []
    runtime = handle._runtime
    runtime.fitting.planning = dataclasses.replace(runtime.fitting.planning, adopt=lambda *what: adopted.append(what))
    for _ in range(2):
        run(pipe, sim)
    assert not adopted


def test_activations_larger_than_what_was_reserved_take_residents_away(
    pipe: DiffusionPipeline, sim: ModuleType
) -> None:
    budget = weights_of(pipe) * 7 // 10
    handle = enable(pipe, memory_budget=budget)
    over = run(pipe, sim, **LARGE)
    before = kept(handle)
    assert over > budget
    assert run(pipe, sim, **LARGE) <= budget
    assert kept(handle) < before
    assert handle.plan.reserve > budget // 10


def test_an_explicit_reserve_stays(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    handle = enable(pipe, memory_budget=weights_of(pipe), config={"activation_reserve": 12345})
    for size in (SMALL, LARGE, SMALL):
        run(pipe, sim, **size)
        assert handle.plan.reserve == 12345


def test_each_shape_of_call_is_remembered_and_a_larger_one_sheds_residents_before_it_runs(
    pipe: DiffusionPipeline, sim: ModuleType
) -> None:
    sim.configure(h2d=1e8)  # so slow that every resident counts
    budget = weights_of(pipe) * 9 // 10
    handle = enable(pipe, memory_budget=budget, config={"residency": "lasting"})
    for size in (LARGE, LARGE, SMALL, SMALL):
        run(pipe, sim, **size)
    small = kept(handle)
    assert run(pipe, sim, **LARGE) <= budget, "it is known what it needs, so the call gives it room"
    large = kept(handle)
    assert large < small
    run(pipe, sim)
    assert kept(handle) == large, "a plan grows between calls only"
    assert run(pipe, sim) <= budget
    assert kept(handle) > large


def test_a_plan_settles(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    handle = enable(pipe, memory_budget=weights_of(pipe) * 6 // 10)
    for _ in range(3):
        run(pipe, sim)
    plan = handle.plan
    for _ in range(3):
        run(pipe, sim)
        assert handle.plan.components == plan.components


def test_counters_are_asked_once_a_call_when_a_shape_is_known(
    pipe: DiffusionPipeline, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(device: torch.device) -> tuple[int, int] | None:
        asked.append(1)
        return memory_counters(device)

    monkeypatch.setattr(platform, "memory_counters", counted)
    handle = enable(pipe, memory_budget=weights_of(pipe))
    counts = []
    for _ in range(MEASURED_CALLS + 2):
        asked.clear()
        passes = sum(part.passes for part in handle.report().components)
        run(pipe, sim)
        done = sum(part.passes for part in handle.report().components) - passes
        counts.append((len(asked), done))
    assert all(count <= done + 2 for count, done in counts[:MEASURED_CALLS])
    assert [count for count, _ in counts[MEASURED_CALLS:]] == [1, 1]


def test_statistics_are_the_users_and_never_reset(
    pipe: DiffusionPipeline, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.get_device_module("sim"), name, lambda *_: pytest.fail("reset"), raising=False)
    enable(pipe, memory_budget=weights_of(pipe))
    for _ in range(3):
        assert torch.equal(factory.run("flux", pipe), resident())


def test_a_peak_from_before_tells_nothing_and_the_default_reserve_is_kept(
    pipe: DiffusionPipeline, sim: ModuleType
) -> None:
    torch.empty(64 << 20, dtype=torch.uint8, device="sim")
    budget = weights_of(pipe)
    handle = enable(pipe, memory_budget=budget)
    for _ in range(3):
        assert torch.equal(factory.run("flux", pipe), resident())
    assert budget // 10 <= handle.plan.reserve <= budget // 10 * 17 // 16


def test_what_an_interrupted_call_took_is_not_remembered(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = enable(pipe, memory_budget=weights_of(pipe))
    with pytest.raises(KeyboardInterrupt):
        factory.run("flux", pipe, callback_on_step_end=interrupt)
    assert {part.activation_peak for part in handle.report().components} == {None}
    run(pipe, sim)
    assert None not in {part.activation_peak for part in handle.report().components}


# ---- free memory


def test_without_a_budget_plans_follow_what_is_free(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    weights = weights_of(pipe)
    sim.configure(cap=sim.mem(0)["active"] + 3 * weights)
    handle = enable(pipe)
    run(pipe, sim)
    assert all(not c.largest_streamed for c in handle.plan.components)
    everything = handle.plan.peak_bytes
    assert everything >= weights
    handle.release()
    other = torch.empty(sim.mem_get_info()[0] - weights * 7 // 10, dtype=torch.uint8, device="sim")
    run(pipe, sim)
    assert handle.plan.peak_bytes < weights * 7 // 10, "somebody else has taken memory"
    assert handle.plan.peak_bytes <= (handle.plan.budget or 0)
    del other
    for _ in range(2):
        run(pipe, sim)
    assert handle.plan.peak_bytes >= everything
    assert all(not c.largest_streamed for c in handle.plan.components)


def test_a_small_change_of_free_memory_changes_no_plan(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    weights = weights_of(pipe)
    sim.configure(cap=sim.mem(0)["active"] + weights)
    handle = enable(pipe)
    for _ in range(3):
        run(pipe, sim)
    plan = handle.plan
    other = torch.empty(weights // 40, dtype=torch.uint8, device="sim")
    run(pipe, sim)
    assert handle.plan.components == plan.components
    assert handle.plan.budget == plan.budget
    del other


def test_the_least_of_several_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"sim:0": 7, "sim:1": 5, "cpu": None}
    monkeypatch.setattr(platform, "free_memory", lambda device: free[str(device)])
    devices = [torch.device("meta"), torch.device("meta")]
    names = iter(["sim:0", "sim:1"])
    assert fitting.free_memory([next(names) for _ in devices]) == 5  # type: ignore[misc]
    assert fitting.free_memory([torch.device("cpu")]) is None


def test_enough_free_memory_keeps_everything_resident_whatever_the_profiles_modes(
    pipe: DiffusionPipeline, sim: ModuleType
) -> None:
    weights = weights_of(pipe)
    sim.configure(cap=sim.mem(0)["active"] + 3 * weights)
    for gib, mode in [(2 * weights / 2**30, Mode.AUTO), (4 * weights / 2**30, Mode.MEMORY)]:
        register_profile(FluxPipeline, OffloadProfile(("memory",), keep_resident_min_free_gib=gib))
        handle = enable(pipe)
        run(pipe, sim)
        assert handle.plan.mode is mode
        assert any("everything resident" in note for note in handle.report().notes) is (mode is Mode.AUTO)
        assert (kept(handle) >= weights) is (mode is Mode.AUTO)
        handle.remove()


# ---- platforms


def choices(handle: OffloadHandle) -> set[Choice]:
    return {component.choice for component in handle.plan.components}


def test_where_streaming_is_off_components_stay_whole_and_the_report_says_what_to_do(
    pipe: DiffusionPipeline, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "streaming_default", lambda device: OFF)
    sim.configure(cap=sim.mem(0)["active"] + weights_of(pipe) * 3 // 4)
    handle = enable(pipe)
    run(pipe, sim)
    assert choices(handle) <= {Choice.RESIDENT, Choice.OFFLOAD}
    assert Choice.OFFLOAD in choices(handle)
    (note,) = [note for note in handle.report().notes if OFF.reason in note]
    assert "memory_budget" in note
    run(pipe, sim)
    sim.configure(cap=sim.mem(0)["active"] + weights_of(pipe) * 4)
    roomy = enable(pipe)
    run(pipe, sim)
    assert choices(roomy) == {Choice.RESIDENT}


@pytest.mark.parametrize(
    "explicit",
    [{"memory_budget": "1MiB"}, {"mode": "speed"}, {"mode": "memory"}, {"components": "all"}],
    ids=lambda explicit: next(iter(explicit)),
)
def test_whatever_the_user_says_wins_over_the_platform(
    explicit: dict[str, Any], pipe: DiffusionPipeline, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "streaming_default", lambda device: OFF)
    sim.configure(cap=sim.mem(0)["active"] + weights_of(pipe) * 3 // 4)
    handle = enable(pipe, **explicit)
    run(pipe, sim)
    assert choices(handle) == {Choice.LAYERWISE}
    assert not any(OFF.reason in note for note in handle.report().notes)


def test_what_is_larger_than_the_device_streams_even_where_that_is_off(
    pipe: DiffusionPipeline, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "streaming_default", lambda device: OFF)
    sim.configure(cap=sim.mem(0)["active"] + weights_of(pipe) * 45 // 100)
    handle = enable(pipe)
    run(pipe, sim)
    assert handle.plan.component("transformer").choice is Choice.LAYERWISE
    assert any("doesn't fit as a whole" in note for note in handle.report().notes)


def test_what_platforms_declare(monkeypatch: pytest.MonkeyPatch, sim: ModuleType) -> None:
    def declared(kind: str, integrated: bool = False) -> bool:
        properties = type("Properties", (), {"is_integrated": integrated})
        module = type("Module", (), {"get_device_properties": staticmethod(lambda device: properties)})
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        found = streaming_default(torch.device(kind, 0) if kind != "npu" else _Device("npu"))  # type: ignore[arg-type]
        assert found.reason in str(found)
        return found.is_on

    monkeypatch.setattr(torch.version, "hip", None)
    assert [declared(kind) for kind in ("cpu", "cuda", "xpu", "sim")] == [True] * 4
    assert [declared("mps"), declared("npu"), declared("cuda", integrated=True)] == [False] * 3
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not declared("cuda")


class _Device:
    """A device of a kind that this torch doesn't know."""

    def __init__(self, kind: str) -> None:
        self.type = kind


def test_a_cpu_has_no_limit_and_keeps_everything(sim: ModuleType) -> None:
    register_profile(FluxPipeline, OffloadProfile(("memory",)))
    pipe = factory.CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(onload_device="cpu")
    factory.run("flux", pipe)
    assert handle.plan.mode is Mode.AUTO
    assert all(not c.largest_streamed for c in handle.plan.components)


# ---- what is said


def test_the_report_has_what_was_predicted_and_what_was_measured(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    handle = enable(pipe, memory_budget=weights_of(pipe) * 6 // 10)
    for _ in range(4):
        run(pipe, sim)
    report = handle.report()
    assert report.activation_reserve == handle.plan.reserve
    parts = {part.name: part for part in report.components}
    assert all((part.activation_peak or 0) > 0 for part in report.components)
    measured, predicted = parts["transformer"].step_measured, parts["transformer"].step_predicted
    assert measured is not None
    assert predicted is not None
    assert measured >= 0
    assert parts["vae"].step_measured is None, "a decode has no end that can be told"


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_what_was_decided_is_logged_once_for_each_plan(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    said = Said()
    fitting.logger.addHandler(said)
    fitting.logger.setLevel(logging.INFO)
    try:
        handle = enable(pipe, memory_budget=weights_of(pipe) * 6 // 10)
        for _ in range(3):
            run(pipe, sim)
        count, parts = len(said.lines), handle.plan.components
        # The peak counts what activations need, which may be better known than when it was said.
        expected = [line.split(";")[0] for line in auto.describe(handle.plan)]
        assert [line.split(";")[0] for line in said.lines[-len(parts) :]] == expected
        run(pipe, sim)
        assert len(said.lines) == count
    finally:
        fitting.logger.removeHandler(said)
        fitting.logger.setLevel(logging.NOTSET)


def test_diffusers_own_verbosity_counts_for_it() -> None:
    assert fitting.logger.name.startswith("diffusers.")


def test_a_line_says_layers_waiting_and_peak(pipe: DiffusionPipeline, sim: ModuleType) -> None:
    handle = enable(pipe, memory_budget=weights_of(pipe) * 45 // 100)
    for _ in range(3):
        run(pipe, sim)
    plan = handle.plan
    (line,) = [line for line in auto.describe(plan) if line.startswith("transformer:")]
    resident_layers, layers = plan.component("transformer").layers()
    assert line.startswith(f"transformer: {resident_layers} of {layers} layers resident, {layers - resident_layers} ")
    assert ("hides behind compute" in line) or ("times its compute" in line)
    assert "; peak " in line


# ---- bounds


def test_what_counters_tell_of_a_pass() -> None:
    assert bounds(100, True, (60, 60), 10) == Bounds(30, 30), "the peak is this pass's, and what was held is known"
    assert bounds(100, True, (40, 60), 10) == Bounds(30, 50), "weights came while it ran"
    assert bounds(100, False, (60, 60), 10) == Bounds(0, 30), "no more than that, or the peak had risen"


def test_nothing_uncertain_exceeds_what_is_reserved_anyway() -> None:
    assert Bounds(0, 500).value(200) == 200
    assert Bounds(300, 500).value(200) == 300
    assert Bounds(0, 100).value(200) == 100
    assert Bounds(30, 50).merged(Bounds(0, 40)) == Bounds(30, 40)
    assert Bounds(60, 70).merged(Bounds(0, 40)).value(10) == 60, "another pass that took less"


def test_a_component_that_a_shape_did_not_show_counts_as_in_others() -> None:
    seen, a, b = Activations(), ((1, 2),), ((3, 4),)
    for shape, values in [(a, {"text_encoder": 5, "transformer": 10}), (b, {"transformer": 40})]:
        seen.start_call()
        for name, value in values.items():
            seen.add(name, Bounds(value, value))
        seen.end_call(shape)
    assert seen.needs(((9,),), 100) is None
    needs = seen.needs(b, 100)
    assert needs is not None
    assert needs.by_component == {"text_encoder": 5, "transformer": 42}
    assert not seen.is_measured(a)
    seen.forget("transformer")
    assert set(seen.of(a)) == {"text_encoder"}


def test_a_plan_serves_needs_that_fit_and_waste_little() -> None:
    room = Needs({"a": 1000, "b": 10})
    total = 3200
    assert room.serves(Needs({"a": 950, "b": 10}), 17, total)
    assert room.serves(Needs({"a": 1050, "b": 10}), 17, total), "all but the slack fits"
    assert not room.serves(Needs({"a": 1100, "b": 10}), 17, total)
    assert not room.serves(Needs({"a": 800, "b": 10}), 17, total)
    assert not room.serves(Needs({"a": 1000}), 17, total)


def test_free_memory_that_changes_within_the_margin_is_the_same() -> None:
    cases: list[tuple[int | None, int | None, bool]] = [(None, 5, True), (None, None, False), (100, 96, False)]
    cases += [(100, 94, True), (100, 106, True)]
    assert [fitting.has_changed(before, now) for before, now, _ in cases] == [changed for *_, changed in cases]
