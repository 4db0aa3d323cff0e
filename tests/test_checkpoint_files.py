"""Weights that stay in their checkpoint's files: where they are found, in every tier and on every device, and edits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import UNet2DModel
from safetensors.torch import load_file, save_file
from torch import nn

import models
from diffusers_layerwise import (
    LayerwiseOffloadError,
    OffloadHandle,
    apply_layerwise_offload,
    checkpoints,
    files,
    reader,
    tiers,
)
from diffusers_layerwise.discovery import discover
from factory import CASES
from factory import run as call
from models import numbers, run, tokens

linux_only = pytest.mark.skipif(not files.can_tell_edits(), reason="this system doesn't tell what was edited")
WIDTH = 64
pytestmark = linux_only


def stored(module: nn.Module, folder: Path, name: str = "model.safetensors") -> Path:
    """Saves a module's weights, tied ones once, and makes it hold views of the file, as a loader would."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    save_file({n: p.detach().clone() for n, p in module.named_parameters()}, path)
    loaded = load_file(path)
    for n, parameter in module.named_parameters():
        parameter.data = loaded[n]
    return path


def chain(folder: Path) -> models.Chain:
    """A chain of blocks whose weights are views of a file."""
    module = models.make(models.Chain, 6, WIDTH)
    stored(module, folder)
    return module


def x() -> torch.Tensor:
    """An input for it."""
    return numbers(2, WIDTH)


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    """The execution device."""
    if request.param == "sim":
        request.getfixturevalue("sim")
    return str(request.param)


STREAMING = {
    "memory": {"mode": "memory"},
    "half": {"mode": "speed", "share": 0.5},
    "layers": {"mode": "manual", "config": {"group_size": "layer"}},
    "prefetch_3": {"mode": "manual", "config": {"prefetch": 3}},
    "resident": {"mode": "manual", "config": {"resident": 1.0}},
}


@pytest.mark.parametrize("tier", ["pinned", "pageable", "mapped", "file"])
@pytest.mark.parametrize("way", STREAMING)
def test_results_are_the_same_in_every_tier(device: str, tier: str, way: str, tmp_path: Path) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    options = dict(STREAMING[way])
    options["config"] = dict(options.pop("config", {}), host=tier)
    handle = models.stream(module, device=device, **options)
    for _ in range(4):
        assert torch.equal(run(module, x()), expected)
    part = handle.report().components[0]
    assert part.host_tier == tier
    if device == "sim" and tier in ("mapped", "file"):
        assert part.pinned_bytes < part.weights / 10
    if tier == "file" and device == "sim":
        assert part.disk_bytes >= part.moved_bytes / 2
    handle.remove()
    assert torch.equal(run(module, x()), expected)


@pytest.mark.parametrize("tier", ["mapped", "file"])
@pytest.mark.parametrize("stack", [*models.STACKS, *models.LANGUAGE_MODELS])
def test_every_kind_of_module_streams_from_files(device: str, stack: str, tier: str, tmp_path: Path) -> None:
    module = models.make((models.STACKS | models.LANGUAGE_MODELS)[stack])
    if stack == "transposed":
        pytest.skip("strides aren't kept in files")
    if stack in ("weight_norm", "parametrised"):
        values = {n: p.detach().clone() for n, p in module.named_parameters()}
        save_file(values, tmp_path / "model.safetensors")
        loaded = load_file(tmp_path / "model.safetensors")
        for n, parameter in module.named_parameters():
            parameter.data = loaded[n]
    else:
        stored(module, tmp_path)
    given = tokens(2, 5) if stack in models.LANGUAGE_MODELS else numbers(2, models.WIDTH)
    expected = run(module, given)
    handle = models.stream(module, device=device, config={"host": tier})
    for _ in range(3):
        assert torch.equal(run(module, given), expected)
    handle.remove()


# ---- where weights are found


def unet() -> UNet2DModel:
    """A small model of diffusers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet2DModel(
            sample_size=8,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
        ).eval()


LAYOUTS: dict[str, dict[str, object]] = {
    "single": {},
    "sharded": {"max_shard_size": "200KB"},
    "variant": {"variant": "fp16"},
    "sharded variant": {"variant": "fp16", "max_shard_size": "200KB"},
}


def in_files(module: nn.Module, checkpoint: str | None = None) -> tuple[int, int]:
    """Bytes of a module's units that are taken from files, and those that aren't."""
    component = discover(module, "unet")
    found = checkpoints.search(component, checkpoint)
    _, left = checkpoints.take(component, found)
    return sum(e.nbytes for unit in component.units for e in unit.extents) - left, left


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_found_in_every_layout_of_a_folder(layout: str, is_mapped: bool, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path, **LAYOUTS[layout])
    variant = {k: v for k, v in LAYOUTS[layout].items() if k == "variant"}
    model = UNet2DModel.from_pretrained(tmp_path, disable_mmap=not is_mapped, **variant)
    before = dict(model.named_parameters())
    taken, left = in_files(model)
    assert taken > 0
    assert left == 0
    assert all(before[name] is p for name, p in model.named_parameters())
    fresh = UNet2DModel.from_pretrained(tmp_path, **variant)
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_model_of_a_single_file_streams_from_that_file(device: str, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    pipe = CASES["flux"].build()
    pipe.transformer.save_pretrained(tmp_path / "transformer")
    file = tmp_path / "one.safetensors"
    os.replace(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", file)
    model = FluxTransformer2DModel.from_single_file(
        str(file), config=str(tmp_path), subfolder="transformer", torch_dtype=torch.float32
    )
    pipe.transformer = model
    expected = call("flux", pipe)
    handle = pipe.enable_layerwise_offload({"transformer": {"host": "file"}}, "memory", onload_device=device)
    for _ in range(2):
        assert torch.equal(call("flux", pipe), expected)
    part = next(c for c in handle.report().components if c.name == "transformer")
    assert part.disk_bytes > 0
    assert part.host_bytes["file"] > 0.9 * sum(part.host_bytes.values())


def test_weights_are_found_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--someone--something" / "snapshots" / "abc"
    unet().save_pretrained(snapshot / "unet")
    refs = cache / "models--someone--something" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    model = UNet2DModel.from_pretrained(snapshot / "unet", disable_mmap=True)
    model.register_to_config(_name_or_path="someone/something")
    assert in_files(model)[1] == 0


def test_weights_of_another_type_or_with_other_bytes_are_not_taken(tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path)
    model = UNet2DModel.from_pretrained(tmp_path, torch_dtype=torch.float16)
    assert in_files(model)[0] == 0
    model = UNet2DModel.from_pretrained(tmp_path, disable_mmap=True)
    weight = model.get_parameter("mid_block.resnets.0.conv1.weight")
    with torch.no_grad():
        weight.view(-1)[-1] += 1
    expected = weight.detach().clone()
    _, left = in_files(model)
    assert left == weight.nbytes
    assert torch.equal(weight, expected)


def test_two_folders_with_the_same_names_are_told_apart(device: str, tmp_path: Path) -> None:
    one, two = models.make(models.Chain, 4, WIDTH, seed=1), models.make(models.Chain, 4, WIDTH, seed=2)
    expected = [run(one, x()), run(two, x())]
    values = [models.copies(one), models.copies(two)]
    for held, folder in zip(values, ("one", "two"), strict=True):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors")
    for module, folder in ((one, "one"), (two, "two")):
        models.stream(module, device=device, config={"host": "file", "checkpoint": tmp_path / folder})
    for _ in range(3):
        assert torch.equal(run(one, x()), expected[0])
        assert torch.equal(run(two, x()), expected[1])
    # Right names, types and shapes, and other bytes.
    third = models.make(models.Chain, 4, WIDTH, seed=1)
    handle = models.stream(third, device=device, config={"host": "file", "checkpoint": tmp_path / "two"})
    assert torch.equal(run(third, x()), expected[0])
    assert "stay in host memory" in " ".join(handle.report().components[0].notes)


def test_what_is_in_no_file_is_refused_by_name(tmp_path: Path) -> None:
    module = models.make(models.Chain)
    with pytest.raises(LayerwiseOffloadError, match=r"config.host='file' for 'Chain', but none of its weights"):
        apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "file"})
    with pytest.raises(ValueError, match=r"config.checkpoint: there is no"):
        apply_layerwise_offload(module, onload_device="cpu", config={"host": "file", "checkpoint": tmp_path / "no"})
    assert not hasattr(module, "_hf_hook")


def test_tied_weights_are_read_once(sim: ModuleType, tmp_path: Path) -> None:
    module = models.make(models.TiedLanguageModel, 4, WIDTH, 512)
    stored(module, tmp_path)
    expected = run(module, tokens(2, 5))
    handle = models.stream(module, config={"host": "file"})
    for _ in range(3):
        assert torch.equal(run(module, tokens(2, 5)), expected)
    part = handle.report().components[0]
    assert sum(part.host_bytes.values()) < 1.1 * sum(p.nbytes for p in module.parameters())
    assert module.head.weight is module.embed.weight


# ---- edits

EDITS: dict[str, Callable[[models.Chain], None]] = {}


def edit(function: Callable[[models.Chain], None]) -> Callable[[models.Chain], None]:
    """A way to edit weights."""
    EDITS[function.__name__] = function
    return function


@edit
def in_place(module: models.Chain) -> None:
    with torch.no_grad():
        module.blocks[2].lin.weight.mul_(2)


@edit
def through_data(module: models.Chain) -> None:
    module.blocks[2].lin.weight.data += 1


@edit
def one_element(module: models.Chain) -> None:
    module.blocks[5].lin.weight.data[-1, -1] = 3


@edit
def through_state_dict(module: models.Chain) -> None:
    module.state_dict()["blocks.3.lin.weight"].zero_()


@edit
def other_memory(module: models.Chain) -> None:
    module.blocks[1].lin.weight.data = torch.full((WIDTH, WIDTH), 0.01)


@edit
def other_object(module: models.Chain) -> None:
    module.blocks[1].lin.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))


@edit
def load_state_dict(module: models.Chain) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


@pytest.mark.parametrize("tier", ["mapped", "file"])
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_edit_is_seen_by_the_next_pass(device: str, how: str, when: str, tier: str, tmp_path: Path) -> None:
    module, plain = chain(tmp_path / "a"), chain(tmp_path / "b")
    handle = None
    for step in range(4):
        if step == 2:
            EDITS[how](plain)
            if handle is not None:
                handle.release()
            EDITS[how](module)
        if handle is None and (when == "before") == (step >= 2):
            handle = models.stream(module, device=device, config={"host": tier})
        assert torch.equal(run(module, x()), run(plain, x())), step
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    handle.remove()
    assert torch.equal(run(module, x()), run(plain, x()))


def test_state_dict_and_saving_work_while_it_streams(device: str, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path / "a")
    model = UNet2DModel.from_pretrained(tmp_path / "a")
    expected = {name: p.detach().clone() for name, p in unet().named_parameters()}
    models.stream(model, device=device, config={"host": "file"})
    for _ in range(3):
        with torch.no_grad():
            model(torch.zeros(1, 3, 8, 8), 1)
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), expected[name])
    model.save_pretrained(tmp_path / "b")
    again = UNet2DModel.from_pretrained(tmp_path / "b")
    for name, p in again.named_parameters():
        assert torch.equal(p, expected[name])


def test_a_removed_folder_and_a_replaced_file_are_still_read(device: str, tmp_path: Path) -> None:
    module = chain(tmp_path / "a")
    expected = run(module, x())
    models.stream(module, device=device, config={"host": "file"})
    assert torch.equal(run(module, x()), expected)
    save_file({"w": torch.zeros(4)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "a" / "model.safetensors")
    assert torch.equal(run(module, x()), expected)
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(run(module, x()), expected)


@pytest.mark.parametrize("host", ["file", "mapped", None])
def test_a_pipeline_that_was_loaded_from_a_folder_streams_from_it(
    device: str, host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["flux"].build().save_pretrained(tmp_path)
    pipe = type(CASES["flux"].build()).from_pretrained(tmp_path)
    plain = type(pipe).from_pretrained(tmp_path)
    expected = call("flux", plain)
    options: dict[str, object] = {"host": host} if host else {"host_memory_budget": 200_000}
    monkeypatch.setattr(tiers, "most_bytes", lambda *_: 0)
    handle = pipe.enable_layerwise_offload(None, "memory", onload_device=device, config=options)
    for _ in range(3):
        assert torch.equal(call("flux", pipe), expected)
    report = handle.report()
    assert report.host_bytes - reader.staging_bytes() < 0.9 * report.weights
    assert all(set(c.host_bytes) & {"file", "mapped"} for c in report.components if host)
    if host is None:
        held = {c.name: c.pinned_bytes + c.host_bytes.get("pageable", 0) for c in report.components}
        assert held["transformer"] > 0
        assert str(handle.plan.host) in str(handle.plan)
    pipe.disable_layerwise_offload()
    assert torch.equal(call("flux", pipe), expected)
    assert handle.report().host_bytes <= report.host_peak


# ---- where files and models are odd


def results(model: UNet2DModel) -> torch.Tensor:
    """One forward."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.ones(1, 3, 8, 8), 1).sample.cpu()
    return found


def part_of(handle: OffloadHandle) -> dict[str, int]:
    """Bytes of the only component by tier."""
    return handle.report().components[0].host_bytes


@pytest.mark.parametrize("how", ["as it was", "in shards"])
def test_saving_to_the_folder_that_is_streamed_from_is_safe(how: str, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path)
    model = UNet2DModel.from_pretrained(tmp_path)
    handle = models.stream(model, device="cpu", config={"host": "file"})
    results(model)
    with torch.no_grad():
        model.mid_block.resnets[0].conv1.weight.mul_(2)
    expected = results(model)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path, **({"max_shard_size": "200KB"} if how == "in shards" else {}))
    for _ in range(2):
        assert torch.equal(results(model), expected)
    if how == "in shards":
        (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    for name, p in UNet2DModel.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(p, values[name])
    handle.remove()
    # The files that it is a view of have no name any more, and the new ones have the same bytes.
    handle = models.stream(model, device="cpu", config={"host": "file"})
    for _ in range(2):
        assert torch.equal(results(model), expected)
    assert part_of(handle)["file"] > 0.9 * sum(part_of(handle).values())
    handle.remove()
    shutil.rmtree(tmp_path)
    with pytest.raises(LayerwiseOffloadError, match="none of its weights is in a checkpoint file"):
        models.stream(model, device="cpu", config={"host": "file"})
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name])


@pytest.mark.parametrize("kind", ["copied", "pickle", "pickle, copied"])
def test_what_a_loader_copied_is_found_by_its_bytes_or_refused(kind: str, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path, safe_serialization=kind == "copied")
    options = {"low_cpu_mem_usage": False} if kind == "copied" else {"use_safetensors": False}
    model = UNet2DModel.from_pretrained(tmp_path, disable_mmap="copied" in kind, **options)
    expected = results(model)
    if kind == "pickle, copied":
        with pytest.raises(LayerwiseOffloadError, match=r"none of its weights .* from safetensors files"):
            models.stream(model, device="cpu", config={"host": "file"})
        return
    handle = models.stream(model, device="cpu", config={"host": "file"})
    for _ in range(2):
        assert torch.equal(results(model), expected)
    assert part_of(handle)["file"] > 0.9 * sum(part_of(handle).values())


class Odd(nn.Module):
    """Parameters of types and shapes that weights seldom have."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.none = nn.Parameter(torch.zeros(0, WIDTH))
        self.one = nn.Parameter(torch.tensor(2.5))
        self.flags = nn.Parameter(torch.arange(5001) % 3 == 0, requires_grad=False)
        self.index = nn.Parameter(torch.arange(3001) % WIDTH, requires_grad=False)
        self.small = nn.Parameter(torch.linspace(-1, 1, 999).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Uses all of them."""
        found = self.lin(given) * self.one + self.small.float().sum() + self.none.sum()
        return found + given[:, self.index].sum(1, keepdim=True) * self.flags.sum()


@pytest.mark.parametrize("tier", ["mapped", "file"])
def test_types_and_shapes_of_any_kind_stream(device: str, tier: str, tmp_path: Path) -> None:
    module = models.make(Odd)
    stored(module, tmp_path)
    expected = run(module, x())
    handle = models.stream(module, device=device, config={"host": tier})
    for _ in range(3):
        assert torch.equal(run(module, x()), expected)
    handle.remove()
    assert torch.equal(run(module, x()), expected)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_bytes_anywhere_in_a_file_are_read_or_stay_in_memory(device: str, shift: int, tmp_path: Path) -> None:
    """Old writers didn't align their data: what can't be a view of its place is held, and a note says so."""
    module = models.make(models.Chain, 6, WIDTH)
    expected = run(module, x())
    save_file(models.copies(module), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    count = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + count] + b" " * (shift + -(8 + count) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data[8 + count :])
    options = {"host": "file", "checkpoint": tmp_path}
    if shift % 4:
        with pytest.raises(LayerwiseOffloadError, match="none of its weights is in a checkpoint file"):
            models.stream(module, device=device, config=options)
        handle = models.stream(module, device=device)
    else:
        handle = models.stream(module, device=device, config=options)
        assert part_of(handle)["file"] > 0
    for _ in range(3):
        assert torch.equal(run(module, x()), expected) or (device == "cpu" and not shift % 4)
    handle.remove()


def test_a_file_in_memory_streams_too(device: str) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        module = chain(Path(folder))
        expected = run(module, x())
        handle = models.stream(module, device=device, config={"host": "file"})
        for _ in range(3):
            assert torch.equal(run(module, x()), expected)
        assert handle.report().disk_bytes > 0
        handle.remove()


def test_there_and_back_in_another_type_is_seen(device: str, tmp_path: Path) -> None:
    module, plain = chain(tmp_path / "a"), chain(tmp_path / "b")
    handle = models.stream(module, device=device, config={"host": "file"})
    for dtype in (torch.bfloat16, torch.float16):
        run(module, x())
        for each in (module, plain):
            each.to(dtype).to(torch.float32)
        for (name, value), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            assert torch.equal(value, other), name
        assert torch.equal(run(module, x()), run(plain, x()))
    handle.remove()
