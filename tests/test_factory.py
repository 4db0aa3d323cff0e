"""The factory's own promises: real classes, the same output every time, pipelines that can be saved and loaded."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

import factory
from factory import CASES, CORE, KNOWN_BROKEN, NO_RELOAD

OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in CORE]
LOADABLE = [name for name in CORE if NO_RELOAD not in CASES[name].tags]


def test_table() -> None:
    """The table covers many pipeline classes, and none of those that are left out."""
    classes = {case.pipeline_class for case in CASES.values()}
    assert len(classes) >= 200
    assert not classes & KNOWN_BROKEN.keys()
    assert all(name == case.name for name, case in CASES.items())
    assert all(issubclass(getattr(diffusers, name), diffusers.DiffusionPipeline) for name in classes)
    assert all(hasattr(diffusers, name) for name in KNOWN_BROKEN)


@pytest.mark.parametrize("name", [*CORE, *OTHERS])
def test_build_and_run(name: str) -> None:
    """Two builds and two calls give the same finite output, and the global random state is left alone."""
    state = torch.get_rng_state()
    pipe = CASES[name].build()
    first = factory.run(name, pipe)
    assert torch.isfinite(first.float()).all()
    assert first.float().std() > 0
    assert torch.equal(first, factory.run(name, pipe))
    assert torch.equal(first, factory.run(name, CASES[name].build()))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in factory.modules_of(pipe).values())


@pytest.mark.parametrize("name", LOADABLE)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    """A pipeline loaded from disk gives the output of the one that was saved."""
    case = CASES[name]
    pipe = case.build()
    pipe.save_pretrained(tmp_path)
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(pipe)
    for module in factory.modules_of(loaded).values():
        for tensor in [*module.parameters(), *module.buffers()]:
            # A checkpoint's memory map isn't aligned, and some CPUs' kernels round differently then.
            tensor.data = tensor.data.clone()
    assert torch.equal(factory.run(case, loaded), factory.run(case, pipe))


def test_seed_and_overrides() -> None:
    """`run` passes the seed and the overrides on."""
    pipe = CASES["sd15"].build()
    base = factory.run("sd15", pipe)
    assert not torch.equal(base, factory.run("sd15", pipe, seed=1))
    assert factory.run("sd15", pipe, output_type="latent").shape != base.shape
