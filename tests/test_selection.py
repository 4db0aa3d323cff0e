"""Which components a selection means: names, groups, exclusions, options, and which of several wins."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import diffusers
import pytest

from diffusers_layerwise import LayerwiseOffloadConfig
from diffusers_layerwise.config import Mode
from diffusers_layerwise.plan import Choice
from diffusers_layerwise.selection import PRECEDENCE, in_group, role, select
from factory import CASES

NAMES = """
    text_encoder text_encoder_2 text_encoder_3 image_encoder transformer transformer_2 unet controlnet prior_prior
    decoder vae safety_checker
""".split()
GENERAL = LayerwiseOffloadConfig(prefetch=9)


def chosen(components: Any, mode: Mode = Mode.AUTO) -> list[str]:
    """The selected names, in the pipeline's order."""
    return list(select(components, NAMES, mode, GENERAL))


def options(components: Any, name: str) -> int | None:
    """The `prefetch` that a selection gives one component."""
    return select(components, NAMES, Mode.AUTO, GENERAL)[name][1].prefetch


# ---- names and groups


def test_nothing_named_means_every_component() -> None:
    found = select(None, NAMES, Mode.AUTO, GENERAL)
    assert list(found) == NAMES
    assert set(found.values()) == {(Choice.LAYERWISE, GENERAL, False)}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PRECEDENCE])
def test_a_name_means_that_component(name: str) -> None:
    assert chosen(name) == chosen([name]) == chosen((name,)) == chosen({name}) == [name]
    assert select(name, NAMES, Mode.AUTO, GENERAL)[name] == (Choice.LAYERWISE, GENERAL, True)


@pytest.mark.parametrize(
    ("group", "members"),
    [
        ("all", NAMES),
        ("default", ["text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "vae"]),
        ("dit", ["transformer", "transformer_2", "unet", "controlnet", "prior_prior", "decoder"]),
        ("text_encoder", ["text_encoder", "text_encoder_2", "text_encoder_3"]),
        ("image_encoder", ["image_encoder"]),
        ("vae", ["vae"]),
    ],
)
def test_a_group_means_its_members(group: str, members: list[str]) -> None:
    assert chosen(group) == members
    assert not any(exact for _, _, exact in select(group, NAMES, Mode.AUTO, GENERAL).values())


def test_the_groups_in_order_of_precedence() -> None:
    assert PRECEDENCE == ("dit", "text_encoder", "image_encoder", "vae", "default", "all")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("transformer_2", "dit"),
        ("prior_transformer", "dit"),
        ("prior_text_encoder", "text_encoder"),
        ("prior_image_encoder", "image_encoder"),
        ("text_encoder_3", "text_encoder"),
        ("mllm", "text_encoder"),
        ("vqgan", "vae"),
        ("movq", "vae"),
        ("safety_checker", None),
        ("adapter", None),
    ],
)
def test_a_components_role_follows_from_its_name(name: str, group: str | None) -> None:
    assert role(name) == group
    assert in_group(name, "all")
    assert in_group(name, "default") == (group in ("text_encoder", "image_encoder", "vae"))


def test_every_real_pipeline_has_its_denoiser_in_the_group_that_means_it() -> None:
    without = {}
    for case in CASES.values():
        pipeline_class = getattr(diffusers, case.pipeline_class)
        names, _ = pipeline_class._get_signature_keys(pipeline_class)
        if not any(role(name) == "dit" for name in names) and not {"prior", "upsampler"} & case.tags:
            without[case.name] = sorted(names)
    assert not without


@pytest.mark.parametrize(
    "words",
    [
        "=text_encoder",
        ["=text_encoder"],
        {"=text_encoder": "layerwise"},
        " =Text-Encoder",
        "= text_encoder",
    ],
)
def test_an_equals_sign_means_that_component_and_not_the_group(words: Any) -> None:
    assert chosen(words) == ["text_encoder"]


# ---- exclusion


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["all", "!vae"], ["vae"]),
        (["!vae", "all"], ["vae"]),
        ("all, !vae", ["vae"]),
        (["all", "! vae"], ["vae"]),
        (["all", "!VAE", "!unet"], ["vae", "unet"]),
        (["all", "!text_encoder"], ["text_encoder", "text_encoder_2", "text_encoder_3"]),
        (["all", "!=text_encoder"], ["text_encoder"]),
        (["all", "vae", "!vae"], ["vae"]),
        ({"all": "layerwise", "!vae": "layerwise"}, ["vae"]),
        (["!vae"], ["vae"]),
        ("!vae", ["vae"]),
        ("!vae, !unet", ["vae", "unet"]),
        ({"!text_encoder": "skip"}, ["text_encoder", "text_encoder_2", "text_encoder_3"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", list(Mode))
def test_an_exclusion_wins_wherever_it_stands_and_alone_means_all_the_others(
    words: Any, missing: list[str], mode: Mode
) -> None:
    assert chosen(words, mode) == [name for name in NAMES if name not in missing]


def test_an_unknown_exclusion_is_an_error_too() -> None:
    with pytest.raises(ValueError, match=r"No component 'vea'\. Did you mean 'vae'\?"):
        chosen(["all", "!vea"])


# ---- spelling


@pytest.mark.parametrize(
    "words",
    [
        "transformer_2,vae",
        "transformer_2, vae",
        " Transformer-2 ,VAE ",
        "transformer 2,vae,",
        ",,vae,,TRANSFORMER_2",
        ["Transformer-2", " vae "],
        ["transformer_2, vae"],
        ["vae", "transformer_2", "vae", "VAE", "Transformer-2"],
        ["vae", "", "transformer_2", " "],
        ("transformer_2", "vae"),
        frozenset({"transformer_2", "vae"}),
        {"Transformer-2": "layerwise", " VAE": "Layerwise "},
        MappingProxyType({"transformer_2": "layerwise", "vae": {}}),
    ],
    ids=str,
)
def test_case_blanks_dashes_commas_and_repeats_do_not_matter(words: Any) -> None:
    assert chosen(words) == ["transformer_2", "vae"]


# ---- errors


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("tranformer", "transformer"),
        ("text_encodr_2", "text_encoder_2"),
        ("vea", "vae"),
        ("defalt", "default"),
        ("=transfomer", "transformer"),
        ("contolnet", "controlnet"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_all_valid_ones(word: str, hint: str) -> None:
    with pytest.raises(ValueError, match=r"^No component ") as caught:
        chosen([word])
    message = str(caught.value)
    assert f"Did you mean {hint!r}?" in message
    assert all(name in message for name in [*NAMES, *PRECEDENCE])


def test_a_name_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match=r"No component 'xyzzy'\. The pipeline has"):
        chosen("xyzzy")


@pytest.mark.parametrize("words", [[3], ["vae", None], {3: "layerwise"}, [b"vae"], [["vae"]], {("vae",): "skip"}])
def test_a_name_that_is_no_string_is_a_type_error(words: Any) -> None:
    with pytest.raises(TypeError, match="components must name components by string, got "):
        chosen(words)


@pytest.mark.parametrize("words", [3, 1.5, True, object()])
def test_what_names_nothing_is_a_type_error(words: Any) -> None:
    with pytest.raises(TypeError, match=r"components must be a name, a list of names or a dict, got "):
        chosen(words)


@pytest.mark.parametrize("words", [None, ["image_encoder"], ["vae", "!vae"]])
def test_manual_mode_needs_something_selected(words: Any) -> None:
    with pytest.raises(ValueError, match="components="):
        select(words, ["unet", "vae"], Mode.MANUAL, GENERAL)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("words", [[], "", " , ", {}, ()], ids=str)
def test_an_empty_selection_is_refused_in_every_mode(words: Any, mode: Mode) -> None:
    with pytest.raises(
        ValueError, match=r"components=.* selects nothing; pass None for all, or some of \['text_encoder"
    ):
        chosen(words, mode)


def test_a_set_that_no_component_belongs_to_selects_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match="selects nothing"):
        select("image_encoder", ["unet", "vae"], Mode.AUTO, GENERAL)


# ---- choices and options


@pytest.mark.parametrize("choice", list(Choice))
def test_a_dict_gives_each_its_choice(choice: Choice) -> None:
    found = select({"unet": choice.value, "vae": choice.value.upper()}, NAMES, Mode.AUTO, GENERAL)
    assert found == {"unet": (choice, GENERAL, True), "vae": (choice, GENERAL, False)}


def test_a_dict_of_options_means_layerwise_with_them_on_top_of_the_general_ones() -> None:
    general = LayerwiseOffloadConfig(prefetch=1, placement="spread")
    found = select({"unet": {"resident": 0.4}}, NAMES, Mode.AUTO, general)
    assert found["unet"] == (
        Choice.LAYERWISE,
        LayerwiseOffloadConfig(prefetch=1, placement="spread", resident=0.4),
        True,
    )


@pytest.mark.parametrize("value", ["residnt", "", 3, None, True, ["layerwise"], 0.5])
def test_an_unknown_choice_is_refused_with_the_valid_ones(value: Any) -> None:
    with pytest.raises(ValueError, match=r"components\['vae'\] must be one of \['layerwise', 'resident', 'offload'"):
        chosen({"vae": value})


def test_an_unknown_choice_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'resident'\?"):
        chosen({"vae": "residnt"})


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"no field 'prefech'\. Did you mean 'prefetch'\?"):
        chosen({"vae": {"prefech": 1}})


# ---- precedence


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("stronger", "weaker", "name"),
    [
        ("transformer_2", "dit", "transformer_2"),
        ("text_encoder_2", "text_encoder", "text_encoder_2"),
        ("=text_encoder", "text_encoder", "text_encoder"),
        ("=vae", "vae", "vae"),
        ("transformer", "all", "transformer"),
        ("dit", "all", "unet"),
        ("text_encoder", "default", "text_encoder_3"),
        ("image_encoder", "default", "image_encoder"),
        ("vae", "default", "vae"),
        ("default", "all", "vae"),
    ],
)
def test_the_more_specific_selection_wins_in_either_order(stronger: str, weaker: str, name: str, turned: bool) -> None:
    pairs = [(stronger, {"prefetch": 1}), (weaker, {"prefetch": 2})]
    assert options(dict(reversed(pairs) if turned else pairs), name) == 1


def test_selections_are_not_mixed() -> None:
    """The winner's options count alone; what another selection says of the same component does not leak in."""
    found = select({"all": {"resident": 0.5}, "unet": {"prefetch": 1}}, NAMES, Mode.AUTO, LayerwiseOffloadConfig())
    assert found["unet"][1] == LayerwiseOffloadConfig(prefetch=1)
    assert found["vae"][1] == LayerwiseOffloadConfig(resident=0.5)


def test_a_choice_by_name_beats_options_by_group() -> None:
    found = select({"default": {"prefetch": 1}, "=vae": "resident"}, NAMES, Mode.AUTO, GENERAL)
    assert found["vae"] == (Choice.RESIDENT, GENERAL, True)
    assert found["text_encoder"][0] is Choice.LAYERWISE


# ---- components that are None


def test_a_component_that_is_empty_may_be_named_and_a_tokenizer_may_not() -> None:
    pipe = CASES["flux"].build()
    assert pipe.image_encoder is None
    handle = pipe.enable_layerwise_offload(["image_encoder", "transformer"], "memory", onload_device="cpu")
    assert handle.plan.component("transformer").choice is Choice.LAYERWISE
    handle.remove()
    for name in ("tokenizer", "scheduler", "feature_extractor"):
        with pytest.raises(ValueError, match=rf"^'{name}' holds no weights"):
            pipe.enable_layerwise_offload([name], onload_device="cpu")
