"""Messages say what to call instead: the argument that was meant, the function for a module, how to enable again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import models
from diffusers_layerwise import (
    LayerwiseOffloadConfig,
    LayerwiseOffloadError,
    OffloadProfile,
    apply_layerwise_offload,
    disable_layerwise_offload,
    discovery,
    enable_layerwise_offload,
)
from factory import CASES

CASE = CASES["flux"]


@pytest.fixture(scope="module")
def pipe() -> DiffusionPipeline:
    """A pipeline that nothing is done to: all calls are refused."""
    return CASE.build()


HINTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"components": "8GiB"}, ValueError, "No component '8gib'. Did you mean memory_budget='8gib'? The pipeline has"),
    ({"components": 8 << 30}, TypeError, "got 8589934592 (int). Did you mean memory_budget=8589934592?"),
    ({"components": "memory"}, ValueError, "No component 'memory'. Did you mean mode='memory'? The pipeline has"),
    ({"components": "cuda:0"}, ValueError, "Did you mean onload_device='cuda:0'?"),
    ({"components": {"prefetch": 2}}, ValueError, "No component 'prefetch'. Did you mean config={'prefetch': ...}?"),
    ({"components": LayerwiseOffloadConfig(prefetch=2)}, TypeError, "Did you mean config=...?"),
    ({"mode": "8GiB"}, ValueError, "got '8GiB'. Did you mean memory_budget='8GiB'?"),
    ({"memory_budget": "auto"}, ValueError, "got 'auto'. Did you mean mode='auto'?"),
    ({"config": "memory"}, TypeError, "got 'memory'. Did you mean mode='memory'?"),
]


@pytest.mark.parametrize(("given", "error", "message"), HINTS, ids=[str(given) for given, _, _ in HINTS])
def test_what_another_argument_takes_is_answered_with_that_argument(
    pipe: DiffusionPipeline, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        pipe.enable_layerwise_offload(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"components": ["all", "!nope"]}, "No component 'nope'. The pipeline has ["),
        ({"mode": "fast"}, "mode must be one of ['auto', 'memory', 'speed', 'manual'], got 'fast'."),
    ],
    ids=str,
)
def test_nothing_is_guessed_where_no_name_is_near(pipe: DiffusionPipeline, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        pipe.enable_layerwise_offload(**given)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["scheduler", "tokenizer", "=tokenizer_2"])
def test_a_component_without_weights_is_told_from_an_unknown_one(pipe: DiffusionPipeline, name: str) -> None:
    bare = name.strip("=")
    with pytest.raises(ValueError, match=rf"^'{bare}' holds no weights, .* Leave it out. The pipeline has") as caught:
        pipe.enable_layerwise_offload([name])
    assert "Did you mean" not in str(caught.value)


def test_a_pipeline_and_a_module_are_answered_with_the_call_for_them(pipe: DiffusionPipeline) -> None:
    with pytest.raises(TypeError, match=r"got FluxPipeline. For a pipeline call pipe.enable_layerwise_offload\(\)"):
        apply_layerwise_offload(pipe)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got Linear. For a module use apply_layerwise_offload\(module\)"):
        enable_layerwise_offload(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got Linear. For a module call handle.remove\(\)"):
        disable_layerwise_offload(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [-1, 1.5, "2", "much"])
def test_a_profiles_prefetch_is_refused_by_its_own_name(prefetch: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^OffloadProfile.prefetch "):
        OffloadProfile(prefetch=prefetch)


def test_the_smallest_budget_says_that_activations_come_on_top(pipe: DiffusionPipeline) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"activations that need more come on top: plan_layerwise_off"):
        pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=1)


@pytest.mark.parametrize("components", [None, "all", ["transformer"]])
def test_registered_layers_that_a_component_lacks_are_refused_also_where_nobody_named_it(
    pipe: DiffusionPipeline, components: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_registered", {**discovery._registered, type(pipe.transformer): ("bloks",)})
    with pytest.raises(LayerwiseOffloadError, match=r"names 'bloks', which FluxTransformer2DModel doesn't have"):
        pipe.enable_layerwise_offload(components, onload_device="cpu")
    assert pipe.layerwise_offload is None


# ---- what is under layerwise offload, or was


def test_refreshing_an_unknown_component_is_refused_with_the_nearest_name() -> None:
    handle = CASE.build().enable_layerwise_offload(mode="memory", onload_device="cpu")
    with pytest.raises(ValueError, match=r"No component 'tranformer' is .* Did you mean 'transformer'\?"):
        handle.refresh("tranformer")


def test_a_handle_that_has_ended_is_not_entered_again() -> None:
    pipe = CASE.build()
    replaced = pipe.enable_layerwise_offload("vae", onload_device="cpu")
    newer = pipe.enable_layerwise_offload("vae", onload_device="cpu")
    bare = apply_layerwise_offload(nn.Linear(2, 2).eval(), onload_device="cpu")
    with bare, newer:
        pass
    calls = {replaced: "pipe.enable_layerwise_offload(", newer: "pipe.enable", bare: "apply_layerwise_offload(module, "}
    for handle, call in calls.items():
        message = re.escape("This handle has ended: its layerwise offload was taken off, or replaced by a newer call. ")
        with pytest.raises(LayerwiseOffloadError, match=message + f"Enable it again: with {re.escape(call)}"):
            handle.__enter__()


def test_gradients_and_moves_are_refused_with_the_call_that_ends_it() -> None:
    module = models.make(models.MlpStack)
    apply_layerwise_offload(module, "memory", onload_device="cpu")
    off = re.escape("take layerwise offload off first (handle.remove())")
    with pytest.raises(LayerwiseOffloadError, match=off):
        module(models.numbers(2, models.WIDTH))
    with pytest.raises(LayerwiseOffloadError, match=off.replace("take", "Take")):
        module.to("meta")
    pipe = CASE.build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    off = re.escape("take layerwise offload off first (pipe.disable_layerwise_offload())")
    with pytest.raises(LayerwiseOffloadError, match=off):
        pipe.transformer.train()(hidden_states=torch.ones(1))
    with pytest.raises(LayerwiseOffloadError, match=off):
        pipe.transformer.to("meta")


def test_more_resident_groups_than_there_are_means_all() -> None:
    pipe = CASE.build()
    handle = pipe.enable_layerwise_offload({"transformer": {"resident": 10**6}}, "manual", onload_device="cpu")
    transformer = handle.plan.component("transformer")
    assert all(group.resident for group in transformer.groups)
