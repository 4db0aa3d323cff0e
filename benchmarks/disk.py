"""Weights from a disk: ours against plain mapping, accelerate's disk offload and diffusers' group offload to disk.

Every method runs on the CPU in a process of its own, which loads a checkpoint made here, and runs a few passes. Cold:
the files are dropped from the page cache before each pass. Warm: they aren't. Rounds go through all methods in turn;
what is printed are medians as ratios to plain mapping and to the bound that no method can beat (compute, or the bytes
at the speed of direct reads, measured just before each cold pass since disks change their minds), the most anonymous
memory (which can't be given up, unlike the cache) that a method took on top of a process that has run a small model of
the kind, and what it wrote to the disk. "ours, streamed" may hold a quarter of the
weights in memory; "ours, auto" may take what is free.

    python benchmarks/disk.py --quick
    python benchmarks/disk.py --models dit,unet --gib 1.4 --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

METHODS = ("mapped in place", "ours, streamed", "ours, auto", "accelerate disk", "diffusers group disk")
#: Of the weights' bytes: what "ours, streamed" may hold in memory.
SHARE = 0.25


def make(name: str, gib: float, quick: bool) -> torch.nn.Module:
    """A model with random bfloat16 weights: FLUX's width with as many layers as fit, or SDXL's UNet."""
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

    torch.set_default_dtype(torch.bfloat16)
    try:
        if name == "dit":
            heads = 4 if quick else 24
            width = heads * 128
            layers = max(1, int(gib * 2**30 / 2 / (26.5 * width * width)))
            return FluxTransformer2DModel(
                num_layers=max(1, layers // 3),
                num_single_layers=max(1, layers - layers // 3),
                num_attention_heads=heads,
                attention_head_dim=128,
                joint_attention_dim=width,
                pooled_projection_dim=64,
            )
        scale = 0.25 if quick else min(1.0, (gib / 4.8) ** 0.5)
        sizes = tuple(max(64, int(width * scale) // 64 * 64) for width in (320, 640, 1280))
        return UNet2DConditionModel(
            block_out_channels=sizes,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=tuple(size // 64 for size in sizes),
            cross_attention_dim=1024,
            use_linear_projection=True,
        )
    finally:
        torch.set_default_dtype(torch.float32)


def inputs(model: Any) -> dict[str, Any]:
    """Inputs of few tokens: the disk is to be the limit."""
    config, kind = model.config, torch.bfloat16
    if "Flux" in type(model).__name__:
        return {
            "hidden_states": torch.ones(1, 16, config.in_channels, dtype=kind),
            "encoder_hidden_states": torch.ones(1, 8, config.joint_attention_dim, dtype=kind),
            "pooled_projections": torch.ones(1, config.pooled_projection_dim, dtype=kind),
            "timestep": torch.ones(1, dtype=kind),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(8, 3),
        }
    return {
        "sample": torch.ones(1, 4, 8, 8, dtype=kind),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.ones(1, 8, config.cross_attention_dim, dtype=kind),
    }


# ---------------------------------------------------------------------- memory and cache
def anonymous() -> int:
    """Bytes of this process that no file backs: they can't be dropped. Page-locked memory is among them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most anonymous memory in a block, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self.most, self._end = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, anonymous())


def drop_cache(folder: Path) -> None:
    """Drops the files below a folder from the page cache. Pages that a process has mapped stay, so it unmaps them."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def unmap(folder: Path) -> None:
    """Lets go of this process's clean pages of the files below a folder: else the cache couldn't drop them."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    cold = 20  # MADV_COLD and MADV_PAGEOUT (21) keep what was written to; MADV_DONTNEED would throw it away
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith(str(folder)):
            start, stop = (int(number, 16) for number in parts[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), cold + 1)


# ---------------------------------------------------------------------- the methods
def prepare(method: str, model: Any, work: Path) -> Callable[[], dict[str, Any]]:
    """Sets a method up. Returns what reports on it."""
    if method.startswith("ours"):
        from diffusers_layerwise import apply_layerwise_offload

        if method == "ours, auto":
            handle = apply_layerwise_offload(model, onload_device="cpu")
        else:
            budget = int(SHARE * sum(p.nbytes for p in model.parameters()))
            handle = apply_layerwise_offload(model, onload_device="cpu", memory_budget=budget, config={"host": "file"})
        return lambda: {"disk": handle.report().disk_bytes}
    if method == "accelerate disk":
        from accelerate import disk_offload

        disk_offload(model, str(work), execution_device=torch.device("cpu"))
    if method == "diffusers group disk":
        model.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            offload_to_disk_path=str(work),
        )
    return dict


def warm_up(name: str) -> None:
    """Runs a small model of the kind, so that modules and kernels are loaded before memory is counted."""
    import diffusers_layerwise  # noqa: F401

    small = make(name, 0.05, True).eval()
    small(**inputs(small))
    del small
    gc.collect()


def one(method: str, folder: Path, work: Path, passes: int, name: str) -> dict[str, Any]:
    """One method in this process: seconds of cold and warm passes, and memory."""
    import diffusers

    kind = {"dit": diffusers.FluxTransformer2DModel, "unet": diffusers.UNet2DConditionModel}[name]
    torch.set_grad_enabled(False)
    warm_up(name)
    before = anonymous()
    with Peak() as peak:
        model = kind.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()
        given = inputs(model)
        found = prepare(method, model, work)
        gc.collect()
    os.sync()  # only clean pages can be dropped
    loading = peak.most - before
    times: dict[str, list[float]] = {"cold": [], "warm": [], "speed": []}
    with Peak() as peak:
        model(**given)
        model(**given)
        for temperature in ("cold", "warm"):
            for _ in range(passes):
                if temperature == "cold":
                    for path in (folder, work):
                        unmap(path)
                        drop_cache(path)
                    times["speed"].append(disk_speed(folder))
                start = time.perf_counter()
                output = model(**given)
                times[temperature].append(time.perf_counter() - start)
    digest = output[0].float().sum().item()
    written = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    memory = {"loading": loading, "running": peak.most - before}
    return {**times, **memory, "written": written, "digest": digest, **found()}


def disk_speed(folder: Path, most: int = 1 << 30) -> float:
    """Bytes per second of one thread that reads the files below a folder in turn, `most` bytes, past the page cache."""
    page, count, spent = mmap.mmap(-1, 4 << 20), 0, 0.0
    for path in sorted(folder.rglob("*.safetensors")):
        drop_cache(folder)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        start, offset = time.perf_counter(), 0
        while count + offset < most and (got := os.preadv(fd, [page], offset)):
            offset += got
        count += offset
        spent += time.perf_counter() - start
        os.close(fd)
    return count / spent


# ---------------------------------------------------------------------- all of them
def table(name: str, weights: int, results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The lines of one model's table."""
    speeds = sorted(speed for runs in results.values() for run in runs for speed in run.get("speed", []))
    speed = statistics.median(speeds)
    lines = [
        f"\n{name}: {weights / 2**30:.2f} GiB; direct reads {speeds[0] / 1e9:.2f} to "
        f"{speeds[-1] / 1e9:.2f} GB/s, median {speed / 1e9:.2f}",
        "",
        "| method | cold | warm | cold over its bound | memory / weights, loading | running | written / weights |",
        "|---|---|---|---|---|---|---|",
    ]

    def median(method: str, key: str) -> float:
        values = [v for run in results[method] for v in (run[key] if isinstance(run[key], list) else [run[key]])]
        return statistics.median(values)

    compute = min(median(method, "warm") for method, runs in results.items() if "error" not in runs[0])
    bound = max(compute, weights / speed)
    lines.insert(
        1,
        f"seconds of {METHODS[0]}: cold {median(METHODS[0], 'cold'):.2f}, warm "
        f"{median(METHODS[0], 'warm'):.2f}; bound max(compute, bytes / disk) {bound:.2f}",
    )
    for method, runs in results.items():
        if "error" in runs[0]:
            lines.append(f"| {method} | {runs[0]['error']} | | | |")
            continue
        cells = [f"{median(method, key) / median(METHODS[0], key):.2f}" for key in ("cold", "warm")]
        bounds = [
            cold / max(compute, weights / speed)
            for run in runs
            for cold, speed in zip(run["cold"], run["speed"], strict=True)
        ]
        cells.append(f"{statistics.median(bounds):.2f}")
        cells += [f"{median(method, key) / weights:.2f}" for key in ("loading", "running", "written")]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """Makes a checkpoint, runs all methods in turn, and removes everything again."""
    root = Path(tempfile.mkdtemp(prefix="layerwise-disk-", dir=options.folder))
    try:
        model = make(name, options.gib, options.quick)
        weights = sum(p.nbytes for p in model.parameters())
        model.save_pretrained(root / "model", max_shard_size="1GB")
        del model
        gc.collect()
        results: dict[str, list[dict[str, Any]]] = {method: [] for method in options.methods}
        for _ in range(options.rounds):
            for method in options.methods:
                work = root / "work"
                work.mkdir()
                command = [sys.executable, __file__, "--one", method, name, str(root / "model"), str(work)]
                done = subprocess.run(
                    [*command, "--passes", str(options.passes)], capture_output=True, text=True, check=False
                )
                shutil.rmtree(work)
                last = (done.stderr.strip().splitlines() or ["failed"])[-1]
                results[method].append(json.loads(done.stdout) if done.returncode == 0 else {"error": last})
        return table(name, weights, results)
    finally:
        shutil.rmtree(root)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dit,unet")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of weights of each model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--folder", help="where the checkpoint is made; should be on the disk that is meant")
    parser.add_argument("--methods", type=lambda text: text.split(";"), default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="a few MiB, one round: does it run at all?")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, name, folder, work = options.one
        print(json.dumps(one(method, Path(folder), Path(work), options.passes, name)))
        return
    if options.quick:
        options.gib, options.rounds, options.passes = min(options.gib, 0.05), 1, 1
    for name in options.models.split(","):
        print("\n".join(measure(name, options)), flush=True)


if __name__ == "__main__":
    main()
