"""Parts of components that were called alike before are counted from that call, exactly as if they had run."""

from __future__ import annotations

from typing import Any

import pytest

import factory
from diffusers_layerwise import recorder
from diffusers_layerwise.fake import FakeDevice
from diffusers_layerwise.recorder import trace_pipeline
from diffusers_layerwise.skeleton import from_pipeline

QUICK = "sd15 wan".split()
NAMES = "sdxl flux qwenimage hunyuan_video ltx cogvideox mochi allegro".split()


def traced(name: str, tiling: bool) -> dict[str, Any]:
    """A small pipeline's trace as plain values, with tiles of 16 pixels."""
    device, notes = FakeDevice(), list[str]()
    pipe = from_pipeline(factory.CASES[name].build(), device)
    call = factory.CASES[name].call_kwargs()
    if tiling:
        pipe.vae.enable_tiling()
        for attribute in ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width"):
            if hasattr(pipe.vae, attribute):
                setattr(pipe.vae, attribute, 16)
        for attribute in ("tile_sample_stride_height", "tile_sample_stride_width"):
            if hasattr(pipe.vae, attribute):
                setattr(pipe.vae, attribute, 12)
    return trace_pipeline(pipe, device, call, notes).to_dict()


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)])
def test_a_trace_is_the_same_whether_alike_calls_run_again_or_not(
    name: str, tiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiling and not hasattr(factory.CASES[name].build().vae, "enable_tiling"):
        pytest.skip("its VAE has no tiles")
    short = traced(name, tiling)
    monkeypatch.setattr(recorder, "LARGE", 1 << 30)
    monkeypatch.setattr(recorder, "JOINS", ())
    assert short == traced(name, tiling)
