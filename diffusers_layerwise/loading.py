"""Loading a pipeline so that its weights stay a map of files, whatever dtype it is to have."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from . import cache, weight_cache
from .config import parse_bytes
from .errors import LayerwiseOffloadError
from .files import read_layout
from .headers import has_unknown
from .skeleton import read_index

#: Bytes that converted weights may take on the disk.
CACHE_LIMIT = "128GiB"
VIEWS = "views"


def from_pretrained(
    pretrained: str | os.PathLike[str],
    *,
    torch_dtype: torch.dtype | None = None,
    pipeline_class: type[DiffusionPipeline] = DiffusionPipeline,
    cache_limit: int | str = CACHE_LIMIT,
    **options: Any,
) -> DiffusionPipeline:
    """Loads a pipeline with weights that stay a map of files, so that it may be larger than the host's memory.

    `DiffusionPipeline.from_pretrained` does so by itself where the files have the dtype that is asked for, and this is
    no more than that then. Where they have another one it makes a copy of each weight in memory; this makes one in
    the user's cache folder instead, once, and loads from there with the same values.

    Args:
        pretrained (`str` or `os.PathLike`): A folder, or a repository of the hub.
        torch_dtype (`torch.dtype`, *optional*): The dtype of the weights. Write `dtype=` where diffusers knows it (it
            deprecates `torch_dtype`): it gets the one that was given. None: that of the files.
        pipeline_class (`type`): Whose `from_pretrained` is called.
        cache_limit (`int` or `str`, defaults to `"128GiB"`): Bytes that converted weights may take on the disk; those
            that were used longest ago are removed first. `diffusers-layerwise cache` shows and clears them.
        **options: As for `DiffusionPipeline.from_pretrained`.

    Raises:
        TypeError: `torch_dtype` is something else.
        LayerwiseOffloadError: What has to be converted is more than `cache_limit`, or the disk is full.

    Example:
        >>> pipe = diffusers_layerwise.from_pretrained("a-folder-in-float32", dtype=torch.bfloat16)
        >>> pipe.enable_layerwise_offload(memory_budget="8GiB", config={"host_memory_budget": "16GiB"})
    """
    # diffusers' newer name for it; handed on under the name that it came with.
    word = "dtype" if "dtype" in options else "torch_dtype"
    torch_dtype = options.pop("dtype", torch_dtype)
    if torch_dtype is not None and not isinstance(torch_dtype, torch.dtype):
        raise TypeError(f"{word} must be a torch.dtype or None, got {torch_dtype!r}.")
    limit = parse_bytes(cache_limit, "cache_limit")
    if torch_dtype is None:
        return _load(pipeline_class, pretrained, options)
    folder = Path(pretrained)
    if not folder.is_dir():
        keys = ("variant", "revision", "cache_dir", "token", "local_files_only", "force_download", "proxies")
        folder = Path(pipeline_class.download(str(pretrained), **{k: options[k] for k in keys if k in options}))
    replaced = _converted(folder, torch_dtype, options, limit)
    if not replaced:
        return _load(pipeline_class, folder, {**options, word: torch_dtype})
    view = _view(folder, replaced)
    pipe = _load(pipeline_class, view, {**options, word: torch_dtype})
    pipe.register_to_config(_name_or_path=str(pretrained))
    return pipe


def _load(pipeline_class: type[DiffusionPipeline], place: Any, options: dict[str, Any]) -> DiffusionPipeline:
    found: DiffusionPipeline = pipeline_class.from_pretrained(place, **options)
    return found


def _converted(folder: Path, dtype: torch.dtype, options: dict[str, Any], limit: int) -> dict[str, dict[str, Path]]:
    """For each component whose files have another dtype: their names, and the converted files."""
    found: dict[str, dict[str, Path]] = {}
    for component, value in read_index(folder).items():
        if component.startswith("_") or component in options or not isinstance(value, (list, tuple)):
            continue
        files = _files(folder / component, options.get("variant"))
        kept = _kept(value)
        if not files or kept is None or _is_quantised(folder / component, options.get("quantization_config")):
            continue
        if any(has_unknown(path) for path in files):
            continue  # what can't be named can't be written either
        dtypes = {
            stored.dtype
            for path in files
            for name, stored in read_layout(path).items()
            if not any(part in name for part in kept)
        }
        if dtypes.intersection(weight_cache.FLOATS) - {dtype}:
            beside = [path for names in found.values() for path in names.values()]
            found[component] = weight_cache.converted(component, files, dtype, kept, limit, beside)
    return found


def _files(folder: Path, variant: str | None) -> list[Path]:
    """The safetensors files that a loader would take."""
    mark = rf"\.{re.escape(variant)}" if variant else ""
    shards = r"(-\d+-of-\d+)?"
    pattern = re.compile(rf"(diffusion_pytorch_)?model({mark}{shards}|{shards}{mark})\.safetensors")
    found = sorted(path for path in folder.glob("*.safetensors") if pattern.fullmatch(path.name))
    whole = [path for path in found if "-of-" not in path.name]
    return whole or found


def _is_quantised(folder: Path, asked: Any) -> bool:
    """Whether a component is quantised in its files, or will be while it is loaded.

    Then its loader makes of the dtype what it should: scales are no weights, and rounding twice gives another value.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "config.json").read_text()).get("quantization_config"):
            return True
    if asked is None:
        return False
    # A config that names nobody means everybody.
    named = getattr(asked, "quant_mapping", None) or getattr(asked, "components_to_quantize", None)
    return not named or folder.name in named


def _kept(value: Any) -> list[str] | None:
    """Parts of names of weights that a class may want in float32; None where the class can't be asked.

    They stay as they are, and the loader does what it does with them.
    """
    library, name = value[0], value[1]
    try:
        kind = getattr(importlib.import_module(library), name)
    except (ImportError, AttributeError, TypeError):
        return None
    lists = [getattr(kind, attribute, None) for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    return sorted({str(part) for each in lists for part in each or ()})


def _is_intact(place: Path, links: dict[str, Path]) -> bool:
    try:
        return all((place / name).readlink() == target.resolve() for name, target in links.items())
    except OSError:
        return False  # a file, or nothing


def _view(folder: Path, replaced: dict[str, dict[str, Path]]) -> Path:
    """A folder of links: the pipeline's own files, and the converted ones in place of theirs."""
    links = {entry.name: entry for entry in folder.iterdir() if entry.name not in replaced}
    for component, files in replaced.items():
        inner = {f"{component}/{entry.name}": entry for entry in (folder / component).iterdir()}
        links |= inner | {f"{component}/{name}": path for name, path in files.items()}
    for number in itertools.count():
        key = cache.digest({name: str(path.resolve()) for name, path in links.items()}, number)
        place = weight_cache.root() / VIEWS / key
        if not place.exists():
            break
        if _is_intact(place, links):
            return place
        # Somebody has saved to it, what only replaces the link. That is left to them, and another one is made.
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=place.parent))
        for name, target in links.items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).symlink_to(target.resolve())
        with contextlib.suppress(OSError):  # another process was faster, with the same links
            work.replace(place)
        return place
    except (OSError, NotImplementedError) as error:
        raise LayerwiseOffloadError(
            f"{place.parent} can't hold the links to converted weights: {error}. Set XDG_CACHE_HOME to a folder that "
            f"can, or load with the dtype of the files."
        ) from error
