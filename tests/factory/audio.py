"""Sound: AudioLDM, AudioLDM 2 and Stable Audio."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import KNOWN_BROKEN, add, fill, pipeline
from factory.inputs import NEGATIVE, prompted
from factory.stable_diffusion import sd_scheduler
from factory.text import LAYERS, WIDTH, tiny_t5
from factory.tokenizers import VOCAB_SIZE, build_roberta_tokenizer, build_t5_tokenizer
from factory.unets import tiny_unet_sd

TAGS = "audio unet clap weight_norm"
CALL = {"audio_length_in_s": 0.02, "negative_prompt": NEGATIVE}

CLAP_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "projection_dim": WIDTH,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def tiny_clap() -> transformers.PreTrainedModel:
    """ClapModel."""
    audio = {
        "spec_size": 64,
        "window_size": 4,
        "num_mel_bins": 64,
        "depths": [2, 2],
        "num_attention_heads": [2, 2],
        "hidden_size": 16,
        "patch_embeds_hidden_size": 8,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "projection_dim": WIDTH,
    }
    return transformers.ClapModel(
        transformers.ClapConfig(text_config=CLAP_TEXT, audio_config=audio, projection_dim=WIDTH)
    )


def tiny_clap_text() -> transformers.PreTrainedModel:
    """ClapTextModelWithProjection."""
    return transformers.ClapTextModelWithProjection(transformers.models.clap.ClapTextConfig(**CLAP_TEXT))


def tiny_vocoder() -> transformers.PreTrainedModel:
    """SpeechT5HifiGan; its convolutions have weight norm."""
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )
    return transformers.SpeechT5HifiGan(config)


def tiny_unet_audio() -> diffusers.ModelMixin:
    """UNet without cross attention states; the text comes in with the time."""
    return tiny_unet_sd(
        cross_attention_dim=(8, 16),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=WIDTH,
        class_embeddings_concat=True,
    )


def audio_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of AudioLDM components."""
    defaults = {
        "unet": tiny_unet_audio,
        "vae": lambda: tiny_vae_kl(in_channels=1, out_channels=1),
        "text_encoder": tiny_clap,
        "tokenizer": build_roberta_tokenizer,
        "scheduler": sd_scheduler,
        "vocoder": tiny_vocoder,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add("audioldm", "AudioLDMPipeline", prompted(**CALL), TAGS, audio_pipeline, text_encoder=tiny_clap_text)
KNOWN_BROKEN["MusicLDMPipeline"] = (
    "takes the text features of CLAP for a tensor, which transformers 5 wraps in an output"
)


def tiny_gpt2() -> transformers.PreTrainedModel:
    """GPT2LMHeadModel."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=WIDTH, n_head=4, n_layer=LAYERS, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.config.max_new_tokens = 4
    return model


def audioldm2_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of AudioLDM 2 components; the language model generates the conditioning."""
    unet = diffusers.AudioLDM2UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=2,
        norm_num_groups=4,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=([None, WIDTH, WIDTH], [None, WIDTH, WIDTH]),
        attention_head_dim=4,
    )
    projection = diffusers.AudioLDM2ProjectionModel(
        text_encoder_dim=WIDTH, text_encoder_1_dim=WIDTH, langauge_model_dim=WIDTH
    )
    return audio_pipeline(
        pipeline_class,
        unet=unet,
        text_encoder_2=tiny_t5(),
        tokenizer_2=build_t5_tokenizer(),
        language_model=tiny_gpt2(),
        projection_model=projection,
        feature_extractor=transformers.ClapFeatureExtractor(),
    )


add(
    "audioldm2", "AudioLDM2Pipeline", prompted(**CALL, max_new_tokens=4), TAGS + " t5 gpt2 generate", audioldm2_pipeline
)


def stable_audio_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of Stable Audio components."""
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=2 * WIDTH,
        cross_attention_input_dim=WIDTH,
    )
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    projection = StableAudioProjectionModel(text_encoder_dim=WIDTH, conditioning_dim=WIDTH, min_value=0, max_value=32)
    scheduler = diffusers.DPMSolverMultistepScheduler(prediction_type="v_prediction", solver_order=2)
    return pipeline(
        pipeline_class,
        transformer=transformer,
        vae=vae,
        text_encoder=tiny_t5(),
        tokenizer=build_t5_tokenizer(16),
        projection_model=projection,
        scheduler=scheduler,
    )


add(
    "stable_audio",
    "StableAudioPipeline",
    prompted(negative_prompt=NEGATIVE),
    "audio dit t5 weight_norm",
    stable_audio_pipeline,
)
