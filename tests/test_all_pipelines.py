"""Every pipeline of the factory, every component layerwise, and back: a sample in each run, all of them marked slow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import diffusers_layerwise  # noqa: F401
import factory

#: What gradients are needed for can't be streamed, and is refused by name.
REFUSED = {"sd15_attend": "gradients enabled"}
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


def state(pipe: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """Each parameter's identity and value."""
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    return {f"{n}.{k}": (id(p), p.detach().clone()) for n, m in modules.items() for k, p in m.named_parameters()}


def leftovers(pipe: Any) -> list[str]:
    """Hooks and attributes that an ordinary pipeline doesn't have."""
    found = [name for name in pipe.__dict__ if "layerwise" in name]
    for name, module in pipe.components.items():
        for path, part in module.named_modules() if isinstance(module, nn.Module) else []:
            marks = {"_hf_hook", "_old_forward", "forward"} & set(part.__dict__)
            found += [f"{name}.{path}: {mark}" for mark in sorted(marks)]
    return found


@pytest.mark.parametrize("name", cases())
def test_every_component_streams_and_comes_back(sim: ModuleType, name: str) -> None:
    case = factory.CASES[name]
    expected = factory.run(case, case.build())
    pipe = case.build()
    before, marks = state(pipe), leftovers(pipe)
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    if name in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            factory.run(case, pipe)
    else:
        for _ in range(2):
            assert torch.equal(factory.run(case, pipe), expected)
        assert handle.plan.peak_bytes == handle.report().peak_seen
    pipe.disable_layerwise_offload()
    after = state(pipe)
    assert before.keys() == after.keys()
    for key, (identity, value) in before.items():
        assert after[key][0] == identity or key.startswith(REPLACED)
        assert torch.equal(after[key][1], value)
    assert leftovers(pipe) == marks
    assert pipe.layerwise_offload is None
