"""What `mode="auto"` may do with a pipeline: profiles, declared for classes, and the ones that are shipped.

A profile is found along the classes that a pipeline's class derives from, by the classes themselves. Nothing is guessed
from how a class or a model is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .config import Mode, check_prefetch, format_bytes

#: The attribute by which a pipeline class declares its own profile.
ATTRIBUTE = "_layerwise_offload_profile"
#: Free memory from which on everything stays resident without further ado: GiB, for pipelines of images and of videos.
IMAGE_FREE_GIB, VIDEO_FREE_GIB = 45.0, 120.0
_MODES = (Mode.AUTO.value, Mode.MEMORY.value, Mode.SPEED.value)


@dataclasses.dataclass(frozen=True)
class OffloadProfile:
    """What `mode="auto"` may do with the pipelines of a class. Explicit arguments of the user's always win over it.

    Args:
        layerwise_modes (`tuple[str]`, defaults to `("auto", "memory")`): The modes that `"auto"` may take. Where
            `"auto"` isn't among them, `mode="auto"` without a memory budget behaves as the first one.
        prefetch (`int` or `str`, *optional*): Groups onloaded ahead, or bytes as a text (`"256MiB"`), where something
            streams and `config` doesn't say. None lets the plan choose.
        keep_resident_min_free_gib (`float`, *optional*): With at least so many GiB of free device memory everything
            that fits stays resident, whatever `layerwise_modes` says. None: no such amount.
        keep_resident_components (`tuple[str]`): Components or sets (`"vae"`) that stay resident where they fit, before
            groups of others do.
        reason (`str`): Why, for the report.
        source (`str`): Where the numbers come from, for the report.

    Example:
        >>> profile = OffloadProfile(prefetch=2, keep_resident_components=("vae",), reason="two stages of one size")
        >>> class MyPipeline(DiffusionPipeline):
        ...     _layerwise_offload_profile = profile
    """

    layerwise_modes: tuple[str, ...] = ("auto", "memory")
    prefetch: int | str | None = None
    keep_resident_min_free_gib: float | None = IMAGE_FREE_GIB
    keep_resident_components: tuple[str, ...] = ()
    reason: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layerwise_modes", "keep_resident_components"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(word, str) for word in value):
                raise TypeError(f"{name} must be a tuple of names, got {value!r}.")
            object.__setattr__(self, name, tuple(value))
        if not self.layerwise_modes or not set(self.layerwise_modes) <= set(_MODES):
            raise ValueError(f"layerwise_modes must name one or more of {list(_MODES)}, got {self.layerwise_modes!r}.")
        check_prefetch(self.prefetch, "OffloadProfile.prefetch")
        free = self.keep_resident_min_free_gib
        if free is not None and (isinstance(free, bool) or not isinstance(free, (int, float)) or not free >= 0):
            raise ValueError(f"keep_resident_min_free_gib must be 0 or more GiB, or None, got {free!r}.")

    @property
    def mode(self) -> Mode:
        """The mode that `"auto"` means."""
        return Mode.AUTO if Mode.AUTO.value in self.layerwise_modes else Mode(self.layerwise_modes[0])

    @property
    def enough_free(self) -> int | None:
        """`keep_resident_min_free_gib` in bytes."""
        free = self.keep_resident_min_free_gib
        return None if free is None else int(free * 2**30)

    def __str__(self) -> str:
        parts = ["modes " + ", ".join(self.layerwise_modes)]
        if self.prefetch is not None:
            parts.append(f"prefetch {self.prefetch}")
        if self.enough_free is not None:
            parts.append(f"all resident from {format_bytes(self.enough_free)} free")
        if self.keep_resident_components:
            parts.append("resident if they fit: " + ", ".join(self.keep_resident_components))
        return "; ".join(parts)


#: A profile, or what makes one of a pipeline: it gets the pipeline (when a folder is planned for, an [`Outline`]), and
#: returns None where it has nothing to say.
Declared = OffloadProfile | Callable[[Any], OffloadProfile | None]


@dataclasses.dataclass(frozen=True)
class Found:
    """A profile that applies, and who declared it; `is_shipped`: neither the user nor the pipeline's class did."""

    profile: OffloadProfile
    origin: str
    is_shipped: bool = False

    def __str__(self) -> str:
        why = f": {self.profile.reason}" if self.profile.reason else ""
        source = f" ({self.profile.source})" if self.profile.source else ""
        return f"{self.origin} [{self.profile}]{why}{source}"


class Outline:
    """A pipeline as its `model_index.json` declares it: `config` and components by name, without any module.

    Args:
        kind (`type`): The pipeline's class.
        index (`Mapping[str, Any]`): What the file holds.
    """

    def __init__(self, kind: type, index: Mapping[str, Any]) -> None:
        self.kind = kind
        self.config = {name: value for name, value in index.items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        """A component's declaration, None where the pipeline has none under this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        value = self.config.get(name)
        return None if isinstance(value, list) and value[:1] == [None] else value


_registered: dict[type, Declared] = {}


def register_profile(pipeline_class: type, profile: Declared | None) -> None:
    """Declares what `mode="auto"` may do with pipelines of a class and of those that derive from it.

    Takes effect when a pipeline is enabled next. It wins over what the class itself declares
    (`_layerwise_offload_profile`) and over what is shipped; a class that derives from it wins over it.

    Args:
        pipeline_class (`type`): The pipeline's class.
        profile (`OffloadProfile` or `Callable`): The profile, or a function that gets the pipeline and returns one, or
            None for no opinion. When a folder is planned for, it gets what `model_index.json` declares: `config`, and
            the components by name. None takes back what was registered.

    Raises:
        TypeError: `pipeline_class` is no class, or `profile` neither a profile nor a function.

    Example:
        >>> register_profile(FluxPipeline, OffloadProfile(keep_resident_components=("vae", "text_encoder")))
        >>> register_profile(WanPipeline, lambda pipe: OffloadProfile(prefetch=2) if pipe.transformer_2 else None)
    """
    if not isinstance(pipeline_class, type):
        raise TypeError(f"register_profile needs a pipeline class, got {pipeline_class!r}.")
    if profile is None:
        _registered.pop(pipeline_class, None)
        return
    if not isinstance(profile, OffloadProfile) and not callable(profile):
        raise TypeError(f"profile must be an OffloadProfile or a function that returns one, got {profile!r}.")
    _registered[pipeline_class] = profile


def find_profile(pipe: Any) -> Found:
    """The profile of a pipeline, or of an [`Outline`]: that of the nearest class which has something to say.

    Raises:
        TypeError: What a class declares is no profile.
    """
    kind = pipe.kind if isinstance(pipe, Outline) else type(pipe)
    for base in kind.__mro__:
        for declared, origin in _declared(base):
            profile = declared if isinstance(declared, OffloadProfile) else declared(pipe)
            if profile is None:
                continue
            if not isinstance(profile, OffloadProfile):
                raise TypeError(f"the layerwise offload profile {origin} must be an OffloadProfile, got {profile!r}.")
            return Found(profile, origin, profile is SHIPPED.get(base.__name__))
    return Found(IMAGE, "default", True)


def _declared(base: type) -> Iterator[tuple[Declared, str]]:
    """What there is for one class, the strongest first, and where it comes from."""
    if base in _registered:
        yield _registered[base], f"registered for {base.__name__}"
    if ATTRIBUTE in vars(base):
        own = getattr(base, ATTRIBUTE)
        if not isinstance(own, OffloadProfile) and not callable(own):
            raise TypeError(f"{base.__name__}.{ATTRIBUTE} must be an OffloadProfile, got {own!r}.")
        yield own, f"declared by {base.__name__}"
    if base.__name__ in SHIPPED and _is_diffusers_own(base):
        yield SHIPPED[base.__name__], f"shipped for {base.__name__}"


def _is_diffusers_own(base: type) -> bool:
    """Whether diffusers itself has this class, not only one of the same name. Imports nothing that isn't there."""
    import diffusers

    return base.__module__.startswith("diffusers.") and getattr(diffusers, base.__name__, None) is base


# ---------------------------------------------------------------------- what is shipped
SIZES = "sizes of the published checkpoints in bfloat16"
LINK = "a link of 22 GB/s and 187 TFLOP/s (0.6 of an A100's dense bfloat16 peak)"

IMAGE = OffloadProfile(
    reason="an image pipeline: a pass often takes less time than its weights take over the link, so residents pay",
    source=f"FLUX.1 at 1024x1024: 74 TFLOP are 0.4 s, its 23.8 GB are 1.1 s; {LINK}",
)
VIDEO = OffloadProfile(
    keep_resident_min_free_gib=VIDEO_FREE_GIB,
    reason="a video pipeline: activations of long videos need the memory that residents would take",
    source=f"LTX-Video 13B at 97x512x704 takes 212 TFLOP, 1.1 s, its 26 GB are 1.2 s; {LINK}",
)
FLUX = OffloadProfile(
    keep_resident_components=("vae",),
    reason="the VAE is small beside transformer and text encoders, and is on its way at the end of every call",
    source=f"{SIZES}: VAE 0.17 GB of 33.7 GB",
)
QWEN_IMAGE = OffloadProfile(
    keep_resident_min_free_gib=64.0,
    keep_resident_components=("vae",),
    reason="transformer and text encoder together exceed the usual amount for images; the VAE is small beside them",
    source=f"{SIZES}: transformer 40.9 GB, text encoder 16.6 GB, VAE 0.25 GB",
)
SDXL = OffloadProfile(
    keep_resident_min_free_gib=16.0,
    keep_resident_components=("vae",),
    reason="everything fits common cards; where it doesn't, the VAE is small beside the rest",
    source=f"{SIZES}: UNet 5.1 GB, text encoders 1.6 GB, VAE 0.17 GB; its VAE computes in float32 by turns",
)
HUNYUAN_VIDEO = OffloadProfile(
    prefetch=2,
    keep_resident_min_free_gib=VIDEO_FREE_GIB,
    reason="large layers of two kinds: two groups ahead even their times out; the rest goes to activations",
    source=f"{SIZES}: transformer 25.6 GB of 20 double and 40 single blocks, text encoders 15.3 GB",
)
LTX = OffloadProfile(
    keep_resident_min_free_gib=64.0,
    keep_resident_components=("vae",),
    reason="latents are compressed so far that passes are short for a video model, so residents pay",
    source=f"LTX-Video 13B at 97x512x704: 212 TFLOP a pass, 1.1 s, its 26 GB are 1.2 s; {LINK}",
)
WAN_TWO_STAGES = OffloadProfile(
    prefetch=2,
    keep_resident_min_free_gib=VIDEO_FREE_GIB,
    reason="two transformers take turns at a boundary and one is idle: residents pay, two groups ahead bridge the turn",
    source=f"{SIZES}: two transformers of 28.6 GB, text encoder 11.4 GB",
)
WAN_ONE_STAGE = OffloadProfile(
    layerwise_modes=("memory",),
    keep_resident_min_free_gib=VIDEO_FREE_GIB,
    reason="a pass computes many times longer than its weights take over the link: residents gain nothing",
    source=f"14B at 81x720x1280 has 75600 tokens: some 6800 TFLOP a pass, 36 s, its 28.6 GB are 1.3 s; {LINK}",
)


def wan(pipe: Any) -> OffloadProfile:
    """Wan's pipelines share their classes: two transformers with a boundary between them make one of two stages."""
    has_second = getattr(pipe, "transformer_2", None) is not None
    return WAN_TWO_STAGES if has_second and pipe.config.get("boundary_ratio") is not None else WAN_ONE_STAGE


def _table(rows: Mapping[str, Declared]) -> dict[str, Declared]:
    """By class: each row names several."""
    return {name: profile for names, profile in rows.items() for name in names.split()}


SHIPPED: dict[str, Declared] = _table(
    {
        "DiffusionPipeline ModularPipeline": IMAGE,
        "FluxPipeline FluxImg2ImgPipeline FluxInpaintPipeline FluxFillPipeline FluxKontextPipeline": FLUX,
        "FluxKontextInpaintPipeline FluxControlPipeline FluxControlImg2ImgPipeline FluxControlInpaintPipeline": FLUX,
        "FluxControlNetPipeline FluxControlNetImg2ImgPipeline FluxControlNetInpaintPipeline": FLUX,
        "QwenImagePipeline QwenImageImg2ImgPipeline QwenImageInpaintPipeline QwenImageEditPipeline": QWEN_IMAGE,
        "QwenImageEditPlusPipeline QwenImageEditInpaintPipeline QwenImageLayeredPipeline": QWEN_IMAGE,
        "QwenImageControlNetPipeline QwenImageControlNetInpaintPipeline": QWEN_IMAGE,
        "StableDiffusionXLPipeline StableDiffusionXLImg2ImgPipeline StableDiffusionXLInpaintPipeline": SDXL,
        "StableDiffusionXLControlNetPipeline StableDiffusionXLControlNetImg2ImgPipeline": SDXL,
        "StableDiffusionXLControlNetInpaintPipeline StableDiffusionXLControlNetUnionPipeline": SDXL,
        "StableDiffusionXLAdapterPipeline StableDiffusionXLInstructPix2PixPipeline": SDXL,
        "HunyuanVideoPipeline HunyuanVideoImageToVideoPipeline HunyuanVideoFramepackPipeline": HUNYUAN_VIDEO,
        "HunyuanSkyreelsImageToVideoPipeline": HUNYUAN_VIDEO,
        "LTXPipeline LTXImageToVideoPipeline LTXConditionPipeline LTXI2VLongMultiPromptPipeline": LTX,
        "WanPipeline WanImageToVideoPipeline WanVideoToVideoPipeline WanVACEPipeline WanAnimatePipeline": wan,
        "AllegroPipeline AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffPAGPipeline": VIDEO,
        "AnimateDiffSDXLPipeline AnimateDiffSparseControlNetPipeline AnimateDiffVideoToVideoPipeline": VIDEO,
        "AnimateDiffVideoToVideoControlNetPipeline ChronoEditPipeline CogVideoXFunControlPipeline": VIDEO,
        "CogVideoXImageToVideoPipeline CogVideoXPipeline CogVideoXVideoToVideoPipeline ConsisIDPipeline": VIDEO,
        "Cosmos2VideoToWorldPipeline Cosmos2_5_PredictBasePipeline Cosmos2_5_TransferPipeline": VIDEO,
        "CosmosTextToWorldPipeline CosmosVideoToWorldPipeline EasyAnimateControlPipeline": VIDEO,
        "EasyAnimateInpaintPipeline EasyAnimatePipeline HeliosPipeline HeliosPyramidPipeline": VIDEO,
        "HunyuanVideo15ImageToVideoPipeline HunyuanVideo15Pipeline I2VGenXLPipeline": VIDEO,
        "Kandinsky5I2VPipeline Kandinsky5T2VPipeline LTX2ConditionPipeline LTX2HDRPipeline": VIDEO,
        "LTX2ImageToVideoPipeline LTX2InContextPipeline LTX2Pipeline LattePipeline LucyEditPipeline": VIDEO,
        "MochiPipeline MotifVideoImage2VideoPipeline MotifVideoPipeline PIAPipeline": VIDEO,
        "SanaImageToVideoPipeline SanaVideoPipeline SkyReelsV2DiffusionForcingImageToVideoPipeline": VIDEO,
        "SkyReelsV2DiffusionForcingPipeline SkyReelsV2DiffusionForcingVideoToVideoPipeline": VIDEO,
        "SkyReelsV2ImageToVideoPipeline SkyReelsV2Pipeline StableVideoDiffusionPipeline": VIDEO,
        "TextToVideoSDPipeline TextToVideoZeroPipeline TextToVideoZeroSDXLPipeline VideoToVideoSDPipeline": VIDEO,
    }
)
"""Profiles by the names of diffusers' classes, so that none of them is imported before it is used."""
