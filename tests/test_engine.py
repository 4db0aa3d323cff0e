"""How one module streams: what is loaded and freed when, divergence, exact results, and what a pass costs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

import models
from diffusers_layerwise import OffloadHandle
from diffusers_layerwise.tensors import align, span
from models import run, stream

Meter = Callable[[Callable[[], Any]], tuple[Any, dict[str, int]]]

STREAMING = {
    "memory": {"mode": "memory"},
    "speed_40": {"mode": "speed", "share": 0.4},
    "auto_60": {"mode": "auto", "share": 0.6},
    "all": {"mode": "speed"},
    "layers": {"mode": "manual", "config": {"group_size": "layer"}},
    "prefetch_0": {"mode": "manual", "config": {"prefetch": 0}},
    "prefetch_3": {"mode": "manual", "config": {"prefetch": 3}},
    "resident_2": {"mode": "manual", "config": {"resident": 2}},
}
"""Ways to stream; `share` is the budget as a part of the weights."""

SETTLED = 6
"""Passes after which no plan is made anew: two are measured, and their times are read when they are past."""


def events(handle: OffloadHandle, function: Callable[[], Any]) -> list[str]:
    """What the function made the engine do with the blocks of a `Chain`, such as `"load 0"`."""
    transfer = handle._runtime.transfer
    transfer.log = []
    function()
    found, transfer.log = transfer.log, None
    return [f"{verb} {name.split('.')[2]}" for verb, name in found]


def misses(handle: OffloadHandle) -> int:
    """Group uses so far that had to be loaded on demand."""
    return handle.report().components[0].misses


# ---- the order of events


def test_two_slots_load_one_block_ahead_and_wrap_round_to_the_next_pass(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    handle = stream(chain)
    body = """
        ready 0, free 0, load 2, ready 1, free 1, load 3, ready 2, free 2, load 0, ready 3, free 3, load 1
    """.strip().split(", ")
    assert events(handle, lambda: run(chain, x)) == ["load 0", "load 1", *body]
    # Before the second pass the blocks are packed in the order seen, so what was prefetched is read anew.
    assert events(handle, lambda: run(chain, x)) == ["free 0", "free 1", "load 0", "load 1", *body]
    for _ in range(2):
        assert events(handle, lambda: run(chain, x)) == body
    assert events(handle, handle.release) == ["free 0", "free 1"]
    assert handle._runtime.transfer.held_bytes == 0


def test_one_slot_loads_each_block_when_the_one_before_it_is_done(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    handle = stream(chain, mode="manual", config={"prefetch": 0, "group_size": 4352})
    for _ in range(2):
        run(chain, x)
    assert events(handle, lambda: run(chain, x)) == [
        f"{verb} {index}" for i in range(4) for verb, index in (("ready", i), ("free", i), ("load", (i + 1) % 4))
    ]


def test_resident_block_is_loaded_once_and_never_freed_between_passes(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    handle = stream(chain, mode="manual", config={"resident": 1, "group_size": 4352})
    seen = [event for _ in range(4) for event in events(handle, lambda: run(chain, x))]
    (resident,) = [i for i, group in enumerate(handle.plan.components[0].groups) if group.resident]
    steady = events(handle, lambda: run(chain, x))
    assert f"load {resident}" in seen
    assert not any(event.endswith(f" {resident}") for event in steady)
    assert sum(event.startswith("load") for event in steady) == 3


def test_order_of_registration_is_replaced_by_the_order_of_the_first_pass(sim: ModuleType) -> None:
    unet, x = models.make(models.SkipUNet), models.numbers(2, models.WIDTH)
    expected = run(unet, x)
    handle = stream(unet)
    missed = []
    for _ in range(4):
        assert torch.equal(run(unet, x), expected)
        missed.append(misses(handle))
    assert missed[0] > 0
    assert missed[1] == missed[2] == missed[3]
    executed = [group.name.split(".")[0] for group in handle.plan.components[0].groups]
    assert executed == sorted(executed, key="down_blocks mid_block up_blocks".split().index)


# ---- divergence

DIVERGING: dict[str, list[Sequence[int]]] = {
    "skip_one": [(0, 1, 2, 3, 4, 5), (0, 1, 3, 4, 5)],
    "skip_first": [(0, 1, 2, 3, 4, 5), (2, 3, 4, 5)],
    "skip_all_but_one": [(0, 1, 2, 3, 4, 5), (4,)],
    "early_exit": [(0, 1, 2, 3, 4, 5), (0, 1, 2)],
    "nothing": [(0, 1, 2, 3, 4, 5), ()],
    "repeat_each": [(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)],
    "repeat_all": [(0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5)],
    "back_and_forth": [(0, 1, 2, 3, 4, 5), (0, 1, 0, 1, 2, 1, 2, 3)],
    "reverse": [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)],
    "shuffle": [(3, 1, 4, 0, 5, 2), (2, 0, 5, 1, 3, 4)],
    "grow": [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)],
    "alternate": [(0, 1, 2, 3, 4, 5), (0, 5), (0, 1, 2, 3, 4, 5), (0, 5), (0, 1, 2, 3, 4, 5)],
}


@pytest.mark.parametrize("way", STREAMING)
@pytest.mark.parametrize("scenario", DIVERGING)
def test_diverging_passes_compute_the_same_and_are_relearned(scenario: str, way: str, sim: ModuleType) -> None:
    chain, x = models.make(models.Chain, 6), models.numbers(2, models.WIDTH)
    orders = DIVERGING[scenario]
    expected = {order: run(chain, x, order=order) for order in orders}
    handle = stream(chain, **STREAMING[way])
    for _ in range(2):
        for order in orders:
            for _ in range(1 if scenario == "alternate" else 3):
                assert torch.equal(run(chain, x, order=order), expected[order])
            if scenario != "alternate":
                before = misses(handle)
                assert torch.equal(run(chain, x, order=order), expected[order])
                assert misses(handle) == before, "the order of the pass before was not taken over"
    report = handle.report()
    assert report.peak_seen <= report.peak_predicted
    handle.release()
    assert handle._runtime.transfer.held_bytes == 0


def test_conditional_branches_are_bit_identical_whichever_is_taken(sim: ModuleType) -> None:
    module, x = models.make(models.Branches), models.numbers(2, models.WIDTH)
    expected = {left: run(module, x, left=left) for left in (True, False)}
    stream(module)
    for left in (True, True, False, False, True, False, True, True):
        assert torch.equal(run(module, x, left=left), expected[left])


# ---- every module, every way to stream


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("way", STREAMING)
@pytest.mark.parametrize("name", [*models.STACKS, *models.LANGUAGE_MODELS])
def test_every_module_is_bit_identical_under_every_plan(
    name: str, way: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "sim":
        request.getfixturevalue("sim")
    module = models.make((models.STACKS | models.LANGUAGE_MODELS)[name])
    x = models.tokens(3, 5) if name in models.LANGUAGE_MODELS else models.numbers(3, models.WIDTH)
    expected = run(module, x)
    handle = stream(module, device=device, **STREAMING[way])
    for _ in range(4):
        assert torch.equal(run(module, x), expected)
    report = handle.report()
    assert report.peak_seen == report.peak_predicted
    assert report.budget is None or report.peak_ever <= report.budget
    if way == "all":
        assert report.ring_slots == 0
        held = {id(t): t for t in [*module.parameters(), *module.buffers()]}.values()
        once = (sum(span(t) for t in held), sum(align(span(t)) for t in held))  # packed or not
        assert report.moved_bytes == 0 if device == "cpu" else once[0] <= report.moved_bytes <= once[1]
    handle.remove()
    assert torch.equal(run(module, x), expected)


# ---- what a pass costs


@pytest.mark.parametrize("way", ["memory", "speed_40", "layers"])
@pytest.mark.parametrize("name", models.STACKS)
def test_steady_pass_adds_one_copy_per_streamed_group_and_nothing_else(
    name: str, way: str, sim: ModuleType, meter: Meter
) -> None:
    resident = models.make(models.STACKS[name]).to("sim")
    module = models.make(models.STACKS[name])
    x = models.numbers(2, models.WIDTH).to("sim")
    with torch.no_grad():
        resident(x)
        _, base = meter(lambda: resident(x))
        handle = stream(module, **STREAMING[way])
        for _ in range(SETTLED):
            module(x)
            sim.synchronize()  # times of a pass that isn't over are read later, and may be what a plan changes for
        _, spent = meter(lambda: module(x))
    extra = {key: spent[key] - base[key] for key in spent if spent[key] != base[key]}
    groups = [g for g in handle.plan.components[0].groups if not g.resident and not g.name.startswith("right")]
    again = [g for g in groups if g.name == "blocks.1.lin"] if name == "shared" else []  # used twice in a pass
    assert extra.pop("h2d_copies") == len(groups + again)
    assert extra.pop("h2d_bytes") == sum(group.size for group in groups + again)
    assert extra == {}


@pytest.mark.parametrize("name", models.STACKS)
def test_device_memory_between_passes_is_what_the_engine_says_it_holds(name: str, sim: ModuleType) -> None:
    module, x = models.make(models.STACKS[name]), models.numbers(2, models.WIDTH)
    gc.collect()  # handles of earlier tests
    before = sim.mem()["allocated"]
    handle = stream(module)
    for _ in range(3):
        run(module, x)
        sim.synchronize()
        assert sim.mem()["allocated"] - before == handle._runtime.transfer.held_bytes > 0
    assert handle.report().peak_seen == handle.plan.peak_bytes
    handle.release()
    sim.synchronize()
    assert sim.mem()["allocated"] - before == handle._runtime.transfer.held_bytes == 0


def test_enabling_touches_no_device(sim: ModuleType, meter: Meter) -> None:
    gc.collect()  # handles of earlier tests
    chain, before = models.make(models.Chain), sim.mem()
    _, spent = meter(lambda: stream(chain))
    assert not any(spent.values())
    assert sim.mem() == before


def test_inputs_move_once_at_the_root_and_containers_without_host_tensors_stay_the_callers(
    sim: ModuleType, meter: Meter
) -> None:
    class Caching(models.Chain):
        """Fills the caller's list, as a video VAE's `feat_cache`."""

        def forward(self, x: torch.Tensor, cache: list[Any], more: dict[str, Any]) -> torch.Tensor:
            """Keeps the input of each block in `cache`."""
            seen.append((cache, more["y"].device.type))
            for index, block in enumerate(self.blocks):
                cache[index] = x
                x = block(x) + more["y"]
            return x

    seen: list[tuple[Any, str]] = []
    chain, x = models.make(Caching), models.numbers(2, models.WIDTH)
    stream(chain)
    for _ in range(3):
        cache: list[Any] = [None] * 4
        _, spent = meter(lambda cache=cache: run(chain, x, cache, more={"y": x}))
        assert seen[-1] == (cache, "sim")
        assert seen[-1][0] is cache
        assert all(kept.device.type == "sim" for kept in cache)
    assert spent["h2d_pageable_bytes"] == 2 * x.numel() * 4
