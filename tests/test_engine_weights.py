"""A streamed module's weights: identity, host copies, layout, saving, and how everything is given back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import factory
import models
from diffusers_layerwise.tensors import ALIGNMENT
from models import copies, run, stream, tensors

Meter = Callable[[Callable[[], Any]], tuple[Any, dict[str, int]]]

SETTLED = 4
"""Passes after which the host copy is packed and prefetch wraps round."""


def watch(module: nn.Module, seen: list[tuple[str, torch.Tensor]]) -> None:
    """Notes the parameters that each plain linear layer has while it runs. To be called before streaming."""

    def spy(child: nn.Linear, name: str, x: torch.Tensor) -> torch.Tensor:
        seen.extend((f"{name}.{key}", parameter.data) for key, parameter in child.named_parameters())
        return nn.Linear.forward(child, x)

    for name, child in module.named_modules():
        if type(child) is nn.Linear:
            child.forward = functools.partial(spy, child, name)


@pytest.fixture(params=[*models.STACKS, *models.LANGUAGE_MODELS])
def case(request: pytest.FixtureRequest, sim: ModuleType) -> tuple[nn.Module, torch.Tensor]:
    """Each toy module with an input."""
    module = models.make((models.STACKS | models.LANGUAGE_MODELS)[request.param])
    return module, models.tokens(3, 5) if request.param in models.LANGUAGE_MODELS else models.numbers(3, models.WIDTH)


# ---- at rest and on the device


def test_parameters_keep_their_identity_and_are_whole_on_the_host_after_each_pass(
    case: tuple[nn.Module, torch.Tensor],
) -> None:
    module, x = case
    objects, values = {name: id(t) for name, t in tensors(module).items()}, copies(module)
    kept = {name for name, t in tensors(module).items() if isinstance(t, nn.Parameter)}
    handle = stream(module)
    streamed = {
        e.name for unit in handle._runtime.schedules[0].component.units for x in unit.extents for e in x.entries
    }
    for _ in range(SETTLED):
        run(module, x)
        for name, tensor in tensors(module).items():
            assert id(tensor) == objects[name]
            assert isinstance(tensor, nn.Parameter) == (name in kept)
            if name in streamed:
                assert tensor.device.type == "cpu", name
            assert torch.equal(tensor.detach().cpu(), values[name]), name
    handle.release()
    assert {tensor.device.type for tensor in tensors(module).values()} == {"cpu"}


def test_weights_are_never_at_storage_offset_0_and_aligned_at_rest_and_on_the_device(
    case: tuple[nn.Module, torch.Tensor],
) -> None:
    module, x = case
    seen: list[tuple[str, torch.Tensor]] = []
    watch(module, seen)
    handle = stream(module)
    for _ in range(SETTLED):
        run(module, x)
    assert {tensor.device.type for _, tensor in seen} <= {"sim"}
    assert all(tensor.storage_offset() > 0 and tensor.data_ptr() % 16 == 0 for _, tensor in seen)
    used = handle._runtime.schedules[0].order.used
    for unit in handle._runtime.schedules[0].component.units:
        for extent in unit.extents if unit.index in used else []:
            assert all(e.tensor.storage_offset() > 0 for e in extent.entries)
            assert extent.source.storage_offset() % ALIGNMENT == 0
            assert extent.source.is_pinned()


def test_device_offsets_are_the_same_in_each_pass(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    seen: list[tuple[str, torch.Tensor]] = []
    watch(chain, seen)
    stream(chain)
    found = []
    for _ in range(SETTLED + 2):
        seen.clear()
        run(chain, x)
        found.append([(name, w.storage_offset(), w.device.type) for name, w in seen])
    assert found[-1] == found[-2] == found[-3]
    assert all(kind == "sim" and offset > 0 for _, offset, kind in found[-1])


def test_strides_of_non_contiguous_weights_are_kept_on_the_host_and_on_the_device(sim: ModuleType) -> None:
    module, x = models.make(models.transposed_stack), models.numbers(2, models.WIDTH)
    strides = {name: t.stride() for name, t in tensors(module).items()}
    assert (1, models.WIDTH) in strides.values()
    expected = run(module, x)
    seen: list[tuple[str, torch.Tensor]] = []
    watch(module, seen)
    handle = stream(module)
    for _ in range(SETTLED):
        assert torch.equal(run(module, x), expected)
        assert {name: t.stride() for name, t in tensors(module).items()} == strides
    assert {tensor.stride() for _, tensor in seen} == {(1, models.WIDTH), (2,)}
    handle.remove()
    assert {name: t.stride() for name, t in tensors(module).items()} == strides


def test_tied_weights_are_moved_once_per_use_and_held_once(sim: ModuleType, meter: Meter) -> None:
    module, ids = models.make(models.TiedLanguageModel), models.tokens(3, 5).to("sim")
    expected = run(module.to("cpu"), ids.cpu())
    handle = stream(module)
    for _ in range(SETTLED):
        assert torch.equal(run(module, ids), expected)
        assert module.head.weight is module.embed.weight
    transfer = handle._runtime.transfer
    before, transfer.log = transfer.moved_bytes, []
    run(module, ids)
    log, transfer.log = transfer.log, None
    (tied,) = [group for group in handle.plan.components[0].groups if group.name.startswith("embed")]
    assert transfer.moved_bytes - before == handle.plan.components[0].streamed_bytes + tied.size
    assert sum("embed" in name for verb, name in log if verb == "ready") == 2
    assert sum("head" in name for _, name in log) == 0


def test_resident_tied_weights_take_memory_once(sim: ModuleType) -> None:
    module, ids = models.make(models.TiedLanguageModel), models.tokens(3, 5)
    unique = sum(p.numel() * p.element_size() for p in module.parameters())
    handle = stream(module, "speed")
    for _ in range(SETTLED):
        run(module, ids)
    tied = module.head.weight.numel() * 4
    assert unique == handle.report().weights
    assert unique <= handle._runtime.transfer.moved_bytes < unique + tied


# ---- saving


def test_state_dict_is_true_between_and_within_passes(sim: ModuleType) -> None:
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    values = copies(module)
    taken: list[dict[str, torch.Tensor]] = []
    stream(module)
    module.blocks[2].register_forward_hook(
        lambda *_: taken.append({name: t.cpu() for name, t in module.state_dict().items()})
    )
    for _ in range(SETTLED):
        run(module, x)
        taken.append(module.state_dict())
    for state in taken:
        assert state.keys() == values.keys()
        assert all(torch.equal(tensor.cpu(), values[name]) for name, tensor in state.items())


def test_pipeline_saved_while_streaming_loads_as_the_one_that_was_not(sim: ModuleType, tmp_path: Path) -> None:
    pipe = factory.CASES["flux"].build()
    values = {name: copies(module) for name, module in factory.modules_of(pipe).items()}
    expected = factory.run("flux", pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(2):
        factory.run("flux", pipe)
    pipe.save_pretrained(tmp_path)
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    for name, module in factory.modules_of(loaded).items():
        for key, value in copies(module).items():
            assert torch.equal(value, values[name][key]), f"{name}.{key}"
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(factory.run("flux", loaded), expected)
    assert torch.equal(factory.run("flux", pipe), expected)


# ---- the way back


def ordinary(module: nn.Module) -> bool:
    """Whether nothing of any offload is left on a module."""
    leftovers = {"_hf_hook", "_old_forward", "forward"}
    return not any(leftovers & m.__dict__.keys() or m._forward_pre_hooks for m in module.modules())


@pytest.mark.parametrize("passes", [0, 1, SETTLED])
@pytest.mark.parametrize("origin", ["cpu", "sim"])
def test_removing_leaves_an_ordinary_module_on_the_device_it_came_from(
    origin: str, passes: int, case: tuple[nn.Module, torch.Tensor], sim: ModuleType
) -> None:
    module, x = case
    had_hooks = any(m._forward_pre_hooks for m in module.modules())
    module.to(origin)
    x = x.to(origin)
    expected, values = run(module, x), copies(module)
    objects = {name: id(t) for name, t in tensors(module).items()}
    handle = stream(module)
    for _ in range(passes):
        run(module, x)
    handle.remove()
    handle.remove()
    assert {name: id(t) for name, t in tensors(module).items()} == objects
    for name, tensor in tensors(module).items():
        assert tensor.device.type == origin, name
        assert torch.equal(tensor.detach(), values[name]), name
        assert not tensor.is_pinned()
    assert ordinary(module) or had_hooks
    assert torch.equal(run(module, x), expected)
    assert run(module, x).grad_fn is None
    module(x).sum().backward()


def test_context_manager_removes_also_after_an_exception(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    chain.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), stream(chain):
        run(chain, x)
    assert ordinary(chain)
    assert {t.device.type for t in tensors(chain).values()} == {"cpu"}


def test_streaming_a_module_twice_replaces_the_first_time(sim: ModuleType) -> None:
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    expected = run(module, x)
    first = stream(module)
    run(module, x)
    second = stream(module, "speed")
    for _ in range(2):
        assert torch.equal(run(module, x), expected)
    first.remove()
    assert torch.equal(run(module, x), expected)
    second.remove()
    assert torch.equal(run(module, x), expected)
    assert ordinary(module)
