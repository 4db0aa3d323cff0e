"""torch.compile: hooks stay outside of compiled code, nothing breaks its graphs, nothing is compiled again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import factory
import models
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload, plan_layerwise_offload
from diffusers_layerwise.compiled import Held, Outside

SLOW = pytest.mark.slow
#: How a denoiser is compiled: its repeated blocks, or all of it in one of four ways.
HOW: dict[str, Callable[..., Any]] = {
    "blocks": lambda pipe, name, **options: getattr(pipe, name).compile_repeated_blocks(**options),
    "compile": lambda pipe, name, **options: getattr(pipe, name).compile(**options),
    "wrapped": lambda pipe, name, **options: setattr(pipe, name, torch.compile(getattr(pipe, name), **options)),
    "forward": lambda pipe, name, **options: setattr(
        getattr(pipe, name), "forward", torch.compile(getattr(pipe, name).forward, **options)
    ),
}
CALLED = {
    "compile": "`pipe.transformer.compile()`",
    "wrapped": "`pipe.transformer = torch.compile(...)`",
    "forward": "`transformer.forward = torch.compile(...)`",
}
SIDE = {"before": "before ours", "after": "after ours", "after a call": "after ours"}
WHOLE = [how for how in HOW if how != "blocks"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    """Each execution device in turn."""
    if request.param == "sim":
        request.getfixturevalue("sim")
    return str(request.param)


def denoiser(pipe: DiffusionPipeline) -> str:
    return "transformer" if "transformer" in pipe.components else "unet"


def compiled(pipe: DiffusionPipeline, how: str, backend: str) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    HOW[how](pipe, denoiser(pipe), backend=counter)
    return counter


def resident(case: str, device: str, how: str, backend: str, **call: Any) -> tuple[torch.Tensor, int]:
    """The image of the compiled pipeline on the device, and how many graphs were compiled for it."""
    pipe = factory.CASES[case].build().to(device)
    counter = compiled(pipe, how, backend)
    image = factory.run(case, pipe, **call)
    assert torch.equal(factory.run(case, pipe, **call), image)
    return image, counter.frame_count


@contextlib.contextmanager
def nothing_compiled_again() -> Iterator[None]:
    """A recompilation is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def own_traces(module: nn.Module) -> list[str]:
    """What is left of us in a module that isn't under layerwise offload."""
    return [
        f"{path}: {name}"
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (Held, Outside)) or name in ("_hf_hook", "_old_forward")
    ]


# ---------------------------------------------------------------------- pipelines
@pytest.mark.parametrize("when", ["before", "after", pytest.param("after a call", marks=SLOW)])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=SLOW)])
@pytest.mark.parametrize("case", ["flux", pytest.param("sd15", marks=SLOW)])
def test_compiled_blocks_stream_without_breaks_and_compile_as_often_as_resident_ones(
    case: str, backend: str, when: str, device: str, cell: Cell
) -> None:
    cell("torch.compile", f"`compile_repeated_blocks()`, {case}", SIDE[when])
    expected, graphs = resident(case, device, "blocks", backend)
    pipe = factory.CASES[case].build()
    counter = compiled(pipe, "blocks", backend) if when == "before" else None
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device=device)
    if when == "after a call":
        factory.run(case, pipe)
    counter = counter or compiled(pipe, "blocks", backend)
    assert torch.equal(factory.run(case, pipe), expected)
    with nothing_compiled_again():
        for _ in range(3):
            assert torch.equal(factory.run(case, pipe), expected)
    # Two denoisers of one class share their blocks' code, so the second may need fewer graphs, never more.
    assert 0 < counter.frame_count <= graphs
    assert not counters["graph_break"]
    report = handle.report()
    assert report.peak_seen <= handle.plan.peak_bytes
    assert next(c for c in report.components if c.name == denoiser(pipe)).streamed_groups


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("case", ["flux", pytest.param("sd15", marks=SLOW)])
def test_a_denoiser_compiled_as_a_whole_runs_with_compiled_blocks_and_is_itself_again_afterwards(
    case: str, how: str, when: str, sim: Any, cell: Cell
) -> None:
    cell("torch.compile", f"{CALLED[how]}, {case}", SIDE[when], "right: with its blocks compiled")
    expected, _ = resident(case, "sim", how, "eager")
    _, graphs = resident(case, "sim", "blocks", "eager")
    pipe = factory.CASES[case].build()
    name = denoiser(pipe)
    counter = compiled(pipe, how, "eager") if when == "before" else None
    before = getattr(pipe, name), getattr(pipe, name)._compiled_call_impl
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    if when == "after a call":
        factory.run(case, pipe)
    counter = counter or compiled(pipe, how, "eager")
    assert torch.equal(factory.run(case, pipe), expected)
    with nothing_compiled_again():
        for _ in range(3):
            assert torch.equal(factory.run(case, pipe), expected)
    assert 0 < counter.frame_count <= graphs
    assert not counters["graph_break"]
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    assert any("compiled as a whole" in note for note in handle.report().notes)
    blocks = counter.frame_count
    pipe.disable_layerwise_offload()
    assert own_traces(getattr(pipe, name)) == []
    if when == "before":
        assert (getattr(pipe, name), getattr(pipe, name)._compiled_call_impl) == before
    assert torch.equal(factory.run(case, pipe), expected)
    assert counter.frame_count > blocks  # compiled as a whole again


@pytest.mark.slow
def test_other_sizes_compile_as_often_as_resident_ones(device: str) -> None:
    """A third size needs no graph of its own: the shapes have become dynamic."""
    sizes = [{"height": 16, "width": 16}, {"height": 32, "width": 16}, {"height": 32, "width": 32}]
    images, graphs = [], 0
    reference = factory.CASES["flux"].build().to(device)
    counter = compiled(reference, "blocks", "eager")
    images = [factory.run("flux", reference, **size) for size in sizes]
    graphs = counter.frame_count
    pipe = factory.CASES["flux"].build()
    counter = compiled(pipe, "blocks", "eager")
    pipe.enable_layerwise_offload(mode="memory", onload_device=device)
    for size, image in zip(sizes, images, strict=True):
        assert torch.equal(factory.run("flux", pipe, **size), image)
    assert counter.frame_count <= graphs
    with nothing_compiled_again():
        for size, image in zip(sizes, images, strict=True):
            assert torch.equal(factory.run("flux", pipe, **size), image)
    assert not counters["graph_break"]


def test_a_compiled_decoder_is_taken_for_its_model(sim: Any) -> None:
    reference, pipe = factory.CASES["flux"].build().to("sim"), factory.CASES["flux"].build()
    for each in (reference, pipe):
        each.vae.decode = torch.compile(each.vae.decode, backend="eager")
    before = pipe.vae.decode
    expected = factory.run("flux", reference)
    counters.clear()
    with pipe.enable_layerwise_offload(mode="memory", onload_device="sim"):
        for _ in range(2):
            assert torch.equal(factory.run("flux", pipe), expected)
        assert not counters["graph_break"]
    assert pipe.vae.decode is before
    assert torch.equal(factory.run("flux", pipe), expected)


def test_a_lora_loaded_into_compiled_blocks(sim: Any) -> None:
    lora = pytest.importorskip("lora", reason="LoRA needs peft")
    images, pipes = [], [factory.CASES["flux"].build() for _ in range(2)]
    checkpoint = lora.factors(pipes[0], ["transformer"], seed=3)
    pipes[0].to("sim")
    pipes[1].enable_layerwise_offload(mode="memory", onload_device="sim")
    for pipe in pipes:
        compiled(pipe, "blocks", "eager")
        images.append([factory.run("flux", pipe)])
        pipe.load_lora_weights(lora.copied(checkpoint))
        images[-1] += [factory.run("flux", pipe) for _ in range(3)]
        pipe.unload_lora_weights()
        images[-1].append(factory.run("flux", pipe))
    for resident_, streamed in zip(*images, strict=True):
        assert torch.equal(resident_, streamed)
    assert not torch.equal(images[0][0], images[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["flux", "sd15"])
def test_inductor_on_the_cpu(case: str) -> None:
    """The same kernels on the same values: bit-identical to the resident pipeline with its blocks compiled."""
    images = []
    for stream in (False, True):
        torch._dynamo.reset()
        pipe = factory.CASES[case].build()
        getattr(pipe, denoiser(pipe)).compile_repeated_blocks(fullgraph=True)
        if stream:
            pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
        images.append(factory.run(case, pipe))
        with nothing_compiled_again():
            assert torch.equal(factory.run(case, pipe), images[-1])
    assert torch.equal(*images)


# ---------------------------------------------------------------------- bare modules
def compile_all(blocks: nn.ModuleList, **options: Any) -> None:
    for block in blocks:
        block.compile(**options)


def wrap_all(blocks: nn.ModuleList, **options: Any) -> None:
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, **options)


def wrap_forwards(blocks: nn.ModuleList, **options: Any) -> None:
    for block in blocks:
        block.forward = torch.compile(block.forward, **options)


@pytest.mark.parametrize("way", [compile_all, wrap_all, wrap_forwards])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=SLOW)])
@pytest.mark.parametrize("mode", ["memory", "auto", "speed"])
def test_slots_and_residents_share_one_graph(mode: str, backend: str, way: Callable[..., None], device: str) -> None:
    """Weights lie elsewhere in each pass, and are the same parameters: no guard on them fails."""
    module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
    inputs = [models.numbers(2, models.WIDTH, seed=seed) for seed in range(8)]
    expected = [models.run(reference, x) for x in inputs]
    counter = CompileCounterWithBackend(backend)
    way(module.blocks, backend=counter)
    calls = [block._compiled_call_impl or block.__dict__.get("forward") for block in module.blocks]
    handle = models.stream(module, mode, device, share=None if mode == "memory" else 0.6)
    for x, output in zip(inputs, expected, strict=True):
        assert torch.equal(models.run(module, x), output)
    # Six blocks of one class, and one graph; `forward` of each is a function of its own to `torch.compile`.
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    with nothing_compiled_again():
        for x, output in zip(inputs, expected, strict=True):
            assert torch.equal(models.run(module, x), output)
    handle.remove()
    assert own_traces(module) == []
    assert [block._compiled_call_impl or block.__dict__.get("forward") for block in module.blocks] == calls
    assert torch.equal(models.run(module, inputs[0]), expected[0])


@pytest.mark.parametrize("way", [compile_all, wrap_all])
def test_blocks_compiled_between_passes_are_found_in_the_next_one(way: Callable[..., None], sim: Any) -> None:
    module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
    handle = models.stream(module)
    inputs = [models.numbers(2, models.WIDTH, seed=seed) for seed in range(4)]
    assert torch.equal(models.run(module, inputs[0]), models.run(reference, inputs[0]))
    counter = CompileCounterWithBackend("eager")
    way(module.blocks, backend=counter)
    for x in inputs:
        assert torch.equal(models.run(module, x), models.run(reference, x))
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    assert not [part for block in module.blocks for part in block.modules() if "_hf_hook" in vars(part)]
    handle.remove()
    assert own_traces(module) == []


def test_a_compiled_leaf_and_a_compiled_root(sim: Any) -> None:
    module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
    x = models.numbers(2, models.WIDTH)
    handle = models.stream(module)
    models.run(module, x)
    counter = CompileCounterWithBackend("eager")
    module.proj_in.compile(backend=counter)
    module.compile(backend=counter)
    for _ in range(3):
        assert torch.equal(models.run(module, x), models.run(reference, x))
    # The blocks' one graph: torch compiles none of a module that is only a `Linear`.
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    handle.remove()
    assert own_traces(module) == []
    assert torch.equal(models.run(module, x), models.run(reference, x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("how", ["around", "forward"])
def test_code_compiled_around_a_streamed_module_stops_at_it(how: str, sim: Any) -> None:
    """It can't be traced through; what is around it is compiled all the same."""
    module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
    handle = models.stream(module)
    x = models.numbers(2, models.WIDTH)
    inner = module.forward if how == "forward" else module
    call = torch.compile(lambda x: inner(x * 2) + 1, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(call(x.to("sim")).cpu(), reference(x * 2) + 1)
    assert sum(counters["graph_break"].values()) <= 2  # in the code around it, and where it begins
    handle.remove()


def test_a_module_given_as_torch_compile_returned_it(sim: Any) -> None:
    module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
    wrapper: Any = torch.compile(module, backend="eager")
    handle = apply_layerwise_offload(wrapper, "memory", onload_device="sim")
    x = models.numbers(2, models.WIDTH)
    for _ in range(3):
        assert torch.equal(models.run(wrapper, x), models.run(reference, x))
        assert torch.equal(models.run(module, x), models.run(reference, x))
    assert not counters["graph_break"]
    handle.remove()
    assert own_traces(wrapper) == []
    assert torch.equal(models.run(wrapper, x), models.run(reference, x))


def test_what_is_compiled_no_longer_streams_layer_by_layer_again(sim: Any) -> None:
    pipe = factory.CASES["flux"].build()
    expected = factory.run("flux", pipe)
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("flux", pipe)
    groups = [c.groups for c in handle.report().components if c.name == "transformer"]
    compiled(pipe, "blocks", "eager")
    assert torch.equal(factory.run("flux", pipe), expected)
    assert [c.groups for c in handle.report().components if c.name == "transformer"] < groups
    for part in pipe.transformer.modules():
        part._compiled_call_impl = None
    for _ in range(2):
        assert torch.equal(factory.run("flux", pipe), expected)
    assert [c.groups for c in handle.report().components if c.name == "transformer"] == groups


def test_a_copy_of_a_compiled_module_is_an_ordinary_one(sim: Any) -> None:
    for way in (compile_all, wrap_forwards):
        module, reference = models.make(models.MlpStack), models.make(models.MlpStack)
        way(module.blocks, backend="eager")
        module.compile(backend="eager")
        handle = models.stream(module)
        x = models.numbers(2, models.WIDTH)
        models.run(module, x)
        twin = copy.deepcopy(module)
        handle.remove()
        assert own_traces(twin) == []
        module.proj_in.weight.data.zero_()
        assert torch.equal(models.run(twin, x), models.run(reference, x))


@pytest.mark.parametrize("how", HOW)
def test_planning_sees_what_was_compiled(how: str) -> None:
    plans = []
    for compile_it in (False, True):
        pipe = factory.CASES["flux"].build()
        counter = compiled(pipe, how, "eager") if compile_it else None
        call = {**factory.CASES["flux"].call_kwargs(), "memory_budget": "2GiB", "hardware": "RTX 4090"}
        plans.append(str(plan_layerwise_offload(pipe, **call)))
        assert counter is None or counter.frame_count == 0
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_blocks_of_one_class_and_many_shapes_are_each_compiled(sim: Any) -> None:
    """`fullgraph=True` is met by one graph of the whole model; torch allows 8 of a class by default."""
    module, reference = (
        models.make(lambda: models.Blocks([models.Mlp(ratio=ratio) for ratio in range(1, 13)])) for _ in range(2)
    )
    counter = CompileCounterWithBackend("eager")
    module.compile(backend=counter, fullgraph=True)
    handle = models.stream(module)
    inputs = [models.numbers(2, models.WIDTH, seed=seed) for seed in range(3)]
    for x in inputs:
        assert torch.equal(models.run(module, x), models.run(reference, x))
    assert counter.frame_count == 12
    handle.remove()
    assert torch.equal(models.run(module, inputs[0]), models.run(reference, inputs[0]))
    assert counter.frame_count == 13


@pytest.mark.slow
@pytest.mark.parametrize("other", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_a_wrapped_model_is_taken_over_from_another_offload(other: str, sim: Any) -> None:
    """accelerate's hook shows on the module, and its `forward` on what `torch.compile(module)` returned."""
    expected, _ = resident("flux", "sim", "wrapped", "eager")
    pipe = factory.CASES["flux"].build()
    counter = compiled(pipe, "wrapped", "eager")
    getattr(pipe, other)(device="sim")
    with pipe.enable_layerwise_offload(mode="memory", onload_device="sim") as handle:
        for _ in range(2):
            assert torch.equal(factory.run("flux", pipe), expected)
        assert any("compiled as a whole" in note for note in handle.report().notes)
    assert own_traces(pipe.transformer) == []
    blocks = counter.frame_count
    pipe.to("sim")
    assert torch.equal(factory.run("flux", pipe), expected)
    assert counter.frame_count > blocks


# ---------------------------------------------------------------------- refused
def test_compiled_code_of_unknown_origin_is_refused_by_name() -> None:
    pipe = factory.CASES["flux"].build()
    pipe.transformer._compiled_call_impl = pipe.transformer._call_impl
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer'.*pipe\.transformer\.compile_repeated_blocks\(\)"):
        pipe.enable_layerwise_offload("transformer", mode="memory", onload_device="cpu")
    assert "_hf_hook" not in vars(pipe.transformer)


@pytest.mark.parametrize("how", ["blocks", "compile", "wrapped"])
def test_device_graphs_are_refused_by_name(how: str, sim: Any, cell: Cell) -> None:
    cell("torch.compile", "CUDA graphs (`mode='reduce-overhead'`)", "before ours", "refused")
    pipe = factory.CASES["flux"].build()
    HOW[how](pipe, "transformer", mode="reduce-overhead")
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer' is compiled with CUDA graphs.*no-cudagraphs"):
        pipe.enable_layerwise_offload("transformer", mode="memory", onload_device="sim")
    assert not isinstance(pipe.transformer._compiled_call_impl, Held)


@pytest.mark.parametrize("how", ["blocks", "compile", "wrapped"])
def test_frozen_weights_are_refused_by_name(how: str) -> None:
    pipe = factory.CASES["flux"].build()
    HOW[how](pipe, "transformer", options={"freezing": True})
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer' is compiled with inductor's freezing.*Compile it"):
        pipe.enable_layerwise_offload("transformer", mode="memory", onload_device="cpu")
    assert not isinstance(pipe.transformer._compiled_call_impl, Held)
