"""diffusers' other switches beside ours, in both orders: what each cell of the table in docs/usage.md promises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import ComponentsManager, DiffusionPipeline
from torch import nn

import diffusers_layerwise
import factory
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, conflicts

CASE = "flux"
#: What the user may select; the rest keeps what it had, or is placed.
SELECTIONS: list[Any] = [
    "all",
    ["transformer"],
    *(pytest.param(s, marks=pytest.mark.slow) for s in (["default"], ["=text_encoder_2"])),
]


def build() -> DiffusionPipeline:
    return factory.CASES[CASE].build()


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """The image of the pipeline on the CPU, whose kernels the simulated device runs."""
    return factory.run(CASE, build())


def run(pipe: DiffusionPipeline) -> torch.Tensor:
    return factory.run(CASE, pipe)


def model(pipe: DiffusionPipeline) -> None:
    pipe.enable_model_cpu_offload(device="sim")


def sequential(pipe: DiffusionPipeline) -> None:
    pipe.enable_sequential_cpu_offload(device="sim")


def leaf(pipe: DiffusionPipeline) -> None:
    pipe.enable_group_offload(onload_device=torch.device("sim:0"), offload_type="leaf_level")


def leaf_with_stream(pipe: DiffusionPipeline) -> None:
    pipe.enable_group_offload(onload_device=torch.device("sim:0"), offload_type="leaf_level", use_stream=True)


def block(pipe: DiffusionPipeline) -> None:
    pipe.enable_group_offload(onload_device=torch.device("sim:0"), offload_type="block_level", num_blocks_per_group=1)


OTHERS = {"model": model, "sequential": sequential, "leaf": leaf, "leaf, stream": leaf_with_stream, "block": block}
Switch = Callable[[DiffusionPipeline], None]

TABLE = "Other offloads and switches"
TITLES = {
    "model": "`enable_model_cpu_offload()`",
    "sequential": "`enable_sequential_cpu_offload()`",
    "leaf": "`enable_group_offload()`, leaf",
    "leaf, stream": "`enable_group_offload()`, leaf, stream",
    "block": "`enable_group_offload()`, block",
}


def states(pipe: DiffusionPipeline) -> dict[str, str | None]:
    """The other offload that each component is under."""
    return {name: conflicts.found(module) for name, module in factory.modules_of(pipe).items()}


def ours(pipe: DiffusionPipeline) -> set[str]:
    """The components that stream."""
    report = pipe.layerwise_offload.report()
    return {c.name for c in report.components if c.choice == "layerwise"}


def marks(pipe: DiffusionPipeline) -> list[str]:
    """What an ordinary pipeline doesn't have."""
    found = [name for name in pipe.__dict__ if "layerwise" in name]
    for name, module in factory.modules_of(pipe).items():
        for path, part in module.named_modules():
            found += [f"{name}.{path}: {mark}" for mark in {"_hf_hook", "forward", "_apply"} & set(part.__dict__)]
    return found


def values(pipe: DiffusionPipeline) -> dict[str, torch.Tensor]:
    return {
        f"{n}.{k}": p.detach().cpu().clone()
        for n, m in factory.modules_of(pipe).items()
        for k, p in m.named_parameters()
    }


# ---------------------------------------------------------------------- another offload before ours
@pytest.mark.parametrize("calls_before", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("other", OTHERS)
def test_another_offload_before_ours_is_replaced_for_the_selected_components_only(
    other: str, selection: Any, calls_before: int, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, TITLES[other], "before ours", "right: replaced for the selected components")
    if other == "block" and calls_before:
        pytest.skip("diffusers' block offload fails by itself on this pipeline's VAE")
    pipe = build()
    weights = values(pipe)
    OTHERS[other](pipe)
    for _ in range(calls_before):
        run(pipe)
    before = states(pipe)
    handle = pipe.enable_layerwise_offload(selection, "memory", onload_device="sim")
    for _ in range(2):
        if other == "block" and "vae" not in ours(pipe):
            break  # the same failure, of a component that we leave alone
        assert torch.equal(run(pipe), expected)
        after = states(pipe)
        assert {n for n, s in after.items() if s is None} == ours(pipe)
        assert all(s == before[n] for n, s in after.items() if s is not None)
        assert pipe.device == pipe._execution_device == torch.device("sim:0")
        for name, component in factory.modules_of(pipe).items():
            assert component.device == torch.device("sim:0"), name
    replaced = [note for note in handle.report().notes if "replaced" in note]
    assert len(replaced) == len(ours(pipe))
    pipe.disable_layerwise_offload()
    if selection == "all":
        assert marks(pipe) == []
        found = values(pipe)
        assert all(torch.equal(found[key], value) for key, value in weights.items())
        assert {p.device.type for m in factory.modules_of(pipe).values() for p in m.parameters()} == {"cpu"}
    else:
        assert states(pipe) == before, "the part that kept the other offload needs the rest under it too"
    if other != "block":
        assert torch.equal(run(pipe), expected)


# ---------------------------------------------------------------------- another offload after ours
@pytest.mark.parametrize("selection", SELECTIONS)
def test_model_offload_after_ours_gets_what_is_not_layerwise(
    selection: Any, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, TITLES["model"], "after ours", "right: gets the other components")
    pipe = build()
    handle = pipe.enable_layerwise_offload(selection, "memory", onload_device="sim")
    run(pipe)
    streamed = ours(pipe)
    pipe.enable_model_cpu_offload(device="sim")
    for _ in range(2):
        assert ours(pipe) == streamed
        assert {n for n, s in states(pipe).items() if s == "model"} == set(factory.modules_of(pipe)) - streamed
        assert torch.equal(run(pipe), expected)
        assert pipe.device == pipe._execution_device == torch.device("sim:0")
        assert {c.device for c in factory.modules_of(pipe).values()} == {torch.device("sim:0")}
    pipe.maybe_free_model_hooks()
    assert ours(pipe) == streamed
    handle.remove()
    assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("other", ["sequential", "leaf", "leaf, stream", "block"])
def test_sequential_and_group_offload_after_ours_are_refused_and_change_nothing(
    other: str, calls: int, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, TITLES[other], "after ours", "refused")
    pipe = build()
    handle = pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="sim")
    for _ in range(calls):
        run(pipe)
    before = marks(pipe)
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer'.*disable_layerwise_offload\(\) first"):
        OTHERS[other](pipe)
    assert marks(pipe) == before
    assert pipe.layerwise_offload is handle
    assert torch.equal(run(pipe), expected)
    pipe.disable_layerwise_offload()
    if other != "block":
        OTHERS[other](pipe)
        assert torch.equal(run(pipe), expected)


def test_group_offload_of_a_component_of_ours_is_refused_and_of_others_is_diffusers_own(
    sim: ModuleType, expected: torch.Tensor
) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="sim")
    with pytest.raises(LayerwiseOffloadError, match="FluxTransformer2DModel is under layerwise offload"):
        pipe.transformer.enable_group_offload(torch.device("sim"), offload_type="leaf_level")
    assert torch.equal(run(pipe), expected)


def test_group_offload_to_disk_is_refused_by_name(sim: ModuleType, tmp_path: Any, cell: Cell) -> None:
    cell(TABLE, "`enable_group_offload()` to disk", "before ours", "refused")
    pipe = build()
    pipe.transformer.enable_group_offload(
        torch.device("sim"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
    )
    with pytest.raises(LayerwiseOffloadError, match="'transformer' is under diffusers' group offload to disk"):
        pipe.enable_layerwise_offload(onload_device="sim")
    assert pipe.layerwise_offload is None


@pytest.mark.parametrize("other", ["model", "sequential", "leaf, stream"])
def test_a_bare_module_is_taken_from_another_offload(other: str, sim: ModuleType, expected: torch.Tensor) -> None:
    pipe = build()
    OTHERS[other](pipe)
    handle = diffusers_layerwise.apply_layerwise_offload(pipe.transformer, "memory", onload_device="sim")
    assert torch.equal(run(pipe), expected)
    assert states(pipe)["transformer"] is None or other == "model"
    handle.remove()


# ---------------------------------------------------------------------- twice, and undone
@pytest.mark.parametrize("second", SELECTIONS)
@pytest.mark.parametrize("first", SELECTIONS)
def test_enabling_twice_replaces_the_first_call(
    first: Any, second: Any, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, "`enable_layerwise_offload()` again", "after ours", "right: replaces the first")
    pipe = build()
    old = pipe.enable_layerwise_offload(first, "memory", onload_device="sim")
    run(pipe)
    new = pipe.enable_layerwise_offload(second, "auto", onload_device="sim")
    once = build()
    once.enable_layerwise_offload(second, "auto", onload_device="sim")
    assert ours(pipe) == ours(once)
    assert marks(pipe) == marks(once), "hooks are doubled"
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    old.remove()
    assert pipe.layerwise_offload is new
    assert torch.equal(run(pipe), expected)
    pipe.disable_layerwise_offload()
    assert marks(pipe) == []


@pytest.mark.parametrize("calls", [0, 2])
def test_remove_all_hooks_ends_layerwise_offload_in_good_order(
    calls: int, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, "`remove_all_hooks()`", "after ours", "right: ends ours")
    gc.collect()
    before = sim.mem(0)["allocated"]
    pipe = build()
    pipe.enable_layerwise_offload(mode="auto", onload_device="sim", config={"residency": "lasting"})
    for _ in range(calls):
        run(pipe)
    pipe.remove_all_hooks()
    assert pipe.layerwise_offload is None
    assert marks(pipe) == []
    gc.collect()
    assert sim.mem(0)["allocated"] - before < 100  # the scheduler's time steps
    assert torch.equal(run(pipe), expected)


def test_reset_device_map_ends_layerwise_offload_where_there_is_a_map(
    sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, "`reset_device_map()` without a map", "after ours")
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    pipe.reset_device_map()  # no map: nothing to reset
    assert torch.equal(run(pipe), expected)


# ---------------------------------------------------------------------- harmless switches
HARMLESS: dict[str, Switch] = {
    "maybe_free_model_hooks": lambda pipe: pipe.maybe_free_model_hooks(),
    "enable_vae_tiling": lambda pipe: pipe.vae.enable_tiling(),
    "enable_vae_slicing": lambda pipe: pipe.vae.enable_slicing(),
    "set_progress_bar_config": lambda pipe: pipe.set_progress_bar_config(disable=True),
    "fuse_qkv_projections": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "enable_attention_slicing": lambda pipe: pipe.enable_attention_slicing(),
    "enable_gradient_checkpointing": lambda pipe: pipe.transformer.enable_gradient_checkpointing(),
}


@pytest.mark.parametrize("order", ["before", pytest.param("after", marks=pytest.mark.slow), "after two calls"])
@pytest.mark.parametrize("switch", HARMLESS)
def test_a_switch_that_is_no_offload_works_in_both_orders(switch: str, order: str, sim: ModuleType, cell: Cell) -> None:
    cell(TABLE, f"`{switch}()`", "before ours" if order == "before" else "after ours")
    stock, pipe = build(), build()
    if order == "before":
        HARMLESS[switch](pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    if order == "after two calls":
        run(pipe), run(pipe)
    if order != "before":
        HARMLESS[switch](pipe)
    HARMLESS[switch](stock)
    wanted = run(stock)
    for _ in range(2):
        assert torch.equal(run(pipe), wanted)
    pipe.disable_layerwise_offload()
    assert marks(pipe) == []
    assert torch.equal(run(pipe), wanted)


# ---------------------------------------------------------------------- devices and dtypes
def test_a_pipeline_that_was_on_the_device_goes_back_there(sim: ModuleType, expected: torch.Tensor, cell: Cell) -> None:
    cell("Moves", "`pipe.to(device)`", "before ours", "right: goes back there")
    pipe = build().to("sim")
    ids = {key: id(p) for m in factory.modules_of(pipe).values() for key, p in m.named_parameters()}
    held, weights = sim.mem(0)["allocated"], sum(v.nbytes for v in values(pipe).values())
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    assert sim.mem(0)["allocated"] <= held - weights
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    pipe.disable_layerwise_offload()
    assert {p.device.type for m in factory.modules_of(pipe).values() for p in m.parameters()} == {"sim"}
    assert {key: id(p) for m in factory.modules_of(pipe).values() for key, p in m.named_parameters()} == ids
    assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_moving_the_pipeline_makes_the_plan_for_that_device(
    selection: Any, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell("Moves", "`pipe.to(device)`", "after ours", "right: runs there")
    gc.collect()
    sim.configure(ndev=2)
    before = sim.mem(0)["allocated"] + sim.mem(1)["allocated"]
    pipe = build()
    handle = pipe.enable_layerwise_offload(selection, "memory", onload_device="sim:0")
    run(pipe)
    for device in ("sim:1", "cpu", "sim:0"):
        assert pipe.to(device) is pipe
        assert pipe.layerwise_offload is handle
        assert str(pipe.device) == str(pipe._execution_device) == device
        moved = sim.mem(1)["allocs"]
        for _ in range(2):
            assert torch.equal(run(pipe), expected)
        assert (sim.mem(1)["allocs"] > moved) == (device == "sim:1")
        assert handle.report().device == device
        held = sim.mem(0)["allocated"] + sim.mem(1)["allocated"] - before
        assert held < 100 or selection != "all"
    handle.remove()
    assert marks(pipe) == []
    assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_change_of_dtype_is_made_on_the_host_copy(calls: int, mode: str, sim: ModuleType, cell: Cell) -> None:
    cell("Moves", "`pipe.to(dtype)`", "after ours")
    stock = build().to(torch.bfloat16)
    wanted = run(stock)
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"residency": "lasting"})
    for _ in range(calls):
        run(pipe)
    pipe.to(torch.bfloat16)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    weights = sum(p.numel() * 2 for m in factory.modules_of(pipe).values() for p in m.parameters())
    for _ in range(2):
        assert torch.equal(run(pipe), wanted)
    assert handle.report().weights == weights
    assert pipe.to("sim", torch.float32) is pipe
    handle.remove()
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.float32}


def half_and_back(module: nn.Module) -> None:
    module.half()
    module.float()


OWN_MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to its device": lambda module: module.to("sim"),
    "to the CPU": lambda module: module.to("cpu"),
    "to a dtype": lambda module: module.to(torch.float64).to(torch.float32),
    "to device and dtype": lambda module: module.to("sim", torch.float32),
    "half and back": half_and_back,
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("calls", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["transformer", "text_encoder_2", "vae"])
@pytest.mark.parametrize("move", OWN_MOVES)
def test_a_components_own_moves_have_defined_results(
    move: str, name: str, calls: int, sim: ModuleType, cell: Cell
) -> None:
    cell("Moves", f"one component: {move}", "after ours")
    stock, pipe = build(), build()
    pipe.enable_layerwise_offload(mode="auto", onload_device="sim", config={"residency": "lasting"})
    for _ in range(calls):
        run(pipe)
    for each in (stock, pipe):
        component = getattr(each, name)
        if each is pipe or "device" not in move:
            OWN_MOVES[move](component)
    wanted = run(stock)
    assert str(getattr(pipe, name).device) == "sim:0"
    for _ in range(2):
        assert torch.equal(run(pipe), wanted)
    pipe.disable_layerwise_offload()
    assert marks(pipe) == []


def test_a_component_alone_cannot_go_to_another_device(sim: ModuleType, expected: torch.Tensor, cell: Cell) -> None:
    cell("Moves", "one component: to another device", "after ours", "refused")
    sim.configure(ndev=2)
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim:0")
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer' .* can't be moved to sim:1 by itself"):
        pipe.transformer.to("sim:1")
    assert torch.equal(run(pipe), expected)


def test_generators_and_latents_land_where_the_pipeline_computes(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="sim")
    latents, _ = pipe.prepare_latents(
        1, 1, 16, 16, torch.float32, pipe._execution_device, torch.Generator().manual_seed(0)
    )
    assert str(latents.device) == "sim:0"


# ---------------------------------------------------------------------- ComponentsManager
def managed(pipe: DiffusionPipeline) -> ComponentsManager:
    manager = ComponentsManager()
    for name, module in factory.modules_of(pipe).items():
        manager.add(name, module)
    return manager


@pytest.mark.parametrize("selection", SELECTIONS)
def test_components_manager_before_ours_loses_the_selected_components(
    selection: Any, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(
        TABLE,
        "`ComponentsManager.enable_auto_cpu_offload()`",
        "before ours",
        "right: replaced for the selected components",
    )
    pipe = build()
    manager = managed(pipe)
    manager.enable_auto_cpu_offload(device="sim")
    pipe.enable_layerwise_offload(selection, "memory", onload_device="sim")
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
        assert {n for n, s in states(pipe).items() if s == "auto"} == set(factory.modules_of(pipe)) - ours(pipe)
    pipe.disable_layerwise_offload()
    assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_components_manager_after_ours_leaves_ours_alone(
    selection: Any, sim: ModuleType, expected: torch.Tensor, cell: Cell
) -> None:
    cell(TABLE, "`ComponentsManager.enable_auto_cpu_offload()`", "after ours", "right: gets the other components")
    pipe = build()
    manager = managed(pipe)
    pipe.enable_layerwise_offload(selection, "memory", onload_device="sim")
    run(pipe)
    streamed = ours(pipe)
    manager.enable_auto_cpu_offload(device="sim")
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
        assert ours(pipe) == streamed
    assert len(manager.components) == len(factory.modules_of(pipe))


# ---------------------------------------------------------------------- hooks of somebody else
class Scale(ModelHook):  # type: ignore[misc]
    """Somebody's own hook at a component's root: it changes the output, so that its absence shows."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return (output[0] * 0.5, *output[1:])


def test_a_foreign_hook_at_a_root_stays_and_works(sim: ModuleType) -> None:
    stock, pipe = build(), build()
    for each in (stock, pipe):
        add_hook_to_module(each.transformer, Scale())
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(2):
        assert torch.equal(run(pipe), run(stock))
    assert str(pipe._execution_device) == str(pipe.transformer._hf_hook.execution_device) == "sim:0"
    pipe.disable_layerwise_offload()
    assert isinstance(pipe.transformer._hf_hook, Scale)
    assert torch.equal(run(pipe), run(stock))
