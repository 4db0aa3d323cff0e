"""Sizes in bytes, modes, and the options of `LayerwiseOffloadConfig`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from diffusers_layerwise import LayerwiseOffloadConfig
from diffusers_layerwise.config import HostTier, Mode, Placement, Residency, format_bytes, parse_bytes, read_mode
from diffusers_layerwise.errors import nearest

FIELDS = [field.name for field in dataclasses.fields(LayerwiseOffloadConfig)]


# ---- sizes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        (8 << 30, 8 << 30),
        (1.5, 1),
        ("1", 1),
        ("7b", 7),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("8 GiB", 8 << 30),
        ("  8GiB  ", 8 << 30),
        ("500 MB", 500 * 10**6),
        ("3KB", 3000),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
        ("1.5g", 3 << 29),
        (".5g", 1 << 29),
        ("2k", 2048),
        ("2m", 2 << 20),
        ("2MiB", 2 << 20),
        ("1t", 1 << 40),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read_with_its_unit(text: int | float | str, count: int) -> None:
    assert parse_bytes(text, "memory_budget") == count
    assert type(parse_bytes(text, "memory_budget")) is int


@pytest.mark.parametrize("value", [0, -1, 0.0, -1.5, math.nan, math.inf, -math.inf, "0", "0GiB"])
def test_a_size_has_to_be_positive_and_finite(value: int | float | str) -> None:
    with pytest.raises(ValueError, match=r"^memory_budget must be more than 0 bytes, got "):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize("value", ["", "GiB", "8XB", "eight", "-3GiB", "8GiB8", "1,5g", "8 G i B", "8GiB/s"])
def test_a_text_that_is_no_size_is_refused_with_an_example(value: str) -> None:
    with pytest.raises(ValueError, match=r"memory_budget must be bytes as an int or a text such as '8GiB'"):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize("value", [None, True, False, [8], {}, b"8GiB", 8j])
def test_a_size_of_another_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"memory_budget must be bytes as an int or a text such as '8GiB'"):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize("value", [0.4, "0.4", "0.1b"])
def test_less_than_one_byte_is_no_size(value: float | str) -> None:
    with pytest.raises(ValueError, match="more than 0 bytes"):
        parse_bytes(value, "memory_budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 42, "4096.00 GiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1 << 10, 1 << 20, 7 << 30])
def test_what_is_written_can_be_read_again(count: int) -> None:
    assert parse_bytes(format_bytes(count), "size") == count


# ---- modes


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_is_read_by_name_in_any_case_or_as_a_member(mode: Mode) -> None:
    assert read_mode(mode) is mode
    assert read_mode(mode.value) is mode
    assert read_mode(f" {mode.value.upper()} ") is mode


@pytest.mark.parametrize(("text", "hint"), [("sped", "speed"), ("memroy", "memory"), ("manuel", "manual")])
def test_an_unknown_mode_is_refused_with_the_nearest_one(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"mode must be one of .*got '{text}'\. Did you mean '{hint}'\?"):
        read_mode(text)


@pytest.mark.parametrize("value", [None, 3, "", [], b"auto"])
def test_what_is_no_mode_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"mode must be one of \['auto', 'memory', 'speed', 'manual'\]"):
        read_mode(value)


# ---- options


def test_nothing_given_leaves_the_choice_to_the_plan() -> None:
    config = LayerwiseOffloadConfig.read(None)
    assert config == LayerwiseOffloadConfig()
    assert config.placement is Placement.STALL
    assert all(getattr(config, name) is None for name in FIELDS if name not in ("placement", "host_memory_budget"))


def test_texts_become_members_and_sizes_become_bytes() -> None:
    config = LayerwiseOffloadConfig(
        prefetch=2,
        resident=0.5,
        placement=" Spread",
        group_size="64MiB",
        residency="LASTING",
        host="pageable",
        activation_reserve="1GiB",
    )
    assert config.placement is Placement.SPREAD
    assert config.group_size == 64 << 20
    assert config.residency is Residency.LASTING
    assert config.host is HostTier.PAGEABLE
    assert config.activation_reserve == 1 << 30
    assert (config.prefetch, config.resident) == (2, 0.5)


@pytest.mark.parametrize(
    "given",
    [
        {"prefetch": 0},
        {"prefetch": "256MiB"},
        {"resident": 0},
        {"resident": 0.0},
        {"resident": 1.0},
        {"resident": 7},
        {"group_size": "layer"},
        {"group_size": 1},
        {"activation_reserve": 0},
        {"host_memory_budget": None},
        {"host_memory_budget": "auto"},
        {"prefetch": None, "resident": None, "group_size": None, "host": None},
    ],
    ids=str,
)
def test_limits_are_valid(given: dict[str, Any]) -> None:
    config = LayerwiseOffloadConfig.read(given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prefetch": -1}, ValueError, "config.prefetch must be 0 or more groups, got -1"),
        ({"prefetch": 1.5}, TypeError, "config.prefetch must be a whole number of groups, got 1.5"),
        ({"prefetch": True}, TypeError, "config.prefetch must be a whole number of groups, got True"),
        ({"prefetch": "2"}, ValueError, "config.prefetch as a text is a size and needs a unit ('256MiB'), got '2'"),
        ({"prefetch": "huge"}, ValueError, "config.prefetch (groups, or bytes as a text) must be bytes"),
        ({"prefetch": "0MiB"}, ValueError, "config.prefetch (groups, or bytes as a text) must be more than 0 bytes"),
        ({"prefetch": [2]}, TypeError, "config.prefetch must be a whole number of groups, got [2]"),
        ({"resident": -1}, ValueError, "config.resident must be 0 or more groups, got -1"),
        ({"resident": 1.5}, ValueError, "config.resident as a share must lie between 0.0 and 1.0, got 1.5"),
        ({"resident": -0.1}, ValueError, "config.resident as a share must lie between 0.0 and 1.0, got -0.1"),
        ({"resident": math.nan}, ValueError, "config.resident as a share must lie between 0.0 and 1.0, got nan"),
        ({"resident": "half"}, TypeError, "config.resident must be a whole number of groups, got 'half'"),
        ({"resident": False}, TypeError, "config.resident must be a whole number of groups, got False"),
        ({"placement": "best"}, ValueError, "config.placement must be one of ['stall', 'spread', 'prefix']"),
        ({"placement": "prefx"}, ValueError, "Did you mean 'prefix'?"),
        ({"placement": None}, ValueError, "config.placement must be one of ['stall', 'spread', 'prefix'], got None"),
        ({"residency": "lastin"}, ValueError, "config.residency must be one of ['use', 'lasting'], got 'lastin'"),
        (
            {"host": "disk"},
            ValueError,
            "config.host must be one of ['pinned', 'pageable', 'mapped', 'file', 'shared'], got 'disk'",
        ),
        ({"group_size": 0}, ValueError, "config.group_size (bytes or 'layer') must be more than 0 bytes"),
        ({"group_size": -5}, ValueError, "config.group_size (bytes or 'layer') must be more than 0 bytes"),
        ({"group_size": "huge"}, ValueError, "config.group_size (bytes or 'layer') must be bytes"),
        ({"group_size": True}, TypeError, "config.group_size (bytes or 'layer') must be bytes"),
        ({"activation_reserve": -1}, ValueError, "config.activation_reserve must be more than 0 bytes"),
        ({"activation_reserve": "x"}, ValueError, "config.activation_reserve must be bytes"),
        ({"activation_reserve": True}, TypeError, "config.activation_reserve must be bytes"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_field_name(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        LayerwiseOffloadConfig.read(given)
    assert type(caught.value) is error
    assert message in str(caught.value)
    with pytest.raises(error):
        LayerwiseOffloadConfig().merged(given)


@pytest.mark.parametrize("name", ["prefech", "Prefetch", "budget", "", 3, None])
def test_an_unknown_field_is_refused_with_all_the_fields(name: Any) -> None:
    with pytest.raises(ValueError, match=r"config has no field ") as caught:
        LayerwiseOffloadConfig.read({name: 1})
    assert repr(name) in str(caught.value)
    assert all(field in str(caught.value) for field in FIELDS)


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"config has no field 'prefech'\. Did you mean 'prefetch'\?"):
        LayerwiseOffloadConfig.read({"prefech": 1})


@pytest.mark.parametrize("value", [3, "prefetch", [("prefetch", 1)], {"prefetch"}, LayerwiseOffloadConfig])
def test_what_is_neither_a_config_nor_a_dict_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="config must be a LayerwiseOffloadConfig or a dict of its fields"):
        LayerwiseOffloadConfig.read(value)


def test_a_config_is_passed_on_and_cannot_change() -> None:
    config = LayerwiseOffloadConfig(prefetch=1)
    assert LayerwiseOffloadConfig.read(config) is config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch = 2


def test_options_of_one_component_replace_those_for_all_field_by_field() -> None:
    general = LayerwiseOffloadConfig(prefetch=1, placement="prefix", group_size="layer")
    own = general.merged({"prefetch": 3, "group_size": None})
    assert own == LayerwiseOffloadConfig(prefetch=3, placement="prefix")
    assert general == LayerwiseOffloadConfig(prefetch=1, placement="prefix", group_size="layer")
    assert general.merged({}) == general


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tranformer", " Did you mean 'transformer'?"),
        ("VAE", ""),
        ("xyz", ""),
        ("", ""),
        ("trans", " Did you mean 'transformer'?"),
    ],
)
def test_the_nearest_name_is_offered_only_when_it_is_near(name: str, expected: str) -> None:
    assert nearest(name, ["transformer", "vae"]) == expected
