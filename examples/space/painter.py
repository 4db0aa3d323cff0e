"""A pipeline for many requests with a budget and a mode each. Knows nothing of the page that it is for.

Nothing here touches a device before the first call: on ZeroGPU a device is lent to a forked worker for one call, and
the process that is forked may not use any.
"""

from __future__ import annotations

import html
import inspect
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

HERE = Path(__file__).resolve().parent
IS_ZERO = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
#: On ZeroGPU every worker is a fork. Weights that stay in the memory (or the files) that they were loaded to are shared
#: by all of them; page-locked ones would be a copy for each, made in seconds that are paid for.
HOST = os.environ.get("HOST") or ("pageable" if IS_ZERO else None)


def find_model() -> str:
    """MODEL, or the digits: beside this file, as in a Space, or in the folder above, as in a clone."""
    beside = [folder for folder in (HERE / "digits", HERE.parent / "digits") if folder.is_dir()]
    found = os.environ.get("MODEL") or (str(beside[0]) if beside else None)
    if found is None:
        raise SystemExit("There is no model: set MODEL to a folder or a repository, or copy examples/digits here.")
    return found


def load(model: str) -> DiffusionPipeline:
    """The pipeline on the host. Never `.to("cuda")`: that would have all of it moved at once, for every worker."""
    dtype = getattr(torch, os.environ.get("DTYPE", "bfloat16"))
    pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Painter:
    """One pipeline and the settings that are in force. Calls take turns."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()
        self.settings: tuple[str, int | None] | None = None
        self.set("memory", None)
        report = pipe.layerwise_offload.report()
        #: Bytes: of all weights, and of the least that have to be on the device at once.
        self.weights, self.least = report.weights, report.peak_predicted

    def set(self, mode: str, budget: int | None) -> None:
        """Enables layerwise offload anew where settings differ; what was learned under the same ones is kept."""
        if self.settings != (mode, budget):
            config = {"host": HOST} if HOST else None
            self.pipe.enable_layerwise_offload(mode=mode, memory_budget=budget, config=config)
            self.settings = (mode, budget)

    def paint(self, prompt: str, mode: str, budget: int, steps: int, seed: int) -> tuple[Image.Image, str, str, str]:
        """An image, a line about it, the report and the timeline as HTML: all that is known where the device is."""
        wanted: dict[str, Any] = {
            "prompt": prompt,
            "num_inference_steps": steps,
            "generator": torch.Generator("cpu").manual_seed(seed),  # the same noise on every device
        }
        accepted = inspect.signature(self.pipe.__call__).parameters
        with self.lock:
            self.set(mode, budget)
            begin = time.perf_counter()
            output = self.pipe(**{name: value for name, value in wanted.items() if name in accepted})
            seconds = time.perf_counter() - begin
            report = self.pipe.layerwise_offload.report()
            timeline = self.pipe.layerwise_offload.timeline()
        return enlarged(output[0][0]), describe(report, seconds), as_html(report), timeline._repr_html_()


def enlarged(image: Image.Image) -> Image.Image:
    """A tiny picture made large enough to look at."""
    factor = max(1, 384 // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)


def describe(report: Any, seconds: float) -> str:
    """The result in a line."""
    share = report.peak_ever / max(1, report.weights)
    moved = sum(component.streamed_groups for component in report.components)
    return (
        f"**{seconds:.2f} s** on {report.device}. Weights took at most **{amount(report.peak_ever)}** of the device, "
        f"{share:.0%} of their {amount(report.weights)}; {moved} groups of layers stream."
    )


def as_html(report: Any) -> str:
    """The report in lines that aren't broken: wide ones scroll."""
    return f'<pre class="report" tabindex="0">{html.escape(str(report))}</pre>'


def amount(count: float) -> str:
    """Bytes for people."""
    unit, size = unit_of(count)
    return f"{count / size:.2f} {unit}"


def unit_of(count: float) -> tuple[str, int]:
    """The unit in which so many bytes are a number of a few digits."""
    return next(
        (name, size)
        for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
        if count >= size or size == 2**10
    )
