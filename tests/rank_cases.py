"""What the tests of ranks run in each of them: `python rank_cases.py RANK WORLD FOLDER CASE...`, over gloo, on the CPU.

Each case returns plain values, which `run` gathers by case and rank; one that raises gives its error's text.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diffusers_layerwise  # noqa: F401  # gives pipelines their methods

TESTS = Path(__file__).resolve().parent
#: Nothing waits longer than this for another rank, nor the tests for a rank.
PATIENCE = 60
DEADLINE = 240

Found = dict[str, Any]
CASES: dict[str, Callable[[Path], Found]] = {}


def case(function: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Adds a case by its name."""
    CASES[function.__name__] = function
    return function


def run(names: list[str], world: int, folder: Path) -> dict[str, list[Found]]:
    """Runs cases in as many processes as there are ranks; returns what each rank found. Leaves no process behind."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": str(world),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(TESTS / "rank_cases.py")]
    logs = [folder / f"{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            arguments = [str(rank), str(world), str(folder), *names]
            ranks.append(subprocess.Popen([*command, *arguments], env=environment, stdout=out, stderr=out))
    end = time.monotonic() + DEADLINE
    try:
        # One that fails leaves the others waiting for it: they need not be waited for.
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    said = "\n".join(f"--- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * world, said
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [rank[name] for rank in found] for name in names}


# ---------------------------------------------------------------------- tensor parallel
def mesh() -> Any:
    """All ranks, in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallel_flux() -> Any:
    """The tiny Flux pipeline with its transformer's attention and feed-forward layers split among the ranks."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import factory

    pipe = factory.CASES["flux"].build()
    plan: dict[str, Any] = {}
    for name, module in pipe.transformer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if name.endswith("net.0.proj"):
            plan[name] = ColwiseParallel()
        elif name.endswith("net.2"):
            plan[name] = RowwiseParallel()
        elif name.endswith(("to_q", "to_k", "to_v", "proj_mlp")):
            # Heads stay whole: what a rank computes of them is gathered.
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    assert len(plan) > 8
    parallelize_module(pipe.transformer, mesh(), plan)
    return pipe.to("cpu")


def shards(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are DTensors."""
    from torch.distributed.tensor import DTensor

    return {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}


def streams_equal(**options: Any) -> Found:
    """The parallel pipeline's images, streamed in two calls and after disabling, against its own resident ones."""
    import factory

    pipe = parallel_flux()
    expected = factory.run("flux", pipe)
    before = {name: (id(p), p.placements, p._local_tensor.clone()) for name, p in shards(pipe.transformer).items()}
    handle = pipe.enable_layerwise_offload(onload_device="cpu", **options)
    equal = [torch.equal(factory.run("flux", pipe), expected) for _ in range(3)]
    report = handle.report()
    part = next(c for c in report.components if c.name == "transformer")
    saved = pipe.transformer.state_dict()
    same_dict = all(torch.equal(saved[name]._local_tensor, local) for name, (_, _, local) in before.items())
    pipe.disable_layerwise_offload()
    after = shards(pipe.transformer)
    same = [
        id(p) == before[name][0] and p.placements == before[name][1] and torch.equal(p._local_tensor, before[name][2])
        for name, p in after.items()
    ]
    return {
        "shards": len(before),
        "equal": equal,
        "streamed": part.streamed_bytes,
        "weights": part.weights,
        "whole": sum(p.numel() * p.element_size() for p in pipe.transformer.parameters()),
        "within": report.peak_seen <= handle.plan.peak_bytes,
        "state dict": same_dict,
        "same shards": len(same) == len(before) and all(same),
        "after": torch.equal(factory.run("flux", pipe), expected),
        "hooks left": any("_hf_hook" in vars(m) for m in pipe.transformer.modules()),
    }


@case
def memory(folder: Path) -> Found:
    """The smallest peak."""
    return streams_equal(mode="memory")


@case
def auto(folder: Path) -> Found:
    """A budget of part of the weights."""
    return streams_equal(mode="auto", memory_budget=400_000, config={"activation_reserve": 0})


@case
def uneven(folder: Path) -> Found:
    """Each rank decides for itself: one streams, the others are resident."""
    if dist.get_rank() == 0:
        return streams_equal(mode="memory")
    return streams_equal(mode="auto")


@case
def edits(folder: Path) -> Found:
    """A sharded weight is edited in place: at rest, and by a hook while it is in use."""
    import models
    from diffusers_layerwise import apply_layerwise_offload

    def build() -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        module = models.make(models.MlpStack)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        return parallelize_module(module, mesh(), plan)

    def double(module: nn.Module, *_: object) -> None:
        module.weight.mul_(2)

    x = models.numbers(4, models.WIDTH)
    resident, streamed = build(), build()
    apply_layerwise_offload(streamed, "memory", onload_device="cpu")
    equal = []
    with torch.no_grad():
        for module in (resident, streamed):
            module.blocks[1].up.register_forward_hook(double)
        for step in range(4):
            if step == 2:
                for module in (resident, streamed):
                    module.blocks[3].down.weight.add_(1)
                    module.blocks[4].up.weight.data.mul_(3)
            equal.append(torch.equal(streamed(x), resident(x)))
    pairs = zip(shards(streamed).values(), shards(resident).values(), strict=True)
    return {"equal": equal, "weights": all(torch.equal(a._local_tensor, b._local_tensor) for a, b in pairs)}


@case
def parallelised_later(folder: Path) -> Found:
    """`parallelize_module` after layerwise offload: the component is looked through anew."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import models
    from diffusers_layerwise import apply_layerwise_offload

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    x = models.numbers(4, models.WIDTH)
    with torch.no_grad():
        expected = parallelize_module(models.make(models.MlpStack), mesh(), plan)(x)
        module = models.make(models.MlpStack)
        apply_layerwise_offload(module, "memory", onload_device="cpu")
        for _ in range(2):
            module(x)
        parallelize_module(module, mesh(), dict(plan))
        equal = [torch.equal(module(x), expected) for _ in range(3)]
    return {"equal": equal, "shards": len(shards(module))}


# ---------------------------------------------------------------------- what is refused
def error_of(function: Callable[[], object]) -> str:
    """The text of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether a module was touched."""
    return any("_hf_hook" in vars(part) for part in module.modules())


def sharded(module: nn.Module, which: str = "all") -> nn.Module:
    """A module under FSDP2: its blocks and itself, or only one block."""
    from torch.distributed.fsdp import fully_shard

    with torch.no_grad():
        for block in module.blocks if which == "all" else module.blocks[1:2]:
            fully_shard(block, mesh=mesh())
        if which == "all":
            fully_shard(module, mesh=mesh())
    return module


@case
def fsdp(folder: Path) -> Found:
    """FSDP1, FSDP2 and data parallel wrappers, before and after."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(4, models.WIDTH)
    with torch.no_grad():
        expected = models.make(models.Chain)(x)
    wrapped = {
        "fsdp2": sharded(models.make(models.Chain)),
        "fsdp2 inside": sharded(models.make(models.Chain), "one"),
        "fsdp1": FullyShardedDataParallel(models.make(models.Chain), device_id=torch.device("cpu")),
        "ddp": nn.parallel.DistributedDataParallel(models.make(models.Chain)),
    }
    errors = {k: error_of(lambda m=m: apply_layerwise_offload(m, onload_device="cpu")) for k, m in wrapped.items()}
    with torch.no_grad():
        works = {name: torch.equal(module(x), expected) for name, module in wrapped.items()}
    inside = wrapped["fsdp2"].blocks[2].lin
    errors["a part"] = error_of(lambda: apply_layerwise_offload(inside, onload_device="cpu"))
    touched = {name: hooked(module) for name, module in wrapped.items()}
    late = models.make(models.Chain)
    handle = apply_layerwise_offload(late, "memory", onload_device="cpu")
    with torch.no_grad():
        late(x)
        sharded(late)
        errors["late"] = error_of(lambda: late(x))
    handle.remove()
    return {"errors": errors, "works": works, "touched": touched, "late touched": hooked(late)}


@case
def fsdp_in_a_pipeline(folder: Path) -> Found:
    """A pipeline whose transformer is under FSDP2: by name it is refused, by a set or "all" it is left alone."""
    from torch.distributed.fsdp import fully_shard

    import factory

    def build() -> Any:
        pipe = factory.CASES["flux"].build()
        for block in pipe.transformer.transformer_blocks:
            fully_shard(block, mesh=mesh())
        fully_shard(pipe.transformer, mesh=mesh())
        return pipe

    expected = factory.run("flux", factory.CASES["flux"].build())
    pipe = build()
    error = error_of(lambda: pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="cpu"))
    touched = any(hooked(m) for m in factory.modules_of(pipe).values())
    equal, notes = [], []
    for components in (None, ["all", "!transformer"], {"all": "layerwise", "transformer": "skip"}):
        handle = pipe.enable_layerwise_offload(components, "memory", onload_device="cpu")
        equal += [torch.equal(factory.run("flux", pipe), expected) for _ in range(2)]
        notes.append(" ".join(handle.report().notes))
        pipe.disable_layerwise_offload()
    return {"error": error, "touched": touched, "equal": equal, "notes": notes}


# ---------------------------------------------------------------------- one copy per host
WIDTH = 1024
DEPTH = 8
WEIGHTS = DEPTH * WIDTH * (WIDTH + 1) * 4


def memory_now() -> dict[str, int]:
    """Bytes that this process uses: shared pages in parts (`pss`) or wholly (`rss`), and what is only its own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    found = {name.rstrip(":"): int(count) * 1024 for name, count, *_ in lines}
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"pss": found["Pss"], "private": private, "rss": found["Rss"]}


def grown(before: dict[str, int]) -> dict[str, int]:
    """What has been added since, once all ranks have come so far; none goes on before all have looked."""
    dist.barrier()
    now = memory_now()
    dist.barrier()
    return {name: now[name] - before[name] for name in now}


def wide(seed: int = 0) -> nn.Module:
    """A stack with weights that are worth sharing."""
    import models

    return models.make(models.Chain, DEPTH, WIDTH, seed=seed)


def streamed_wide(host: str, folder: Path, mapped: bool = False) -> Found:
    """Memory of the wide stack, streamed in two calls, over what the process took before it had any weights."""
    from safetensors.torch import load_file, save_file

    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(2, WIDTH)
    path = folder / "wide.safetensors"
    if mapped and dist.get_rank() == 0:
        save_file(wide().state_dict(), path)
    with torch.no_grad():
        expected = wide()(x)
    dist.barrier()
    before = memory_now()
    module = wide()
    if mapped:
        module.load_state_dict(load_file(path), assign=True)
        with torch.no_grad():
            expected = module(x)
    objects = [id(p) for p in module.parameters()]
    handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": host})
    with torch.no_grad():
        equal = [torch.equal(module(x), expected) for _ in range(3)]
    taken = grown(before)
    report = handle.report()
    handle.remove()
    with torch.no_grad():
        equal.append(torch.equal(module(x), expected))
    kept = grown(before)
    return {
        "equal": equal,
        "taken": taken,
        "kept": kept,
        "tiers": report.components[0].host_bytes,
        "host bytes": report.host_bytes,
        "notes": [*report.notes, *report.components[0].notes],
        "same objects": objects == [id(p) for p in module.parameters()],
        "weights": WEIGHTS,
    }


@case
def own_copies(folder: Path) -> Found:
    """Every rank has its own."""
    return streamed_wide("pageable", folder)


@case
def shared_copy(folder: Path) -> Found:
    """All have one."""
    return streamed_wide("shared", folder)


@case
def mapped_checkpoint(folder: Path) -> Found:
    """All have loaded the same file without copying it."""
    return streamed_wide("mapped", folder, mapped=True)


@case
def shared_checkpoint(folder: Path) -> Found:
    """The same, asked to share: there is nothing to do."""
    return streamed_wide("shared", folder, mapped=True)


@case
def shared_residents(folder: Path) -> Found:
    """On a CPU what is resident is used where it lies, in the shared copy."""
    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(2, WIDTH)
    module = wide()
    with torch.no_grad():
        expected = module(x)
        apply_layerwise_offload(module, "auto", onload_device="cpu", config={"host": "shared"})
        equal = [torch.equal(module(x), expected) for _ in range(3)]
    return {"equal": equal}


@case
def shared_edits(folder: Path) -> Found:
    """Rank 0 edits its weights in every way; nobody else sees that. All go on from the shared copy."""
    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(2, WIDTH)
    module, reference, untouched = wide(), wide(), wide()
    apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})

    def edit(which: nn.Module) -> None:
        which.blocks[0].lin.weight.add_(1)
        which.blocks[1].lin.weight.data.mul_(2)
        which.load_state_dict({"blocks.2.lin.bias": torch.ones(WIDTH)}, strict=False)

    with torch.no_grad():
        first = torch.equal(module(x), untouched(x))
        dist.barrier()
        if dist.get_rank() == 0:
            edit(module)
            edit(reference)
        dist.barrier()
        equal = [torch.equal(module(x), reference(x)) for _ in range(3)]
        differs = not torch.equal(reference(x), untouched(x))
    return {"first": first, "equal": equal, "differs": differs}


@case
def shared_in_part(folder: Path) -> Found:
    """One layer differs in the last rank, by one byte at its end: that one is its own, the others are shared."""
    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(2, WIDTH)
    module = wide()
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        module.blocks[3].lin.weight.data[-1, -1] += 1
    with torch.no_grad():
        expected = module(x)
        for turn in range(2):  # rank 0 writes the copy
            if turn == min(dist.get_rank(), 1):
                handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
            dist.barrier()
        equal = [torch.equal(module(x), expected) for _ in range(3)]
    report = handle.report()
    return {"equal": equal, "tiers": report.components[0].host_bytes, "notes": report.components[0].notes}


@case
def shared_pipeline(folder: Path) -> Found:
    """A pipeline whose transformer is split among the ranks, and whose other components they share."""
    return streams_equal(mode="memory", config={"host": "shared"})


@case
def owner_leaves(folder: Path) -> Found:
    """Who wrote the copy lets go of it, the others go on; a rank that comes later makes do with what it finds."""
    import models
    from diffusers_layerwise import apply_layerwise_offload

    x = models.numbers(2, WIDTH)
    module = wide(seed=3)
    with torch.no_grad():
        expected = module(x)
        if dist.get_rank() == 0:
            handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
            module(x)
        dist.barrier()
        if dist.get_rank() == 1:
            handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
        dist.barrier()
        if dist.get_rank() == 0:
            handle.remove()
            del module, handle
            gc.collect()
            module = wide(seed=3)
        dist.barrier()
        if dist.get_rank() != 1:
            handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
        equal = [torch.equal(module(x), expected) for _ in range(2)]
    return {"equal": equal, "tiers": handle.report().components[0].host_bytes, "notes": handle.report().notes}


# ---------------------------------------------------------------------- running them
def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """One rank: runs the cases in order, and writes what they found."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    found = {}
    for name in names:
        print(name, flush=True)
        found[name] = CASES[name](folder)
        gc.collect()
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
