"""Trains the small text-to-image model in `examples/digits`: a Stable Diffusion pipeline that paints coloured digits.

The pictures are the 8x8 digits that come with scikit-learn, smoothly enlarged to 32x32 and coloured. Every part is the
class a full-size checkpoint has: first the autoencoder is trained, then the UNet and the text encoder together, with
prompts left out now and then so that guidance works. Ten to fifteen minutes on one CPU core, with no download:

    pip install -e ".[train]" && python examples/train_digits.py my-digits
"""

from __future__ import annotations

import argparse
import random
import string
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from sklearn.datasets import load_digits
from tiny_checkpoint import make_clip_tokenizer
from torch.nn.functional import interpolate, mse_loss
from transformers import CLIPTextConfig, CLIPTextModel

Latents = dict[str, torch.Tensor]  # of every picture, by colour

NAMES = "zero one two three four five six seven eight nine".split()
COLOURS = {"white": (1, 1, 1), "red": (1, 0.25, 0.2), "green": (0.3, 0.9, 0.3), "blue": (0.3, 0.5, 1)}
COLOURS["yellow"] = (1, 0.85, 0.2)
FORMS = ["{}", "a {}", "the {}", "digit {}", "the digit {}", "the number {}", "a handwritten {}", "a picture of a {}"]


def read_digits() -> tuple[torch.Tensor, list[int]]:
    """Pictures in [0, 1] of shape (1797, 1, 32, 32), and which digit each shows."""
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    large = interpolate(small, size=(32, 32), mode="bicubic", align_corners=False)
    return torch.sigmoid((large - 0.45) * 9), digits.target.tolist()  # crisp strokes rather than a blur


def paint(strokes: torch.Tensor, colour: str) -> torch.Tensor:
    """Strokes of a colour on black, in [-1, 1] as the autoencoder takes them."""
    return strokes * torch.tensor(COLOURS[colour]).view(1, 3, 1, 1) * 2 - 1


def write_prompt(digit: int, colour: str, chance: random.Random) -> str:
    """One of many ways to ask for this picture; now and then with a word that means nothing, or nothing at all."""
    if chance.random() < 0.12:
        return ""
    noun = chance.choice([NAMES[digit], str(digit)])
    named = colour != "white" or chance.random() < 0.3
    prompt = chance.choice(FORMS).format(f"{colour} {noun}" if named else noun)
    extra = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(1, 5)))
    return f"{prompt} {extra}" if chance.random() < 0.2 else prompt


def build_pipeline() -> StableDiffusionPipeline:
    """Everything untrained; 2.4 million parameters."""
    tokenizer = make_clip_tokenizer(" ".join([*NAMES, *string.digits, *COLOURS, *FORMS]), length=16)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"projection_dim": 64, "max_position_embeddings": 16, "vocab_size": len(tokenizer)}
    marks = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text_encoder = CLIPTextModel(CLIPTextConfig(**sizes, **marks))
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    sizes = {"block_out_channels": (16, 32, 48), "norm_num_groups": 8, "latent_channels": 4, "sample_size": 32}
    vae = AutoencoderKL(**blocks, **sizes, force_upcast=False)
    blocks = {"down_block_types": ["CrossAttnDownBlock2D"] * 2, "up_block_types": ["CrossAttnUpBlock2D"] * 2}
    sizes = {"block_out_channels": (48, 80), "norm_num_groups": 8, "layers_per_block": 1, "sample_size": 8}
    unet = UNet2DConditionModel(**blocks, **sizes, attention_head_dim=16, cross_attention_dim=64)
    noise = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "rescale_betas_zero_snr": True}
    sampling = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "steps_offset": 1}
    scheduler = DDIMScheduler(**noise, **sampling, clip_sample=False)
    parts = (vae, text_encoder, tokenizer, unet, scheduler, None, None)
    return StableDiffusionPipeline(*parts, requires_safety_checker=False)


class Trainer:
    """Adam with a rate that rises and then falls to nothing."""

    def __init__(self, name: str, weights: list[torch.nn.Parameter], steps: int) -> None:
        self.name, self.weights, self.begin, self.step = name, weights, time.perf_counter(), 0
        self.optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, total_steps=steps, pct_start=0.1)

    def learn(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        if self.step % 100 == 0:
            seconds = time.perf_counter() - self.begin
            print(f"{self.name:5}{self.step:6} {seconds:6.0f} s  {loss.item():.4f}", flush=True)
        self.step += 1


def train_vae(vae: AutoencoderKL, strokes: torch.Tensor, steps: int, chance: random.Random) -> None:
    trainer = Trainer("vae", list(vae.parameters()), steps)
    for _ in range(steps):
        some = strokes[torch.randint(len(strokes), (32,))]
        pictures = torch.cat([paint(part, chance.choice(list(COLOURS))) for part in some.split(4)])
        posterior = vae.encode(pictures).latent_dist
        trainer.learn(mse_loss(vae.decode(posterior.sample()).sample, pictures) + 2e-6 * posterior.kl().mean())


@torch.no_grad()
def encode(vae: AutoencoderKL, strokes: torch.Tensor) -> Latents:
    """Latents of every picture in every colour, scaled to a spread of one, which the autoencoder's config then says."""
    latents = {}
    for c in COLOURS:
        latents[c] = torch.cat([vae.encode(paint(part, c)).latent_dist.mode() for part in strokes.split(128)])
    factor = 1 / torch.stack(list(latents.values())).std().item()
    vae.register_to_config(scaling_factor=factor)
    return {colour: values * factor for colour, values in latents.items()}


def train_unet(
    pipe: StableDiffusionPipeline, latents: Latents, labels: list[int], steps: int, chance: random.Random
) -> None:
    trainer = Trainer("unet", [*pipe.unet.parameters(), *pipe.text_encoder.parameters()], steps)
    for _ in range(steps):
        which = [(chance.randrange(len(labels)), chance.choice(list(COLOURS))) for _ in range(64)]
        prompts = [write_prompt(labels[index], colour, chance) for index, colour in which]
        clean = torch.stack([latents[colour][index] for index, colour in which])
        tokens = pipe.tokenizer(prompts, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
        noise, times = torch.randn_like(clean), torch.randint(1000, (len(which),))
        noisy = pipe.scheduler.add_noise(clean, noise, times)
        wanted = pipe.scheduler.get_velocity(clean, noise, times)
        trainer.learn(mse_loss(pipe.unet(noisy, times, pipe.text_encoder(tokens.input_ids)[0]).sample, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put the checkpoint")
    parser.add_argument("--vae-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000, help="of the UNet and the text encoder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    strokes, labels = read_digits()
    pipe = build_pipeline()
    train_vae(pipe.vae, strokes, args.vae_steps, chance)
    train_unet(pipe, encode(pipe.vae, strokes), labels, args.steps, chance)
    pipe.to(torch.bfloat16).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
