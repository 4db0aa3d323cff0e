"""What plans take of a call's arguments, and that they leave those, torch and other threads alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import factory
from diffusers_layerwise import plan_layerwise_offload

pytestmark = pytest.mark.slow

DEVICE = "RTX 4090"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_arrays_of_other_sizes_are_other_calls() -> None:
    pipe = factory.CASES["sd15_img2img"].build()
    peaks = [
        plan_layerwise_offload(
            pipe, hardware=DEVICE, prompt="x", num_inference_steps=4, image=np.zeros((1, size, size, 3), "float32")
        ).total_peak_bytes
        for size in (32, 128, 32)
    ]
    assert peaks[0] == peaks[2] < peaks[1]


def test_what_is_replaced_while_plans_are_made_is_put_back_whatever_the_threads_do() -> None:
    before = (torch.Generator, torch.amp.autocast.__init__, F.scaled_dot_product_attention)
    pipes = {name: factory.CASES[name].build() for name in ("flux", "sd15")}
    found: dict[str, list[int]] = {name: [] for name in pipes}

    def plans(name: str) -> None:
        for scale in (6.0, 7.0):
            call = factory.CASES[name].call_kwargs() | {"guidance_scale": scale}
            found[name].append(plan_layerwise_offload(pipes[name], hardware=DEVICE, **call).total_peak_bytes)

    threads = [threading.Thread(target=plans, args=(name,)) for name in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torch.Generator, torch.amp.autocast.__init__, F.scaled_dot_product_attention) == before
    assert all(len(peaks) == 2 and peaks[0] == peaks[1] for peaks in found.values())


def test_generators_and_callbacks_are_left_for_the_call() -> None:
    pipe, called = factory.CASES["flux"].build(), []
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()

    def callback(*args: object) -> dict[str, object]:
        called.append(args)
        return {}

    call = factory.CASES["flux"].call_kwargs() | {"generator": generator, "callback_on_step_end": callback}
    plan_layerwise_offload(pipe, hardware=DEVICE, **call)
    assert torch.equal(generator.get_state(), state)
    assert called == []


@pytest.mark.parametrize("name", ["sd15_img2img", "sd15_inpaint", "flux_img2img", "flux_controlnet", "wan_image"])
def test_a_call_that_needs_pictures_gets_blank_ones_of_its_size(name: str, tmp_path: Path) -> None:
    """A folder is planned on the command line, where none can be given."""
    factory.CASES[name].build().save_pretrained(tmp_path / "pipe")
    call = factory.CASES[name].call_kwargs()
    call = {key: value for key, value in call.items() if isinstance(value, (int, str))}
    plan = plan_layerwise_offload(tmp_path / "pipe", hardware=DEVICE, **call)
    assert plan.problem is not None
    assert plan.problem.trace.error is None
    assert plan.steps > 0
    assert any("stand-ins of the call's size" in note for note in plan.notes)


@pytest.mark.parametrize("hardware", ["RTX 4070", "H100"])
def test_at_the_free_budget_a_step_takes_its_compute(hardware: str) -> None:
    pipe, call = factory.CASES["sdxl"].build(), factory.CASES["sdxl"].call_kwargs() | {"height": 256, "width": 256}
    free = plan_layerwise_offload(pipe, hardware=hardware, **call).free_budget
    if free is None:
        pytest.skip("copies of so small weights cost more than they take at any budget")
    plan = plan_layerwise_offload(pipe, hardware=hardware, memory_budget=free, **call)
    assert plan.bound == "compute"


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_a_misspelt_argument_is_refused_though_the_pipeline_would_ignore_it(name: str) -> None:
    pipe = factory.CASES[name].build()
    with pytest.raises(TypeError, match=rf"{type(pipe).__name__} takes no argument 'heigth'. Did you mean 'height'\?"):
        plan_layerwise_offload(pipe, hardware=DEVICE, prompt="x", heigth=64)
    if name == "sd15":  # what calls of old gave is still taken
        plan_layerwise_offload(
            pipe, hardware=DEVICE, prompt="x", height=64, width=64, num_inference_steps=1, callback=None
        )
