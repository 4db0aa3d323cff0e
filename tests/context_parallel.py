"""One of two ranks that compute a Flux transformer in context parallel on the CPU: its rank, and a file to meet by.

Exits with an error where an image isn't the one of the resident pipeline in the same two ranks.
"""

from __future__ import annotations

import sys

import torch
from diffusers import ContextParallelConfig, DiffusionPipeline

import diffusers_layerwise  # noqa: F401
import factory

RANKS = 2


def split(pipe: DiffusionPipeline) -> None:
    """Each rank gets a part of the tokens; attention exchanges heads (Ulysses)."""
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))


def run(pipe: DiffusionPipeline, seed: int) -> torch.Tensor:
    return factory.run("flux", pipe, seed)


def main(rank: int, file: str) -> None:
    """Compares both orders, in two modes, two calls each, and after layerwise offload has been taken off."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    # diffusers gives ranks to devices by their number, which it divides by; without an accelerator there are none.
    torch.accelerator.device_count = lambda: 1
    reference = factory.CASES["flux"].build()
    split(reference)
    expected = [run(reference, seed) for seed in (0, 1)]
    for mode, limit in (("memory", {}), ("auto", {"memory_budget": 400_000, "config": {"activation_reserve": 0}})):
        for when in ("before", "after", "after a call"):
            pipe = factory.CASES["flux"].build()
            if when == "before":
                split(pipe)
            pipe.enable_layerwise_offload(mode=mode, onload_device="cpu", **limit)
            if when == "after a call":
                run(pipe, 0)
            if when != "before":
                split(pipe)
            for seed in (0, 1):
                assert torch.equal(run(pipe, seed), expected[seed]), (mode, when, seed)
            pipe.disable_layerwise_offload()
            assert torch.equal(run(pipe, 0), expected[0]), (mode, when, "taken off")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
