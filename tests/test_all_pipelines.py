"""Every pipeline of the factory, every component layerwise, and back: a sample in each run, all of them marked slow."""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell
from diffusers_layerwise.selection import in_group

#: What gradients are needed for can't be streamed, and is refused by name.
REFUSED = {"sd15_attend": "gradients enabled"}
MARKS = ("_hf_hook", "_old_forward", "forward", "_apply", "__reduce_ex__", "__deepcopy__")
#: The pipeline itself makes new parameters of these in each call.
REPLACED = "image_normalizer."
SAMPLE = {
    "sd15_img2img",
    "sdxl_controlnet",
    "flux_control",
    "wan_vace_two_stage",
    "qwenimage_edit",
    "kandinsky3",
    "sana",
}
SAMPLE |= {"hunyuan_dit", "audioldm2", "shap_e", "animatediff", "cogview4", "ltx2", "pixart_alpha", "unclip", "amused"}


def cases() -> list[Any]:
    return [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow) for n in sorted(factory.CASES)]


def state(pipe: Any) -> dict[str, tuple[int, torch.device, torch.Tensor]]:
    """Each parameter's identity, place and value."""
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    return {
        f"{n}.{k}": (id(p), p.device, p.detach().clone()) for n, m in modules.items() for k, p in m.named_parameters()
    }


def leftovers(pipe: Any) -> list[str]:
    """Hooks and attributes that an ordinary pipeline doesn't have."""
    found = [name for name in pipe.__dict__ if "layerwise" in name]
    for name, module in pipe.components.items():
        for path, part in module.named_modules() if isinstance(module, nn.Module) else []:
            found += [f"{name}.{path}: {mark}" for mark in MARKS if mark in part.__dict__]
    return found


def threads() -> list[str]:
    """Threads that run, but for the one that tqdm starts once."""
    return [thread.name for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]


def changed(case: Any) -> dict[str, Any]:
    """Another prompt of another length, where the case has one that is a text."""
    prompt = case.call_kwargs().get("prompt")
    return {"prompt": prompt + ", a very different one, in oil"} if isinstance(prompt, str) else {}


def outputs(case: Any, pipe: Any) -> list[torch.Tensor]:
    """Two calls: as the case says, and with another seed and prompt."""
    return [factory.run(case, pipe), factory.run(case, pipe, seed=1, **changed(case))]


@functools.lru_cache(maxsize=4)
def expected_outputs(name: str) -> list[torch.Tensor]:
    """What the ordinary pipeline on the CPU gives, whose kernels the simulated device runs."""
    case = factory.CASES[name]
    return outputs(case, case.build())


@pytest.mark.parametrize("selection", ["all", "dit"])
@pytest.mark.parametrize("name", cases())
def test_every_component_streams_and_comes_back(sim: ModuleType, name: str, selection: str, cell: Cell) -> None:
    """`all` streams everything; with `dit` the rest is placed on the device, since there is room."""
    case = factory.CASES[name]
    cell("Pipelines", case.pipeline_class, selection, "refused" if name in REFUSED else "right")
    pipe = case.build()
    if selection == "dit" and not any(in_group(component, "dit") for component in factory.modules_of(pipe)):
        pytest.skip("the pipeline has no denoiser that is a component")
    before, marks = state(pipe), leftovers(pipe)
    running = threads()
    handle = pipe.enable_layerwise_offload(selection, mode="memory", onload_device="sim")
    if name in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            factory.run(case, pipe)
    else:
        for found, expected in zip(outputs(case, pipe), expected_outputs(name), strict=True):
            assert torch.equal(found, expected)
        assert handle.plan.peak_bytes >= handle.report().peak_seen
        assert handle.plan.peak_bytes == handle.report().peak_seen or selection == "dit"
    pipe.disable_layerwise_offload()
    after = state(pipe)
    assert before.keys() == after.keys()
    for key, (identity, device, value) in before.items():
        assert after[key][0] == identity or key.startswith(REPLACED)
        assert after[key][1] == device or key.startswith(REPLACED)
        assert torch.equal(after[key][2], value)
    assert leftovers(pipe) == marks
    assert pipe.layerwise_offload is None
    assert threads() == running
