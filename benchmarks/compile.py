"""torch.compile under each offload: graph breaks, graphs, compilations after the first pass, host time of a later pass.

    python benchmarks/compile.py [--models unet,flux] [--device sim] [--json compile.json] [--check]

Tiny models of real classes, compiled after the offload was put on, their repeated blocks or the whole model, with the
backend `eager`: what is counted is torch's tracing, and no kernel is made. Every output is compared bit by bit with the
resident model's, compiled in the same way. Passes take turns, and the least CPU time of a later pass counts, as a ratio
to the resident model's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import load_sim, versions

sim = load_sim()  # before diffusers

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from methods import Attached, Method, diffusers_group, layerwise, resident  # noqa: E402

PASSES = 4
RESIDENT, OURS = "resident", "ours"


def unet() -> nn.Module:
    """Stable Diffusion's structure with two resolutions."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=16, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8, transformer_layers_per_block=2,
    )  # fmt: skip


def unet_inputs() -> dict[str, Any]:
    """One image of 16 x 16 latents, eight tokens."""
    return {"sample": torch.randn(1, 4, 16, 16), "timestep": torch.tensor(10), "return_dict": False,
            "encoder_hidden_states": torch.randn(1, 8, 32)}  # fmt: skip


def flux() -> nn.Module:
    """FLUX's structure with four blocks of each kind."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4, num_layers=4, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def flux_inputs() -> dict[str, Any]:
    """16 image and eight text tokens."""
    return {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
            "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(8, 3), "return_dict": False}  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "unet": (unet, unet_inputs),
    "flux": (flux, flux_inputs),
}


def model_offload() -> Method:
    """What `enable_model_cpu_offload()` puts on a component: moved as a whole when it is called."""

    def attach(module: nn.Module, block_root: str, device: torch.device) -> Attached:
        from accelerate import cpu_offload_with_hook

        _, hook = cpu_offload_with_hook(module, device)
        return Attached(end_use=hook.offload)

    return Method("model offload", attach)


def methods(device: str) -> list[tuple[str, Method]]:
    """Every way to run, the resident model first."""
    stream = device != "cpu"
    return [
        (RESIDENT, resident()),
        (OURS, layerwise(mode="memory")),
        ("diffusers group, block", diffusers_group("block", stream=stream)),
        ("diffusers group, leaf", diffusers_group("leaf", stream=stream)),
        ("model offload", model_offload()),
    ]


@dataclasses.dataclass
class Row:
    """What one way to run a compiled model came to."""

    model: str
    compiled: str
    method: str
    graph_breaks: int = 0
    graphs: int = 0
    again: int = 0  # graphs compiled after the first pass
    recompiles: int = 0  # of code that had been compiled before
    groups: int = 0
    same: bool = True
    seconds: float = float("inf")
    ratio: float = float("nan")
    error: str = ""

    @property
    def missed(self) -> bool:
        """Whether a promise of ours is broken here."""
        return self.method == OURS and bool(
            self.error or self.again or not self.same or self.graph_breaks > self.groups
        )


def to_device(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """The same inputs there."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def recompiles() -> int:
    """How often code was compiled anew since the last reset."""
    ids = [str(metrics.compile_id) for metrics in torch._dynamo.utils.get_compilation_metrics()]
    return sum(each.partition("/")[2].partition("_")[0] != "0" for each in ids)


def measure(model: str, way: str, name: str, method: Method, device: str) -> tuple[Row, torch.Tensor | None]:
    """Compile and run one model under one method."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    counters.clear()
    build, make_inputs = MODELS[model]
    torch.manual_seed(0)
    module, row = build().eval().requires_grad_(False), Row(model, way, name)
    inputs = to_device(make_inputs(), device)
    counter = CompileCounter()
    output = None
    try:
        attached = method.attach(module, "", torch.device(device))
        (module.compile if way == "whole" else module.compile_repeated_blocks)(backend=counter)
        with torch.no_grad():
            for index in range(1 + PASSES):
                began = time.process_time()
                output = module(**inputs)[0].cpu()
                sim.synchronize()
                if index > 1:
                    row.seconds = min(row.seconds, time.process_time() - began)
                if index == 0:
                    first = counter.frame_count
                if attached.end_use is not None:
                    attached.end_use()
        row.again = counter.frame_count - first
        if attached.handle is not None:
            row.groups = len(attached.handle.plan.components[0].groups)
        attached.remove()
    except ImportError:
        raise
    except Exception as problem:
        row.error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:120]}"
    row.graph_breaks, row.graphs = sum(counters["graph_break"].values()), counter.frame_count
    row.recompiles = recompiles()
    return row, output


def race(model: str, way: str, device: str, rounds: int) -> list[Row]:
    """All methods in turn; counts are those of the first round, times the least of all."""
    found: dict[str, Row] = {}
    for _ in range(rounds):
        expected = None
        for name, method in methods(device):
            row, output = measure(model, way, name, method, device)
            expected = output if expected is None else expected
            row.same = output is not None and expected is not None and torch.equal(output, expected)
            known = found.setdefault(name, row)
            known.seconds = min(known.seconds, row.seconds)
    for row in found.values():
        row.ratio = row.seconds / found[RESIDENT].seconds
    return list(found.values())


def show(rows: list[Row]) -> None:
    """Print the table."""
    print("| model | compiled | method | graph breaks | graphs | recompiles | compiled after the first pass | "
          "same bits | host time |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row.error:
            print(f"| {row.model} | {row.compiled} | {row.method} | {row.error} | | | | | |")
            continue
        print(f"| {row.model} | {row.compiled} | {row.method} | {row.graph_breaks} | {row.graphs} | {row.recompiles} | "
              f"{row.again} | {'yes' if row.same else 'no'} | {row.ratio:.2f} |")  # fmt: skip


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="unet,flux")
    parser.add_argument("--device", default="sim", help="sim or cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows and versions here")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a promise is broken")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sim.configure(mode="off")  # no race detection: it costs time
    torch._logging.set_logs(dynamo=logging.ERROR)  # what it warns of is counted
    rows = [
        row
        for model in options.models.split(",")
        for way in ("blocks", "whole")
        for row in race(model, way, options.device, options.rounds)
    ]
    show(rows)
    if options.json:
        data = {"versions": versions(), "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    missed = [row for row in rows if row.missed]
    for row in missed:
        print(f"missed: {row}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
