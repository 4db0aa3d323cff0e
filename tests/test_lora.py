"""LoRA on denoisers and text encoders: loaded, mixed, swapped, fused and deleted, before and after enabling."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell
from lora import StateDict, copied, factors, ip_adapter, tuners

Step = tuple[str, Callable[[DiffusionPipeline], Any]]
PIPELINES = {
    "sd15": ["unet", "text_encoder"],
    "flux": ["transformer"],
    "sdxl": ["unet", "text_encoder", "text_encoder_2"],
    "wan": ["transformer"],
}
SLOW = pytest.mark.slow


def denoiser(pipe: DiffusionPipeline) -> Any:
    return getattr(pipe, "unet", None) or pipe.transformer


def load(checkpoint: StateDict, name: str, **options: Any) -> Callable[[DiffusionPipeline], Any]:
    return lambda pipe: pipe.load_lora_weights(copied(checkpoint), adapter_name=name, **options)


def life(case: str) -> list[Step]:
    """What happens to a pipeline's adapters, one after the other, with a call after each."""
    base = factory.CASES[case].build()
    names = PIPELINES[case]
    first, second = factors(base, names, 1), factors(base, names, 2)
    small, swapped = factors(base, names[:1], 3, rank=2), factors(base, names[:1], 4)
    return [
        ("load", load(first, "a")),
        ("load another", load(second, "b")),
        ("mix", lambda p: p.set_adapters(["a", "b"], adapter_weights=[0.7, 0.4])),
        ("choose", lambda p: p.set_adapters("b")),
        ("switch off", lambda p: p.disable_lora()),
        ("switch on", lambda p: p.enable_lora()),
        ("hot-swap", load(swapped, "b", hotswap=True)),
        ("load a third", load(small, "c")),
        ("mix again", lambda p: p.set_adapters(["a", "c"])),
        ("fuse", lambda p: p.fuse_lora(components=names, lora_scale=0.5)),
        ("unfuse", lambda p: p.unfuse_lora(components=names)),
        ("delete", lambda p: p.delete_adapters("a")),
        ("choose again", lambda p: p.set_adapters("c")),
        ("fuse again", lambda p: p.fuse_lora(components=names[:1])),
        ("unload", lambda p: p.unload_lora_weights()),
        ("load after all", load(first, "a")),
    ]


def modes(default: str) -> list[Any]:
    return [pytest.param(m, marks=() if m == default else SLOW) for m in ("memory", "auto", "speed")]


CASES = [pytest.param(name, marks=() if name == "sd15" else SLOW) for name in PIPELINES]


@pytest.mark.parametrize("adapters", ["resident", pytest.param("streamed", marks=SLOW)])
@pytest.mark.parametrize("when", [pytest.param("before", marks=SLOW), "after"])
@pytest.mark.parametrize("mode", modes("memory"))
@pytest.mark.parametrize("case", CASES)
def test_an_adapters_life(case: str, mode: str, when: str, adapters: str, sim: ModuleType, cell: Cell) -> None:
    cell("LoRA and adapters", f"LoRA, {case}, {adapters}", f"{mode}, {when}")
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    steps = life(case)
    early = steps[:3] if when == "before" else []
    for _, step in early:
        step(reference)
        step(pipe)
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"adapters": adapters})
    assert torch.equal(factory.run(case, pipe), factory.run(case, reference))
    for name, step in steps[len(early) :]:
        step(reference)
        step(pipe)
        expected = factory.run(case, reference)
        for _ in range(2):
            assert torch.equal(factory.run(case, pipe), expected), name
        assert handle.report().peak_seen <= handle.plan.peak_bytes, name
        if mode == "memory":
            assert handle._runtime.transfer.held_bytes == 0
    pipe.disable_layerwise_offload()
    assert torch.equal(factory.run(case, pipe), factory.run(case, reference))


@pytest.mark.parametrize("adapters", ["resident", pytest.param("streamed", marks=SLOW)])
@pytest.mark.parametrize("mode", modes("memory"))
@pytest.mark.parametrize("case", CASES)
def test_adapters_change_between_steps(case: str, mode: str, adapters: str, sim: ModuleType, cell: Cell) -> None:
    cell("LoRA and adapters", f"LoRA between steps, {case}, {adapters}", f"{mode}, after")
    name = PIPELINES[case][0]
    base = factory.CASES[case].build()
    first, second = factors(base, [name], 1), factors(base, [name], 2)
    between: list[Callable[[DiffusionPipeline], Any]] = [
        load(first, "a"),
        load(second, "b"),
        lambda p: p.set_adapters(["a", "b"], [0.3, 0.9]),
        lambda p: p.fuse_lora(components=[name]),
        lambda p: p.unfuse_lora(components=[name]),
        lambda p: p.delete_adapters("a"),
        lambda p: p.unload_lora_weights(),
    ]

    def change(pipe: DiffusionPipeline, step: int, *_: Any) -> dict[str, Any]:
        if step < len(between):
            between[step](pipe)
        return {}

    options = {"num_inference_steps": len(between) + 1, "callback_on_step_end": change}
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"adapters": adapters})
    for _ in range(2):
        assert torch.equal(factory.run(case, pipe, **options), factory.run(case, reference, **options))


@pytest.mark.parametrize("adapters", ["resident", "streamed"])
def test_adapters_that_read_the_layer_they_wrap(adapters: str, sim: ModuleType, cell: Cell) -> None:
    """DoRA computes with the weight of its layer after that layer has run."""
    cell("LoRA and adapters", f"DoRA, {adapters}", "memory, after")
    base = factory.CASES["flux"].build()
    reference, pipe = factory.CASES["flux"].build(), factory.CASES["flux"].build()
    step = load(factors(base, ["transformer"], 1, dora=True), "a")
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim", config={"adapters": adapters})
    for each in (reference, pipe):
        step(each)
    expected = factory.run("flux", reference)
    for _ in range(2):
        assert torch.equal(factory.run("flux", pipe), expected)


# ---------------------------------------------------------------------- what it costs
def schedule_of(pipe: DiffusionPipeline, name: str) -> Any:
    return next(s for s in pipe.layerwise_offload._runtime.schedules if s.name == name)


def test_loading_leaves_the_layers_where_they_are_packed(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim", config={"adapters": "resident"})
    factory.run("sd15", pipe)
    schedule, other = schedule_of(pipe, "unet"), schedule_of(pipe, "text_encoder")
    places = {unit: schedule.store.place(unit) for unit in schedule.component.units}
    groups, chunks = other.groups, list(other.store._chunks)
    load(factors(factory.CASES["sd15"].build(), ["unet"], 1), "a")(pipe)
    factory.run("sd15", pipe)
    assert {unit: schedule.store.place(unit) for unit in schedule.component.units} == places
    assert (other.groups, other.store._chunks) == (groups, chunks)
    assert len(tuners(pipe.unet)) > 20


def test_loading_takes_no_more_of_the_device_than_a_call(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("sd15", pipe)
    checkpoint = factors(factory.CASES["sd15"].build(), ["unet", "text_encoder"], 1)
    before, moved = sim.mem(0)["allocated"], sim.counters()["h2d_bytes"]
    load(checkpoint, "a")(pipe)
    pipe.fuse_lora(components=["unet", "text_encoder"])
    pipe.unfuse_lora(components=["unet", "text_encoder"])
    assert sim.mem(0)["allocated"] <= before
    assert sim.counters()["h2d_bytes"] == moved


@pytest.mark.parametrize("adapters", ["resident", "streamed"])
def test_a_deleted_adapter_takes_no_room_any_more(adapters: str, sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim", config={"adapters": adapters})
    factory.run("sd15", pipe)
    factory.run("sd15", pipe)
    before = handle.plan.peak_bytes
    base = factory.CASES["sd15"].build()
    for name, seed in (("a", 1), ("b", 2)):
        load(factors(base, ["unet"], seed, rank=16), name)(pipe)
        factory.run("sd15", pipe)
    both = handle.plan.peak_bytes
    pipe.delete_adapters("b")
    factory.run("sd15", pipe)
    one = handle.plan.peak_bytes
    pipe.unload_lora_weights()
    factory.run("sd15", pipe)
    assert handle.plan.peak_bytes == before < one < both
    assert handle.report().peak_seen == before


def test_large_adapters_stream_with_their_layers_and_small_ones_stay(sim: ModuleType) -> None:
    peaks = {}
    for adapters in ("resident", "streamed", None):
        pipe = factory.CASES["sd15"].build()
        load(factors(pipe, ["unet"], 1, rank=16), "a")(pipe)
        handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim", config={"adapters": adapters})
        peaks[adapters] = handle.plan.peak_bytes
    assert peaks[None] == peaks["streamed"] < peaks["resident"]


def test_fused_layers_are_packed_again(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    load(factors(factory.CASES["sd15"].build(), ["unet"], 1), "a")(pipe)
    factory.run("sd15", pipe)
    pipe.fuse_lora(components=["unet"], safe_fusing=True)
    factory.run("sd15", pipe)
    schedule = schedule_of(pipe, "unet")
    assert all(schedule.store.place(unit) is not None for unit in schedule.component.units)


def test_adapters_too_large_for_the_budget_are_refused_and_leave_a_pipeline_that_works(sim: ModuleType) -> None:
    reference, pipe = factory.CASES["sd15"].build(), factory.CASES["sd15"].build()
    options = {"memory_budget": 200_000, "config": {"activation_reserve": 0, "adapters": "resident"}}
    handle = pipe.enable_layerwise_offload(mode="auto", onload_device="sim", **options)
    expected = factory.run("sd15", reference)
    assert torch.equal(factory.run("sd15", pipe), expected)
    load(factors(reference, ["unet"], 1, rank=32), "a")(pipe)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="smallest budget that works"):
            factory.run("sd15", pipe)
        assert handle._runtime.transfer.held_bytes == 0
    pipe.unload_lora_weights()
    for _ in range(2):
        assert torch.equal(factory.run("sd15", pipe), expected)
    assert handle.report().peak_ever <= 200_000


# ---------------------------------------------------------------------- found by tests/test_soak.py
@pytest.mark.parametrize("mode", ["memory", pytest.param("speed", marks=SLOW)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("order", [("disable_lora", "fuse_lora"), ("fuse_lora", "disable_lora")])
def test_fused_and_switched_off_is_taken_out_of_the_weights(
    order: tuple[str, str], when: str, mode: str, sim: ModuleType
) -> None:
    """PEFT does that in a layer's forward, in place: on what is then a copy on the device."""
    reference, pipe = factory.CASES["sd15"].build(), factory.CASES["sd15"].build()
    checkpoint = factors(pipe, ["unet", "text_encoder"], 1)
    if when == "after":
        pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
        factory.run("sd15", pipe)
    for each in (reference, pipe):
        load(checkpoint, "a")(each)
        for verb in order:
            getattr(each, verb)()
    if when == "before":
        pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    expected = factory.run("sd15", reference)
    for _ in range(3):
        assert torch.equal(factory.run("sd15", pipe), expected)
    for each in (reference, pipe):
        each.enable_lora()
    assert torch.equal(factory.run("sd15", pipe), factory.run("sd15", reference))


@pytest.mark.parametrize("what", ["LoRA", "IP-Adapter"])
def test_what_is_put_in_before_the_end_returns_to_the_device_with_its_component(what: str, sim: ModuleType) -> None:
    """No call came between to look the component through."""
    pipe = factory.CASES["sd15"].build()
    checkpoint, adapter = factors(pipe, ["unet"], 1), ip_adapter(pipe.unet, 32)
    pipe.to("sim")
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("sd15", pipe)
    if what == "LoRA":
        load(checkpoint, "a")(pipe)
    else:
        pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    pipe.disable_layerwise_offload()
    places = {t.device.type for t in [*pipe.unet.parameters(), *pipe.unet.buffers()]}
    assert places == {"sim"}


@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_loading_beside_model_offload_leaves_both_as_they_were(component: str, sim: ModuleType) -> None:
    """The loader takes accelerate's hooks off all components that it sees, and puts back only model offload."""
    reference, pipe = factory.CASES["sd15"].build(), factory.CASES["sd15"].build()
    checkpoint = factors(pipe, [component], 1)
    pipe.enable_layerwise_offload(["unet", "vae"], mode="memory", onload_device="sim")
    pipe.enable_model_cpu_offload(device="sim")
    assert torch.equal(factory.run("sd15", pipe), factory.run("sd15", reference))
    for each in (reference, pipe):
        load(checkpoint, "a")(each)
    handle = pipe.layerwise_offload
    assert handle is not None
    assert {part.name for part in handle.report().components} == {"unet", "vae"}
    for _ in range(2):
        assert torch.equal(factory.run("sd15", pipe), factory.run("sd15", reference))
    for each in (reference, pipe):
        each.to(torch.bfloat16)
        each.unload_lora_weights()
        load(checkpoint, "b")(each)
        assert {p.dtype for p in getattr(each, component).parameters()} == {torch.bfloat16}
    assert torch.equal(factory.run("sd15", pipe), factory.run("sd15", reference))
