"""Makes a small diffusers checkpoint of real architecture: Flux, with random weights.

Nothing is downloaded. Every part is the class a full-size checkpoint has (FluxTransformer2DModel with double and
single blocks, a CLIP and a T5 text encoder, AutoencoderKL, the flow-match scheduler), and both tokenizers are made
here from a few sentences. The picture it paints is noise; what it is good for is moving weights about.

    python examples/tiny_checkpoint.py my-flux
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

NAME = "flux-small-1"  # a new number for every change of what is made, so that an old folder is not reused

CORPUS = """
a photo of a red fox sitting in fresh snow, soft morning light, shallow depth of field
an oil painting of a harbour at dusk, small boats, warm lamps, heavy brush strokes
a watercolour of a lighthouse on a cliff above the sea, gulls in the wind
a macro photograph of a dew drop on a blade of grass, the garden upside down inside it
an astronaut riding a horse on the moon, cinematic lighting, highly detailed
a bowl of ramen on a wooden table, steam rising, studio light, food photography
a city street in the rain at night, neon signs reflected in puddles, a lone cyclist
a portrait of an old fisherman with a grey beard, black and white, film grain
an isometric drawing of a tiny library with green plants and a sleeping cat
a mountain lake at sunrise, mist over the water, pine trees, wide angle
"""


def default_folder() -> Path:
    """Where the checkpoint is kept between runs: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "diffusers-layerwise" / NAME


def make_checkpoint(folder: Path | None = None, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Makes the checkpoint in `folder`, or finds it there, and returns the folder."""
    folder = folder or default_folder()
    if (folder / "model_index.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build_pipeline(dtype).save_pretrained(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)  # in one step: a folder under the final name is always whole
        except OSError:
            if not (folder / "model_index.json").is_file():  # somebody else was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def build_pipeline(dtype: torch.dtype = torch.bfloat16) -> FluxPipeline:
    """A FluxPipeline of about 190 million random parameters."""
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=6,
            projection_dim=384,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
    )
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=32128,  # the real table: one large weight outside the layers
            d_model=512,
            d_kv=64,
            d_ff=1024,
            num_layers=8,
            num_heads=8,
            feed_forward_proj="gated-gelu",
        )
    )
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=11,
        joint_attention_dim=512,
        pooled_projection_dim=384,
        guidance_embeds=True,
        axes_dims_rope=(8, 28, 28),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=16,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    for model in (text_encoder, text_encoder_2, transformer, vae):
        torch.nn.Module.to(model, dtype)  # diffusers' own `to` would warn about fp32 parts, of which there are none
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def make_clip_tokenizer(corpus: str = CORPUS, merge_count: int = 400, length: int = 77) -> CLIPTokenizer:
    """CLIP's byte-level BPE, with the most frequent merges of the corpus.

    Trained by hand, since `tokenizers.trainers` breaks ties differently in every process and a checkpoint should be
    the same wherever it is made.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = alphabet + [f"{byte}</w>" for byte in alphabet]
    words = Counter(re.findall(r"[a-z]+|[^\sa-z]", corpus.lower()))
    split = {word: (*word[:-1], f"{word[-1]}</w>") for word in words}
    merges: list[tuple[str, str]] = []
    for _ in range(merge_count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        split = {word: merge_pair(parts, best) for word, parts in split.items()}
    symbols += dict.fromkeys("".join(merge) for merge in merges)
    # CLIP's text model pools at the end-of-text mark, which has the highest id of all.
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def merge_pair(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`parts` with every occurrence of `pair` made one symbol."""
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def make_t5_tokenizer() -> T5TokenizerFast:
    """T5's unigram model: the corpus' words scored by frequency, and single characters for all else."""
    words = Counter(CORPUS.split())
    total = sum(words.values())
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -6.0}
    pieces |= {f"▁{word}": math.log(count / total) for word, count in words.items()}
    pieces |= {chr(code): -9.0 for code in range(33, 127)}
    return T5TokenizerFast(vocab=list(pieces.items()), extra_ids=100, model_max_length=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, help="where to put it (default: the user's cache folder)")
    print(make_checkpoint(parser.parse_args().folder))


if __name__ == "__main__":
    main()
