"""Host time that each way to offload adds to a layer, in CPU microseconds over the bare model.

    python benchmarks/hook_cost.py [--device cpu,sim] [--json hook_cost.json] [--check]

48 residual MLP blocks of width 64 with 16 tokens: so small that the host's work is all there is. Every model is built
once, rounds go through all of them in turn, and the minimum CPU time over the rounds counts, so that noise on the
machine hits all alike. On `cpu` nothing has to move, so diffusers moves nothing there; ours, told to stream, copies all
the same. On `sim` (a simulated accelerator) streams, events and copies are used as on a real one, but every copy is a
memcpy on this CPU: `one copy per block` is those alone, `less copies` a method's cost without them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import load_sim, versions

BLOCKS, WIDTH, TOKENS = 48, 64, 16
STREAMED_TARGET, RESIDENT_TARGET = 0.5, 0.1  # of what diffusers' block offload adds, on the same device
BARE, STREAMED, RESIDENT, PEER = "bare", "ours, streamed", "ours, resident", "diffusers block"
LEAF, SEQUENTIAL = "diffusers leaf", "accelerate sequential (cpu_offload)"
COPYING = (STREAMED, PEER, LEAF, SEQUENTIAL)  # on an accelerator
COPIES = "one copy per block, nothing else"

sim = load_sim()  # before diffusers

import torch  # noqa: E402
from torch import nn  # noqa: E402

from methods import (  # noqa: E402
    Attached,
    Method,
    accelerate_align,
    accelerate_sequential,
    diffusers_group,
    layerwise,
)


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """48 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass
class Contender:
    """One way to run the stack and the best time it had, in CPU seconds per pass."""

    name: str
    device: str
    run: Callable[[], Any]
    best: float = float("inf")
    error: str = ""


@dataclasses.dataclass
class Cost:
    """A row of the table: CPU microseconds."""

    device: str
    method: str
    us_per_pass: float
    us_per_block: float  # over bare
    of_peer: float  # us_per_block / that of diffusers' block offload
    us_less_copies: float | None = None  # us_per_block less what the memcpys take, where there are any
    target: float | None = None
    error: str = ""

    @property
    def missed(self) -> bool:
        """Whether a promise of ours is broken here."""
        return bool(self.error) or (self.target is not None and self.of_peer > self.target)


def methods_for(device: str) -> list[tuple[str, Method]]:
    """Every way to offload, ours streamed and resident among them."""
    stream = device != "cpu"
    streamed = layerwise(mode="manual", config={"group_size": "layer", "resident": 0, "prefetch": 1})
    kept = layerwise(mode="manual", config={"group_size": "layer", "resident": 1.0})
    return [
        (STREAMED, streamed),
        (RESIDENT, kept),
        (PEER, diffusers_group("block", stream=stream)),
        (LEAF, diffusers_group("leaf", stream=stream)),
        ("accelerate AlignDevicesHook, no offload", accelerate_align()),
        (SEQUENTIAL, accelerate_sequential()),
    ]


def contender(name: str, device: str, method: Method | None) -> Contender:
    """Build a stack with a method on it (None: bare)."""
    torch.manual_seed(0)
    stack, where = Stack().eval().requires_grad_(False), torch.device(device)
    x = torch.randn(1, TOKENS, WIDTH).to(where)
    attached: Attached | None = None
    error = ""
    try:
        if method is None:
            stack.to(where)
        else:
            attached = method.attach(stack, "", where)
        with torch.no_grad():
            for _ in range(3):
                stack(x)
    except ImportError:
        raise
    except Exception as problem:
        error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:160]}"

    def run(keep: Any = attached) -> None:
        stack(x)

    return Contender(name, device, run, error=error)


def copies_alone(device: str) -> Contender:
    """A block's bytes in one copy per block, from 48 places to two slots: what the memcpys of streaming take here."""
    count = sum(p.numel() * p.element_size() for p in Block().parameters())
    sources = [torch.zeros(count, dtype=torch.uint8) for _ in range(BLOCKS)]
    if device != "cpu":
        sources = [source.pin_memory() for source in sources]
    slots = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2)]

    def run() -> None:
        for index, source in enumerate(sources):
            slots[index % 2].copy_(source, non_blocking=True)

    return Contender(COPIES, device, run)


def race(contenders: list[Contender], rounds: int, passes: int) -> None:
    """Time all contenders in turn, `rounds` times: a pass to warm the caches, then each pass by itself."""
    alive = [one for one in contenders if not one.error]
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(rounds):
                for one in alive:
                    sim.synchronize()  # the simulated device keeps books of what is in flight
                    one.run()
                    for _ in range(passes):
                        began = time.process_time()
                        one.run()
                        one.best = min(one.best, time.process_time() - began)
    finally:
        gc.enable()


def costs(contenders: list[Contender]) -> list[Cost]:
    """Rows over the bare model of the same device."""
    best = {(one.device, one.name): one.best for one in contenders}
    rows = []
    for one in contenders:
        base = 0.0 if one.name == COPIES else best[one.device, BARE]
        over, peer = one.best - base, best[one.device, PEER] - best[one.device, BARE]
        target = {STREAMED: STREAMED_TARGET, RESIDENT: RESIDENT_TARGET}.get(one.name)
        row = Cost(one.device, one.name, one.best * 1e6, over / BLOCKS * 1e6, over / peer, None, target, one.error)
        if one.name == STREAMED or (one.device != "cpu" and one.name in COPYING):
            row.us_less_copies = (over - best[one.device, COPIES]) / BLOCKS * 1e6
        rows.append(row)
    return rows


def show(rows: list[Cost]) -> None:
    """Print the table."""
    print(f"{'device':<8}{'method':<42}{'us per pass':>12}{'us per block':>14}{'less copies':>13}"
          f"{'/ diffusers block':>19}{'target':>8}")  # fmt: skip
    for row in rows:
        if row.error:
            print(f"{row.device:<8}{row.method:<42}  {row.error}")
            continue
        target = f"{row.target:g}{'!' if row.missed else ' '}" if row.target else ""
        less = "" if row.us_less_copies is None else f"{row.us_less_copies:.2f}"
        print(f"{row.device:<8}{row.method:<42}{row.us_per_pass:>12.0f}{row.us_per_block:>14.2f}{less:>13}"
              f"{row.of_peer:>19.3f}{target:>8}")  # fmt: skip


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu,sim", help="comma-separated, of: cpu, sim")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--passes", type=int, default=4, help="passes timed per round")
    parser.add_argument("--json", type=Path, help="write the rows and versions here")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sim.configure(mode="off")  # no race detection: it costs time
    contenders: list[Contender] = []
    for device in options.device.split(","):
        contenders.append(contender(BARE, device, None))
        contenders += [contender(name, device, method) for name, method in methods_for(device)]
        contenders.append(copies_alone(device))
    race(contenders, options.rounds, options.passes)
    rows = costs(contenders)
    show(rows)
    if options.json:
        data = {"versions": versions(), "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if options.check and any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
