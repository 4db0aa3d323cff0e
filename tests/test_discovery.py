"""What discovery finds in a module: units, layers, and what stays resident. No device is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import factory
import models
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload, discovery, register_layers
from diffusers_layerwise.discovery import Component, discover
from diffusers_layerwise.tensors import ALIGNMENT


def names(component: Component) -> list[str]:
    """The units' names, in order."""
    return [unit.name for unit in component.units]


def fixed_names(component: Component) -> set[str]:
    """The names of what stays resident."""
    return {entry.name for extent in component.fixed for entry in extent.entries}


def aligned_bytes(*tensors: torch.Tensor) -> int:
    """Bytes in a region, each tensor on a multiple of 256."""
    return sum(-(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT for t in tensors)


@pytest.fixture
def registry() -> Iterator[None]:
    """Forgets what a test registers."""
    before = dict(discovery._registered)
    yield
    discovery._registered.clear()
    discovery._registered.update(before)


# ---- units and layers


def test_units_are_leaf_modules_and_layers_the_blocks_of_the_stack() -> None:
    found = discover(models.make(models.MlpStack, depth=2), "stack")
    assert found.layers == ["blocks.0", "blocks.1"]
    assert {unit.name: unit.layer for unit in found.units if "norm" not in unit.name} == {
        "proj_in": None,
        "blocks.0.up": "blocks.0",
        "blocks.0.down": "blocks.0",
        "blocks.1.up": "blocks.1",
        "blocks.1.down": "blocks.1",
        "proj_out": None,
    }


def test_unit_size_counts_each_tensor_aligned() -> None:
    module = models.make(models.Chain)
    unit = discover(module, "chain").units[0]
    assert unit.size == aligned_bytes(module.blocks[0].lin.weight, module.blocks[0].lin.bias) == 4096 + 256


def test_nested_stacks_are_found_at_every_depth_with_the_innermost_block_as_layer() -> None:
    found = discover(models.make(models.SkipUNet), "unet")
    layer_of = {unit.name: unit.layer for unit in found.units}
    assert layer_of["down_blocks.0.resnets.1.up"] == "down_blocks.0.resnets.1"
    assert layer_of["mid_block.resnets.0.down"] == "mid_block.resnets.0"
    assert layer_of["up_blocks.1.sample"] == "up_blocks.1"
    assert layer_of["mid_block.sample"] is None
    assert {layer.split(".")[0] for layer in found.layers} == {"down_blocks", "mid_block", "up_blocks"}


def test_sequential_of_different_layers_is_no_stack() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    assert discover(module, "mlp").layers == []


@pytest.mark.parametrize(
    ("case", "component", "stacks"),
    [
        ("sd15", "unet", {"down_blocks", "mid_block", "up_blocks"}),
        ("sd15", "vae", {"encoder.down_blocks", "encoder.mid_block", "decoder.up_blocks", "decoder.mid_block"}),
        ("sd15_multi_controlnet", "controlnet", {"nets.0", "nets.1"}),
        ("flux", "transformer", {"transformer_blocks", "single_transformer_blocks"}),
        ("qwenimage", "text_encoder", {"model.language_model.layers", "model.visual.blocks"}),
        ("stable_cascade_prior", "prior", {"down_blocks", "up_blocks"}),
    ],
)
def test_stacks_of_real_components_are_all_found(case: str, component: str, stacks: set[str]) -> None:
    module = factory.modules_of(factory.CASES[case].build())[component]
    found = discover(module, component)
    for stack in stacks:
        assert any(layer.startswith(f"{stack}.") for layer in found.layers), stack


@pytest.mark.parametrize("case", ["flux", "sdxl", "wan", "qwenimage", "hunyuan_video", "sd15_multi_controlnet"])
def test_every_tensor_of_a_real_pipeline_has_exactly_one_place(case: str) -> None:
    for name, module in factory.modules_of(factory.CASES[case].build()).items():
        found = discover(module, name)
        placed = [id(entry.tensor) for entry in found.entries()]
        assert len(placed) == len(set(placed))
        assert set(placed) == {id(t) for t in [*module.parameters(), *module.buffers()]}
        assert found.weights == sum(p.numel() * p.element_size() for p in module.parameters())
        assert found.unmovable == []
        assert [unit.index for unit in found.units] == list(range(len(found.units)))


# ---- modules that must move as one


def test_multihead_attention_is_one_unit_since_it_reads_its_childs_weight() -> None:
    module = models.make(models.attention_stack)
    found = discover(module, "stack")
    unit = next(unit for unit in found.units if unit.name == "blocks.0.attention")
    held = {entry.name for extent in unit.extents for entry in extent.entries}
    assert "blocks.0.attention.out_proj.weight" in held
    assert "blocks.0.attention.in_proj_weight" in held
    assert not any("out_proj" in name for name in names(found))


class Reader(nn.Module):
    """Hands a child's weight to a function, as HunyuanDiT's attention pool and vector quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(models.WIDTH, models.WIDTH)
        self.more = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`proj` is read, `more` is called."""
        return self.more(nn.functional.linear(x, self.proj.weight, self.proj.bias))


def test_child_whose_weight_a_parent_reads_stays_resident() -> None:
    module = models.make(models.Blocks, [Reader() for _ in range(3)])
    found = discover(module, "stack")
    assert names(found) == [f"blocks.{i}.more" for i in range(3)]
    held = {entry.name for extent in found.fixed for entry in extent.entries}
    assert held == {f"blocks.{i}.proj.{kind}" for i in range(3) for kind in ("weight", "bias")}


def test_parametrised_module_is_one_unit_with_its_originals() -> None:
    found = discover(models.make(models.parametrised_stack), "stack")
    assert names(found) == [f"blocks.{i}.lin" for i in range(3)]
    held = {entry.name for extent in found.units[0].extents for entry in extent.entries}
    assert held == {"blocks.0.lin.bias", "blocks.0.lin.parametrizations.weight.original"}


def test_tied_tensor_is_held_by_one_unit_that_both_modules_trigger() -> None:
    module = models.make(models.TiedLanguageModel)
    found = discover(module, "lm")
    holders = [unit for unit in found.units if module.embed in unit.triggers or module.head in unit.triggers]
    assert [unit.triggers for unit in holders] == [[module.embed, module.head]]
    assert found.weights == sum(p.numel() * p.element_size() for p in module.parameters())


def test_module_that_appears_twice_is_one_unit() -> None:
    module = models.make(models.shared_stack)
    assert names(discover(module, "stack")) == ["blocks.0.lin", "blocks.1.lin", "blocks.2.lin"]


def test_parameter_that_two_layers_share_beside_others_of_their_own_stays_resident() -> None:
    module = models.make(models.Chain)
    module.blocks[1].lin.weight = module.blocks[0].lin.weight
    found = discover(module, "chain")
    assert "blocks.0.lin.weight" in fixed_names(found)
    placed = [id(entry.tensor) for entry in found.entries()]
    assert len(placed) == len(set(placed)) == len(list(module.parameters()))


def test_views_that_overlap_share_one_extent_and_keep_their_offsets() -> None:
    module = models.make(models.Chain, depth=1)
    fused = torch.randn(2 * models.WIDTH, models.WIDTH)
    holder = nn.Module()
    holder.whole = nn.Parameter(fused)
    holder.lower = nn.Parameter(fused[models.WIDTH :])
    module.fused = holder
    unit = next(unit for unit in discover(module, "chain").units if unit.name == "fused")
    (extent,) = unit.extents
    assert extent.offsets == [0, models.WIDTH * models.WIDTH * 4]
    assert unit.size == aligned_bytes(fused)


# ---- what stays resident


def test_buffers_and_parameters_of_modules_around_units_stay_resident() -> None:
    found = discover(models.make(models.MlpStack), "stack")
    assert {"scale", "shift"} <= fixed_names(found)
    assert not {"scale", "shift"} & set(names(found))


def test_small_units_stay_resident_up_to_a_fiftieth_of_the_component() -> None:
    found = discover(models.make(models.MlpStack, depth=2, width=128), "stack")
    norms = {f"blocks.{i}.norm.{part}" for i in range(2) for part in ("weight", "bias")}
    assert norms <= fixed_names(found)
    small = aligned_bytes(*[torch.empty(128)] * len(norms))
    assert small <= 0.02 * (found.streamable + small)


def test_small_is_relative_so_that_a_tiny_component_streams_like_a_large_one() -> None:
    tiny, large = (discover(models.make(models.Chain, width=width), "chain") for width in (4, 256))
    assert names(tiny) == names(large)
    assert tiny.fixed == large.fixed == []


def test_units_that_are_small_but_many_are_streamed_once_their_share_is_used_up() -> None:
    module = nn.Module()
    module.big = nn.Linear(512, 512)
    module.small = nn.ModuleList(nn.Linear(8, 8) for _ in range(400))
    found = discover(module, "module")
    fixed = found.fixed_size
    assert 0 < fixed <= 0.02 * (fixed + found.streamable)
    assert len(found.units) > 1


# ---- what the user may say, and what can't be


def test_registered_layers_move_as_one_unit_each(registry: None) -> None:
    module = models.make(models.MlpStack, depth=2)
    register_layers(models.MlpStack, ["blocks"])
    found = discover(module, "stack")
    assert names(found) == ["proj_in", "blocks.0", "blocks.1", "proj_out"]
    assert found.units[1].triggers == [module.blocks[0]]
    assert {entry.name for extent in found.units[1].extents for entry in extent.entries} == {
        f"blocks.0.{name}" for name, _ in module.blocks[0].named_parameters()
    }


def test_registering_no_layers_makes_the_class_one_unit_wherever_it_appears(registry: None) -> None:
    register_layers(models.Mlp, [])
    found = discover(models.make(models.SkipUNet), "unet")
    assert "down_blocks.0.resnets.0" in names(found)
    assert not any(name.endswith(("up", "down", "norm")) for name in names(found))


def test_registration_holds_for_subclasses(registry: None) -> None:
    class Narrower(models.MlpStack):
        """Another class of the same shape."""

    register_layers(models.MlpStack, ["blocks"])
    assert "blocks.0" in names(discover(models.make(Narrower, depth=2), "stack"))


def test_registered_name_that_does_not_exist_is_an_error_that_lists_the_children(registry: None) -> None:
    register_layers(models.MlpStack, ["layers"])
    with pytest.raises(LayerwiseOffloadError, match=r"'layers', which MlpStack doesn't have.*'blocks'"):
        discover(models.make(models.MlpStack), "stack")


@pytest.mark.parametrize(("kind", "layers"), [("MlpStack", ["blocks"]), (models.MlpStack, "blocks"), (int, ["blocks"])])
def test_registering_nonsense_is_a_type_error(kind: object, layers: object) -> None:
    with pytest.raises(TypeError):
        register_layers(kind, layers)  # type: ignore[arg-type]


def test_meta_weights_are_named_and_refused_with_the_remedy() -> None:
    with torch.device("meta"):
        module = models.Chain()
    assert discover(module, "chain").unmovable[0] == "blocks.0.lin.weight is on the meta device and has no data"
    with pytest.raises(LayerwiseOffloadError, match=r"meta device.*Load its weights first"):
        apply_layerwise_offload(module, "memory", onload_device="cpu")


def test_tensor_subclass_that_can_not_be_made_anew_is_named_and_refused() -> None:
    module = models.make(models.Chain)
    module.blocks[2].lin.register_buffer("packed", torch.zeros(4).as_subclass(models.Sealed))
    reasons = discover(module, "chain").unmovable
    assert len(reasons) == 1
    assert reasons[0].startswith("blocks.2.lin.packed has an inner tensor 'hidden'")
    with pytest.raises(LayerwiseOffloadError, match=r"blocks\.2\.lin\.packed"):
        apply_layerwise_offload(module, "memory", onload_device="cpu")


def test_module_without_parameters_is_refused() -> None:
    with pytest.raises(LayerwiseOffloadError, match="no parameters"):
        apply_layerwise_offload(nn.Sequential(nn.ReLU()), "memory", onload_device="cpu")


def test_discovery_moves_and_changes_nothing() -> None:
    module = models.make(models.weight_norm_stack)
    before = {name: (id(t), t.data_ptr(), t._version) for name, t in module.state_dict(keep_vars=True).items()}
    discover(module, "stack")
    after = {name: (id(t), t.data_ptr(), t._version) for name, t in module.state_dict(keep_vars=True).items()}
    assert before == after
