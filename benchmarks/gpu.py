"""The same claims on a real accelerator, in under five minutes: step time at equal peak memory.

    python benchmarks/gpu.py --json gpu.json          # on the accelerator that torch finds; says so when there is none
    python benchmarks/gpu.py --device sim --tiny      # tries the script itself, on the simulated device

A transformer of FLUX.1-dev's width with random bfloat16 weights. Each peer is run, then ours with the peer's own peak
as its budget, then ours at fixed shares. Rounds go through all of them in turn, and medians over all rounds count.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import add_repository_to_path, first_tensor, load_sim, median, versions

add_repository_to_path()
if any(argument in ("sim", "--device=sim") for argument in sys.argv):
    sim = load_sim()  # before diffusers

import torch  # noqa: E402
from torch import nn  # noqa: E402

from methods import Attached, Method, diffusers_group, layerwise, resident  # noqa: E402
from models import CASES, Inputs  # noqa: E402

PEERS = (
    diffusers_group("block"),
    diffusers_group("block", record_stream=True),
    diffusers_group("leaf"),
    diffusers_group("leaf", record_stream=True),
)
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
GIB = 2**30
WARM = 4  # passes after the first
UNIT = 1.16 * GIB  # one double and two single blocks


@dataclasses.dataclass
class Result:
    """One method: seconds per step of every round, peaks in bytes of weights (`allocated` less activations)."""

    method: str
    matches: str = ""  # the peer whose peak is the budget
    budget: int | None = None
    steps: list[float] = dataclasses.field(default_factory=list)
    step_s: float = float("nan")
    first_pass_s: float = float("nan")
    allocated: int = 0  # max_memory_allocated
    weight_peak: int = 0
    plan_peak: int | None = None  # what the plan's formula says
    plan: str = ""
    bound_s: float = float("nan")
    of_bound: float = float("nan")
    identical: bool = True
    error: str = ""


@dataclasses.dataclass
class Rig:
    """The model's weights on the host, the device, and how to run a pass."""

    device: torch.device
    weights: dict[str, torch.Tensor]
    inputs: Inputs
    skeleton: Callable[[], nn.Module]
    passes: int
    activations: int = 0
    reference: torch.Tensor | None = None

    @property
    def module(self) -> Any:
        """The device's own module (torch.cuda, torch.xpu, ...)."""
        return torch.get_device_module(self.device)

    def fresh(self) -> nn.Module:
        """A model whose parameters are the host's tensors, not copies."""
        model = self.skeleton()
        model.load_state_dict(self.weights, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weights.values())


def skeleton_maker(double: int, single: int) -> Callable[[], nn.Module]:
    """FLUX.1-dev's transformer with fewer blocks, on the meta device."""

    def make() -> nn.Module:
        from diffusers import FluxTransformer2DModel

        with torch.device("meta"):
            model = FluxTransformer2DModel(num_layers=double, num_single_layers=single, guidance_embeds=True)
        return nn.Module.to(model, torch.bfloat16)  # ModelMixin.to would warn

    return make


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """Host weights, filled by repeating one random block: random enough to compute with, and fast."""
    model.to_empty(device="cpu")
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for name, value in model.state_dict().items():
        flat = value.view(-1)
        if value.dim() == 1 and name.endswith("weight"):
            flat.fill_(1)  # the scale of a norm
            continue
        block = noise.to(value.dtype)
        for start in range(0, flat.numel(), block.numel()):
            part = flat[start : start + block.numel()]
            part.copy_(block[: part.numel()])
    return dict(model.state_dict())


def flux_inputs(device: torch.device) -> Inputs:
    """1024 x 1024: 4096 image and 512 text tokens."""
    make = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).to(device, torch.bfloat16)

    return {
        "hidden_states": noise(1, 4096, 64), "encoder_hidden_states": noise(1, 512, 4096),
        "pooled_projections": noise(1, 768), "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
        "img_ids": torch.zeros(4096, 3, device=device), "txt_ids": torch.zeros(512, 3, device=device),
        "guidance": torch.full((1,), 3.5, device=device), "return_dict": False,
    }  # fmt: skip


def real_rig(device: torch.device, options: argparse.Namespace) -> Rig:
    """FLUX's width with as many blocks as fit: the resident run must fit on the device, two copies on the host."""
    free = int(torch.get_device_module(device).mem_get_info(device)[0])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
    room = min(0.6 * free, 0.4 * host, options.gib * GIB)
    count = max(1, int(room / UNIT))
    make = skeleton_maker(count, 2 * count)  # FLUX.1-dev has 19 and 38
    return Rig(device, fill(make()), flux_inputs(device), make, options.passes)


def tiny_rig(device: torch.device, options: argparse.Namespace) -> Rig:
    """The schedule benchmark's scaled FLUX with few blocks."""
    case = CASES["flux"]

    def make() -> nn.Module:
        model: Any = case.build()
        del model.transformer_blocks[3:], model.single_transformer_blocks[6:]
        return model

    torch.manual_seed(0)
    rig = Rig(device, dict(make().state_dict()), case.inputs(device), make, options.passes)
    if device.type == "sim":
        torch.get_device_module(device).configure(mode="off", **case.clock(), **case.link(45e6))
    return rig


def attempt(rig: Rig, method: Method, result: Result) -> None:
    """Set a method up, run a first pass, warm up, time, and take everything down again."""
    gc.collect()
    torch.accelerator.synchronize()
    rig.module.empty_cache()
    rig.module.reset_peak_memory_stats()
    model, attached = rig.fresh(), Attached()
    try:
        attached = method.attach(model, "", rig.device)
        with torch.no_grad():
            began = time.perf_counter()
            model(**rig.inputs)
            torch.accelerator.synchronize()
            result.first_pass_s = time.perf_counter() - began
            output = timed(rig, model, result)
        account(rig, result, attached, output)
        attached.remove()
    except ImportError:
        raise
    except Exception as error:  # a refusal is a result
        result.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def timed(rig: Rig, model: nn.Module, result: Result) -> Any:
    """Warm passes, then timed ones without a pause between them; device time between events.

    The host waits after each warm pass but the last, so that a method that learns from a pass's times has them.
    """
    for _ in range(WARM - 1):
        model(**rig.inputs)
        torch.accelerator.synchronize()
    output = model(**rig.inputs)
    events = [torch.Event(device=rig.device, enable_timing=True) for _ in range(rig.passes + 1)]
    stream = torch.accelerator.current_stream()
    events[0].record(stream)
    for event in events[1:]:
        output = model(**rig.inputs)
        event.record(stream)
    torch.accelerator.synchronize()
    result.steps += [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
    return output


def account(rig: Rig, result: Result, attached: Attached, output: Any) -> None:
    """Peaks, the plan's word on them, and whether the output is the resident model's."""
    result.allocated = max(result.allocated, int(rig.module.max_memory_allocated()))
    value = first_tensor(output).cpu()
    if rig.reference is None:  # the resident run comes first
        rig.reference, rig.activations = value, result.allocated - rig.size
    result.weight_peak = result.allocated - rig.activations
    result.identical = result.identical and torch.equal(value, rig.reference)
    plan = getattr(attached.handle, "plan", None)
    if plan is not None:
        result.plan_peak, result.plan = int(plan.peak_bytes), str(plan)


def bandwidth(rig: Rig) -> float:
    """Bytes per second from pinned memory in one large copy."""
    count = min(512 << 20, rig.size)
    source = torch.empty(count, dtype=torch.uint8).pin_memory()
    target = torch.empty(count, dtype=torch.uint8, device=rig.device)
    seconds = []
    for _ in range(5):
        start, end = (torch.Event(device=rig.device, enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.accelerator.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return count / median(seconds)


def run_round(rig: Rig, results: dict[str, Result]) -> None:
    """All methods once, each peer next to ours at the peer's peak."""
    first = results.setdefault("resident", Result(resident().name))
    attempt(rig, resident(), first)
    if first.error:
        raise SystemExit(f"The resident model must fit, to compare with: pass a smaller --gib. {first.error}")
    for peer in PEERS:
        theirs = results.setdefault(peer.name, Result(peer.name))
        attempt(rig, peer, theirs)
        if theirs.error:
            continue
        budget = min(theirs.weight_peak, rig.size)
        name = f"ours at the peak of {peer.name}"
        ours = results.setdefault(name, Result(name, peer.name, budget))
        attempt(rig, layerwise(ours.budget / rig.size if ours.budget else None), ours)
    for share in SHARES:
        method = layerwise(share)
        attempt(rig, method, results.setdefault(method.name, Result(method.name, "", round(share * rig.size))))
    smallest = layerwise(mode="memory", label="ours, mode memory")
    attempt(rig, smallest, results.setdefault(smallest.name, Result(smallest.name)))


def finish(rig: Rig, results: dict[str, Result], link: float) -> list[Result]:
    """Medians and bounds."""
    compute = median(results["resident"].steps)
    for result in results.values():
        result.step_s = median(result.steps)
        result.bound_s = max(compute, (rig.size - min(result.weight_peak, rig.size)) / link)
        result.of_bound = result.step_s / result.bound_s
    return list(results.values())


def show(rig: Rig, rows: list[Result], link: float) -> None:
    """Print the table."""
    print(f"weights {rig.size / GIB:.2f} GiB, activations {rig.activations / GIB:.2f} GiB, link {link / 1e9:.1f} GB/s, "
          f"transfer/compute {rig.size / link / rows[0].step_s:.2f}")  # fmt: skip
    print(f"{'method':<66}{'step ms':>9}{'/bound':>8}{'peak MiB':>10}{'plan MiB':>10}{'budget':>9}{'first s':>9}")
    for row in rows:
        if row.error:
            print(f"{row.method:<66}  {row.error}")
            continue
        plan = "" if row.plan_peak is None else f"{row.plan_peak / 2**20:.1f}"
        budget = "" if row.budget is None else f"{row.budget / 2**20:.0f}"
        print(f"{row.method:<66}{row.step_s * 1e3:>9.2f}{row.of_bound:>8.3f}{row.weight_peak / 2**20:>10.1f}{plan:>10}"
              f"{budget:>9}{row.first_pass_s:>9.2f}{'' if row.identical else '  OUTPUT DIFFERS'}")  # fmt: skip


def hardware(rig: Rig) -> dict[str, Any]:
    """What it ran on."""
    name = getattr(rig.module, "get_device_name", lambda: rig.device.type)()
    return {"device": name, "memory": int(rig.module.mem_get_info(rig.device)[1]), "cpus": os.cpu_count(),
            "cuda": torch.version.cuda, "hip": torch.version.hip}  # fmt: skip


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    parser.add_argument("--gib", type=float, default=8.0, help="most GiB of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=5, help="timed passes per round")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no further round after this long")
    parser.add_argument("--json", type=Path, help="write results, hardware and versions here")
    options = parser.parse_args()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if options.device is None and found is None:
        print("No accelerator here: nothing to measure. (--device sim --tiny tries the script on a simulated one.)")
        return 0
    device = torch.device(options.device or str(found))
    began, results = time.time(), dict[str, Result]()
    rig = (tiny_rig if options.tiny else real_rig)(device, options)
    link = bandwidth(rig)
    for number in range(options.rounds):
        if number and time.time() - began + (time.time() - began) / number > options.seconds:
            break
        run_round(rig, results)
    rows = finish(rig, results, link)
    show(rig, rows, link)
    print(f"{time.time() - began:.0f} s")
    if options.json:
        data = {"hardware": hardware(rig), "versions": versions(), "weights": rig.size, "bandwidth": link,
                "rows": [dataclasses.asdict(row) for row in rows]}  # fmt: skip
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
