"""A Space: a prompt in, an image out, and how its weights came to the device. Runs anywhere, on a CPU too.

    pip install -e ".[space]" && python examples/space/app.py
    MODEL=black-forest-labs/FLUX.1-dev python examples/space/app.py

MODEL is a folder or a repository of the hub; without it, it is the small model of digits that comes with the examples.
DTYPE, HOST and SECONDS come from the environment too: see README.md.

Nothing here touches a device before a request: on ZeroGPU a device is lent to a forked worker for one call, and the
process that is forked may not use any.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before torch is: on ZeroGPU this package replaces parts of it.
try:
    import spaces
except ImportError:
    spaces = None

import gradio as gr
import torch
from painter import Painter, amount, find_model, load, unit_of

from diffusers_layerwise import LayerwiseOffloadError

MODES = ["auto", "memory", "speed"]
#: For which ZeroGPU lends a device to a call, at most.
SECONDS = int(os.environ.get("SECONDS", "120"))


def on_device(function: Any) -> Any:
    """Has ZeroGPU lend a device for each call. Elsewhere the function as it is."""
    return function if spaces is None else spaces.GPU(duration=SECONDS)(function)


#: The largest integer up to which a browser has all of them.
MOST_SEED = 2**53 - 1
STYLE = """
.report { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre; overflow: auto; max-height: 340px;
  margin: 0; padding: 10px 12px; border-radius: 8px; background: var(--background-fill-secondary);
  color: var(--body-text-color); }
.timeline iframe { display: block; height: 600px !important; border-radius: 8px; color-scheme: light;
  background: #fff; }
.dark .timeline iframe { color-scheme: dark; background: #0d1117; }
.empty { padding: 3em 1em; text-align: center; color: var(--body-text-color-subdued); }
"""
NOTHING = '<div class="empty">{}</div>'


def make_page(painter: Painter, model: str) -> gr.Blocks:
    """The page. Requests wait in a queue, and one is worked on at a time."""
    unit, size = unit_of(painter.weights)
    # A tenth of a budget is left to activations, and a little is lost to rounding.
    low, high = painter.least / 0.85 / size, painter.weights * 1.3 / size
    digits = 1 if high >= 10 else 2
    step = 10.0**-digits

    def paint(
        prompt: str, mode: str, budget: float | None, steps: float | None, seed: float | None
    ) -> tuple[Any, str, str, str]:
        if budget is None or steps is None or seed is None:
            raise gr.Error("Budget, steps and seed need a number each, and one of them is empty.", title="A gap")
        if steps < 1:
            raise gr.Error(f"It takes at least 1 step, got {steps:g}.", title="No steps")
        try:
            return painter.paint(prompt, mode, int(budget * size), int(steps), int(seed))
        except torch.OutOfMemoryError as error:
            raise gr.Error(str(error), title="More device memory is needed") from error
        except (ValueError, TypeError, LayerwiseOffloadError) as error:
            # A text that can't be encoded, a mode that is none: of errors that aren't its own, Gradio says nothing.
            raise gr.Error(f"The prompt or a setting isn't taken: {error}", title="This can't be painted") from error

    handler = on_device(paint)
    with gr.Blocks(title="Layerwise offload", fill_width=True) as page:
        gr.Markdown(
            f"## Layerwise offload\n`{Path(model).name if Path(model).exists() else model}`, "
            f"{amount(painter.weights)} of weights, streamed to the device layer by layer within a budget. "
            "The image is the same, bit for bit, whatever you choose here."
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=320):
                prompt = gr.Textbox("a red seven", label="Prompt", lines=1, max_lines=3)
                mode = gr.Radio(
                    MODES, value="auto", label="Mode", info="memory: the smallest peak, whatever the budget"
                )
                budget = gr.Slider(
                    round(low + step, digits),
                    round(high, digits),
                    round((low + high) / 2.5, digits),
                    step=step,
                    label=f"Memory budget, {unit}",
                    info="device memory for weights and activations",
                )
                with gr.Row():
                    steps = gr.Slider(1, 50, 20, step=1, label="Steps", min_width=120)
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED, min_width=80)
                button = gr.Button("Paint", variant="primary")
                image = gr.Image(label="Image", format="png", height=384, interactive=False)
                line = gr.Markdown()
            with gr.Column(scale=5, min_width=480):
                gr.Markdown("### One step of the denoiser")
                timeline = gr.HTML(
                    NOTHING.format("Paint something to see what computed, what was copied, and where it waited."),
                    elem_classes="timeline",
                )
                gr.Markdown("### Report")
                report = gr.HTML(NOTHING.format("What was planned and what was measured."))
        inputs, outputs = [prompt, mode, budget, steps, seed], [image, line, report, timeline]
        gr.on([button.click, prompt.submit], handler, inputs, outputs, concurrency_limit=1, api_name="paint")
    page.queue(default_concurrency_limit=1, max_size=32)
    return page


def main() -> None:
    model = find_model()
    make_page(Painter(load(model)), model).launch(css=STYLE)


if __name__ == "__main__":
    main()
