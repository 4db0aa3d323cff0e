"""The report on a machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import factory
from diffusers_layerwise import doctor, hostmemory, platform
from diffusers_layerwise.cli import main
from diffusers_layerwise.doctor import examine
from diffusers_layerwise.hardware import PRESETS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("flux")
    factory.CASES["flux"].build().save_pretrained(place)
    return place


def test_it_names_versions_memory_and_what_is_in_the_way() -> None:
    found = examine(device="cpu", seconds=0)
    rows = dict(found.rows)
    assert torch.__version__ in rows["torch"]
    assert "diffusers " in rows["packages"]
    assert rows["control group"].startswith(("no limit", "limit "))
    assert "available" in rows["host memory"]
    assert "link" not in rows  # a CPU has none
    assert "No accelerator" in found.problems[0]
    text = str(found)
    assert all(name in text for name in rows)
    assert "- No accelerator" in text


def test_it_says_what_would_be_chosen_for_a_folder(folder: Path) -> None:
    found = examine(folder, device="cpu", seconds=0)
    assert found.plan is not None
    assert "transformer" in found.plan
    assert str(folder) in str(found)
    assert str(folder) in dict(found.rows)["direct reads"]


def test_without_an_accelerator_it_says_for_which_card_it_plans(folder: Path) -> None:
    found = examine(folder, device="cpu", seconds=0)
    assert f"{folder} on an RTX 4090, as there is no accelerator here:" in str(found)


def test_a_folder_that_is_no_pipeline_is_a_problem_and_no_failure(tmp_path: Path) -> None:
    found = examine(tmp_path, device="cpu", seconds=0)
    assert found.plan == "no plan, see below"
    assert "model_index.json" in found.problems[-1]


def test_a_file_that_can_t_be_opened_is_a_problem_and_no_failure(folder: Path, tmp_path: Path) -> None:
    """Such as a link in the hub's cache to a download that never ended."""
    place = tmp_path / "flux"
    shutil.copytree(folder, place)
    for path in list(place.rglob("*.safetensors")):
        path.unlink()
        path.symlink_to(tmp_path / "nothing")
    found = examine(place, device="cpu", seconds=0)
    assert dict(found.rows)["direct reads"] == "unknown: No such file or directory"
    assert any(".safetensors can't be read" in problem for problem in found.problems)
    assert found.plan == "no plan, see below"


def test_no_folder_for_temporary_files_is_a_problem_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", fail)
    assert any("point TMPDIR at" in problem for problem in examine(device="cpu", seconds=0).problems)


def test_only_a_pipeline_s_own_files_are_looked_for(tmp_path: Path) -> None:
    deep = tmp_path / "downloads" / "models" / "other"
    deep.mkdir(parents=True)
    (deep / "x.safetensors").write_bytes(b"")
    assert str(deep) not in dict(examine(tmp_path, device="cpu", seconds=0).rows)["direct reads"]


@pytest.mark.sim
def test_a_device_s_memory_link_and_page_locking_are_shown(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.devices, "measure", lambda device, seconds: PRESETS["T4"])
    monkeypatch.setattr(platform, "try_pinning", lambda device: "no more")
    found = examine(device="sim")
    rows = dict(found.rows)
    assert " free" in rows["device"]
    assert rows["link"] == "12.0 GB/s from page-locked memory, 4.0 from other"
    assert rows["page-locking"].startswith("fails: no more (ulimit -l: ")
    assert any("page-locked" in problem for problem in found.problems)
    assert not any("No accelerator" in problem for problem in found.problems)


@pytest.mark.sim
def test_a_slow_link_is_a_problem(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    slow = dataclasses.replace(PRESETS["T4"], pinned=3e9)
    monkeypatch.setattr(doctor.devices, "measure", lambda device, seconds: slow)
    assert any("The link is slow (3.0 GB/s)" in problem for problem in examine(device="sim").problems)


def test_under_zerogpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setattr(doctor.devices, "measure", lambda *_: pytest.fail("measured"))
    assert "ZeroGPU" in dict(examine(device="cpu").rows)


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_a_variable_that_denies_zerogpu_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", value)
    assert "ZeroGPU" not in dict(examine(device="cpu", seconds=0).rows)


@pytest.mark.sim
def test_under_zerogpu_nothing_is_page_locked(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setattr(platform, "try_pinning", lambda *_: pytest.fail("page-locked"))
    assert "page-locking" not in dict(examine(device="sim").rows)


def test_a_tight_control_group_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "memory_limit", lambda: 1 << 20)
    assert any("control group allows 1.00 MiB" in problem for problem in examine(device="cpu", seconds=0).problems)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "8\n", "sys/fs/cgroup/a/memory.high": "4\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "8192\n",
            },
            8192,
        ),
        ({}, None),
    ],
)
def test_the_tightest_control_group_counts(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hostmemory.memory_limit(tmp_path) == limit


def test_a_cache_that_can_t_be_written_to_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert any("XDG_CACHE_HOME" in problem for problem in examine(device="cpu", seconds=0).problems)


def test_the_command_prints_text_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--quick", "--device", "cpu"]) == 0
    assert "direct reads" in capsys.readouterr().out
    assert main(["doctor", "--quick", "--json", "--device", "cpu"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["plan"] is None
    assert values["found"]["device"].startswith("cpu")


def test_a_device_that_is_not_there_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "nowhere"]) == 2
    assert "'nowhere' can't be used" in capsys.readouterr().err


def test_python_m_runs_it() -> None:
    command = [sys.executable, "-m", "diffusers_layerwise", "doctor", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "matrix products" in done.stdout
