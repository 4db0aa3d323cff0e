"""Presets, their names, and measuring this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusers_layerwise import cache, hardware
from diffusers_layerwise.flops import Cost
from diffusers_layerwise.hardware import PRESETS, Hardware, find, load, measure, resolve, store


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_where_they_come_from_and_are_plausible(name: str) -> None:
    preset = PRESETS[name]
    assert "NVIDIA" in preset.source
    assert "of the peak" in preset.source
    assert 10 << 30 < preset.memory < 150 << 30
    assert preset.pageable < preset.pinned < preset.bandwidth
    assert preset.matmul["float32"] <= preset.matmul["bfloat16"] <= preset.matmul["float16"]
    assert Hardware.from_dict(preset.to_dict()) == preset


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx 3060", "RTX 3060 12GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        ("Tesla T4", "T4"),
    ],
)
def test_names_are_forgiving(name: str, found: str) -> None:
    assert find(name).name == found


@pytest.mark.parametrize(("name", "hint"), [("RTX 4900", "RTX 4090"), ("RTX 4070 Ti", "RTX 4070"), ("A1000", "A100")])
def test_unknown_names_are_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{hint}'"):
        find(name)


def test_seconds_are_the_slower_of_flops_and_bytes_and_at_least_the_launches() -> None:
    device = PRESETS["A100"]
    rate = device.matmul["bfloat16"]
    assert device.seconds(Cost({"bfloat16": 10**13}, 10)) == pytest.approx(1e13 / rate)
    assert device.seconds(Cost({"bfloat16": 10}, 10**10)) == pytest.approx(1e10 / device.bandwidth)
    assert device.seconds(Cost(kernels=1000)) == pytest.approx(1000 * device.launch)
    assert device.seconds(Cost({"float64": 10**13})) == pytest.approx(1e13 / device.matmul["float32"])


def test_measuring_the_cpu_gives_rates_that_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load("cpu") is None
    found = measure("cpu", seconds=0.4)
    rates = (found.pinned, found.pageable, found.attention, found.bandwidth, found.disk, *found.matmul.values())
    assert all(rate > 1e6 for rate in rates)
    assert 0 < found.launch < 1e-2
    assert "measured" in found.source
    assert store(found) == cache.cache_folder() / hardware.FILE
    assert load("cpu") == found


def test_a_broken_or_unwritable_cache_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.cache_folder().mkdir(parents=True)
    (cache.cache_folder() / hardware.FILE).write_text("{broken")
    assert load("cpu") is None
    assert store(PRESETS["L4"]) is not None
    assert load("L4") == PRESETS["L4"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert store(PRESETS["L4"]) is None
    assert load("L4") is None


def test_what_hardware_may_be() -> None:
    notes: list[str] = []
    assert resolve(PRESETS["L4"], notes) is PRESETS["L4"]
    assert resolve("l4", notes) is PRESETS["L4"]
    assert notes == []
    with pytest.raises(TypeError, match="Hardware or the name"):
        resolve(4, notes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the fields"):
        Hardware.from_dict({"name": "x"})
