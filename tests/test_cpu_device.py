"""Pipelines with the CPU as the execution device: streamed bit-identically, taken off without a trace."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import diffusers
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import DiffusionPipeline
from torch import nn

import factory
from diffusers_layerwise import LayerwiseOffloadError, OffloadHandle, apply_layerwise_offload
from diffusers_layerwise.hooks import PlacedHook
from diffusers_layerwise.tensors import ALIGNMENT
from factory import CASES

NAMES = ["flux", pytest.param("sd15", marks=pytest.mark.slow)]
WAYS: dict[str, dict[str, Any]] = {
    "memory": {"mode": "memory"},
    "auto": {"mode": "auto"},
    "auto, budget": {"mode": "auto", "memory_budget": "500KiB"},
    "speed, budget": {"mode": "speed", "memory_budget": "700KiB", "config": {"activation_reserve": 0}},
    "manual, half": {"mode": "manual", "components": {"all": {"resident": 0.5}}},
    "manual, layers": {"mode": "manual", "components": "all", "config": {"group_size": "layer", "prefetch": 1}},
    "manual, one slot": {"mode": "manual", "components": "all", "config": {"prefetch": 0, "placement": "prefix"}},
    "some": {"mode": "memory", "components": "dit"},
    "mixed": {"components": {"all": "layerwise", "=vae": "resident", "=text_encoder": "offload"}, "mode": "memory"},
    "lasting": {"mode": "auto", "memory_budget": "500KiB", "config": {"residency": "lasting"}},
}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each case in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def plain(name: str) -> torch.Tensor:
    """What the stock pipeline makes."""
    return factory.run(name, CASES[name].build())


def enable(pipe: DiffusionPipeline, **arguments: Any) -> OffloadHandle:
    return pipe.enable_layerwise_offload(**({"mode": "memory", "onload_device": "cpu"} | arguments))


def traces(pipe: DiffusionPipeline) -> list[str]:
    """Attributes that a stock pipeline and its modules don't have."""
    found = [key for key in vars(pipe) if "layerwise" in key]
    for part, component in factory.modules_of(pipe).items():
        for path, module in component.named_modules():
            extra = {"_hf_hook", "_old_forward", "forward"} & set(vars(module))
            found += [f"{part}.{path}: {key}" for key in extra]
            found += [f"{part}.{path}: pre-hook"] * len(module._forward_pre_hooks)
    return found


def weights(pipe: DiffusionPipeline) -> dict[str, nn.Parameter]:
    return {
        f"{part}.{path}": parameter
        for part, component in factory.modules_of(pipe).items()
        for path, parameter in component.named_parameters()
    }


@pytest.mark.parametrize("way", WAYS)
def test_three_calls_are_bit_identical_and_removing_restores_the_pipeline(
    name: str, plain: torch.Tensor, way: str
) -> None:
    pipe = CASES[name].build()
    before = {path: (id(p), p.detach().clone()) for path, p in weights(pipe).items()}
    handle = enable(pipe, **WAYS[way])
    for _ in range(3):
        assert torch.equal(factory.run(name, pipe), plain)
    handle.remove()
    assert traces(pipe) == []
    assert {path: id(p) for path, p in weights(pipe).items()} == {path: i for path, (i, _) in before.items()}
    assert all(torch.equal(p, before[path][1]) for path, p in weights(pipe).items())
    assert torch.equal(factory.run(name, pipe), plain)


def test_memory_mode_streams_with_little_device_memory_in_the_steady_state(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    handle = enable(pipe)
    factory.run(name, pipe)
    moved = handle.report().moved_bytes
    assert torch.equal(factory.run(name, pipe), plain)
    report = handle.report()
    assert report.moved_bytes - moved >= sum(c.streamed_bytes for c in report.components)
    assert report.peak_ever < report.weights / 2
    assert report.peak_seen == report.peak_predicted
    assert all(c.resident_groups == 0 for c in report.components)


def run_until_settled(name: str, pipe: DiffusionPipeline, handle: OffloadHandle) -> None:
    """Calls until one didn't change the plan: another may follow from each pass whose times are measured."""
    for _ in range(12):
        plan = handle.plan
        factory.run(name, pipe)
        if handle.plan is plan:
            return
    pytest.fail("a new plan in every call")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "lasting"])
def test_the_peak_is_the_plans_after_a_call_that_kept_to_it(name: str, way: str) -> None:
    pipe = CASES[name].build()
    handle = enable(pipe, **WAYS[way])
    run_until_settled(name, pipe, handle)
    report = handle.report()
    assert report.peak_seen == report.peak_predicted == handle.plan.peak_bytes


def test_the_peak_of_lasting_residents_is_the_plans_but_for_what_is_never_used(name: str) -> None:
    """A VAE's encoder that no call uses may be planned to be resident, and is never loaded."""
    pipe = CASES[name].build()
    handle = enable(pipe, mode="speed", memory_budget="700KiB", config={"residency": "lasting"})
    run_until_settled(name, pipe, handle)
    unused = 0
    for schedule in handle._runtime.schedules:
        for group in handle.plan.component(schedule.name).groups:
            used = {unit.index for unit in schedule.order.sequence[group.start : group.stop]} & schedule.order.used
            unused += 0 if used or not group.resident else group.size + ALIGNMENT
    assert handle.report().peak_seen == handle.plan.peak_bytes - unused


@pytest.mark.parametrize("way", ["auto, budget", "speed, budget", "lasting"])
def test_the_peak_is_never_above_the_budget(name: str, way: str) -> None:
    pipe = CASES[name].build()
    handle = enable(pipe, **WAYS[way])
    for _ in range(4):
        factory.run(name, pipe)
    report, plan = handle.report(), handle.plan
    assert plan.budget is not None
    assert plan.budget + plan.reserve == report.budget
    assert report.peak_ever <= plan.budget


def test_resident_weights_are_counted_and_not_copied(name: str, plain: torch.Tensor) -> None:
    """They compute where they lie: on this device host and device memory are the same."""
    pipe = CASES[name].build()
    pointers = {path: p.data_ptr() for path, p in weights(pipe).items()}
    handle = enable(pipe, mode="auto")
    seen: set[int] = set()
    hooks = [
        module.register_forward_hook(lambda module, _args, _out: seen.update(p.data_ptr() for p in module.parameters()))
        for component in factory.modules_of(pipe).values()
        for module in component.modules()
    ]
    assert torch.equal(factory.run(name, pipe), plain)
    for hook in hooks:
        hook.remove()
    report = handle.report()
    assert (report.moved_bytes, report.copies, report.ring_slots) == (0, 0, 0)
    assert report.peak_seen == report.peak_predicted >= report.weights
    assert seen <= set(pointers.values())
    assert {path: p.data_ptr() for path, p in weights(pipe).items()} == pointers


def test_weights_at_rest_are_the_host_copy_and_on_the_way_the_slots(name: str) -> None:
    pipe = CASES[name].build()
    pointers = {path: p.data_ptr() for path, p in weights(pipe).items()}
    main = pipe.transformer if name == "flux" else pipe.unet
    seen: set[int] = set()
    for module in main.modules():
        module.register_forward_hook(lambda m, _args, _out: seen.update(p.data_ptr() for p in m.parameters(False)))
    enable(pipe)
    factory.run(name, pipe)
    assert {path: p.data_ptr() for path, p in weights(pipe).items()} == pointers
    assert len(seen - set(pointers.values())) > 10
    assert all(not p.requires_grad or p.grad is None for p in weights(pipe).values())


def test_enabling_twice_replaces_the_first_call_and_hooks_each_module_once(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    first = enable(pipe)
    hooked = [trace for trace in traces(pipe) if trace.endswith("_hf_hook")]
    assert torch.equal(factory.run(name, pipe), plain)
    second = enable(pipe, mode="auto")
    assert pipe.layerwise_offload is second
    assert [trace for trace in traces(pipe) if trace.endswith("_hf_hook")] == hooked
    moved = first.report().moved_bytes
    assert torch.equal(factory.run(name, pipe), plain)
    assert first.report().moved_bytes == moved > 0
    first.remove()
    assert pipe.layerwise_offload is second
    assert torch.equal(factory.run(name, pipe), plain)


def test_the_handle_as_a_context_removes_itself_also_after_an_exception(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    with enable(pipe) as handle:
        assert pipe.layerwise_offload is handle
        assert torch.equal(factory.run(name, pipe), plain)
    assert traces(pipe) == []
    with pytest.raises(ZeroDivisionError), enable(pipe):
        raise ZeroDivisionError
    assert traces(pipe) == []
    assert torch.equal(factory.run(name, pipe), plain)


def test_disabling_is_idempotent(name: str) -> None:
    pipe = CASES[name].build()
    pipe.disable_layerwise_offload()
    handle = enable(pipe)
    for _ in range(2):
        pipe.disable_layerwise_offload()
        handle.remove()
        handle.release()
        assert traces(pipe) == []


def test_release_and_refresh_give_device_memory_back_and_the_next_call_takes_it_again(
    name: str, plain: torch.Tensor
) -> None:
    pipe = CASES[name].build()
    handle = enable(pipe, mode="auto", memory_budget="700KiB", config={"residency": "lasting"})
    for _ in range(2):
        assert torch.equal(factory.run(name, pipe), plain)
    handle.refresh("vae")
    handle.refresh()
    handle.release()
    handle.release()
    assert handle._runtime.transfer.held_bytes == 0
    with pytest.raises(ValueError, match=r"No component 'vea' is offloaded. Did you mean 'vae'\? There are "):
        handle.refresh("vea")
    assert torch.equal(factory.run(name, pipe), plain)


def test_a_call_that_fails_leaves_a_pipeline_that_works(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    enable(pipe, mode="auto", memory_budget="500KiB")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for part in ("text_encoder", "transformer" if name == "flux" else "unet", "vae"):
        last = pipe.vae.decoder.conv_out if part == "vae" else list(getattr(pipe, part).modules())[-1]
        hooks = [module.register_forward_hook(fail) for module in (last, getattr(pipe, part))]
        with pytest.raises(KeyboardInterrupt):
            factory.run(name, pipe)
        for hook in hooks:
            hook.remove()
        assert torch.equal(factory.run(name, pipe), plain)


def test_the_call_keeps_its_signature_and_a_stock_pipeline_of_the_class_is_unaffected(
    name: str, plain: torch.Tensor
) -> None:
    stock = CASES[name].build()
    enable(CASES[name].build())
    assert type(stock).__call__.__wrapped__ is not None
    assert torch.equal(factory.run(name, stock), plain)
    assert stock.layerwise_offload is None
    assert traces(stock) == []


def test_saving_an_enabled_pipeline_saves_its_weights(name: str, plain: torch.Tensor, tmp_path: Any) -> None:
    pipe = CASES[name].build()
    enable(pipe)
    factory.run(name, pipe)
    pipe.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(factory.run(name, loaded), plain)


def test_nothing_keeps_a_dropped_pipeline_alive(name: str) -> None:
    pipe = CASES[name].build()
    enable(pipe)
    factory.run(name, pipe)
    ghost = weakref.ref(pipe.vae)
    del pipe
    gc.collect()
    assert ghost() is None


# ---- one module under two handles


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_module_that_is_applied_twice_stays_right(name: str, plain: torch.Tensor, order: tuple[int, int]) -> None:
    pipe = CASES[name].build()
    main = pipe.transformer if name == "flux" else pipe.unet
    handles = [apply_layerwise_offload(main, "memory", onload_device="cpu") for _ in range(2)]
    for _ in range(2):
        assert torch.equal(factory.run(name, pipe), plain)
    for index in order:
        handles[index].remove()
        assert torch.equal(factory.run(name, pipe), plain)
    assert traces(pipe) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_pipelines_may_share_their_components(order: tuple[int, int]) -> None:
    first = CASES["sd15"].build()
    plain = factory.run("sd15", first)
    second = diffusers.StableDiffusionPipeline(**first.components, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    pipes = [first, second]
    for pipe in pipes:
        enable(pipe)
    for pipe in [*pipes, *pipes]:
        assert torch.equal(factory.run("sd15", pipe), plain)
    for index in order:
        pipes[index].disable_layerwise_offload()
        assert all(torch.equal(factory.run("sd15", pipe), plain) for pipe in pipes)
    assert traces(first) == traces(second) == []


@pytest.fixture
def sharing() -> list[DiffusionPipeline]:
    """Two pipelines with one UNet and one VAE, and a text encoder each."""
    first, other = CASES["sd15"].build(), CASES["sd15"].build()
    parts = first.components | {"text_encoder": other.text_encoder}
    second = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    return [first, second]


def moved(handle: OffloadHandle) -> dict[str, int]:
    """Bytes moved so far for each component that the handle streams."""
    return {component.name: component.moved_bytes for component in handle.report().components}


@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_the_newer_handle_governs_a_component_and_the_older_one_keeps_the_others(
    sharing: list[DiffusionPipeline], mode: str
) -> None:
    first, second = sharing
    plain = factory.run("sd15", first)
    older = enable(first, mode=mode, memory_budget="500KiB")
    assert torch.equal(factory.run("sd15", first), plain)
    newer = enable(second)
    assert list(moved(older)) == ["text_encoder"]
    assert [component.name for component in older.plan.components] == ["text_encoder"]
    for _ in range(2):
        before = moved(newer)
        assert torch.equal(factory.run("sd15", first), plain)
        assert {name for name, count in moved(newer).items() if count > before[name]} == {"unet", "vae"}
        assert torch.equal(factory.run("sd15", second), plain)
    assert older.report().peak_seen <= older.plan.peak_bytes
    assert (first.layerwise_offload, second.layerwise_offload) == (older, newer)


def test_when_the_newer_one_is_disabled_the_older_one_takes_over_again(sharing: list[DiffusionPipeline]) -> None:
    first, second = sharing
    plain = factory.run("sd15", first)
    older, newer = enable(first), enable(second)
    factory.run("sd15", second)
    newer.remove()
    assert list(moved(older)) == ["text_encoder", "vae", "unet"]
    assert second.layerwise_offload is None
    for pipe in (first, second):
        before = moved(older)
        assert torch.equal(factory.run("sd15", pipe), plain)
        assert moved(older)["unet"] > before["unet"]
    again = enable(first)
    assert set(moved(again)) == {"text_encoder", "unet", "vae"}
    assert torch.equal(factory.run("sd15", first), plain)
    first.disable_layerwise_offload()
    assert traces(first) == traces(second) == []


def test_removing_the_older_one_leaves_the_newer_one_in_force(sharing: list[DiffusionPipeline]) -> None:
    first, second = sharing
    plain = factory.run("sd15", first)
    older, newer = enable(first), enable(second)
    older.remove()
    before = moved(newer)
    assert torch.equal(factory.run("sd15", first), plain)
    assert all(count > before[name] for name, count in moved(newer).items() if name != "text_encoder")
    assert torch.equal(factory.run("sd15", second), plain)


def test_a_component_of_a_pipeline_can_be_streamed_by_itself(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    main = pipe.transformer if name == "flux" else pipe.unet
    handle = enable(pipe)
    factory.run(name, pipe)
    own = apply_layerwise_offload(main, "memory", onload_device="cpu")
    for _ in range(2):
        before = own.report().moved_bytes
        assert torch.equal(factory.run(name, pipe), plain)
        assert own.report().moved_bytes > before
    own.remove()
    pipe.disable_layerwise_offload()
    handle.remove()
    assert traces(pipe) == []
    assert torch.equal(factory.run(name, pipe), plain)


def test_a_part_of_a_streamed_component_is_refused_by_name(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    main, whole = (pipe.transformer, "transformer") if name == "flux" else (pipe.unet, "unet")
    handle = enable(pipe)
    part = next(module for module in main.modules() if isinstance(module, nn.ModuleList))[0]
    for module in (part, next(m for m in part.modules() if isinstance(m, nn.Linear))):
        with pytest.raises(LayerwiseOffloadError, match=f"is a part of '{whole}', which is under layerwise offload"):
            apply_layerwise_offload(module, "memory", onload_device="cpu")
    assert torch.equal(factory.run(name, pipe), plain)
    handle.remove()
    assert apply_layerwise_offload(part, "memory", onload_device="cpu").plan.slots > 0


def test_a_component_takes_over_its_parts_that_were_streamed_alone(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    main = pipe.transformer if name == "flux" else pipe.unet
    part = next(module for module in main.modules() if isinstance(module, nn.ModuleList))[0]
    own = apply_layerwise_offload(part, "memory", onload_device="cpu")
    assert torch.equal(factory.run(name, pipe), plain)
    alone = own.report().moved_bytes
    assert alone > 0
    handle = enable(pipe)
    assert own.plan.components == ()
    assert torch.equal(factory.run(name, pipe), plain)
    own.remove()
    assert torch.equal(factory.run(name, pipe), plain)
    handle.remove()
    assert traces(pipe) == []


@pytest.mark.parametrize("chained", ["a hook of the user's", "a pipeline that skips it"])
def test_a_module_is_taken_over_also_where_another_hook_is_chained(
    sharing: list[DiffusionPipeline], chained: str
) -> None:
    first, second = sharing
    plain = factory.run("sd15", first)
    older = enable(first)
    if chained == "a hook of the user's":
        add_hook_to_module(first.vae, ModelHook(), append=True)
    else:
        enable(second, components={"all": "layerwise", "=vae": "skip"})
    assert torch.equal(factory.run("sd15", first), plain)
    newer = apply_layerwise_offload(first.vae, "memory", onload_device="cpu")
    assert "vae" not in moved(older)
    for _ in range(2):
        assert torch.equal(factory.run("sd15", first), plain)
    newer.remove()
    assert torch.equal(factory.run("sd15", first), plain)


# ---- components that are left out


def test_a_skipped_component_is_left_alone(name: str, plain: torch.Tensor) -> None:
    pipe = CASES[name].build()
    pointers = [p.data_ptr() for p in pipe.vae.parameters()]
    handle = enable(pipe, components={"all": "layerwise", "=vae": "skip"})
    assert [m for m in pipe.vae.modules() if "_hf_hook" in vars(m)] == [pipe.vae]
    hook = vars(pipe.vae)["_hf_hook"]
    assert isinstance(hook, PlacedHook)
    assert hook.execution_device == pipe.vae.device == torch.device("cpu")
    for _ in range(2):
        assert torch.equal(factory.run(name, pipe), plain)
    report = handle.report()
    assert report.notes == ("vae: skipped as asked; its weights stay where they are",)
    assert "note: vae: skipped as asked; its weights stay where they are" in str(report)
    assert "vae" not in [component.name for component in (*report.components, *handle.plan.components)]
    assert [p.data_ptr() for p in pipe.vae.parameters()] == pointers
    handle.remove()
    assert traces(pipe) == []
    assert torch.equal(factory.run(name, pipe), plain)


@pytest.mark.parametrize("mode", ["auto", "memory", "speed", "manual"])
def test_what_is_not_selected_is_resident_when_it_fits_and_else_moved_as_a_whole(
    name: str, plain: torch.Tensor, mode: str
) -> None:
    part, enough, less = {"flux": ("transformer", "1500KiB", "600KiB"), "sd15": ("unet", "900KiB", "450KiB")}[name]
    for budget, choice, residency in ((enough, "resident", "lasting"), (less, "offload", "use")):
        pipe = CASES[name].build()
        config = {"activation_reserve": 0}
        handle = enable(pipe, components=part, mode=mode, memory_budget=budget, config=config)
        found = {c.name: (c.choice.value, c.residency.value, c.streamed_bytes) for c in handle.plan.components}
        assert found.pop(part)[0] == "layerwise"
        assert set(found.values()) == {(choice, residency, 0)}
        run_until_settled(name, pipe, handle)
        assert torch.equal(factory.run(name, pipe), plain)
        report = handle.report()
        assert report.peak_ever <= report.budget


@pytest.mark.parametrize("mode", ["memory", "manual"])
def test_an_exclusion_alone_means_all_the_others(name: str, plain: torch.Tensor, mode: str) -> None:
    pipe = CASES[name].build()
    handle = enable(pipe, components=["!vae"], mode=mode)
    for _ in range(2):
        assert torch.equal(factory.run(name, pipe), plain)
    parts = {component.name: component for component in handle.report().components}
    assert not parts.pop("vae").streamed_groups
    assert all(part.choice == "layerwise" and part.streamed_groups for part in parts.values())


# ---- copies


def linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6))).eval()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_an_enabled_module_is_an_ordinary_module(copied: Any) -> None:
    module, given = linears(), torch.ones(1, 32)
    with torch.no_grad():
        plain = module(given)
        apply_layerwise_offload(module, "memory", onload_device="cpu")
        twin = copied(module)
        assert not any("_hf_hook" in vars(m) for m in twin.modules())
        assert torch.equal(twin(given), plain)
        assert torch.equal(module(given), plain)
