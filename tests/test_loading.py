"""Pipelines in another dtype than their files: converted once, the same values, still a map of files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import diffusers_layerwise
import factory
from diffusers_layerwise import LayerwiseOffloadError, loading, weight_cache
from diffusers_layerwise.cli import main
from diffusers_layerwise.files import file_mappings, read_layout
from diffusers_layerwise.headers import has_unknown, read_header
from factory import CASES

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline in float32."""
    place = tmp_path_factory.mktemp("flux")
    CASES["flux"].build().save_pretrained(place)
    return place


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return Path(shutil.copytree(saved, tmp_path / "flux"))


def load(folder: Path, **options: Any) -> DiffusionPipeline:
    """Loads it in bfloat16."""
    return diffusers_layerwise.from_pretrained(folder, torch_dtype=BF16, **options)


def weights(pipe: DiffusionPipeline) -> dict[str, torch.Tensor]:
    """All parameters by name."""
    modules = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    return {f"{name}.{n}": p for name, m in modules.items() for n, p in m.named_parameters()}


def mapped(pipe: DiffusionPipeline) -> int:
    """Bytes of parameters that are views of files."""
    ranges = [(m.start, m.stop) for m in file_mappings() if m.path.endswith(".safetensors")]
    return sum(p.nbytes for p in weights(pipe).values() if any(a <= p.data_ptr() < b for a, b in ranges))


@pytest.mark.parametrize("layout", ["single", "sharded", "variant"])
def test_values_are_those_of_the_loader_and_stay_a_map(layout: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"variant": "fp16"} if layout == "variant" else {}
    more = {"max_shard_size": "100KB"} if layout == "sharded" else {}
    folder = tmp_path / "pipe"
    CASES["flux"].build().save_pretrained(folder, **options, **more)
    plain = DiffusionPipeline.from_pretrained(folder, torch_dtype=BF16, **options)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for _ in range(2):
        pipe = load(folder, **options)
        found = weights(pipe)
        for name, value in weights(plain).items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        assert mapped(pipe) > 0.95 * sum(p.nbytes for p in found.values())
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert torch.equal(factory.run("flux", pipe), factory.run("flux", plain))


def test_it_streams_from_the_converted_files(folder: Path) -> None:
    expected = factory.run("flux", load(folder))
    pipe = load(folder)
    pipe.enable_layerwise_offload(None, "memory", onload_device="cpu", config={"host": "file"})
    for _ in range(2):
        assert torch.equal(factory.run("flux", pipe), expected)
    assert pipe.layerwise_offload.report().disk_bytes > 0


def test_an_ordinary_call_keeps_weights_a_map_also_after_two_calls(folder: Path) -> None:
    pipe = DiffusionPipeline.from_pretrained(folder)
    total = sum(p.nbytes for p in weights(pipe).values())
    assert mapped(pipe) > 0.95 * total
    pipe.enable_layerwise_offload(None, "memory", onload_device="cpu", config={"host": "mapped"})
    for _ in range(2):
        factory.run("flux", pipe)
    assert mapped(pipe) > 0.95 * total


def test_files_of_the_right_dtype_are_loaded_from_where_they_are(folder: Path) -> None:
    diffusers_layerwise.from_pretrained(folder)
    diffusers_layerwise.from_pretrained(folder, torch_dtype=torch.float32)
    assert weight_cache.entries() == []
    with pytest.raises(TypeError, match=r"torch_dtype must be a torch.dtype or None, got 'bf16'"):
        diffusers_layerwise.from_pretrained(folder, torch_dtype="bf16")  # type: ignore[arg-type]
    diffusers_layerwise.from_pretrained(folder, dtype=BF16)
    assert {entry.dtype for entry in weight_cache.entries()} == {"bfloat16"}


def test_it_is_made_once_by_content_and_anew_for_other_content(folder: Path, tmp_path: Path) -> None:
    load(folder)
    held = {entry.folder: entry.folder.stat().st_ctime_ns for entry in weight_cache.entries()}
    assert len(held) == 4
    load(Path(shutil.copytree(folder, tmp_path / "copy")))
    assert {entry.folder for entry in weight_cache.entries()} == set(held)
    # One weight is another one, and neither the name nor the size tells.
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3:] = b"\x01\x02\x3f"
    path.write_bytes(data)
    found = weights(load(folder))
    for name, value in weights(DiffusionPipeline.from_pretrained(folder, torch_dtype=BF16)).items():
        assert torch.equal(found[name], value)
    assert len(weight_cache.entries()) == 5


def test_what_is_broken_is_made_anew(folder: Path) -> None:
    expected = weights(DiffusionPipeline.from_pretrained(folder, torch_dtype=BF16))
    load(folder)
    first, second, *_ = weight_cache.entries()
    for entry, count in ((first, 100), (second, 0)):
        (path,) = (p for p in entry.folder.iterdir() if p.suffix == ".safetensors")
        os.truncate(path, count)
    found = weights(load(folder))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    entry = weight_cache.entries()[0]
    (path,) = (p for p in entry.folder.iterdir() if p.suffix == ".safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    del found
    path.unlink()
    path.write_bytes(data)
    assert weight_cache.verify() == [str(entry)]
    assert len(weight_cache.entries()) == 3
    assert weight_cache.verify() == []


def test_the_cache_is_bounded(folder: Path, tmp_path: Path) -> None:
    load(folder)
    total = sum(entry.nbytes for entry in weight_cache.entries())
    with pytest.raises(LayerwiseOffloadError, match=r"more than cache_limit, .* Raise it"):
        diffusers_layerwise.from_pretrained(folder, torch_dtype=torch.float16, cache_limit=total * 9 // 10)
    diffusers_layerwise.from_pretrained(folder, torch_dtype=torch.float16, cache_limit=total + 5000)
    assert {entry.dtype for entry in weight_cache.entries()} == {"float16"}
    assert sum(entry.nbytes for entry in weight_cache.entries()) <= total + 5000


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_a_full_disk_is_an_error_that_leaves_nothing(when: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if when == "before":
            usage = shutil.disk_usage(folder)._replace(free=10)
            patch.setattr(weight_cache.shutil, "disk_usage", lambda _: usage)
        else:
            patch.setattr(weight_cache.os, "fsync", full)
        with pytest.raises(LayerwiseOffloadError, match=r"could not be written to .* Make room there"):
            load(folder)
    assert weight_cache.entries() == []
    assert [p for p in weight_cache.root().iterdir() if p.name.startswith("new-")] == []
    load(folder)
    assert len(weight_cache.entries()) == 4


def test_the_command_lists_verifies_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert "transformer in bfloat16" in out
    assert main(["cache", "verify"]) == 0
    assert "removed" not in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "removed" in capsys.readouterr().out
    assert weight_cache.entries() == []
    load(folder)


# ---- what the cache holds is what the files say


@pytest.mark.parametrize("where", ["the checkpoint", "the cache"])
def test_bytes_that_change_behind_a_time_that_does_not_are_seen(where: str, folder: Path) -> None:
    load(folder)
    if where == "the checkpoint":
        path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    else:
        (entry,) = (entry for entry in weight_cache.entries() if entry.component == "transformer")
        (path,) = entry.folder.glob("*.safetensors")
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x12\x3f")
    if where == "the checkpoint":
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    found = weights(load(folder))
    for name, value in weights(DiffusionPipeline.from_pretrained(folder, torch_dtype=BF16)).items():
        assert torch.equal(found[name], value), name


def test_a_copied_cache_is_read_through_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    for path in weight_cache.root().glob("*/*.safetensors"):
        os.utime(path)
    made = {entry.folder: entry.folder.stat().st_ino for entry in weight_cache.entries()}
    load(folder)
    assert {entry.folder: entry.folder.stat().st_ino for entry in weight_cache.entries()} == made
    monkeypatch.setattr(weight_cache, "_hash", None)
    load(folder)


def test_saving_to_where_weights_come_from_changes_only_that(folder: Path) -> None:
    expected = {name: value.clone() for name, value in weights(load(folder)).items()}
    pipe = load(folder)
    place = Path(pipe.transformer.config._name_or_path)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.zero_()
    pipe.transformer.save_pretrained(place if place.name == "transformer" else place / "transformer")
    for name, value in weights(load(folder)).items():
        assert torch.equal(value, expected[name]), name
    assert weight_cache.verify() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 2, "files": {"a": 1}}'])
def test_an_entry_whose_description_is_broken_is_no_entry(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder)
    (weight_cache.entries()[0].folder / weight_cache.MANIFEST).write_text(text)
    assert len(weight_cache.entries()) == 3
    assert main(["cache"]) == 0
    assert main(["cache", "verify"]) == 0
    load(folder)
    assert len(weight_cache.entries()) == 4
    capsys.readouterr()


@pytest.mark.parametrize("fault", ["an error", "an early end"])
def test_a_checkpoint_that_cannot_be_read_is_an_error_with_its_name(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, source: Any) -> Any:
        if fault == "an early end":
            os.truncate(self.source, self.source.stat().st_size - 100)
        else:
            source = Failing()
        yield from pieces(self, source)

    pieces = weight_cache._Layout._pieces
    monkeypatch.setattr(weight_cache._Layout, "_pieces", failing)
    with pytest.raises(LayerwiseOffloadError, match=r"could not be read: (Input/output error|it was cut)"):
        load(folder)
    assert list(weight_cache.root().glob("*")) == []


class Failing:
    """A file on a disk that fails."""

    def seek(self, _: int) -> None:
        """Does nothing."""

    def read(self, _: int) -> bytes:
        """Fails."""
        raise OSError(errno.EIO, "Input/output error")


# ---- what is no matter of a dtype


def test_quantised_components_are_left_to_their_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in files are no weights, and what is quantised on loading isn't rounded before."""
    made: list[str] = []

    def converted(component: str, files: Any, *_: Any) -> dict[str, Path]:
        made.append(component)
        return {path.name: path for path in files}

    monkeypatch.setattr(weight_cache, "converted", converted)
    config = folder / "transformer" / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    loading._converted(folder, BF16, {}, 1 << 40)
    assert sorted(made) == ["text_encoder", "text_encoder_2", "vae"]
    config.write_text(whole)
    for named, left in (
        ({"quant_mapping": {"transformer": None}}, ["text_encoder", "text_encoder_2", "vae"]),
        ({"quant_mapping": None, "components_to_quantize": ["vae", "text_encoder"]}, ["text_encoder_2", "transformer"]),
        ({"quant_mapping": None, "components_to_quantize": None}, []),
    ):
        made.clear()
        loading._converted(folder, BF16, {"quantization_config": types.SimpleNamespace(**named)}, 1 << 40)
        assert sorted(made) == left


@pytest.mark.parametrize("kind", ["torchao", "quanto"])  # diffusers asks for a GPU for bitsandbytes
def test_a_pipeline_that_is_quantised_on_loading_has_the_values_of_its_loader_and_streams(
    kind: str, folder: Path
) -> None:
    pytest.importorskip({"quanto": "optimum.quanto"}.get(kind, kind))
    plain = DiffusionPipeline.from_pretrained(folder, torch_dtype=BF16, quantization_config=quantisation(kind))
    expected = factory.run("flux", plain)
    pipe = load(folder, quantization_config=quantisation(kind))
    assert sorted(entry.component for entry in weight_cache.entries()) == ["text_encoder", "text_encoder_2", "vae"]
    assert torch.equal(factory.run("flux", pipe), expected)
    pipe.enable_layerwise_offload(None, "memory", onload_device="cpu")
    for _ in range(2):
        assert torch.equal(factory.run("flux", pipe), expected)
    pipe.disable_layerwise_offload()
    with pytest.raises(LayerwiseOffloadError, match=r"config.host='file' for 'transformer'"):
        pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="cpu", config={"host": "file"})
    assert torch.equal(factory.run("flux", pipe), expected)


def quantisation(kind: str) -> Any:
    """A config that quantises the transformer."""
    import diffusers

    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = diffusers.QuantoConfig(weights_dtype="int8")
    return diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": config})


def test_types_without_a_name_are_left_to_the_loader(folder: Path) -> None:
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    count = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + count])
    end = len(data) - 8 - count
    header["odd"] = {"dtype": "F4", "shape": [2], "data_offsets": [end, end + 1]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + count :] + b"\0")
    assert has_unknown(path)
    assert "odd" not in read_layout(path)
    assert "odd" not in read_header(path)
    assert set(loading._converted(folder, BF16, {}, 1 << 40)) == {"text_encoder", "text_encoder_2", "transformer"}
