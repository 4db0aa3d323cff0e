"""A server that paints, with a LoRA for each request; requests that come at the same time wait for their turn.

    pip install -e ".[server]"
    MEMORY_BUDGET=8GiB CHECKPOINT=~/models/FLUX.1-dev LORAS=~/loras uvicorn --app-dir examples lora_server:app
    curl -d '{"prompt": "a blue five", "lora": "mine"}' -H 'Content-Type: application/json' \
        localhost:8000/paint > five.png        # with the LoRA in ~/loras/mine.safetensors

Everything comes from the environment. Without CHECKPOINT it is the digits that come with this, without MEMORY_BUDGET
the memory that is free. LoRAs are loaded once and stay; a request picks one, or none.
"""

import asyncio
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

CHECKPOINT = Path(os.environ.get("CHECKPOINT") or Path(__file__).parent / "digits").expanduser()
LORAS = Path(os.environ.get("LORAS", "loras")).expanduser()

pipe = DiffusionPipeline.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)
pipe.enable_layerwise_offload(memory_budget=os.environ.get("MEMORY_BUDGET"))
queue = ThreadPoolExecutor(max_workers=1)  # one pipeline, one call at a time, in the order in which they came
loaded: set[str] = set()
app = FastAPI()


class Wish(BaseModel):
    prompt: str
    lora: str | None = None
    scale: float = 1.0
    seed: int = 0
    steps: int = Field(20, ge=1, le=100)


def paint(wish: Wish) -> bytes:
    """One picture as PNG. Runs in the queue's thread alone, as adapters belong to the pipeline and not to a call."""
    if wish.lora and wish.lora not in loaded:
        pipe.load_lora_weights(LORAS, weight_name=f"{wish.lora}.safetensors", adapter_name=wish.lora)
        loaded.add(wish.lora)
    if wish.lora:
        pipe.enable_lora()
        pipe.set_adapters(wish.lora, wish.scale)
    elif loaded:
        pipe.disable_lora()
    generator = torch.Generator("cpu").manual_seed(wish.seed)
    image = pipe(wish.prompt, num_inference_steps=wish.steps, generator=generator).images[0]
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@app.post("/paint")
async def answer(wish: Wish) -> Response:
    known = sorted(path.stem for path in LORAS.glob("*.safetensors"))
    if wish.lora and wish.lora not in known:
        raise HTTPException(404, f"no LoRA {wish.lora!r}; there are {known}")
    return Response(await asyncio.wrap_future(queue.submit(paint, wish)), media_type="image/png")


@app.get("/report")
async def report() -> Response:
    return Response(f"{pipe.layerwise_offload.report()}\n", media_type="text/plain")
