"""Many random operations on one pipeline: every image is a fresh resident pipeline's, and nothing is left behind.

`SOAK_SEED=7 SOAK_CALLS=40 python -m pytest -m "slow or not slow" tests/test_soak.py` replays one; a failure prints what
was done.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("peft", reason="LoRA needs peft")

from soak import Soak, anonymous_bytes, descriptors, running, saved

SEED = int(os.environ.get("SOAK_SEED", "0"))
pytestmark = pytest.mark.usefixtures("one_thread")
CALLS = int(os.environ.get("SOAK_CALLS", "200"))
SLACK = 32 * 2**20
"""Host bytes that allocators and caches of other packages may take meanwhile: they fill in the first hundred calls."""
ADAPTERS = 2 * 2**20
"""Bytes of adapters and an image encoder that may be there at one time and not at another; all else is 1.3 MB."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder)
    return folder


def soak(sim: ModuleType, folder: Path, seed: int, calls: int) -> None:
    """So many calls; looks every 25 whether something stays."""
    life = Soak(sim, seed, folder)
    try:
        life.call()
        tensors = life.rest()
        pinned, threads, files = sim.mem(0)["pinned"], running(), descriptors()
        held: list[int] = []
        checked = 0
        while life.calls < calls:
            life.step()
            if life.calls - checked >= 25:
                checked = life.calls
                assert life.rest() <= tensors + ADAPTERS
                held.append(anonymous_bytes())
        assert life.rest() <= tensors + ADAPTERS
        assert sim.mem(0)["pinned"] <= pinned
        assert running() == threads
        assert descriptors() == files
        assert not held or max(held[1:], default=0) <= held[0] + SLACK, held
    except BaseException:
        print(f"SOAK_SEED={seed} SOAK_CALLS={calls}, what was done:", *life.told, sep="\n")
        raise


@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_life_of_a_pipeline(sim: ModuleType, checkpoints: Path, seed: int) -> None:
    soak(sim, checkpoints, seed, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_life_of_a_pipeline(sim: ModuleType, checkpoints: Path) -> None:
    soak(sim, checkpoints, SEED, CALLS)
