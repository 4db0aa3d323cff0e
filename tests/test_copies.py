"""Copies and pickles of offloaded modules and pipelines are ordinary ones, with the weights as they are now."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import factory
import models
from models import make, numbers, run, stream, tensors, tokens

MARKS = {"_hf_hook", "_old_forward", "forward", "__deepcopy__", "__reduce_ex__"}


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_file(thing: Any) -> Any:
    page = io.BytesIO()
    torch.save(thing, page)
    page.seek(0)
    return torch.load(page, weights_only=False)


COPIERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_file,
}
copiers = pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)


def marks(module: nn.Module) -> list[str]:
    """What an ordinary module doesn't have."""
    found = [f"{path}: {mark}" for path, part in module.named_modules() for mark in MARKS & set(vars(part))]
    return found + [f"{path}: pre-hook" for path, part in module.named_modules() if part._forward_pre_hooks]


def assert_ordinary(twin: nn.Module, original: nn.Module) -> None:
    """No trace of offload, the same values on the CPU, and memory of its own of just the size of each tensor."""
    assert marks(twin) == []
    ours, theirs = tensors(twin), tensors(original)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, theirs[name].detach().cpu())
        assert tensor.requires_grad == theirs[name].requires_grad
        assert type(tensor) is type(theirs[name])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.untyped_storage().data_ptr() != theirs[name].untyped_storage().data_ptr()
    for name in ours:
        for other in ours:
            assert (ours[name] is ours[other]) == (theirs[name] is theirs[other]), "ties"


@copiers
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_copy_is_an_ordinary_module_with_the_same_results(
    sim: ModuleType, device: str, mode: str, calls: int, copier: Callable[[Any], Any]
) -> None:
    """In mode `auto` all weights are residents that stay on the device between calls."""
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    module.proj_in.weight.requires_grad_(False)
    expected = run(module, x)
    with stream(module, mode, device):
        for _ in range(calls):
            run(module, x)
        twin = copier(module)
        assert_ordinary(twin, module)
        assert torch.equal(run(twin, x), expected)
        part = copier(module.blocks[2])
        assert_ordinary(part, module.blocks[2])
        assert_ordinary(copier(module.blocks[1].up), module.blocks[1].up)
        assert torch.equal(run(module, x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(run(module, x), expected)
    assert marks(module) == []


@copiers
@pytest.mark.parametrize("kind", ["shared", "parametrised", "attention", "transposed"])
def test_copies_of_modules_with_peculiar_weights_are_right(
    sim: ModuleType, kind: str, copier: Callable[[Any], Any]
) -> None:
    if kind == "parametrised" and copier is not copy.deepcopy:
        pytest.skip("torch doesn't pickle parametrised modules")
    module, x = make(models.STACKS[kind]), numbers(3, models.WIDTH)
    expected = run(module, x)
    with stream(module):
        for _ in range(2):
            run(module, x)
        twin = copier(module)
        assert marks(twin) == []
        assert torch.equal(run(twin, x), expected)
        assert torch.equal(run(module, x), expected)


@copiers
def test_tied_weights_are_tied_in_the_copy(sim: ModuleType, copier: Callable[[Any], Any]) -> None:
    module, ids = make(models.TiedLanguageModel), tokens(3, 4)
    expected = run(module, ids)
    with stream(module):
        run(module, ids)
        twin = copier(module)
        assert twin.head.weight is twin.embed.weight
        assert_ordinary(twin, module)
        assert torch.equal(run(twin, ids), expected)


@copiers
def test_edits_since_the_last_call_are_in_the_copy(sim: ModuleType, copier: Callable[[Any], Any]) -> None:
    """On the host for what streams, on the device for what lasts there."""
    for mode in ("memory", "auto"):
        module, x = make(models.MlpStack), numbers(3, models.WIDTH)
        with stream(module, mode):
            for _ in range(2):
                run(module, x)
            sim.synchronize()  # the next pass's first groups are on their way
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.5)
            twin = copier(module)
            assert torch.equal(run(twin, x), run(module, x))


def test_a_pickle_of_a_small_module_holds_its_own_bytes_only(sim: ModuleType) -> None:
    """Weights are packed into large chunks, of which a view would be written as a whole."""
    module, x = make(models.MlpStack, depth=20), numbers(3, models.WIDTH)
    with stream(module):
        for _ in range(2):
            run(module, x)
        small = module.blocks[0].norm
        for written in (pickle.dumps(small), pickle.dumps([small.weight.shape, module.blocks[0].norm])):
            assert len(written) < 4096


def test_hooks_that_somebody_else_put_on_travel_and_ours_do_not(sim: ModuleType) -> None:
    module, x = make(models.Chain), numbers(3, models.WIDTH)
    add_hook_to_module(module.blocks[1].lin, Doubling())
    expected = run(module, x)
    with stream(module):
        for copier in COPIERS.values():
            assert torch.equal(run(module, x), expected)
            twin = copier(module)
            hooked = [part for part in twin.modules() if "_hf_hook" in vars(part)]
            assert hooked == [twin.blocks[1].lin]
            assert isinstance(hooked[0]._hf_hook, Doubling)
            assert torch.equal(run(twin, x), expected)
    assert torch.equal(run(module, x), expected)


class Doubling(ModelHook):
    """Doubles the output."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Twice the output."""
        return 2 * output


def test_a_forward_of_the_instances_own_is_kept(sim: ModuleType) -> None:
    module, x = make(models.Chain), numbers(3, models.WIDTH)
    module.blocks[0].lin.forward = _negated
    expected = run(module, x)
    with stream(module):
        twin = copy.deepcopy(module)
        assert vars(twin.blocks[0].lin)["forward"] is _negated
        assert torch.equal(run(twin, x), expected)


def _negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_the_pre_hook_of_weight_norm_units_stays_behind(sim: ModuleType) -> None:
    """torch can't copy the old `weight_norm` while its derived weight has a graph, so that one is computed anew."""
    module, x = make(models.weight_norm_stack), numbers(3, models.WIDTH)
    expected = run(module, x)
    for part in module.modules():
        if "weight" in vars(part):
            part.weight = part.weight.detach()
    with stream(module):
        run(module, x)
        twin = copy.deepcopy(module)
        assert [len(part._forward_pre_hooks) for part in twin.modules() if part._forward_pre_hooks] == [1, 1]
        assert torch.equal(run(twin, x), expected)
        assert torch.equal(run(module, x), expected)


@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_a_copied_pipeline_is_an_ordinary_one(sim: ModuleType, name: str, mode: str) -> None:
    pipe = factory.CASES[name].build()
    expected = factory.run(name, pipe)
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"residency": "lasting"})
    assert torch.equal(factory.run(name, pipe), expected)
    twin = copy.deepcopy(pipe)
    assert twin.layerwise_offload is None
    for part, module in factory.modules_of(twin).items():
        assert_ordinary(module, getattr(pipe, part))
    assert torch.equal(factory.run(name, twin), expected)
    assert torch.equal(factory.run(name, pipe), expected)
    twin.enable_layerwise_offload(mode="memory", onload_device="sim")
    assert torch.equal(factory.run(name, twin), expected)
    pipe.disable_layerwise_offload()
    for module in factory.modules_of(pipe).values():
        assert not [name for part in module.modules() for name in MARKS & set(vars(part))]


def test_a_skipped_component_is_copied_without_our_hook() -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload({"all": "layerwise", "vae": "skip"}, "memory", onload_device="cpu")
    for copier in COPIERS.values():
        assert marks(copier(pipe.vae)) == []
    assert torch.equal(factory.run("sd15", pipe), expected)
    pipe.disable_layerwise_offload()
    assert marks(pipe.vae) == []


def test_a_pickled_handle_is_none() -> None:
    module = make(models.Chain)
    with stream(module, device="cpu") as handle:
        assert through_pickle(handle) is None


def test_copying_while_another_thread_calls_gives_the_true_weights(sim: ModuleType) -> None:
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    with stream(module, "auto", share=0.5):
        seen: list[bool] = []
        worker = threading.Thread(target=lambda: seen.extend(torch.equal(run(module, x), expected) for _ in range(8)))
        worker.start()
        twins = [copy.deepcopy(module) for _ in range(4)]
        worker.join(60)
        assert seen == [True] * 8
        assert all(torch.equal(run(twin, x), expected) for twin in twins)


def test_removing_takes_the_attributes_off_again() -> None:
    module = make(models.SkipUNet)
    with stream(module, device="cpu"):
        assert all("__deepcopy__" in vars(part) for part in module.modules())
    assert marks(module) == []
