"""Text and image encoders of transformers: they stream within a quarter of their weights, whoever calls which part."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import models
from diffusers_layerwise import OffloadHandle
from factory import text, vision
from models import stream

LAYERS = 12
VOCABULARY = 99
DEPTH = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}

ENCODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: text.tiny_t5(num_layers=LAYERS, vocab_size=VOCABULARY),
    "umt5": lambda: text.tiny_umt5(num_layers=LAYERS, vocab_size=VOCABULARY),
    "clip_text": lambda: text.tiny_clip_text(num_hidden_layers=LAYERS),
    "clip_vision": lambda: vision.tiny_clip_vision(num_hidden_layers=LAYERS),
    "siglip_vision": lambda: vision.tiny_siglip_vision(num_hidden_layers=LAYERS),
    "llama": lambda: text.tiny_llama(**DEPTH),
    "gemma2": lambda: text.tiny_gemma2(**DEPTH),
    "qwen3": lambda: text.tiny_qwen3(**DEPTH),
}

Inputs = dict[str, torch.Tensor]


def inputs_of(name: str, device: str = "cpu") -> Inputs:
    """Pixels or token numbers with a mask that hides the last ones."""
    if "vision" in name:
        return {"pixel_values": models.numbers(2, 3, 32, 32).to(device)}
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": models.tokens(2, 12).to(device), "attention_mask": mask.to(device)}


def outputs(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """All tensors that a call returns, on the CPU; attention caches are left out."""
    with torch.no_grad():
        result = model(**inputs, output_hidden_states=True)
    found: list[torch.Tensor] = []
    for value in result.values():
        if isinstance(value, torch.Tensor):
            found.append(value.cpu())
        elif isinstance(value, tuple):
            found += [item.cpu() for item in value if isinstance(item, torch.Tensor)]
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def bound(handle: OffloadHandle, model: nn.Module) -> float:
    """A quarter of the weights; where one module is larger than that, that one, one slot and what stays beside it."""
    (component,) = handle.plan.components
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(unit.size for unit in handle._runtime.schedules[0].component.units)
    alone = largest + handle.plan.slot_bytes + component.fixed_bytes + 256
    assert alone <= handle.plan.slots * largest + component.fixed_bytes
    return max(0.25 * weights, alone)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_is_bit_identical_within_a_quarter_of_its_weights(name: str, sim: ModuleType) -> None:
    model = models.make(ENCODERS[name])
    expected = outputs(model, inputs_of(name))
    handle = stream(model)
    for where in ("cpu", "sim", "cpu", "sim"):
        assert same(outputs(model, inputs_of(name, where)), expected)
    report = handle.report()
    assert report.peak_seen == handle.plan.peak_bytes <= bound(handle, model)
    assert report.components[0].resident_groups == 0
    layers = {layer.rpartition(".")[2] for layer in handle._runtime.schedules[0].component.layers}
    assert {str(index) for index in range(LAYERS)} <= layers


def test_large_models_stay_far_below_a_quarter(sim: ModuleType) -> None:
    model = models.make(lambda: text.tiny_t5(num_layers=24, d_model=64, d_ff=160, vocab_size=VOCABULARY))
    expected = outputs(model, inputs_of("t5"))
    handle = stream(model)
    for _ in range(3):
        assert same(outputs(model, inputs_of("t5")), expected)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert handle.report().peak_ever <= 0.1 * weights


def test_attention_pooling_head_of_siglip_is_one_unit(sim: ModuleType) -> None:
    model = models.make(ENCODERS["siglip_vision"])
    pools = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert pools
    handle = stream(model)
    units = [unit.name for unit in handle._runtime.schedules[0].component.units]
    assert set(pools) <= set(units)
    assert not any(name.startswith(f"{pool}.") for name in units for pool in pools)


# ---- parts called directly


def test_embedding_table_is_called_on_its_own(sim: ModuleType) -> None:
    model, ids = models.make(ENCODERS["t5"]), models.tokens(2, 5)
    with torch.no_grad():
        expected, whole = model.get_input_embeddings()(ids), outputs(model, inputs_of("t5"))
    stream(model)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model.get_input_embeddings()(ids.to("sim")).cpu(), expected)
        assert same(outputs(model, inputs_of("t5")), whole)


@pytest.mark.parametrize(
    ("name", "part"),
    [("t5", "encoder"), ("umt5", "encoder"), ("clip_text", ""), ("siglip_vision", ""), ("qwen3", "model")],
)
def test_inner_model_is_called_on_its_own(name: str, part: str, sim: ModuleType) -> None:
    model = models.make(ENCODERS[name])
    inner = model.get_submodule(part)
    expected, whole = outputs(inner, inputs_of(name)), outputs(model, inputs_of(name))
    handle = stream(model)
    for _ in range(3):
        assert same(outputs(inner, inputs_of(name, "sim")), expected)
    assert same(outputs(model, inputs_of(name)), whole)
    assert same(outputs(inner, inputs_of(name, "sim")), expected)
    assert handle.report().peak_seen <= handle.plan.peak_bytes


def test_single_layers_are_called_in_any_order(sim: ModuleType) -> None:
    model, hidden = models.make(ENCODERS["siglip_vision"]), models.numbers(2, 16, text.WIDTH)
    layers = next(m for name, m in model.named_modules() if name.endswith("encoder.layers"))

    def call(index: int, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result = layers[index](x, attention_mask=None)
        return (result[0] if isinstance(result, tuple) else result).cpu()

    expected = {index: call(index, hidden) for index in (3, 0, 7, 11)}
    handle = stream(model)
    for _ in range(3):
        assert all(torch.equal(call(index, hidden.to("sim")), value) for index, value in expected.items())
    handle.release()
    assert handle._runtime.transfer.held_bytes == 0


@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_generate_gives_the_tokens_of_the_resident_model(kind: str, mode: str, sim: ModuleType) -> None:
    configs = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**text.decoder_options(DEPTH))),
        "qwen3": ENCODERS["qwen3"],
    }
    model = models.make(configs[kind])
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs_of("llama"), **options)
    handle = stream(model, mode, share=0.5 if mode == "auto" else None)
    for _ in range(2):
        found = model.generate(**inputs_of("llama", "sim"), **options)
        assert torch.equal(found.sequences.cpu(), expected.sequences)
        assert same([score.cpu() for score in found.scores], list(expected.scores))
    assert handle.report().components[0].passes >= 12
    assert handle.report().peak_seen <= handle.plan.peak_bytes


def test_devices_that_models_report_are_the_execution_device(sim: ModuleType) -> None:
    model = models.make(ENCODERS["t5"])
    handle = stream(model)
    assert model.device == model.encoder.device == torch.device("sim:0")
    handle.remove()
    assert model.device == model.encoder.device == torch.device("cpu")
