"""Host memory of several ranks on one machine that have the same weights, by where the host copy lies.

    python benchmarks/ranks.py [--ranks 2] [--mib 512] [--json ranks.json]
    python benchmarks/ranks.py --quick

Ranks are processes over gloo, and the execution device is the CPU. Each has the same stack of linear layers and streams
it three times, in mode `memory`. What counts is the growth of a process's proportional set size since before it had
weights: a page that several processes map counts in parts, so that the sum over the ranks is what the host holds.
Unshared copies, shared ones and a mapped checkpoint are measured by the same processes, one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_layerwise import apply_layerwise_offload
from measure import versions

DEPTH = 16
PATIENCE = 600
HOSTS = ("pageable", "shared", "mapped")


class Stack(nn.Module):
    """Equal linear layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def stack(width: int) -> Stack:
    """The same in every rank."""
    torch.manual_seed(0)
    return Stack(width).eval()


def proportional() -> int:
    """Bytes of host memory that this process takes, shared pages in parts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def together() -> int:
    """The memory of this rank while all others are at the same point."""
    dist.barrier()
    found = proportional()
    dist.barrier()
    return found


def measure(host: str, width: int, path: Path) -> dict[str, float]:
    """One rank, one tier: bytes that it grew by, seconds to enable and of a pass."""
    x = torch.randn(4, width)
    before = together()
    module = stack(width)
    if host == "mapped":
        module.load_state_dict(load_file(path), assign=True)
    with torch.no_grad():
        expected = module(x) if host == "mapped" else stack(width)(x)
        dist.barrier()
        begin = time.perf_counter()
        handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": host})
        enabled = time.perf_counter() - begin
        module(x)
        module(x)
        dist.barrier()
        begin = time.perf_counter()
        output = module(x)
        seconds = time.perf_counter() - begin
    assert torch.equal(output, expected)
    grown = together() - before
    handle.remove()
    return {"bytes": grown, "enable": enabled, "pass": seconds}


def rank_main(rank: int, world: int, width: int, folder: Path) -> None:
    """What each process does."""
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", f"file://{folder / 'store'}", patience, world, rank)
    torch.set_num_threads(1)
    path = folder / "stack.safetensors"
    if rank == 0:
        save_file(stack(width).state_dict(), path)
    dist.barrier()
    found = {host: measure(host, width, path) for host in HOSTS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, width: int) -> list[dict[str, dict[str, float]]]:
    """Starts the ranks; returns what each of them found."""
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}
        command = [sys.executable, __file__, "--width", str(width), "--folder", name]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--ranks", str(world)], env=environment)
            for rank in range(world)
        ]
        try:
            for each in ranks:
                if each.wait(timeout=PATIENCE):
                    raise SystemExit("a rank failed")
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(world)]


def table(found: list[dict[str, dict[str, float]]], width: int) -> None:
    """Prints bytes over the weights, and everything over what it is unshared."""
    weights = DEPTH * (width * width + width) * 4
    totals = {host: sum(rank[host]["bytes"] for rank in found) for host in HOSTS}
    print(f"{len(found)} ranks, {weights / 2**20:.0f} MiB of weights; bytes are over the weights; {versions()}\n")
    names = " | ".join(f"rank {rank}" for rank in range(len(found)))
    print(f"| host | {names} | sum | sum / unshared | pass / unshared | enable, first to last (s) |")
    print("|---" * (len(found) + 5) + "|")
    for host in HOSTS:
        each = " | ".join(f"{rank[host]['bytes'] / weights:.2f}" for rank in found)
        passes = sum(rank[host]["pass"] for rank in found) / sum(rank["pageable"]["pass"] for rank in found)
        enabled = sorted(rank[host]["enable"] for rank in found)
        total = totals[host]
        print(
            f"| {host} | {each} | {total / weights:.2f} | {total / totals['pageable']:.2f} | {passes:.2f} "
            f"| {enabled[0]:.2f} to {enabled[-1]:.2f} |"
        )


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512, help="weights of a rank")
    parser.add_argument("--quick", action="store_true", help="a few MiB: does it run at all?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.ranks, options.width, options.folder)
        return
    width = int(((16 if options.quick else options.mib) * 2**20 / (4 * DEPTH)) ** 0.5) // 64 * 64
    found = run(options.ranks, width)
    table(found, width)
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions(), "width": width, "ranks": found}, indent=1))


if __name__ == "__main__":
    main()
