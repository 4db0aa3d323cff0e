"""Profiles: who declares them, which one applies, and what each of their fields changes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers import DiffusionPipeline, FluxPipeline, WanPipeline

import diffusers_layerwise
import factory
from diffusers_layerwise import OffloadProfile, plan_layerwise_offload, profiles, register_profile
from diffusers_layerwise.auto import Policy, decide
from diffusers_layerwise.config import LayerwiseOffloadConfig, Mode
from diffusers_layerwise.plan import Choice, ComponentSpec, UnitSpec
from diffusers_layerwise.profiles import IMAGE, SHIPPED, VIDEO, Found, Outline, find_profile
from diffusers_layerwise.search import Request

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(profiles, "_registered", dict(profiles._registered))


class Own(FluxPipeline):
    """A third party's pipeline that derives from one of diffusers'."""


class Declaring(FluxPipeline):
    """One that declares a profile."""

    _layerwise_offload_profile = OffloadProfile(prefetch=3, reason="as declared")


def bare(kind: type) -> Any:
    """An instance without components."""
    return object.__new__(kind)


# ---- which profile applies


def test_a_class_without_a_profile_has_that_of_the_nearest_class_it_derives_from() -> None:
    assert find_profile(bare(FluxPipeline)) == Found(profiles.FLUX, "shipped for FluxPipeline", True)
    assert find_profile(bare(Own)) == Found(profiles.FLUX, "shipped for FluxPipeline", True)
    assert find_profile(bare(DiffusionPipeline)).profile is IMAGE


def test_a_class_declares_its_own_profile_and_those_that_derive_from_it_have_it_too() -> None:
    class Below(Declaring):
        pass

    assert find_profile(bare(Below)) == Found(Declaring._layerwise_offload_profile, "declared by Declaring")


def test_what_is_registered_wins_over_what_is_declared_and_that_over_what_is_shipped() -> None:
    mine = OffloadProfile(prefetch=1)
    register_profile(Declaring, mine)
    assert find_profile(bare(Declaring)) == Found(mine, "registered for Declaring")
    register_profile(Declaring, None)
    assert find_profile(bare(Declaring)).origin == "declared by Declaring"
    register_profile(DiffusionPipeline, mine)
    assert find_profile(bare(FluxPipeline)).profile is profiles.FLUX, "the nearest class wins"


def test_a_class_of_the_same_name_is_not_the_one_that_a_profile_is_shipped_for() -> None:
    imposter = type("WanPipeline", (DiffusionPipeline,), {})
    assert find_profile(bare(imposter)).profile is IMAGE
    imposter.__module__ = "diffusers.pipelines.wan.pipeline_wan"
    assert find_profile(bare(imposter)).profile is IMAGE


def test_a_function_gets_the_pipeline_and_may_have_nothing_to_say() -> None:
    mine = OffloadProfile(prefetch=1)
    asked: list[Any] = []

    def only_own(pipe: Any) -> OffloadProfile | None:
        asked.append(pipe)
        return mine if type(pipe) is Own else None

    register_profile(FluxPipeline, only_own)
    own, stock = bare(Own), bare(FluxPipeline)
    assert find_profile(own).profile is mine
    assert find_profile(stock).profile is profiles.FLUX
    assert asked == [own, stock]


def test_versions_of_wan_are_told_apart_by_the_structure_that_is_declared() -> None:
    one, two = factory.CASES["wan"].build(), factory.CASES["wan_two_stage"].build()
    assert isinstance(one, WanPipeline)
    assert type(one) is type(two)
    assert find_profile(one).profile is profiles.WAN_ONE_STAGE
    assert find_profile(two).profile is profiles.WAN_TWO_STAGES
    stage = ["diffusers", "WanTransformer3DModel"]
    index = {"_class_name": "WanPipeline", "transformer": stage, "transformer_2": [None, None], "boundary_ratio": None}
    assert find_profile(Outline(WanPipeline, index)).profile is profiles.WAN_ONE_STAGE
    index |= {"transformer_2": stage, "boundary_ratio": 0.875}
    assert find_profile(Outline(WanPipeline, index)).profile is profiles.WAN_TWO_STAGES


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a pipeline class"):
        register_profile("FluxPipeline", IMAGE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="OffloadProfile or a function"):
        register_profile(FluxPipeline, {"prefetch": 2})  # type: ignore[arg-type]
    register_profile(FluxPipeline, lambda pipe: {"prefetch": 2})  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="registered for FluxPipeline"):
        find_profile(bare(FluxPipeline))
    wrong = type("Wrong", (DiffusionPipeline,), {"_layerwise_offload_profile": 3})
    with pytest.raises(TypeError, match=r"Wrong\._layerwise_offload_profile"):
        find_profile(bare(wrong))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"layerwise_modes": ()}, ValueError),
        ({"layerwise_modes": ("manual",)}, ValueError),
        ({"layerwise_modes": "auto"}, TypeError),
        ({"prefetch": -1}, ValueError),
        ({"prefetch": "2"}, ValueError),
        ({"keep_resident_min_free_gib": -1.0}, ValueError),
        ({"keep_resident_components": "vae"}, TypeError),
        ({"keep_resident_components": (1,)}, TypeError),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        OffloadProfile(**fields)


# ---- what is shipped


def test_shipped_profiles_are_for_classes_of_diffusers_and_say_why_and_whence() -> None:
    known = [name for name in SHIPPED if hasattr(diffusers, name)]
    assert len(known) > 80
    found = [find_profile(bare(getattr(diffusers, name))) for name in known if SHIPPED[name] is not profiles.wan]
    for each in [*(f.profile for f in found), profiles.WAN_ONE_STAGE, profiles.WAN_TWO_STAGES]:
        assert each.reason
        assert each.source
    origins = [each.origin for each in found]
    assert origins == [f"shipped for {name}" for name in known if SHIPPED[name] is not profiles.wan]


def test_the_amount_of_free_memory_is_larger_for_videos() -> None:
    assert (IMAGE.keep_resident_min_free_gib, VIDEO.keep_resident_min_free_gib) == (45.0, 120.0)
    assert find_profile(bare(diffusers.CogVideoXPipeline)).profile is VIDEO


def test_importing_loads_no_pipeline() -> None:
    """The table has names, so that diffusers' lazy modules stay lazy."""
    probe = (
        "import sys, diffusers_layerwise\n"
        "print([m for m in sys.modules if m.startswith('diffusers.pipelines.') and m.count('.') > 2 "
        "and 'pipeline_wan' in m or 'pipeline_flux' in m])"
    )
    root = Path(diffusers_layerwise.__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


# ---- what each field changes


def spec(name: str, layers: int, **fields: Any) -> ComponentSpec:
    """Equal layers of 64 MiB."""
    units = tuple(UnitSpec(f"{name}.{i}", str(i), 64 * MIB) for i in range(layers))
    return ComponentSpec(name, units, tuple(range(layers)), 0, layers * 64 * MIB, **fields)


SPECS = [spec("transformer", 40), spec("vae", 2), spec("text_encoder", 8)]
PLAIN = OffloadProfile(keep_resident_min_free_gib=None)


def decided(profile: OffloadProfile, total: int = GIB, free: int | None = None, **policy: Any) -> Any:
    """What auto decides; the smallest plan takes a fraction of the budget, and everything more than it."""
    return decide(SPECS, Request(Mode.AUTO, total, 0), Policy(Found(profile, "here"), free=free, **policy))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layerwise_modes": ({"layerwise_modes": ("memory",)}, {}),
    "prefetch": ({"prefetch": 2}, {}),
    "keep_resident_min_free_gib": (
        {"layerwise_modes": ("memory",), "keep_resident_min_free_gib": 4.0},
        {"free": 5 * GIB, "total": 5 * GIB},
    ),
    "keep_resident_components": ({"keep_resident_components": ("vae",)}, {}),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(OffloadProfile)])
def test_every_field_changes_a_decision_or_the_report(field: str) -> None:
    if field not in CHANGES:
        assert "because" in str(Found(dataclasses.replace(PLAIN, **{field: "because"}), "here"))
        return
    fields, around = CHANGES[field]
    without = OffloadProfile(**{"keep_resident_min_free_gib": None} | {k: v for k, v in fields.items() if k != field})
    profile = dataclasses.replace(without, **{field: fields[field]})
    assert decided(profile, **around) != decided(without, **around)


def test_auto_takes_the_first_mode_where_it_may_not_be_auto_itself_unless_there_is_a_budget() -> None:
    profile = OffloadProfile(layerwise_modes=("memory", "speed"), keep_resident_min_free_gib=None)
    assert decided(profile).mode is Mode.MEMORY
    assert "profile here" in decided(profile).notes[0]
    assert decided(profile, has_budget=True).mode is Mode.AUTO


def test_with_enough_free_memory_everything_that_fits_stays_resident() -> None:
    profile = OffloadProfile(layerwise_modes=("memory",), keep_resident_min_free_gib=4.0)
    assert decided(profile, 5 * GIB, 5 * GIB).mode is Mode.AUTO
    assert decided(profile, 5 * GIB, 3 * GIB).mode is Mode.MEMORY, "not enough is free"
    assert decided(profile, 2 * GIB, 5 * GIB).mode is Mode.MEMORY, "it doesn't fit"


def test_components_that_shall_stay_do_as_far_as_they_fit_and_the_user_did_not_say() -> None:
    profile = dataclasses.replace(PLAIN, keep_resident_components=("text_encoder", "vae"))
    assert decided(profile).resident == ("text_encoder", "vae")
    assert decided(profile, 500 * MIB).resident == ("vae",), "the text encoder leaves no room for a ring"
    assert decided(profile, has_components=True).resident == ()


def test_a_prefetch_that_does_not_fit_or_is_not_needed_is_no_error() -> None:
    profile = dataclasses.replace(PLAIN, prefetch=6)
    assert decided(profile, GIB).prefetch == 6
    assert decided(profile, 200 * MIB).prefetch is None
    assert decided(profile, 8 * GIB).prefetch is None, "nothing streams"


def test_other_modes_and_what_has_no_limit_are_left_alone() -> None:
    profile = dataclasses.replace(PLAIN, prefetch=2, keep_resident_components=("vae",))
    policy = Policy(Found(profile, "here"))
    for mode, total in [(Mode.MEMORY, GIB), (Mode.SPEED, GIB), (Mode.AUTO, None)]:
        assert str(decide(SPECS, Request(mode, total, 0), policy)) == f"auto: mode {mode.value}"


# ---- in plans and reports


def test_the_report_says_which_profile_applies_and_why() -> None:
    pipe = factory.CASES["flux"].build()
    report = pipe.enable_layerwise_offload(onload_device="cpu").report()
    assert report.profile is not None
    assert report.profile.startswith("shipped for FluxPipeline [")
    assert profiles.FLUX.reason in report.profile
    assert profiles.FLUX.source in report.profile
    assert f"profile: {report.profile}" in str(report).splitlines()
    assert report.to_dict()["profile"] == report.profile
    assert pipe.enable_layerwise_offload(mode="memory", onload_device="cpu").report().profile is None


def test_a_profile_is_in_the_plan_of_a_pipeline_that_declares_it() -> None:
    register_profile(FluxPipeline, OffloadProfile(keep_resident_components=("vae", "text_encoder"), reason="as said"))
    pipe = factory.CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(onload_device="cpu", memory_budget="1MiB")
    kept = [c.name for c in handle.plan.components if c.choice is Choice.RESIDENT]
    assert sorted(kept) == ["text_encoder", "vae"]
    asked = pipe.enable_layerwise_offload({"all": "layerwise"}, onload_device="cpu", memory_budget="1MiB")
    assert asked.plan.component("vae").choice is Choice.LAYERWISE


def test_a_shipped_profile_keeps_nothing_of_an_explicit_budget_from_the_denoiser() -> None:
    pipe = factory.CASES["flux"].build()
    assert profiles.FLUX.keep_resident_components == ("vae",)
    auto = pipe.enable_layerwise_offload(onload_device="cpu", memory_budget="1MiB").plan
    assert not [c.name for c in auto.components if c.choice is Choice.RESIDENT]
    speed = pipe.enable_layerwise_offload(onload_device="cpu", memory_budget="1MiB", mode="speed").plan
    assert [(c.name, c.groups) for c in auto.components] == [(c.name, c.groups) for c in speed.components]


def test_planning_without_a_device_goes_by_the_same_profile(tmp_path: Path) -> None:
    register_profile(FluxPipeline, OffloadProfile(layerwise_modes=("memory",), keep_resident_min_free_gib=None))
    pipe = factory.CASES["flux"].build()
    pipe.save_pretrained(tmp_path)
    call = factory.CASES["flux"].call_kwargs()
    for what in (pipe, tmp_path):
        plan = plan_layerwise_offload(what, hardware="T4", **call)
        assert plan.mode is Mode.MEMORY
        assert any(re.match(r"profile registered for FluxPipeline", note) for note in plan.notes)
    assert plan_layerwise_offload(pipe, hardware="T4", memory_budget="1GiB", **call).mode is Mode.AUTO
    assert plan_layerwise_offload(pipe, hardware="T4", mode="speed", **call).mode is Mode.SPEED


def test_a_note_on_enough_memory_leaves_out_what_was_asked_to_stream() -> None:
    def spec(name: str, *kept: bool | None, **config: Any) -> ComponentSpec:
        units = tuple(UnitSpec(str(i), str(i), 4, resident=one) for i, one in enumerate(kept))
        order = tuple(range(len(units)))
        return ComponentSpec(name, units, order, 0, 4 * len(units), config=LayerwiseOffloadConfig(**config))

    policy = Policy(Found(OffloadProfile(), "a test"), False, False, free=64 << 30)
    request = Request(Mode.AUTO, 60 << 30)

    def note(*specs: ComponentSpec) -> str:
        return decide(specs, request, policy).notes[0]

    whole, mapped = spec("vae", None, None), spec("unet", True, False)
    assert note(whole, spec("unet", None, None)) == "auto: everything resident: 64.00 GiB are free, at least 45.00 GiB"
    assert "everything resident but what the device map of unet streams: " in note(whole, mapped)
    assert "but what config['resident'] of dit streams: " in note(whole, spec("dit", None, None, resident=1))
