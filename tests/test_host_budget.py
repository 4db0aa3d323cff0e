"""Host memory as a budget: how much there is, who gets it, and what streaming from files really takes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import models
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload, tiers
from diffusers_layerwise.config import HostTier, LayerwiseOffloadConfig, format_bytes
from diffusers_layerwise.hostmemory import (
    HostItem,
    assign_tiers,
    automatic_budget,
    available_memory,
    local_processes,
)
from diffusers_layerwise.selection import is_denoiser
from models import run
from test_checkpoint_files import WIDTH, chain, linux_only, x

GIB = 1 << 30


# ---- how much there is


def system(root: Path, available: int = 16 * GIB, cgroup: str = "", **held: str) -> Path:
    """A system's files: `held` are those of control groups, with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in held.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_it_is_what_the_system_has_available(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path)) == 16 * GIB
    assert available_memory(tmp_path / "nothing") is None


def test_the_tightest_group_counts_less_what_it_uses_but_for_caches(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        cgroup="0::/a/b\n",
        memory_dot_max="max\n",
        a__memory_dot_max=str(8 * GIB),
        a__memory_dot_current=str(3 * GIB),
        a__memory_dot_stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
        a__b__memory_dot_max="max\n",
        a__b__memory_dot_current=str(GIB),
    )
    assert available_memory(root) == 8 * GIB - (3 * GIB - GIB - GIB // 2)


def test_groups_of_version_1_and_of_a_container(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        cgroup="5:cpu:/x\n4:memory:/docker/unknown\n",
        memory__memory_dot_limit_in_bytes=str(4 * GIB),
        memory__memory_dot_usage_in_bytes=str(2 * GIB),
        memory__memory_dot_stat=f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    )
    assert available_memory(root) == 3 * GIB
    assert available_memory(system(tmp_path / "none", cgroup="0::/\n")) == 16 * GIB


def test_a_group_that_slows_down_before_its_limit_counts_from_there(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        cgroup="0::/a\n",
        a__memory_dot_max="max\n",
        a__memory_dot_high=str(6 * GIB),
        a__memory_dot_current=str(GIB),
    )
    assert available_memory(root) == 5 * GIB


def test_processes_of_one_host_share_it() -> None:
    assert local_processes({}) == 1
    assert local_processes({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert local_processes({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "x"}) == 2
    assert automatic_budget(10 * GIB, 3) == 3 * GIB
    assert automatic_budget(100 * GIB, 1) == 96 * GIB
    assert automatic_budget(None, 1) is None


def test_this_system_says_something() -> None:
    found = available_memory()
    assert found is None or found > 0


# ---- who gets it


def item(component: str, key: int, nbytes: int = 10, uses: int = 1, from_file: bool = True) -> HostItem:
    """Some units' bytes."""
    return HostItem(component, key, nbytes, uses, from_file)


def test_what_is_used_most_is_held_first_and_the_rest_is_read() -> None:
    items = [
        item("text_encoder", 0, 40),
        item("transformer", 0, 30, uses=20),
        item("transformer", 1, 30),
        item("transformer", 2, 30, uses=20),
    ]
    plan = assign_tiers(items, 75, HostTier.PINNED, HostTier.FILE)
    assert plan.nbytes == {"text_encoder": {"file": 40}, "transformer": {"pinned": 60, "file": 30}}
    assert plan.tiers["transformer", 1] is HostTier.FILE
    assert plan.held == 60
    assert str(plan).splitlines()[0] == "host memory: 60 B of 75 B"
    assert assign_tiers(items, None, HostTier.PINNED, HostTier.FILE).held == 130
    assert assign_tiers(items, 0, HostTier.PINNED, HostTier.FILE).held == 0


def test_what_is_in_no_file_or_has_a_tier_comes_first() -> None:
    items = [
        item("unet", 0, 50, uses=20),
        item("vae", 0, 40, from_file=False),
        HostItem("text_encoder", 0, 40, tier=HostTier.MAPPED),
    ]
    plan = assign_tiers(items, 80, HostTier.PINNED, HostTier.FILE)
    assert plan.nbytes == {"unet": {"file": 50}, "vae": {"pinned": 40}, "text_encoder": {"mapped": 40}}


def test_denoisers_are_known_by_name() -> None:
    assert all(map(is_denoiser, ["transformer", "transformer_2", "unet", "controlnet of P", "prior", "decoder"]))
    assert not any(map(is_denoiser, ["text_encoder", "vae", "image_encoder"]))


def test_sizes_are_read_and_nonsense_is_refused() -> None:
    assert LayerwiseOffloadConfig(host_memory_budget="16GiB").host_memory_budget == 16 * GIB
    for wrong in ("much", 0, -1, True):
        with pytest.raises((ValueError, TypeError), match=r"config.host_memory_budget \('auto', None, or bytes\)"):
            LayerwiseOffloadConfig(host_memory_budget=wrong)


# ---- with modules


@linux_only
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8, 2.0])
def test_a_budget_splits_a_module_between_memory_and_file(
    sim: ModuleType, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "most_bytes", lambda *_: 0)
    module = chain(tmp_path)
    weights = sum(p.nbytes for p in module.parameters())
    expected = run(module, x())
    handle = models.stream(module, config={"host_memory_budget": int(share * weights) + 1})
    for _ in range(5):
        assert torch.equal(run(module, x()), expected)
    report = handle.report()
    part = report.components[0]
    assert part.pinned_bytes <= share * weights + 4096
    if share == 2:
        assert part.host_tier == "pinned"
        assert part.disk_bytes == 0
    else:
        assert part.disk_bytes > 0
        assert part.host_bytes["file"] >= (1 - share) * weights * 0.8
    if share == 0.4:
        assert part.pinned_bytes > 0.2 * weights
        assert set(part.host_bytes) == {"pinned", "file"}
    assert handle.plan.host is not None
    assert handle.plan.host.nbytes["Chain"].get("file", 0) == part.host_bytes.get("file", 0)
    assert "host memory" in str(handle.plan)
    assert "host memory" in str(report)
    assert f") of {format_bytes(int(share * weights) + 1)}; Chain" in str(report)
    handle.remove()


def test_a_report_says_the_limit_that_was_given_with_what_staging_takes_of_it(tmp_path: Path) -> None:
    handle = apply_layerwise_offload(
        chain(tmp_path), "memory", onload_device="cpu", config={"host_memory_budget": "100KiB"}
    )
    report = handle.report()
    assert (report.host_limit, report.host_budget) == (100 << 10, 0)
    assert ") of 100.00 KiB; Chain" in str(report)
    handle.remove()


@linux_only
def test_a_budget_below_what_is_in_no_file_is_refused(sim: ModuleType, tmp_path: Path) -> None:
    module = models.make(models.Chain, 6, WIDTH)
    with pytest.raises(LayerwiseOffloadError, match=r"config.host_memory_budget is 1.00 KiB, but .* have to be held"):
        models.stream(module, config={"host_memory_budget": 1024})
    mapped = chain(tmp_path)
    with pytest.raises(LayerwiseOffloadError, match=r"config.host_memory_budget"):
        models.stream(mapped, config={"host_memory_budget": 1024, "host": "pinned"})
    assert not hasattr(mapped, "_hf_hook")


@linux_only
@pytest.mark.parametrize("onto", ["cpu", "sim"])
def test_an_automatic_budget_leaves_in_files_what_does_not_fit(
    onto: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if onto == "sim":
        request.getfixturevalue("sim")
    module = chain(tmp_path)
    weights = sum(p.nbytes for p in module.parameters())
    expected = run(module, x())
    monkeypatch.setattr(tiers, "most_bytes", lambda *_: 0)
    monkeypatch.setattr(tiers, "available_memory", lambda: weights * 2 // 3)
    handle = models.stream(module, mode="auto", device=onto)
    for _ in range(4):
        assert torch.equal(run(module, x()), expected)
    report = handle.report()
    assert report.components[0].host_bytes["file"] > 0
    if onto == "cpu":
        # The device's memory is the host's, so weights that don't fit it stream.
        assert report.components[0].streamed_groups > 0
        assert report.peak_seen <= weights * 2 // 3


MEMORY = """
    import os, sys
    import torch
    from diffusers import UNet2DModel
    from diffusers_layerwise import apply_layerwise_offload

    def anonymous():
        return int(next(l for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous:")).split()[1]) << 10

    folder, tier = sys.argv[1:]
    model = UNet2DModel.from_pretrained(folder, torch_dtype=torch.float32)
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.zeros(1, 3, 8, 8)
    with torch.no_grad():
        if tier == "reference":
            torch.save(model(x, 1).sample, os.path.join(folder, "reference.pt"))
            sys.exit()
    expected = torch.load(os.path.join(folder, "reference.pt"))
    torch.nn.Conv2d(3, 3, 3)(x)
    before = anonymous()
    budget = 96 << 20
    handle = apply_layerwise_offload(model, "memory", onload_device="cpu", memory_budget=budget, config={"host": tier})
    print("enabled", weights, anonymous() - before)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x, 1).sample, expected)
    grown = anonymous() - before
    print("called", weights, grown, handle.report().host_bytes, handle.report().disk_bytes)
    assert weights > 200e6
    assert grown < budget + (48 << 20), grown
    assert model.state_dict()
    assert anonymous() - before < budget + (48 << 20)
"""


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("tier", ["mapped", "file"])
def test_weights_stay_backed_by_their_file(tier: str, tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    UNet2DModel(
        sample_size=8,
        block_out_channels=(384, 768),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=32,
    ).save_pretrained(tmp_path)
    root = str(Path(tiers.__file__).parent.parent)
    environment = dict(os.environ, PYTHONPATH=root, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    for which in ("reference", tier):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path), which],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
