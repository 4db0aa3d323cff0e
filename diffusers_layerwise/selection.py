"""Which components a user means: names, sets of names, exclusions, and options for each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .config import LayerwiseOffloadConfig, Mode, meant_for
from .errors import nearest
from .plan import Choice

Components = str | Sequence[str] | Mapping[str, Any] | None

#: Groups from the most to the least specific: where selections disagree, the earlier one wins (an exact name first).
PRECEDENCE = ("dit", "text_encoder", "image_encoder", "vae", "default", "all")

SETS = list(PRECEDENCE)

_ROLES = {
    "dit": re.compile(r"(.*_)?(transformer|unet|prior|decoder|controlnet|denoiser)(_.*)?"),
    "text_encoder": re.compile(r"(.*_)?(text_encoder|text_model|language_model|mllm)(_.*)?"),
    "image_encoder": re.compile(r"(.*_)?(image_encoder|vision_encoder)(_.*)?"),
    "vae": re.compile(r"(.*_)?(vae|vqvae|movq|vqgan)(_.*)?"),
}


def role(name: str) -> str | None:
    """The group that a component's name belongs to besides `default` and `all`, or None."""
    for group in ("text_encoder", "image_encoder", "vae", "dit"):
        if _ROLES[group].fullmatch(name):
            return group
    return None


def is_denoiser(name: str) -> bool:
    """Whether a component's name is that of one which every step of a call uses; also of a part ("controlnet of P")."""
    return role(name.partition(" of ")[0]) == "dit"


def in_group(name: str, group: str) -> bool:
    """Whether a component belongs to a group. `default` is text encoders, image encoders and VAEs."""
    if group == "all":
        return True
    return role(name) in ("text_encoder", "image_encoder", "vae") if group == "default" else role(name) == group


def normalise(word: str) -> str:
    """Lower case, `-` and blanks as `_`."""
    return re.sub(r"[\s\-]+", "_", word.strip().lower())


def select(
    components: Components,
    valid: Iterable[str],
    mode: Mode,
    config: LayerwiseOffloadConfig,
    weightless: Iterable[str] = (),
) -> dict[str, tuple[Choice, LayerwiseOffloadConfig, bool]]:
    """Resolves a selection.

    Args:
        components (`str`, `list`, `dict` or None): Names, sets, `"!name"` to exclude, `"=name"` for that one only;
            as a dict, each with a choice (`"layerwise"`, `"resident"`, `"offload"`, `"skip"`) or a dict of options.
        valid (`Iterable[str]`): The pipeline's component names, in its order.
        mode (`Mode`): `manual` needs names.
        config (`LayerwiseOffloadConfig`): Options for all.
        weightless (`Iterable[str]`): The pipeline's other components, which a message tells apart from unknown ones.

    Returns:
        For each selected name: its choice, its options, and whether it was named exactly rather than by a group.

    Raises:
        TypeError: A selector is no string.
        ValueError: An unknown name or choice, or nothing selected in `manual` mode.
    """
    names = list(valid)
    if components is None:
        if mode is Mode.MANUAL:
            raise ValueError(f"mode='manual' needs components=[...]: names among {names} or sets among {SETS}.")
        components = ["all"]
    items = _items(components)
    if not items:
        raise ValueError(f"components={components!r} selects nothing; pass None for all, or some of {names}.")
    if all(word.startswith("!") for word, _ in items):
        items = [("all", "layerwise"), *items]
    chosen: dict[str, tuple[int, Choice, LayerwiseOffloadConfig, bool]] = {}
    excluded: set[str] = set()
    for word, value in items:
        matches, rank = _matches(word, names, weightless)
        if word.startswith("!"):
            excluded.update(matches)
            continue
        choice, options = _value(word, value, config)
        for name in matches:
            if name not in chosen or rank <= chosen[name][0]:
                chosen[name] = (rank, choice, options, rank == -1)
    found = {n: chosen[n][1:] for n in names if n in chosen and n not in excluded}
    if not found:
        raise ValueError(f"components={components!r} selects nothing; the pipeline has {names}.")
    return found


def _items(components: Any) -> list[tuple[str, Any]]:
    if isinstance(components, str):
        components = components.split(",")
    if isinstance(components, Mapping):
        pairs = list(components.items())
    elif isinstance(components, (Sequence, set, frozenset)):
        pairs = [(part, "layerwise") for word in components for part in _split(word)]
    else:
        hint = meant_for(components, but="components")
        raise TypeError(f"components must be a name, a list of names or a dict, got {_short(components)}.{hint}")
    for word, _ in pairs:
        if not isinstance(word, str):
            raise TypeError(f"components must name components by string, got {_short(word)}.")
    if isinstance(components, Mapping):
        return [(normalise(word), value) for word, value in pairs]
    return [(normalise(word), value) for word, value in pairs if word.strip()]


def _short(value: Any) -> str:
    """A value and its type for a message; the type alone where the value would fill the screen."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 60 else f"a {kind}; write names, such as 'transformer'"


def _split(word: Any) -> list[Any]:
    return word.split(",") if isinstance(word, str) else [word]


def _matches(word: str, names: list[str], weightless: Iterable[str]) -> tuple[list[str], int]:
    """The names that a word means, and its rank: -1 for an exact name, else the group's place in `PRECEDENCE`."""
    bare = word.lstrip("!").strip("_")
    if bare.startswith("="):
        return [_exact(bare[1:].strip("_"), names, weightless)], -1
    if bare in PRECEDENCE:
        return [name for name in names if in_group(name, bare)], PRECEDENCE.index(bare)
    return [_exact(bare, names, weightless)], -1


def _exact(word: str, names: list[str], weightless: Iterable[str]) -> str:
    by_form = {normalise(name): name for name in names}
    if word in by_form:
        return by_form[word]
    there = f"The pipeline has {names}; sets are {SETS}."
    if word in map(normalise, weightless):
        raise ValueError(f"{word!r} holds no weights, so there is nothing to stream. Leave it out. {there}")
    raise ValueError(f"No component {word!r}.{_hint(word, [*by_form, *PRECEDENCE])} {there}")


def _hint(word: str, valid: list[str]) -> str:
    """The nearest name, or the argument that the word is meant for."""
    if word in (field.name for field in dataclasses.fields(LayerwiseOffloadConfig)):
        return f" Did you mean config={{{word!r}: ...}}?"
    return nearest(word, valid) or meant_for(word.replace("_", " "), but="components")


def _value(word: str, value: Any, config: LayerwiseOffloadConfig) -> tuple[Choice, LayerwiseOffloadConfig]:
    if isinstance(value, Mapping):
        return Choice.LAYERWISE, config.merged(dict(value))
    valid = [choice.value for choice in Choice]
    if isinstance(value, str) and value.strip().lower() in valid:
        return Choice(value.strip().lower()), config
    hint = nearest(str(value), valid)
    raise ValueError(f"components[{word!r}] must be one of {valid} or a dict of options, got {value!r}.{hint}")
