"""Wrong arguments: a clear error before anything is touched, with an earlier handle still in force."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import factory
import models
from diffusers_layerwise import (
    LayerwiseOffloadError,
    OffloadHandle,
    apply_layerwise_offload,
    disable_layerwise_offload,
    enable_layerwise_offload,
    register_layers,
)
from factory import CASES

CASE = CASES["flux"]
LOADED: dict[str, torch.Tensor] = {}


def expected() -> torch.Tensor:
    """What the stock pipeline makes."""
    if not LOADED:
        LOADED["image"] = factory.run(CASE, CASE.build())
    return LOADED["image"]


def snapshot(pipe: DiffusionPipeline) -> list[Any]:
    """Everything that an enable might touch: attributes, hooks, parameters and where they point."""
    found: list[Any] = [sorted(vars(pipe)), pipe.layerwise_offload, type(pipe).__call__]
    for name, component in factory.modules_of(pipe).items():
        found.append((name, id(component), getattr(component, "device", None)))
        for path, module in component.named_modules():
            found.append((path, sorted(vars(module)), id(module.__dict__.get("_hf_hook"))))
            found.append([len(hooks) for hooks in (module._forward_pre_hooks, module._forward_hooks)])
        found += [(id(p), p.data_ptr(), p._version, p.requires_grad) for p in component.parameters()]
        found += [(id(b), b.data_ptr(), b._version) for b in component.buffers()]
    return found


@pytest.fixture(scope="module")
def plain() -> DiffusionPipeline:
    """A pipeline that no test may change."""
    return CASE.build()


@pytest.fixture(scope="module")
def enabled() -> Iterator[DiffusionPipeline]:
    """One that streams, and that no test may change either."""
    pipe = CASE.build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    factory.run(CASE, pipe)
    yield pipe
    assert torch.equal(factory.run(CASE, pipe), expected())


def seal(module: nn.Module) -> None:
    """Makes the first weight of a module such a tensor."""
    owner = next(m for m in module.modules() if isinstance(getattr(m, "weight", None), nn.Parameter))
    owner.weight = nn.Parameter(owner.weight.data.as_subclass(models.Sealed), requires_grad=False)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"components": ["tranformer"]}, ValueError, r"No component 'tranformer'. Did you mean 'transformer'?"),
    ({"components": {"text_encodr_2": "skip"}}, ValueError, r"Did you mean 'text_encoder_2'?"),
    ({"components": ["all", "!vea"]}, ValueError, "No component 'vea'. Did you mean 'vae'?"),
    ({"components": "scheduler"}, ValueError, "'scheduler' holds no weights, so there is nothing to stream"),
    ({"components": [3]}, TypeError, "components must name components by string, got 3 (int)"),
    ({"components": {3: "layerwise"}}, TypeError, "components must name components by string, got 3 (int)"),
    ({"components": 3}, TypeError, "components must be a name, a list of names or a dict, got 3"),
    ({"components": []}, ValueError, "components=[] selects nothing; pass None for all, or some of ['"),
    ({"components": "", "mode": "memory"}, ValueError, "components='' selects nothing; pass None for all"),
    ({"components": {}, "mode": "manual"}, ValueError, "components={} selects nothing; pass None for all"),
    ({"components": {"vae": "residnt"}}, ValueError, "got 'residnt'. Did you mean 'resident'?"),
    ({"components": {"vae": {"prefech": 1}}}, ValueError, "no field 'prefech'. Did you mean 'prefetch'?"),
    ({"components": {"vae": {"prefetch": -1}}}, ValueError, "config.prefetch must be 0 or more groups, got -1"),
    ({"mode": "manual"}, ValueError, "mode='manual' needs components"),
    ({"mode": "sped"}, ValueError, "mode must be one of"),
    ({"mode": None}, ValueError, "mode must be one of"),
    ({"memory_budget": 0}, ValueError, "memory_budget must be more than 0 bytes, got 0"),
    ({"memory_budget": -1}, ValueError, "memory_budget must be more than 0 bytes, got -1"),
    ({"memory_budget": math.nan}, ValueError, "memory_budget must be more than 0 bytes, got nan"),
    ({"memory_budget": "8XB"}, ValueError, "memory_budget must be bytes as an int or a text such as '8GiB'"),
    ({"memory_budget": [8]}, TypeError, "memory_budget must be bytes as an int or a text such as '8GiB'"),
    ({"config": {"prefetch": -1}}, ValueError, "config.prefetch must be 0 or more groups, got -1"),
    ({"config": {"prefetch": 1.5}}, TypeError, "config.prefetch must be a whole number of groups, got 1.5"),
    ({"config": {"prefetch": "2"}}, ValueError, "config.prefetch as a text is a size and needs a unit ('256MiB')"),
    ({"config": {"resident": 1.5}}, ValueError, "config.resident as a share must lie between 0.0 and 1.0, got 1.5"),
    ({"config": {"resident": -2}}, ValueError, "config.resident must be 0 or more groups, got -2"),
    (
        {"config": {"host": "disk"}},
        ValueError,
        "config.host must be one of ['pinned', 'pageable', 'mapped', 'file', 'shared'], got 'disk'",
    ),
    ({"config": {"placement": "best"}}, ValueError, "config.placement must be one of ['stall', 'spread', 'prefix']"),
    ({"config": {"prefech": 1}}, ValueError, "config has no field 'prefech'. Did you mean 'prefetch'?"),
    ({"config": 3}, TypeError, "config must be a LayerwiseOffloadConfig or a dict of its fields"),
    ({"onload_device": "cude"}, ValueError, "onload_device must be a device such as 'cuda' or 'cpu', got 'cude'"),
    ({"onload_device": []}, ValueError, "onload_device must be a device such as 'cuda' or 'cpu', got []"),
    ({"onload_device": "meta"}, ValueError, "onload_device can't be 'meta'"),
    ({"memory_budget": 1}, torch.OutOfMemoryError, "the smallest budget that works is"),
    ({"memory_budget": "1KiB", "mode": "memory"}, torch.OutOfMemoryError, "the smallest budget that works is"),
    (
        {
            "memory_budget": "1MiB",
            "mode": "manual",
            "components": {"all": "layerwise", "transformer": {"resident": 0.9}},
        },
        torch.OutOfMemoryError,
        "can't hold the resident groups that config['resident'] asks for in 'transformer': the smallest budget",
    ),
    (
        {"memory_budget": "300KiB", "mode": "manual", "components": "all", "config": {"prefetch": 100}},
        torch.OutOfMemoryError,
        "the smallest budget that works is",
    ),
]
IDS = [", ".join(f"{key}={value!r}" for key, value in given.items()) for given, _, _ in BAD]


def refused(pipe: DiffusionPipeline, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        pipe.enable_layerwise_offload(**({"onload_device": "cpu"} | given))
    assert type(caught.value) is error


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=IDS)
def test_a_wrong_argument_is_refused_before_anything_is_touched(
    plain: DiffusionPipeline, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = snapshot(plain)
    refused(plain, given, error, message)
    assert snapshot(plain) == before


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=IDS)
def test_a_wrong_argument_leaves_an_earlier_handle_in_force(
    enabled: DiffusionPipeline, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = snapshot(enabled)
    refused(enabled, given, error, message)
    assert snapshot(enabled) == before


def works(pipe: DiffusionPipeline, handle: OffloadHandle) -> bool:
    """Whether the handle is in force and the pipeline streams to the right image."""
    moved = handle.report().moved_bytes
    same = torch.equal(factory.run(CASE, pipe), expected())
    return same and pipe.layerwise_offload is handle and handle.report().moved_bytes > moved


def test_an_earlier_handle_works_on_after_a_second_enable_failed_at_the_last_check() -> None:
    pipe = CASE.build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    assert works(pipe, handle)
    with pytest.raises(torch.OutOfMemoryError):
        pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=1)
    assert works(pipe, handle)
    handle.remove()
    assert pipe.layerwise_offload is None
    assert torch.equal(factory.run(CASE, pipe), expected())


@pytest.mark.parametrize("kind", ["sealed", "meta", "group offload"])
def test_an_earlier_handle_stays_when_a_named_component_cannot_be_streamed(kind: str, tmp_path: Path) -> None:
    pipe = CASE.build()
    handle = pipe.enable_layerwise_offload(["transformer", "vae"], "memory", onload_device="cpu")
    if kind == "sealed":
        pipe.image_encoder = nn.Linear(4, 4)
        seal(pipe.image_encoder)
    elif kind == "meta":
        pipe.image_encoder = nn.Linear(4, 4, device="meta")
    else:
        other = CASE.build().vae
        other.enable_group_offload(torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
        pipe.image_encoder = other
    before = snapshot(pipe)
    with pytest.raises(LayerwiseOffloadError, match="'image_encoder' "):
        pipe.enable_layerwise_offload("=image_encoder", onload_device="cpu")
    assert snapshot(pipe) == before
    assert pipe.layerwise_offload is handle


def test_another_offload_stays_when_the_budget_is_too_small() -> None:
    pipe = CASE.build()
    pipe.enable_model_cpu_offload(device="cpu")
    before = snapshot(pipe)
    with pytest.raises(torch.OutOfMemoryError):
        pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=1)
    assert snapshot(pipe) == before


# ---- the smallest budget


def smallest(error: torch.OutOfMemoryError) -> int:
    """The budget that the message says."""
    return int(re.search(r"smallest budget that works is (\d+) bytes", str(error))[1])


def refuse_budget(pipe: DiffusionPipeline, budget: int, **config: Any) -> int:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=budget, config=config)
    return smallest(caught.value)


def test_the_smallest_budget_in_the_message_works_and_one_byte_less_does_not() -> None:
    pipe = CASE.build()
    least = refuse_budget(pipe, 1000, activation_reserve=0)
    assert refuse_budget(pipe, least - 1, activation_reserve=0) == least
    handle = pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=least, config={"activation_reserve": 0})
    assert torch.equal(factory.run(CASE, pipe), expected())
    assert handle.report().peak_ever <= least


def test_the_smallest_budget_counts_an_explicit_reserve() -> None:
    pipe = CASE.build()
    least = refuse_budget(pipe, 1000, activation_reserve=0)
    assert refuse_budget(pipe, 5000, activation_reserve=4000) == least + 4000
    pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=least + 4000, config={"activation_reserve": 4000})


def test_the_smallest_budget_in_the_message_works_with_the_default_reserve() -> None:
    pipe = CASE.build()
    least = refuse_budget(pipe, 1000)
    assert refuse_budget(pipe, least - 1) == least
    pipe.enable_layerwise_offload(onload_device="cpu", memory_budget=least)


@pytest.mark.parametrize(
    ("mode", "own", "budget"),
    [
        pytest.param(
            *("manual", {"prefetch": 1, "resident": 0.9}, "900KiB"),
        ),
        pytest.param(
            *("memory", {"resident": 10}, "300KiB"),
        ),
        pytest.param(
            *("manual", {"prefetch": 1, "resident": 3}, "220KiB"),
        ),
        ("manual", {"prefetch": 8}, "250KiB"),
        ("speed", {"prefetch": "256KiB"}, "250KiB"),
    ],
    ids=str,
)
def test_explicit_options_that_do_not_fit_are_refused_with_a_budget_that_works(
    mode: str, own: dict[str, Any], budget: str
) -> None:
    pipe, parts = CASE.build(), {"all": "layerwise", "transformer": own}
    before = snapshot(pipe)
    with pytest.raises(torch.OutOfMemoryError, match="can't hold ") as caught:
        pipe.enable_layerwise_offload(parts, mode, onload_device="cpu", memory_budget=budget)
    assert snapshot(pipe) == before
    least = smallest(caught.value)
    handle = pipe.enable_layerwise_offload(parts, mode, onload_device="cpu", memory_budget=least)
    for _ in range(2):
        assert torch.equal(factory.run(CASE, pipe), expected())
    assert handle.report().peak_ever <= least
    transformer = next(c for c in handle.report().components if c.name == "transformer")
    if isinstance(own.get("resident"), int):
        assert transformer.resident_groups == own["resident"]


def test_the_smallest_budget_of_a_module_is_its_weights_alone() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        apply_layerwise_offload(module, onload_device="cpu", memory_budget=1)
    least = smallest(caught.value)
    with pytest.raises(torch.OutOfMemoryError):
        apply_layerwise_offload(module, onload_device="cpu", memory_budget=least - 1)
    with torch.no_grad():
        plain = module(torch.ones(2, 64))
        handle = apply_layerwise_offload(module, onload_device="cpu", memory_budget=least)
        assert torch.equal(module(torch.ones(2, 64)), plain)
    assert handle.report().peak_ever <= least


# ---- what can't be streamed


@pytest.mark.parametrize("value", [None, 3, "FluxPipeline", nn.Linear(2, 2), DiffusionPipeline])
def test_what_is_no_pipeline_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="enable_layerwise_offload needs a DiffusionPipeline, got "):
        enable_layerwise_offload(value, onload_device="cpu")


@pytest.mark.parametrize("value", [None, 3, nn.Linear, torch.ones(2)])
def test_what_is_no_module_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"apply_layerwise_offload needs an nn.Module, got "):
        apply_layerwise_offload(value, onload_device="cpu")


def test_a_pipeline_is_no_module(plain: DiffusionPipeline) -> None:
    with pytest.raises(TypeError, match=r"apply_layerwise_offload needs an nn.Module, got FluxPipeline"):
        apply_layerwise_offload(plain, onload_device="cpu")


@pytest.mark.parametrize("value", [None, 3, nn.Linear(2, 2)])
def test_disabling_what_is_no_pipeline_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="DiffusionPipeline"):
        disable_layerwise_offload(value)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ReLU(), "has no parameters, so there is nothing to stream"),
        (nn.Sequential(nn.ReLU()), "has no parameters, so there is nothing to stream"),
        (nn.Linear(4, 4, device="meta"), "weight is on the meta device and has no data and 1 more. Load its weights"),
    ],
    ids=["no parameters", "none at any depth", "meta"],
)
def test_a_module_without_weights_is_refused_with_the_reason(module: nn.Module, reason: str) -> None:
    before = [sorted(vars(m)) for m in module.modules()]
    with pytest.raises(LayerwiseOffloadError, match=re.escape(reason)):
        apply_layerwise_offload(module, onload_device="cpu")
    assert [sorted(vars(m)) for m in module.modules()] == before


def test_a_tensor_subclass_is_refused_by_name_when_named_and_skipped_with_a_note_when_not() -> None:
    pipe = CASE.build()
    seal(pipe.vae)
    before = snapshot(pipe)
    with pytest.raises(LayerwiseOffloadError, match=r"'vae' can't be streamed: .*Sealed's, which can't be made anew"):
        pipe.enable_layerwise_offload({"=vae": "layerwise"}, "memory", onload_device="cpu")
    assert snapshot(pipe) == before
    handle = pipe.enable_layerwise_offload("all", "memory", onload_device="cpu")
    assert any("vae: skipped: 'vae' can't be streamed" in note for note in handle.report().notes)
    assert "vae" not in [component.name for component in handle.plan.components]
    assert torch.equal(factory.run(CASE, pipe), expected())


def test_a_named_component_without_parameters_is_refused() -> None:
    pipe = CASE.build()
    pipe.image_encoder = nn.Identity()
    with pytest.raises(LayerwiseOffloadError, match=r"'image_encoder'.* has no parameters"):
        pipe.enable_layerwise_offload("=image_encoder", onload_device="cpu")


def test_a_skipped_component_has_to_be_where_it_will_run(sim: ModuleType) -> None:
    pipe = CASE.build()
    before = snapshot(pipe)
    message = (
        r"components\['vae'\] is 'skip', .* they are on cpu and the pipeline runs on sim:0\. Move it first \(pipe.vae"
    )
    with pytest.raises(LayerwiseOffloadError, match=message):
        pipe.enable_layerwise_offload({"all": "layerwise", "=vae": "skip"}, "memory", onload_device="sim")
    assert snapshot(pipe) == before
    pipe.vae.to("sim")
    pipe.enable_layerwise_offload({"all": "layerwise", "=vae": "skip"}, "memory", onload_device="sim")
    for _ in range(2):
        assert torch.equal(factory.run(CASE, pipe), expected())
    assert {p.device.type for p in pipe.vae.parameters()} == {"sim"}


@pytest.mark.parametrize("value", [None, nn.Linear(2, 2), "Linear", int])
def test_layers_are_registered_for_classes_of_modules_only(value: Any) -> None:
    with pytest.raises(TypeError, match=r"register_layers needs an nn.Module class, got "):
        register_layers(value, [])


@pytest.mark.parametrize("names", ["blocks", [3], [None]])
def test_layers_are_registered_by_a_list_of_names_only(names: Any) -> None:
    class Own(nn.Module):
        pass

    with pytest.raises(TypeError, match="register_layers needs a list of dotted names, got "):
        register_layers(Own, names)


def test_a_registered_name_that_does_not_exist_is_refused_with_the_children_that_do() -> None:
    class Net(nn.Sequential):
        pass

    register_layers(Net, ["blocks"])
    with pytest.raises(LayerwiseOffloadError, match=r"register_layers\(Net, \.\.\.\) names 'blocks'.*\['0', '1'\]"):
        apply_layerwise_offload(Net(nn.Linear(2, 2), nn.Linear(2, 2)), onload_device="cpu")
