"""An interrupt at any point leaves a state in which the next call is right; handles that were removed stay inert."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import diffusers_layerwise as dl
import diffusers_layerwise.host as host
import factory
import models
from diffusers_layerwise.binding import Binding
from diffusers_layerwise.group import Group
from diffusers_layerwise.schedule import Schedule


def interrupt_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int) -> Callable[[], None]:
    """Raises KeyboardInterrupt at the nth call of a function; returns what undoes it."""
    original, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    return lambda: monkeypatch.setattr(owner, name, original)


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(host, "move_extent"), (Binding, "bind"), (Binding, "point_at"), (Binding, "point_home"), (Group, "start_onload")],
)
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_passes_after_an_interrupt_are_bit_identical(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, warm: int
) -> None:
    module, x = models.make(models.STACKS["chain"]), models.numbers(3, models.WIDTH)
    # Weights of their own, so that memory left by another test can't hold the right bytes by chance.
    generator = torch.Generator().manual_seed(100 * nth + 10 * warm + len(name))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1, generator=generator)
        expected = module(x)
        with dl.apply_layerwise_offload(module, "memory", onload_device="sim") as handle:
            for _ in range(warm):
                module(x)
            undo = interrupt_at(monkeypatch, owner, name, nth)
            try:
                module(x)
            except KeyboardInterrupt:
                sim.synchronize()
            undo()
            for _ in range(4):
                assert torch.equal(module(x).cpu(), expected)
            assert handle.plan.peak_bytes >= handle.report().peak_seen
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("mode", ["auto", "memory"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_a_plan_cut_short_in_a_pipeline_is_adopted_anew(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, nth: int, mode: str
) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    budget = sum(p.numel() * p.element_size() for m in factory.modules_of(pipe).values() for p in m.parameters()) // 2
    config = {"activation_reserve": 0}
    # Without a budget the free memory is read, and the plan made anew, at the first call.
    given = budget if mode == "auto" else None
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim", memory_budget=given, config=config)
    undo = interrupt_at(monkeypatch, Schedule, "adopt", nth)
    try:
        factory.run("sd15", pipe)
    except KeyboardInterrupt:
        sim.synchronize()
    undo()
    for _ in range(2):
        assert torch.equal(factory.run("sd15", pipe), expected)
        rings = {id(schedule.ring) for schedule in handle._runtime.schedules}
        assert len(rings) == 1  # all of them the ring that the plan counts
    assert handle.report().peak_ever <= budget


def test_a_pass_cut_short_is_no_order(sim: ModuleType) -> None:
    module, x = models.make(models.STACKS["chain"]), models.numbers(3, models.WIDTH)
    with torch.no_grad(), dl.apply_layerwise_offload(module, "memory", onload_device="sim") as handle:
        for _ in range(4):
            module(x)
        hook = module.blocks[2].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            module(x)
        hook.remove()
        before = handle.report().components[0].misses
        module(x)
        assert handle.report().components[0].misses == before


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_a_removed_handle_does_nothing_to_the_pipeline_any_more(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    old = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(onload_device="sim")
    factory.run("sd15", pipe)
    old.release()
    old.refresh()
    old.remove()
    assert torch.equal(factory.run("sd15", pipe), expected)
    pipe.disable_layerwise_offload()
    assert torch.equal(factory.run("sd15", pipe), expected)


def test_a_removed_handle_keeps_no_host_memory(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    gc.collect()  # handles of other tests
    before = sim.mem(0)["pinned"]
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(2):
        factory.run("sd15", pipe)
    pipe.disable_layerwise_offload()
    gc.collect()
    assert sim.mem(0)["pinned"] <= before
    assert handle.report().peak_seen > 0


def test_decoding_on_alternating_streams_is_ordered(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    latents = torch.randn(1, 4, 8, 8).to("sim")
    sim.synchronize()
    streams = [sim.Stream(), sim.Stream()]
    for turn in range(6):
        with sim.stream(streams[turn % 2]), torch.no_grad():
            pipe.vae.decode(latents)
    sim.synchronize()
    assert sim.races() == []


def test_edits_through_data_of_lasting_residents_are_taken_by_refresh(sim: ModuleType) -> None:
    module, x = models.make(models.STACKS["chain"]), models.numbers(3, models.WIDTH)
    with torch.no_grad():
        with dl.apply_layerwise_offload(module, onload_device="sim") as handle:
            for _ in range(2):
                module(x)
            for parameter in module.parameters():
                parameter.data.mul_(0.5)
            edited = module(x).cpu()
            handle.refresh()
            assert torch.equal(module(x).cpu(), edited)
        assert torch.equal(module(x), edited)
