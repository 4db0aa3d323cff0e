"""Checkpoints larger than the memory that is allowed, in processes of their own: what they hold, and their images."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffusers_layerwise import tiers
from factory.flux import flux_pipeline, tiny_flux
from test_checkpoint_files import linux_only

pytestmark = [linux_only, pytest.mark.slow]
MIB = 1 << 20
#: Weights of the transformer are some 207 MiB.
SIZES = {"num_attention_heads": 8, "attention_head_dim": 64, "axes_dims_rope": [8, 28, 28]}
HOST, DEVICE = 56 * MIB, 40 * MIB
#: Activations, and what libraries allocate in a first call.
SLACK = 24 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Flux pipeline, sharded."""
    place = tmp_path_factory.mktemp("large")
    pipe = flux_pipeline("FluxPipeline", transformer=tiny_flux(**SIZES))
    pipe.save_pretrained(place, max_shard_size="60MB")
    return place


SCRIPT = """
    import os, sys, threading
    sys.path.insert(0, sys.argv[1])
    folder, how, host, device, out = sys.argv[2:]
    if how in ("sim", "pinned"):
        import simdev
    import torch
    import factory
    import diffusers_layerwise
    from diffusers import FluxPipeline
    torch.set_num_threads(1)

    def held():
        # Page-locked memory is anonymous too, and so is what stands for the simulated device's.
        line = next(l for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous:"))
        return int(line.split()[1]) << 10

    small = factory.CASES["flux"].build()
    factory.run("flux", small)  # libraries are loaded, pools are made
    if how in ("sim", "pinned"):
        small.to("sim")
        factory.run("flux", small)
    before, most, end = held(), [0], threading.Event()

    def watch():
        while not end.wait(0.002):
            most[0] = max(most[0], held() - before)

    if how.startswith("reference"):
        # Kernels of a CPU round differently where weights aren't aligned, as in a file. On a device they always are.
        pipe = FluxPipeline.from_pretrained(folder, disable_mmap=how.endswith("sim"))
        image = factory.run("flux", pipe)
        torch.save(image, out)
        sys.exit()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        pipe = FluxPipeline.from_pretrained(folder)
        config = {"host_memory_budget": int(host)}
        if how == "pinned":
            config = {"host": "pinned"}
        pipe.enable_layerwise_offload(
            memory_budget=int(device),
            onload_device="cpu" if how == "cpu" else "sim",
            config=config | {"activation_reserve": 0},
        )
        for _ in range(3):
            image = factory.run("flux", pipe)
    finally:
        end.set()
        thread.join()
    torch.save(image, out)
    report = pipe.layerwise_offload.report()
    print(most[0], report.host_peak, report.peak_ever, report.disk_bytes, report.weights, report.host_bytes)
    print(report)
"""


def run(folder: Path, how: str, out: Path, wrap: tuple[str, ...] = ()) -> list[int]:
    """Runs a pipeline in a process of its own; returns bytes: most held, host peak, device peak, read, weights."""
    tests = Path(__file__).resolve().parent
    environment = dict(os.environ, PYTHONPATH=str(Path(tiers.__file__).parent.parent), CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tests), str(folder), how, str(HOST), str(DEVICE)]
    done = subprocess.run(
        [*wrap, *command, str(out)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return [] if how.startswith("reference") else [int(word) for word in done.stdout.splitlines()[0].split()]


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, torch.Tensor]:
    """The images of the same pipeline as it is loaded, by device."""
    for how in ("cpu", "sim"):
        run(folder, f"reference {how}", folder / f"{how}.pt")
    return {how: torch.load(folder / f"{how}.pt") for how in ("cpu", "sim")}


@pytest.mark.parametrize("how", ["cpu", "sim"])
def test_a_checkpoint_larger_than_the_memory_allowed_gives_the_same_image(
    how: str, folder: Path, references: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    if how == "sim":
        pytest.importorskip("simdev")
    most, host_peak, device_peak, read, weights, _ = run(folder, how, tmp_path / "image.pt")
    assert torch.equal(torch.load(tmp_path / "image.pt"), references[how])
    assert weights > 200e6 > HOST + DEVICE
    assert read > weights
    assert host_peak <= HOST
    assert device_peak <= DEVICE
    assert most <= HOST + DEVICE + SLACK


def test_the_ram_tier_holds_the_weights_once(folder: Path, references: dict[str, torch.Tensor], tmp_path: Path) -> None:
    pytest.importorskip("simdev")
    most, host_peak, device_peak, _, weights, _ = run(folder, "pinned", tmp_path / "image.pt")
    assert torch.equal(torch.load(tmp_path / "image.pt"), references["sim"])
    assert host_peak <= 1.05 * weights
    assert most <= 1.05 * weights + device_peak + SLACK


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that limits memory, where one can be made."""
    name = f"layerwise-{uuid.uuid4().hex[:8]}"
    for parent, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        made = parent / name
        try:
            made.mkdir()
        except OSError as error:
            reason = str(error)
            continue
        try:
            if not (made / limit).exists():
                reason = f"{parent} is no control group"
                continue
            (made / limit).write_text(str(LIMIT))
            yield made
            return
        except OSError as error:
            reason = str(error)
        finally:
            made.rmdir()
    pytest.skip(f"no control group can be made here: {reason}")


LIMIT = 900 * MIB


def test_it_runs_in_a_control_group_that_is_too_small_for_it(
    group: Path, folder: Path, references: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wrap = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    run(folder, "cpu", tmp_path / "image.pt", wrap)
    assert torch.equal(torch.load(tmp_path / "image.pt"), references["cpu"])


SHARING = """
    import sys, torch
    from diffusers import FluxTransformer2DModel
    from diffusers_layerwise import apply_layerwise_offload
    model = FluxTransformer2DModel.from_pretrained(sys.argv[1], subfolder="transformer")
    handle = apply_layerwise_offload(model, "memory", onload_device="cpu", config={"host": "mapped"})
    total = 0
    for parameter in model.parameters():
        total += float(parameter.sum())
    print("there", flush=True)
    sys.stdin.readline()
    rss = pss = 0
    lines = iter(open("/proc/self/smaps"))
    inside = False
    for line in lines:
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = "safetensors" in line
        elif inside and line.startswith(("Rss:", "Pss:")):
            count = int(line.split()[1]) << 10
            rss, pss = (rss + count, pss) if line.startswith("Rss") else (rss, pss + count)
    print(rss, pss, flush=True)
    sys.stdin.readline()
"""


def test_two_processes_share_the_page_cache_of_one_checkpoint(folder: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(Path(tiers.__file__).parent.parent), CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", textwrap.dedent(SHARING), str(folder)]
    both = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for one in both:
            assert one.stdout is not None
            assert one.stdout.readline() == "there\n"
        for one in both:
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write("\n")
            one.stdin.flush()
            resident, share = (int(word) for word in one.stdout.readline().split())
            assert resident > 150e6
            assert share < 0.6 * resident
    finally:
        for one in both:
            one.kill()
            one.wait()
            for pipe in (one.stdin, one.stdout):
                if pipe is not None:
                    pipe.close()


def test_nothing_is_written_beside_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = {}
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".pt":
                state = path.stat()
                found[str(path)] = (state.st_size, state.st_mtime_ns)
        return found

    before = files()
    run(folder, "cpu", tmp_path / "image.pt")
    assert files() == before
    assert os.listdir(tmp_path) == ["image.pt"]
