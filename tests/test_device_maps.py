"""Device maps of accelerate: taken as plans, run, given back, and written.

The simulated device is two devices here. The reference is the same module on the CPU, whose kernels it runs.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

import diffusers_layerwise as dl
import factory
import models
from compatibility import Cell
from diffusers_layerwise.config import LayerwiseOffloadConfig, Mode
from diffusers_layerwise.device_maps import shortest
from diffusers_layerwise.plan import ComponentSpec, UnitSpec, cut
from diffusers_layerwise.search import Request, make_plan, smallest_peak

DeviceMap = dict[str, Any]

DEPTH = 6
MIXED: DeviceMap = {"proj_in": 0, "blocks.0": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.3": 0, "blocks.4": "cpu"}
MIXED |= {"blocks.5": "cpu", "proj_out": "cpu"}
CHAIN: DeviceMap = {
    "blocks.0": 0,
    "blocks.1": "cpu",
    "blocks.2": "disk",
    "blocks.3": 1,
    "blocks.4": "cpu",
    "blocks.5": 0,
}


@pytest.fixture
def two(sim: ModuleType) -> Iterator[ModuleType]:
    """Two simulated devices, the first one current."""
    sim.configure(ndev=2)
    sim.set_device(0)
    yield sim
    sim.set_device(0)


def chain() -> models.Chain:
    """Six blocks."""
    return models.make(models.Chain, DEPTH)


def stack() -> models.MlpStack:
    """Six blocks, with a parameter and a buffer at the root."""
    return models.make(models.MlpStack, DEPTH)


def dispatched(module: nn.Module, device_map: DeviceMap, folder: Path | None = None, **options: Any) -> nn.Module:
    """The module as accelerate dispatches it."""
    if set(map(str, device_map.values())) == {"cpu"}:
        options |= {"main_device": 0, "state_dict": module.state_dict(), "force_hooks": True}
    return accelerate.dispatch_model(module, device_map, offload_dir=folder, **options)


def state(module: nn.Module) -> dict[str, tuple[str, int]]:
    """Where each tensor is, and its identity."""
    return {name: (str(tensor.device), id(tensor)) for name, tensor in models.tensors(module).items()}


def hooks(module: nn.Module) -> dict[str, int]:
    """The identity of each module's hook."""
    return {name: id(part._hf_hook) for name, part in module.named_modules() if hasattr(part, "_hf_hook")}


def check_rounds(module: nn.Module, x: torch.Tensor, expected: torch.Tensor, rounds: int = 4) -> None:
    """Every call gives what is expected, where the input was."""
    for _ in range(rounds):
        with torch.no_grad():
            output = module(x)
        assert output.device == x.device
        assert torch.equal(output.cpu(), expected)


def resident_units(handle: dl.OffloadHandle) -> set[str]:
    """The names of units in resident groups."""
    return {u.name for c in handle.plan.components for g in c.groups if g.resident for u in c.units[g.start : g.stop]}


MAPS: dict[str, tuple[Callable[[], nn.Module], DeviceMap]] = {
    "all on the device": (chain, {"": 0}),
    "all on the host": (chain, {"blocks": "cpu"}),
    "device and host": (stack, MIXED | {"scale": 0, "shift": 0}),
    "by name": (chain, {"blocks.0": "sim:0", "blocks.1": "cpu", "blocks.2": "sim:0", "blocks.3": torch.device("sim", 0)}
                | {"blocks.4": "cpu", "blocks.5": "cpu"}),
    "device, host, disk and another device": (chain, CHAIN),
    "the last block elsewhere": (chain, CHAIN | {"blocks.3": "disk", "blocks.5": 1}),
    "all but one on disk": (chain, {f"blocks.{i}": "disk" for i in range(1, DEPTH)} | {"blocks.0": 0}),
}  # fmt: skip
maps = pytest.mark.parametrize("kind", MAPS)


# ------------------------------------------------------------------ dispatched modules
@maps
@pytest.mark.parametrize("mode", ["auto", "memory"])
def test_a_dispatched_module_runs_as_its_map_says(
    two: ModuleType, tmp_path: Path, kind: str, mode: str, cell: Cell
) -> None:
    cell("Device maps", f"a module dispatched: {kind}", mode)
    make, device_map = MAPS[kind]
    x = models.numbers(3, models.WIDTH)
    expected = models.run(make(), x)
    module = dispatched(make(), device_map, tmp_path)
    with dl.apply_layerwise_offload(module, mode) as handle:
        assert handle.report().device == "sim:0"
        check_rounds(module, x.to("sim:0"), expected)
        here = {key for key, value in device_map.items() if str(value) in ("0", "sim:0")}
        wanted = {u.name for c in handle.plan.components for u in c.units if any(covers(k, u.name) for k in here)}
        assert resident_units(handle) == wanted
        assert handle.plan.components[0].residency is dl.plan.Residency.LASTING or not wanted
    check_rounds(module, x.to("sim:0"), expected, 2)


def covers(key: str, name: str) -> bool:
    """Whether a map's entry decides for a module."""
    return key in ("", name) or name.startswith(key + ".")


@maps
def test_removing_gives_back_the_same_hooks_placeholders_and_map(two: ModuleType, tmp_path: Path, kind: str) -> None:
    make, device_map = MAPS[kind]
    module = dispatched(make(), device_map, tmp_path)
    x = models.numbers(3, models.WIDTH).to("sim:0")
    expected = models.run(module, x)
    before = (state(module), hooks(module), dict(module.hf_device_map), set(module.__dict__))
    handle = dl.apply_layerwise_offload(module)
    assert module.hf_device_map == before[2]
    models.run(module, x)
    handle.remove()
    assert (state(module), hooks(module), dict(module.hf_device_map), set(module.__dict__)) == before
    assert torch.equal(models.run(module, x), expected)


def test_input_from_the_host_comes_back_to_the_host(two: ModuleType, tmp_path: Path) -> None:
    x = models.numbers(3, models.WIDTH)
    module = dispatched(chain(), CHAIN, tmp_path)
    with dl.apply_layerwise_offload(module):
        check_rounds(module, x, models.run(chain(), x))


def test_the_execution_device_is_the_one_that_the_map_uses(two: ModuleType) -> None:
    module = dispatched(chain(), {f"blocks.{i}": 1 if i % 2 else "cpu" for i in range(DEPTH)})
    x = models.numbers(3, models.WIDTH)
    with dl.apply_layerwise_offload(module) as handle:
        check_rounds(module, x.to("sim:1"), models.run(chain(), x))
        assert handle.report().device == "sim:1"
        assert set(handle.plan.device_map("Chain").values()) == {1, "cpu"}


def test_weights_on_disk_are_neither_pinned_nor_copied_into_memory(two: ModuleType, tmp_path: Path) -> None:
    module = dispatched(chain(), MAPS["all but one on disk"][1], tmp_path)
    with dl.apply_layerwise_offload(module) as handle:
        for _ in range(3):
            models.run(module, models.numbers(3, models.WIDTH).to("sim:0"))
        handle.release()
        for index in range(1, DEPTH):
            assert str(tmp_path / f"blocks.{index}.lin.weight.dat") == mapped_file(module.blocks[index].lin.weight)
        one = module.blocks[0].lin
        block = one.weight.nbytes + one.bias.nbytes
        assert handle.report().components[0].pinned_bytes <= block + 1024
        assert "disk" in " ".join(handle.report().notes)


def mapped_file(tensor: torch.Tensor) -> str:
    """The file that a host tensor's memory is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def test_a_safetensors_file_that_the_index_names_is_mapped(two: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "weights.safetensors"
    source, x = chain(), models.numbers(3, models.WIDTH)
    save_file({f"m.{name}": tensor for name, tensor in source.state_dict().items()}, file)
    index = {
        name: {"safetensors_file": str(file), "weight_name": f"m.{name}", "dtype": "float32"}
        for name in source.state_dict()
        if not name.startswith("blocks.0")
    }
    module = dispatched(chain(), MAPS["all but one on disk"][1], None, offload_index=index)
    with dl.apply_layerwise_offload(module) as handle:
        check_rounds(module, x.to("sim:0"), models.run(source, x), 3)
        handle.release()
        assert mapped_file(module.blocks[3].lin.weight) == str(file)


def test_host_memory_has_taken_over_weights_once(two: ModuleType) -> None:
    module = dispatched(stack(), MIXED | {"scale": 0, "shift": 0})
    loader = module.blocks[1].up._hf_hook.weights_map.dataset
    with dl.apply_layerwise_offload(module) as handle:
        for _ in range(2):
            models.run(module, models.numbers(3, models.WIDTH).to("sim:0"))
        handle.release()
        assert loader.state_dict["blocks.1.up.weight"].data_ptr() == module.blocks[1].up.weight.data_ptr()


def test_tied_weights_keep_their_tie(two: ModuleType) -> None:
    x = models.tokens(2, 5)
    expected = models.run(models.make(models.TiedLanguageModel), x)
    for device_map in (
        {"embed": "cpu", "blocks": 0, "head": "cpu"},
        {"embed": 0, "blocks": "cpu", "head": 0},
        {"embed": 0, "blocks": "cpu", "head": "cpu"},
    ):
        module = dispatched(models.make(models.TiedLanguageModel), device_map)
        assert torch.equal(models.run(module, x.to("sim:0")), expected)
        with dl.apply_layerwise_offload(module):
            assert module.head.weight is module.embed.weight
            check_rounds(module, x.to("sim:0"), expected)
        check_rounds(module, x.to("sim:0"), expected, 2)


def test_offloaded_buffers_are_taken_over_and_given_back(two: ModuleType) -> None:
    class Shifted(models.Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(models.WIDTH))
            self.register_buffer("scale", torch.randn(models.WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.shift

    def make() -> nn.Module:
        return models.make(models.Blocks, [models.make(Shifted, seed=i) for i in range(4)])

    x = models.numbers(3, models.WIDTH)
    device_map = {"blocks.0": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.3": 0}
    module = dispatched(make(), device_map, offload_buffers=True)
    before = (state(module), hooks(module))
    with dl.apply_layerwise_offload(module):
        check_rounds(module, x.to("sim:0"), models.run(make(), x))
    assert (state(module), hooks(module)) == before
    check_rounds(module, x.to("sim:0"), models.run(make(), x), 2)


def test_modules_that_accelerate_loads_as_a_whole_are_taken_over(two: ModuleType) -> None:
    x = models.numbers(3, models.WIDTH)
    make = models.STACKS["attention"]
    expected = models.run(models.make(make), x)
    device_map = {"blocks.0": 0, "blocks.1": "cpu", "blocks.2": "cpu"}
    module = dispatched(models.make(make), device_map, preload_module_classes=["MultiheadAttention"])
    before = (state(module), hooks(module))
    with dl.apply_layerwise_offload(module):
        check_rounds(module, x.to("sim:0"), expected)
    assert (state(module), hooks(module)) == before
    check_rounds(module, x.to("sim:0"), expected, 2)


def test_a_map_of_host_and_disk_runs_on_the_cpu(tmp_path: Path) -> None:
    x = models.numbers(3, models.WIDTH)
    device_map = {f"blocks.{i}": "disk" if i % 2 else "cpu" for i in range(DEPTH)}
    module = dispatched(chain(), device_map, tmp_path)
    before = (state(module), hooks(module))
    with dl.apply_layerwise_offload(module, onload_device="cpu") as handle:
        check_rounds(module, x, models.run(chain(), x))
        assert handle.plan.device_map("Chain") == device_map
    assert (state(module), hooks(module)) == before
    check_rounds(module, x, models.run(chain(), x), 2)


def test_an_error_in_the_middle_leaves_a_split_module_usable(two: ModuleType, tmp_path: Path) -> None:
    x = models.numbers(3, models.WIDTH)
    module = dispatched(chain(), CHAIN, tmp_path)
    with dl.apply_layerwise_offload(module):
        check_rounds(module, x.to("sim:0"), models.run(chain(), x), 2)
        for order in ([0, 1, 99], [3, 99], [2, 3, 99]):
            with pytest.raises(IndexError), torch.no_grad():
                module(x.to("sim:0"), order)
        check_rounds(module, x.to("sim:0"), models.run(chain(), x), 2)
        for order in ([5, 3, 2, 0], [3, 3, 1]):
            with torch.no_grad():
                assert torch.equal(module(x.to("sim:0"), order).cpu(), chain()(x, order))


def test_a_module_that_is_dropped_while_taken_over_is_freed(two: ModuleType, tmp_path: Path) -> None:
    module = dispatched(chain(), CHAIN, tmp_path)
    handle = dl.apply_layerwise_offload(module)
    models.run(module, models.numbers(3, models.WIDTH).to("sim:0"))
    gone = weakref.ref(module)
    del module, handle
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ edits
@pytest.mark.parametrize("how", ["in place", "through data", "another parameter"])
def test_edits_are_what_accelerate_computes_with_afterwards(two: ModuleType, tmp_path: Path, how: str) -> None:
    x = models.numbers(3, models.WIDTH)
    module, plain = dispatched(chain(), CHAIN, tmp_path), chain()
    files = {file: file.read_bytes() for file in tmp_path.glob("*.dat")}
    with dl.apply_layerwise_offload(module) as handle:
        models.run(module, x.to("sim:0"))
        for block in (0, 1, 2, 4):
            for owner in (plain, module):
                edit(owner.blocks[block].lin, how)
        handle.refresh()
        check_rounds(module, x.to("sim:0"), models.run(plain, x), 2)
    check_rounds(module, x.to("sim:0"), models.run(plain, x), 2)
    for block in (1, 2, 4):
        kept = module.blocks[block].lin._hf_hook.weights_map["weight"]
        assert kept.device.type == "cpu"
        assert torch.equal(kept, plain.blocks[block].lin.weight)
    assert {file: file.read_bytes() for file in files} == files


def edit(linear: nn.Linear, how: str) -> None:
    """Doubles a weight."""
    with torch.no_grad():
        if how == "in place":
            linear.weight.mul_(2)
        elif how == "through data":
            linear.weight.data.mul_(2)
        else:
            linear.weight = nn.Parameter(linear.weight.detach().cpu() * 2)


def test_edits_of_what_a_safetensors_file_holds_are_kept(two: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "weights.safetensors"
    plain, x = chain(), models.numbers(3, models.WIDTH)
    save_file(plain.state_dict(), file)
    index = {name: {"safetensors_file": str(file)} for name in plain.state_dict() if not name.startswith("blocks.0")}
    module = dispatched(chain(), MAPS["all but one on disk"][1], None, offload_index=index)
    with dl.apply_layerwise_offload(module):
        for owner in (plain, module):
            edit(owner.blocks[2].lin, "through data")
        check_rounds(module, x.to("sim:0"), models.run(plain, x), 3)
    loader = module.blocks[2].lin._hf_hook.weights_map.dataset
    assert list(loader.state_dict) == ["blocks.2.lin.weight"]
    check_rounds(module, x.to("sim:0"), models.run(plain, x), 2)


def test_resetting_the_map_meanwhile_leaves_an_ordinary_pipeline(two: ModuleType) -> None:
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    pipe = balanced("sd15", {"unet": 0, "vae": 1, "text_encoder": "cpu"})
    handle = dl.enable_layerwise_offload(pipe)
    factory.run("sd15", pipe)
    pipe.reset_device_map()
    handle.remove()
    assert not any(hooks(module) for module in factory.modules_of(pipe).values())
    assert torch.equal(factory.run("sd15", pipe.to("sim:0")), expected)


def test_a_skipped_component_is_left_to_accelerate(two: ModuleType) -> None:
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    pipe = balanced("sd15", {"unet": 0, "vae": 0, "text_encoder": "cpu"})
    before = (state(pipe.text_encoder), hooks(pipe.text_encoder))
    with dl.enable_layerwise_offload(pipe, {"text_encoder": "skip", "unet": "layerwise"}) as handle:
        assert (state(pipe.text_encoder), hooks(pipe.text_encoder)) == before
        assert [c.name for c in handle.plan.components] == ["vae", "unet"]
        assert torch.equal(factory.run("sd15", pipe), expected)


def test_a_treatment_by_name_wins_over_the_map(two: ModuleType) -> None:
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    pipe = balanced("sd15", {"unet": 0, "vae": 1, "text_encoder": "cpu"})
    before = {name: hooks(module) for name, module in factory.modules_of(pipe).items()}
    with dl.enable_layerwise_offload(pipe, {"text_encoder": "resident", "unet": "offload"}, "memory") as handle:
        for _ in range(2):
            assert torch.equal(factory.run("sd15", pipe), expected)
        assert [c.choice.value for c in handle.plan.components] == ["resident", "offload"]
        assert handle.plan.device_map("text_encoder") == {"": 0}
        assert set(handle.plan.device_map("unet").values()) <= {0, "cpu"}
    assert {name: hooks(module) for name, module in factory.modules_of(pipe).items()} == before


def test_a_second_call_takes_the_map_anew_and_the_last_removal_gives_it_back(two: ModuleType, tmp_path: Path) -> None:
    module = dispatched(chain(), CHAIN, tmp_path)
    x = models.numbers(3, models.WIDTH)
    before = (state(module), hooks(module))
    for mode in ("auto", "memory"):
        handle = dl.apply_layerwise_offload(module, mode)
        check_rounds(module, x.to("sim:0"), models.run(chain(), x), 2)
        assert resident_units(handle) == {"blocks.0.lin", "blocks.5.lin"}
    handle.remove()
    assert (state(module), hooks(module)) == before


# ------------------------------------------------------------------ the plan as a map
@maps
def test_the_plan_as_a_map_dispatches_an_equal_module(two: ModuleType, tmp_path: Path, kind: str) -> None:
    make, device_map = MAPS[kind]
    x = models.numbers(3, models.WIDTH)
    expected = models.run(make(), x)
    module = dispatched(make(), device_map, tmp_path / "first")
    handle = dl.apply_layerwise_offload(module)
    models.run(module, x.to("sim:0"))
    made = handle.plan.device_map(type(module).__name__)
    handle.remove()
    again = accelerate.dispatch_model(make(), made, offload_dir=tmp_path / "second")
    where = made.get("", 0)
    assert torch.equal(models.run(again, x.to("cpu" if where == "cpu" else "sim:0")), expected)
    assert made == {"": 0} or kind != "all on the device"
    assert made == {"": "cpu"} or kind != "all on the host"
    assert len(made) <= max(len(device_map) + 2 * DEPTH, 1)


def test_the_plan_of_a_module_without_a_map_is_a_map_too(two: ModuleType) -> None:
    module = stack()
    x = models.numbers(3, models.WIDTH)
    with models.stream(module, "manual", config={"resident": 3}) as handle:
        models.run(module, x)
        models.run(module, x)
        made = handle.plan.device_map("MlpStack")
    assert set(made.values()) == {0, "cpu"}
    again = accelerate.dispatch_model(stack(), made)
    assert torch.equal(models.run(again, x.to("sim:0")), models.run(stack(), x))
    with pytest.raises(KeyError):
        handle.plan.device_map("vae")


def test_a_map_is_as_short_as_possible() -> None:
    assert shortest({"a.w": 0, "a.b": 0}) == {"": 0}
    assert shortest({"a.w": 0, "a.b": 0, "b.c.w": "cpu", "b.d.w": "cpu"}) == {"a": 0, "b": "cpu"}
    assert shortest({"a.w": 0, "s": "cpu", "ab.w": "cpu"}) == {"a": 0, "s": "cpu", "ab": "cpu"}
    assert shortest({"a.w": "disk"}) == {"a": "disk"}


# ------------------------------------------------------------------ maps for modules that aren't dispatched
@pytest.mark.parametrize("mode", ["auto", "memory", "speed", "manual"])
def test_an_inferred_map_says_who_is_resident(two: ModuleType, mode: str, cell: Cell) -> None:
    cell("Device maps", "`infer_auto_device_map`, not dispatched", mode)
    gc.collect()
    before = two.mem(0)["allocated"]
    module, x = stack(), models.numbers(3, models.WIDTH)
    device_map = accelerate.infer_auto_device_map(module, max_memory={0: 40_000, "cpu": 10**9})
    assert set(device_map.values()) == {0, "cpu"}
    with dl.apply_layerwise_offload(module, mode, onload_device="sim:0", config={"device_map": device_map}) as handle:
        for _ in range(4):
            assert torch.equal(models.run(module, x), models.run(stack(), x))
        plan = handle.plan
        assert resident_units(handle) == {
            u.name for u in plan.components[0].units if all(device_for(device_map, n) == 0 for n in u.tensors)
        }
        assert plan.components[0].residency is dl.plan.Residency.LASTING
        assert two.mem(0)["allocated"] - before == plan.peak_bytes
    assert not hasattr(module, "hf_device_map")


def device_for(device_map: DeviceMap, name: str) -> Any:
    """What a map says of a tensor."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def test_no_group_mixes_mapped_resident_and_streamed_units() -> None:
    units = [UnitSpec(str(i), None, 1, resident=kept) for i, kept in enumerate([True, True, False, False, True])]
    assert cut(units, 100) == [(0, 2), (2, 4), (4, 5)]
    assert cut(units, None) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_search_keeps_exactly_what_the_map_keeps(mode: Mode, seed: int) -> None:
    draw = random.Random(seed)
    unit = 1 << 20
    size = [unit * draw.choice([1, 2, 2, 4, 9]) for _ in range(40)]
    kept = [draw.random() < 0.4 for _ in size]
    units = tuple(UnitSpec(str(i), str(i // 4), s, i // 16, k) for i, (s, k) in enumerate(zip(size, kept, strict=True)))
    config = LayerwiseOffloadConfig(
        prefetch=draw.choice([None, None, 1, 3, "8MiB"]), group_size=draw.choice([None, None, "layer", 3 * unit])
    )
    spec = ComponentSpec("a", units, tuple(range(40)), 300, sum(size), config=config)
    other = ComponentSpec("b", tuple(UnitSpec(str(i), str(i), unit) for i in range(30)), tuple(range(30)), 0, 30 * unit)
    least = smallest_peak([spec, other])
    with pytest.raises(torch.OutOfMemoryError, match=f"device map keeps resident in 'a'.*{least} bytes"):
        make_plan([spec, other], Request(mode, least - 1))
    for budget in (least, least + 7 * unit, 2 * least, None):
        plan = make_plan([spec, other], Request(mode, budget))
        groups = plan.component("a").groups
        assert [g.resident for g in groups for _ in range(g.start, g.stop)] == kept
        assert budget is None or plan.peak_bytes <= budget


def test_the_smallest_budget_that_is_named_works_and_one_byte_less_does_not(two: ModuleType) -> None:
    options = {"device_map": {"blocks.0": 0, "blocks.1": 0, "blocks.2": 0, "blocks": "cpu"}}
    with pytest.raises(torch.OutOfMemoryError, match="what the device map keeps resident in 'Chain'") as error:
        dl.apply_layerwise_offload(chain(), memory_budget=8000, onload_device="sim", config=options)
    least = int(str(error.value).split("memory_budget=")[1].split()[0])
    with pytest.raises(torch.OutOfMemoryError, match=str(least)):
        dl.apply_layerwise_offload(chain(), memory_budget=least - 1, onload_device="sim", config=options)
    module, x = chain(), models.numbers(3, models.WIDTH)
    handle = dl.apply_layerwise_offload(module, memory_budget=least, onload_device="sim", config=options)
    for _ in range(3):
        assert torch.equal(models.run(module, x), models.run(chain(), x))
    assert handle.report().peak_ever <= least
    assert resident_units(handle) == {f"blocks.{i}.lin" for i in range(3)}


def test_a_large_mapped_module_does_not_set_the_size_of_slots(two: ModuleType) -> None:
    module = models.wide_language_model()
    options = {"device_map": {"embed": 0, "head": 0, "blocks": "cpu"}}
    with models.stream(module, "memory", config=options) as handle:
        assert handle.plan.slot_bytes < module.embed.weight.nbytes / 4


# ------------------------------------------------------------------ pipelines
def balanced(name: str, device_map: dict[str, Any]) -> Any:
    """A pipeline as `from_pretrained(device_map="balanced")` leaves it: whole components, each with hooks."""
    pipe = factory.CASES[name].build()
    for component, device in device_map.items():
        dispatched(getattr(pipe, component), {"": device}, force_hooks=True)
    pipe.hf_device_map = dict(device_map)
    return pipe


@pytest.mark.parametrize("away", ["text_encoder", pytest.param("vae", marks=pytest.mark.slow)])
def test_a_balanced_pipeline_runs_on_both_devices(two: ModuleType, away: str, cell: Cell) -> None:
    cell("Device maps", "a pipeline balanced over two devices and the host", "auto")
    device_map = {"unet": 0, "vae": 0, "text_encoder": "cpu"} | {away: 1}
    if away == "text_encoder":
        device_map["vae"] = "cpu"
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    pipe = balanced("sd15", device_map)
    module = getattr(pipe, away)
    before = (state(module), hooks(module))
    handle = dl.enable_layerwise_offload(pipe)
    assert f"{away}: resident on sim:1, as its device map says" in handle.report().notes
    assert (state(module), hooks(module)) == before
    assert handle.report().device == "sim:0"
    for _ in range(3):
        assert torch.equal(factory.run("sd15", pipe), expected)
    names = [component.name for component in handle.plan.components]
    assert away not in names
    assert handle.plan.device_map("unet") == {"": 0}
    assert pipe.hf_device_map == device_map
    handle.remove()
    assert torch.equal(factory.run("sd15", pipe), expected)


def test_a_pipeline_loaded_balanced_runs(two: ModuleType, tmp_path: Path, cell: Cell) -> None:
    cell("Device maps", "`from_pretrained(device_map='balanced')`", "auto")
    plain = factory.CASES["sd15"].build()
    expected = factory.run("sd15", plain)
    plain.save_pretrained(tmp_path)
    size = {name: sum(p.nbytes for p in m.parameters()) for name, m in factory.modules_of(plain).items()}
    order = sorted(size, key=lambda name: size[name])
    room = {0: size[order[-1]] + 1000, 1: size[order[-2]] + 1000}
    pipe = type(plain).from_pretrained(
        tmp_path, device_map="balanced", max_memory=room, feature_extractor=None, safety_checker=None
    )
    pipe.set_progress_bar_config(disable=True)
    assert sorted(map(str, pipe.hf_device_map.values())) == ["0", "1", "cpu"]
    before = {name: (state(module), hooks(module)) for name, module in factory.modules_of(pipe).items()}
    with dl.enable_layerwise_offload(pipe) as handle:
        for _ in range(3):
            assert torch.equal(factory.run("sd15", pipe), expected)
        assert [c.name for c in handle.plan.components if c.largest_streamed] == [order[0]]
    assert {name: (state(module), hooks(module)) for name, module in factory.modules_of(pipe).items()} == before
    assert torch.equal(factory.run("sd15", pipe), expected)


def test_a_pipelines_component_is_split_over_both_devices_and_the_host(two: ModuleType) -> None:
    expected = factory.run("flux", factory.CASES["flux"].build())
    pipe = factory.CASES["flux"].build()
    whole = accelerate.infer_auto_device_map(
        pipe.transformer,
        max_memory={0: 400_000, "cpu": 10**9},
        no_split_module_classes=["FluxTransformerBlock", "FluxSingleTransformerBlock"],
    )
    spread = {key: 1 if key == "single_transformer_blocks.0" else value for key, value in whole.items()}
    dispatched(pipe.transformer, spread, skip_keys=pipe.transformer._skip_keys)
    handle = dl.enable_layerwise_offload(pipe)
    for _ in range(3):
        assert torch.equal(factory.run("flux", pipe), expected)
    made = handle.plan.device_map("transformer")
    handle.remove()
    assert torch.equal(run_mapped(pipe, made), expected)


def run_mapped(pipe: Any, made: dict[str, Any]) -> torch.Tensor:
    """The pipeline's output with its transformer dispatched by another map."""
    fresh = factory.CASES["flux"].build()
    accelerate.dispatch_model(fresh.transformer, made, skip_keys=fresh.transformer._skip_keys)
    for name, module in factory.modules_of(fresh).items():
        if name != "transformer":
            module.to("sim:0")
    return factory.run("flux", fresh)


@pytest.mark.parametrize("device", [None, "sim:1"])
def test_a_transformer_loaded_over_devices_host_and_disk_runs(
    two: ModuleType, tmp_path: Path, device: str | None
) -> None:
    pipe = factory.CASES["flux"].build()
    expected = factory.run("flux", pipe)
    pipe.transformer.save_pretrained(tmp_path)
    device_map: DeviceMap = {name: 0 for name, _ in pipe.transformer.named_children() if "blocks" not in name}
    for name in ("transformer_blocks", "single_transformer_blocks"):
        places: list[int | str] = ["cpu", 1, "disk", 1] if name == "transformer_blocks" else ["disk", 0, 1, "cpu"]
        device_map |= {f"{name}.{i}": place for i, place in enumerate(places)}
    pipe.transformer = type(pipe.transformer).from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    before = (state(pipe.transformer), hooks(pipe.transformer))
    for mode in ("auto", "memory"):
        handle = dl.enable_layerwise_offload(pipe, mode=mode, onload_device=device)
        assert handle.report().device == (device or "sim:0")
        for _ in range(2):
            assert torch.equal(factory.run("flux", pipe), expected)
        assert set(handle.plan.device_map("transformer").values()) == {0, 1, "cpu", "disk"}
    pipe.disable_layerwise_offload()
    assert (state(pipe.transformer), hooks(pipe.transformer)) == before


def test_a_single_module_is_taken_over(two: ModuleType) -> None:
    def make() -> nn.Linear:
        return models.make(nn.Linear, models.WIDTH, models.WIDTH)

    # Where its root has weights itself, accelerate leaves the output on the device.
    x = models.numbers(3, models.WIDTH).to("sim:0")
    module = dispatched(make(), {"": "cpu"})
    with dl.apply_layerwise_offload(module) as handle:
        check_rounds(module, x, models.run(make(), x.cpu()))
        assert handle.plan.device_map("Linear") == {"": "cpu"}
    check_rounds(module, x, models.run(make(), x.cpu()), 2)


def test_a_component_takes_a_map_as_an_option(two: ModuleType) -> None:
    expected = factory.run("flux", factory.CASES["flux"].build())
    pipe = factory.CASES["flux"].build()
    inferred = accelerate.infer_auto_device_map(pipe.transformer, max_memory={0: 400_000, "cpu": 10**9})
    handle = dl.enable_layerwise_offload(pipe, {"transformer": {"device_map": inferred}}, onload_device="sim")
    for _ in range(3):
        assert torch.equal(factory.run("flux", pipe), expected)
    transformer = handle.plan.component("transformer")
    assert 0 < sum(g.resident for g in transformer.groups) < len(transformer.groups)


def test_a_map_that_only_said_where_to_load_leaves_a_pipeline_to_the_mode(two: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    for module in factory.modules_of(pipe).values():
        accelerate.dispatch_model(module, {"": 0})
    pipe.hf_device_map = "sim"
    expected = factory.run("sd15", pipe)
    handle = dl.enable_layerwise_offload(pipe, mode="memory")
    assert torch.equal(factory.run("sd15", pipe), expected)
    assert handle.plan.component("unet").resident_bytes == 0
    handle.remove()
    assert {p.device.type for p in pipe.unet.parameters()} == {"sim"}


# ------------------------------------------------------------------ refusals
def refused(module: nn.Module, match: str, error: type[Exception] = dl.LayerwiseOffloadError, **options: Any) -> None:
    """The call is refused, and leaves the module as it was."""
    before = (state(module), hooks(module))
    with pytest.raises(error, match=match):
        dl.apply_layerwise_offload(module, onload_device=options.pop("onload_device", "sim:0"), **options)
    assert (state(module), hooks(module)) == before


BAD_MAPS: list[tuple[object, type[Exception], str]] = [
    ({"blocks.0": 0, "blocsk": "cpu"}, ValueError, "names .'blocsk'., which .* Did you mean 'blocks'"),
    ({"blocks.0": 0}, ValueError, "no entry for blocks.1.lin.weight, blocks.1.lin.bias"),
    ({"": 1}, dl.LayerwiseOffloadError, "only sim:0 and 'cpu'.*accelerate.dispatch_model"),
    ({"": "sim:1"}, dl.LayerwiseOffloadError, "only sim:0 and 'cpu'"),
    ({"": "disk"}, dl.LayerwiseOffloadError, "accelerate.dispatch_model"),
    ({}, ValueError, "is empty"),
    ("auto", TypeError, "must be a dict"),
    ({0: "cpu"}, TypeError, "by string"),
    ({"": True}, TypeError, "must be a device index"),
    ({"": 1.0}, TypeError, "must be a device index"),
    ({"": -1}, ValueError, "must be a device index"),
    ({"": "gpu"}, ValueError, "must be a device index"),
    ({"": "dsik"}, ValueError, "Did you mean 'disk'"),
]


@pytest.mark.parametrize(("value", "error", "match"), BAD_MAPS, ids=lambda value: str(value)[:40])
def test_a_bad_map_is_refused_by_name(two: ModuleType, value: object, error: type[Exception], match: str) -> None:
    refused(chain(), match, error, config={"device_map": value})


def test_a_map_and_a_number_of_residents_contradict_each_other(two: ModuleType, tmp_path: Path, cell: Cell) -> None:
    cell("Device maps", "a map and `config.resident`", "auto", "refused")
    refused(chain(), "give one of them", ValueError, config={"device_map": {"": 0}, "resident": 1})
    module = dispatched(chain(), CHAIN, tmp_path)
    refused(module, "config.resident can't say it too", config={"resident": 1})
    refused(module, "config.device_map can't say it too", config={"device_map": {"": 0}})


def test_a_module_that_is_elsewhere_as_a_whole_is_refused(two: ModuleType, cell: Cell) -> None:
    cell("Device maps", "a module wholly on another device, named", "auto", "refused")
    refused(dispatched(chain(), {"": 1}, force_hooks=True), "pass onload_device='sim:1'")


def test_weights_around_modules_of_another_device_are_refused(two: ModuleType) -> None:
    module = dispatched(stack(), MIXED | {"scale": 0, "shift": 0})
    refused(module, "'MlpStack' has weights of its own on sim:0.*onload_device='sim:0'", onload_device="sim:1")


def test_an_offload_folder_that_is_gone_is_named(two: ModuleType, tmp_path: Path) -> None:
    module = dispatched(chain(), CHAIN, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    refused(module, r"blocks.2.lin.weight is mapped to 'disk', but .* doesn't exist any more")


def test_a_file_of_another_type_is_refused(two: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.half() for name, tensor in chain().state_dict().items()}, file)
    index = {
        name: {"safetensors_file": str(file), "dtype": "float32"}
        for name in chain().state_dict()
        if not name.startswith("blocks.0")
    }
    module = dispatched(chain(), MAPS["all but one on disk"][1], None, offload_index=index)
    refused(module, "is torch.float16 .*dtype=torch.float16")


def test_pipelines_refuse_what_contradicts_their_map(two: ModuleType) -> None:
    pipe = balanced("sd15", {"unet": 0, "vae": 1, "text_encoder": 0})
    with pytest.raises(dl.LayerwiseOffloadError, match="'vae' is dispatched to sim:1 as a whole"):
        dl.enable_layerwise_offload(pipe, ["=vae"])
    with pytest.raises(ValueError, match="names the parts of one component"):
        dl.enable_layerwise_offload(pipe, config={"device_map": {"": 0}})
    assert all(isinstance(getattr(pipe, name)._hf_hook, AlignDevicesHook) for name in pipe.hf_device_map)
    bare = factory.CASES["sd15"].build()
    bare.hf_device_map = {"unet": 0, "vae": 1, "text_encoder": 0}
    with pytest.raises(dl.LayerwiseOffloadError, match="'vae' on sim:1, but accelerate doesn't run it there"):
        dl.enable_layerwise_offload(bare, onload_device="sim:0")
