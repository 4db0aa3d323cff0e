"""Each scheduler that diffusers has, in a pipeline that it is used in: images equal to the resident pipeline's.

Also where the scheduler is swapped once layerwise offload is on. A scheduler that diffusers adds fails here until it
has a case, or a reason to have none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, SchedulerMixin

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell
from factory.core import enliven, pipeline, to_tensor
from factory.text import WIDTH, tiny_clip_text
from factory.tokenizers import build_clip_tokenizer
from factory.wan import SIZE, wan_components, wan_options


def exported() -> set[str]:
    """The names of all schedulers of diffusers, also of those whose packages are missing here."""
    found = set()
    for owner in (diffusers, diffusers.schedulers):
        for name in dir(owner):
            kind = getattr(owner, name, None)
            if inspect.isclass(kind) and name.endswith("Scheduler") and (is_missing(kind) or is_one(kind)):
                found.add(name)
    return found


def is_one(kind: type) -> bool:
    """Whether a class is a scheduler, and not what they have in common."""
    return issubclass(kind, SchedulerMixin) and kind is not SchedulerMixin


def is_missing(kind: type) -> bool:
    """Whether diffusers has put up a sign in place of a class whose packages aren't there."""
    return type(kind).__name__ == "DummyObject"


def scheduler_class(name: str) -> type:
    """A scheduler's class."""
    kind: type = getattr(diffusers, name, None) or getattr(diffusers.schedulers, name)
    return kind


# ---- pipelines that only stand here, for their schedulers
def built(make: Callable[[], DiffusionPipeline]) -> DiffusionPipeline:
    """A pipeline as the factory finishes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = make()
        for module in factory.modules_of(pipe).values():
            enliven(module.eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def helios(kind: str) -> DiffusionPipeline:
    """Video in chunks, each after a history of the ones before."""
    options = {k: v for k, v in wan_options().items() if k not in ("rope_max_seq_len", "attention_head_dim")}
    transformer = diffusers.HeliosTransformer3DModel(**options, attention_head_dim=12, rope_dim=(4, 4, 4))
    if kind == "HeliosPipeline":
        scheduler = diffusers.HeliosScheduler(stages=1, stage_range=[0, 1])
        return pipeline(kind, **wan_components(transformer=transformer, scheduler=scheduler))
    scheduler = diffusers.HeliosDMDScheduler(gamma=0.25)
    return pipeline(kind, **wan_components(transformer=transformer, scheduler=scheduler), is_distilled=True)


def anyflow() -> DiffusionPipeline:
    """Video by a flow map, between any two times."""
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    transformer = diffusers.AnyFlowTransformer3DModel(**{k: v for k, v in wan_options().items() if k != "qk_norm"})
    return pipeline("AnyFlowPipeline", **wan_components(transformer=transformer, scheduler=scheduler))


def llada() -> DiffusionPipeline:
    """Text by filling masks in."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertForMaskedLM(config)
    return diffusers.LLaDA2Pipeline(model=model, scheduler=diffusers.BlockRefinementScheduler(block_length=8))


def vq_diffusion() -> DiffusionPipeline:
    """Images of codes."""
    from diffusers.pipelines.deprecated.vq_diffusion.pipeline_vq_diffusion import (
        LearnedClassifierFreeSamplingEmbeddings as Embeddings,
    )

    transformer = diffusers.Transformer2DModel(
        attention_bias=True,
        cross_attention_dim=WIDTH,
        attention_head_dim=12,
        num_attention_heads=2,
        num_layers=4,
        num_embeds_ada_norm=10,
        num_vector_embeds=13,
        sample_size=4,
        activation_fn="geglu-approximate",
    )
    vqvae = diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=4,
        latent_channels=3,
        num_vq_embeddings=12,
        vq_embed_dim=3,
    )
    return diffusers.VQDiffusionPipeline(
        vqvae=vqvae,
        text_encoder=tiny_clip_text(),
        tokenizer=build_clip_tokenizer(),
        transformer=transformer,
        scheduler=diffusers.VQDiffusionScheduler(num_vec_classes=13, num_train_timesteps=10),
        learned_classifier_free_sampling_embeddings=Embeddings(learnable=False),
    )


def consistency_decoder() -> DiffusionPipeline:
    """Stable Diffusion with a VAE that denoises by itself."""
    pipe = factory.CASES["sd15"].build()
    channels = {"encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16)}
    blocks = {
        "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
        "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
        "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
    }
    pipe.vae = diffusers.ConsistencyDecoderVAE(
        **channels, **blocks, encoder_norm_num_groups=4, decoder_norm_num_groups=4, decoder_layers_per_block=1
    )
    return pipe


# ---- what is used where
@dataclasses.dataclass(frozen=True)
class Use:
    """A pipeline that takes a scheduler: a case of the factory or a builder, what else to call it with, the slot.

    `options` are added to the config of the scheduler that the pipeline comes with. What draws its random numbers on
    the device (and so takes no generator of the CPU's) is compared with the pipeline resident there.
    """

    case: str = "sd15"
    slot: str = "scheduler"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: Callable[[], DiffusionPipeline] | None = None
    takes_generator: bool = True

    def pipe(self) -> DiffusionPipeline:
        """The pipeline, with its own scheduler."""
        return factory.CASES[self.case].build() if self.build is None else built(self.build)

    def run(self, pipe: DiffusionPipeline) -> torch.Tensor:
        """One call."""
        if self.case in factory.CASES:
            return factory.run(self.case, pipe, **self.call)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            generator = factory.generator_kwargs(pipe) if self.takes_generator else {}
            return to_tensor(pipe(**self.call, **generator)[0]).detach().cpu()


VIDEO = {"prompt": "a fox", "output_type": "pt", **SIZE}
CODES: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, "output_type": "np", "truncation_rate": 0.9}
TOKENS: dict[str, Any] = {
    "input_ids": torch.arange(1, 7)[None],
    "gen_length": 16,
    "block_length": 8,
    "num_inference_steps": 3,
    "mask_token_id": 63,
    "eos_token_id": 62,
    "temperature": 0.0,
    "output_type": "seq",
}
PYRAMID = {"pyramid_num_inference_steps_list": [1, 1, 1], "height": 64, "width": 64}

USES: dict[str, Use] = {
    "AmusedScheduler": Use("amused"),
    "BlockRefinementScheduler": Use("text", build=llada, call=TOKENS, takes_generator=False),
    "CMStochasticIterativeScheduler": Use("consistency"),
    "CogVideoXDDIMScheduler": Use("cogvideox"),
    "CogVideoXDPMScheduler": Use("cogvideox"),
    "ConsistencyDecoderScheduler": Use("sd15", build=consistency_decoder),
    "CosineDPMSolverMultistepScheduler": Use("stable_audio"),
    "DDIMInverseScheduler": Use("sd15_diffedit", "inverse_scheduler"),
    "DDIMParallelScheduler": Use(),
    "DDIMScheduler": Use(),
    "DDPMParallelScheduler": Use(),
    "DDPMScheduler": Use(),
    "DDPMWuerstchenScheduler": Use("stable_cascade_prior"),
    "DEISMultistepScheduler": Use(),
    "DPMSolverMultistepInverseScheduler": Use(),
    "DPMSolverMultistepScheduler": Use(),
    "DPMSolverSDEScheduler": Use(),
    "DPMSolverSinglestepScheduler": Use(),
    "EDMDPMSolverMultistepScheduler": Use("sdxl"),
    "EDMEulerScheduler": Use("cosmos"),
    "EulerAncestralDiscreteScheduler": Use(),
    "EulerDiscreteScheduler": Use(),
    "FlowMapEulerDiscreteScheduler": Use("flow map", build=anyflow, call=VIDEO | {"num_inference_steps": 2}),
    "FlowMatchEulerDiscreteScheduler": Use("flux"),
    "FlowMatchHeunDiscreteScheduler": Use("sd3"),
    "FlowMatchLCMScheduler": Use("flux"),
    "HeunDiscreteScheduler": Use(),
    "HeliosScheduler": Use(
        "helios", build=functools.partial(helios, "HeliosPipeline"), call=VIDEO | {"num_inference_steps": 2}
    ),
    "HeliosDMDScheduler": Use("helios", build=functools.partial(helios, "HeliosPyramidPipeline"), call=VIDEO | PYRAMID),
    "IPNDMScheduler": Use(),
    "KDPM2AncestralDiscreteScheduler": Use(),
    "KDPM2DiscreteScheduler": Use(),
    "KarrasVeScheduler": Use("karras_ve"),
    "LCMScheduler": Use(),
    "LMSDiscreteScheduler": Use(),
    "LTXEulerAncestralRFScheduler": Use("ltx_long"),
    "PNDMScheduler": Use(call={"num_inference_steps": 4}),
    "RePaintScheduler": Use("repaint"),
    "SASolverScheduler": Use(),
    "SCMScheduler": Use("sana_sprint"),
    "ScoreSdeVeScheduler": Use("score_sde_ve"),
    "TCDScheduler": Use(),
    "UnCLIPScheduler": Use("kandinsky22_prior"),
    "UniPCMultistepScheduler": Use("wan"),
    "VQDiffusionScheduler": Use("codes", build=vq_diffusion, call=CODES, takes_generator=False),
}
NO_USE = {
    "DiscreteDDIMScheduler": "its pipeline (text) needs a model of its own that is not in the factory",
    "EntropyBoundScheduler": "its pipeline (text) needs a model of its own that is not in the factory",
    "MiniMaxH3Scheduler": "used by modular blocks whose models are not in the factory",
    "PiflowScheduler": "its pipelines (Kandinsky 6) are not in the factory",
    "RFD4ProteinaScheduler": "its pipeline makes proteins, of a model that is not in the factory",
    "ScoreSdeVpScheduler": "no pipeline of diffusers uses it",
}
#: One of each way to step, for each run; the others are marked slow.
SAMPLE = {
    "AmusedScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LCMScheduler",
    "UniPCMultistepScheduler",
}


def test_every_scheduler_has_a_case_or_a_reason() -> None:
    named = USES.keys() | NO_USE.keys()
    assert exported() - named == set()
    assert {name for name in named if not hasattr(diffusers, name) and not hasattr(diffusers.schedulers, name)} == set()
    assert USES.keys() & NO_USE.keys() == set()
    assert USES.keys() >= SAMPLE


def test_what_stable_diffusion_takes_has_a_case_there() -> None:
    scheduler = factory.CASES["sd15"].build().scheduler
    assert {kind.__name__ for kind in scheduler.compatibles} <= USES.keys()


def swapped(name: str, use: Use, pipe: DiffusionPipeline) -> None:
    """Puts the scheduler into its slot, made of the config of what was there."""
    if use.build is consistency_decoder:
        pipe.vae.decoder_scheduler = scheduler_class(name)()
        return
    kind: Any = scheduler_class(name)
    setattr(pipe, use.slot, kind.from_config(getattr(pipe, use.slot).config, **use.options))


def parameters() -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in sorted(USES)]


@functools.lru_cache(maxsize=1)
def expected(name: str) -> torch.Tensor:
    """What the resident pipeline makes."""
    use = USES[name]
    pipe = use.pipe()
    swapped(name, use, pipe)
    found = use.run(pipe if use.takes_generator else pipe.to("sim"))
    assert found.float().std() > 0
    return found


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", parameters())
def test_a_scheduler_in_a_streamed_pipeline(sim: ModuleType, name: str, when: str, cell: Cell) -> None:
    cell("Schedulers", name, f"{when} ours")
    if is_missing(scheduler_class(name)):
        pytest.skip(f"needs {scheduler_class(name)._backends}")  # type: ignore[attr-defined]
    use = USES[name]
    pipe = use.pipe()
    if when == "before":
        swapped(name, use, pipe)
    pipe.enable_layerwise_offload("all", mode="memory", onload_device="sim")
    if when == "after":
        use.run(pipe)
        swapped(name, use, pipe)
    for _ in range(2):
        assert torch.equal(use.run(pipe), expected(name))
    report = pipe.layerwise_offload.report()
    assert report.moved_bytes > 0
    assert report.peak_seen <= pipe.layerwise_offload.plan.peak_bytes
    assert all(part.choice == "layerwise" for part in report.components)
