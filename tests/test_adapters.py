"""Textual inversions, IP-Adapters, and LoRA together with a ControlNet, quantised weights or layerwise casting."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell
from factory.inputs import image_tensor
from factory.vision import tiny_clip_image_processor, tiny_clip_vision
from lora import copied, factors, ip_adapter
from quantized import KINDS, quantise

SLOW = pytest.mark.slow
Step = tuple[str, Callable[[DiffusionPipeline], Any], dict[str, Any]]
MODES = [pytest.param(m, marks=() if m == "memory" else SLOW) for m in ("memory", "auto", "speed")]
WHEN = ["after", pytest.param("before", marks=SLOW)]


def live(case: str, steps: list[Step], mode: str, when: str, make: Callable[[], DiffusionPipeline], device: str) -> Any:
    """Takes the steps on an ordinary pipeline and on a streamed one, and compares two calls after each."""
    reference, pipe = make(), make()
    if device == "cpu" or when == "on the device":
        reference.to(device)
    early = 1 if when == "before" else 0
    for _, step, _ in steps[:early]:
        step(reference)
        step(pipe)
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device=device)
    if when == "after":
        factory.run(case, pipe)
    for name, step, options in [*[("enabled", lambda _: None, o) for _, _, o in steps[:early]], *steps[early:]]:
        step(reference)
        step(pipe)
        expected = factory.run(case, reference, **options)
        for _ in range(2):
            assert torch.equal(factory.run(case, pipe, **options), expected), name
        assert handle.report().peak_seen <= handle.plan.peak_bytes, name
    handle.remove()
    assert torch.equal(factory.run(case, pipe, **options), expected)
    return handle


# ---------------------------------------------------------------------- textual inversion
def tokens(*names: str) -> Callable[[DiffusionPipeline], Any]:
    def load(pipe: DiffusionPipeline) -> None:
        for which in ("", "_2"):
            encoder = getattr(pipe, f"text_encoder{which}", None)
            if encoder is None:
                continue
            for seed, name in enumerate(names):
                vector = torch.randn(1, encoder.config.hidden_size, generator=torch.Generator().manual_seed(seed)) * 3
                pipe.load_textual_inversion(
                    {name: vector}, token=name, text_encoder=encoder, tokenizer=getattr(pipe, f"tokenizer{which}")
                )

    return load


def unload(pipe: DiffusionPipeline) -> None:
    for which in ("", "_2"):
        if getattr(pipe, f"text_encoder{which}", None) is not None:
            pipe.unload_textual_inversion(
                text_encoder=getattr(pipe, f"text_encoder{which}"), tokenizer=getattr(pipe, f"tokenizer{which}")
            )


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["sd15", pytest.param("sdxl", marks=SLOW)])
def test_textual_inversion(case: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    cell("LoRA and adapters", f"textual inversion, {case}", f"{mode}, {when}")
    steps: list[Step] = [
        ("one", tokens("<first>"), {"prompt": "a cat like <first>"}),
        ("two more", tokens("<second>", "<third>"), {"prompt": "<first> and <second> on <third>"}),
        ("none", unload, {"prompt": "a cat"}),
        ("again", tokens("<second>"), {"prompt": "a <second>"}),
    ]
    live(case, steps, mode, when, factory.CASES[case].build, "sim")


def test_a_textual_inversion_shows(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    before = factory.run("sd15", pipe, prompt="a cat like <first>")
    tokens("<first>")(pipe)
    assert not torch.equal(factory.run("sd15", pipe, prompt="a cat like <first>"), before)


# ---------------------------------------------------------------------- IP-Adapter
def image_encoder() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return tiny_clip_vision().eval()


def denoiser(pipe: DiffusionPipeline) -> Any:
    return getattr(pipe, "unet", None) or pipe.transformer


def with_ip_adapter(pipe: DiffusionPipeline) -> None:
    encoder = image_encoder()
    pipe.register_modules(image_encoder=encoder, feature_extractor=tiny_clip_image_processor())
    checkpoint = ip_adapter(denoiser(pipe), encoder.config.projection_dim)
    if hasattr(pipe, "unet"):
        pipe.load_ip_adapter(checkpoint, subfolder=None, weight_name=None, image_encoder_folder=None)
    else:
        pipe.load_ip_adapter(checkpoint, weight_name=None, image_encoder_pretrained_model_name_or_path=None)
    pipe.set_ip_adapter_scale(0.8)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["flux", pytest.param("sd15", marks=SLOW), pytest.param("sdxl", marks=SLOW)])
def test_ip_adapter(case: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    cell("LoRA and adapters", f"IP-Adapter, {case}", f"{mode}, {when}")
    image = {"ip_adapter_image": image_tensor()}
    name = "unet" if case != "flux" else "transformer"
    lora = factors(factory.CASES[case].build(), [name], 1)
    steps: list[Step] = [
        ("load", with_ip_adapter, image),
        ("scale", lambda p: p.set_ip_adapter_scale(0.3), image),
        ("with a LoRA", lambda p: p.load_lora_weights(copied(lora), adapter_name="a"), image),
        ("without it", lambda p: p.unload_lora_weights(), image),
        ("unload", lambda p: p.unload_ip_adapter(), {}),
    ]
    live(case, steps, mode, when, factory.CASES[case].build, "sim")


# ---------------------------------------------------------------------- ControlNet
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["sd15_controlnet", pytest.param("sdxl_controlnet", marks=SLOW)])
def test_lora_with_a_controlnet(case: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    cell("LoRA and adapters", f"LoRA with a ControlNet, {case}", f"{mode}, {when}")
    base = factory.CASES[case].build()
    first, second = factors(base, ["unet", "text_encoder"], 1), factors(base, ["unet"], 2)
    steps: list[Step] = [
        ("load", lambda p: p.load_lora_weights(copied(first), adapter_name="a"), {}),
        ("load another", lambda p: p.load_lora_weights(copied(second), adapter_name="b"), {}),
        ("mix", lambda p: p.set_adapters(["a", "b"], [0.5, 0.6]), {}),
        ("fuse", lambda p: p.fuse_lora(components=["unet", "text_encoder"]), {}),
        ("unload", lambda p: p.unload_lora_weights(), {}),
    ]
    live(case, steps, mode, when, factory.CASES[case].build, "sim")


# ---------------------------------------------------------------------- with other kinds of weights
def cast(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


#: diffusers looks for the weights by name to load a LoRA for Flux, and doesn't find those of optimum-quanto.
ON = [("layerwise casting", "sim"), *((k, d[0]) for k, (_, d, _) in KINDS.items() if "quanto" not in k)]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("mode", ["auto", pytest.param("memory", marks=SLOW)])
@pytest.mark.parametrize(
    ("kind", "device"),
    [pytest.param(*o, marks=() if o[0] in ("layerwise casting", "torchao int8 weight-only") else SLOW) for o in ON],
)
def test_lora_on_other_weights(kind: str, device: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    def make() -> DiffusionPipeline:
        pipe = factory.CASES["flux"].build().to(torch.bfloat16)
        if kind != "layerwise casting":
            quantise(pipe.transformer, kind)
        return pipe

    base = factory.CASES["flux"].build()
    lora = {k: v.to(torch.bfloat16) for k, v in factors(base, ["transformer"], 1).items()}

    def load(pipe: DiffusionPipeline) -> None:
        pipe.load_lora_weights(copied(lora), adapter_name="a")

    # A LoRA that is loaded into a model that casts already comes as fp8, with which diffusers itself can't compute.
    casting = kind == "layerwise casting"
    steps: list[Step] = [
        ("load", load, {}),
        ("cast", cast if casting else lambda _: None, {}),
        ("mix", lambda p: p.set_adapters(["a"], [0.5]), {}),
        *([] if casting else [("unload", lambda p: p.unload_lora_weights(), {})]),
    ]
    cell("LoRA and adapters", f"LoRA on {kind} ({device})", f"{mode}, {when}")
    live("flux", steps, mode, when, make, device)
