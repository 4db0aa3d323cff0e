"""Dtypes of a checkpoint's weights, read from the headers of its safetensors files; no weight is read."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

#: Names in the safetensors format (https://github.com/huggingface/safetensors#format).
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
#: The format's own limit of a header.
MOST_BYTES = 100_000_000


@contextlib.contextmanager
def header_of(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The entries of a safetensors file's header, and where its data begins, for a block that makes something of them.

    Raises:
        ValueError: This is no safetensors file, or the block finds that an entry isn't one.
    """
    with path.open("rb") as file:
        first = file.read(8)
        count = struct.unpack("<Q", first)[0] if len(first) == 8 else MOST_BYTES + 1
        text = file.read(count) if count <= MOST_BYTES else b""
    try:
        yield {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}, 8 + count
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} should begin with a safetensors header, but doesn't: {error!r}.") from error


def read_header(path: Path) -> dict[str, torch.dtype]:
    """The tensors of one safetensors file, name to dtype, but for types that torch has no name for.

    The data after the header may be missing.

    Raises:
        ValueError: This is no safetensors file.
    """
    with header_of(path) as (entries, _):
        return {name: DTYPES[entry["dtype"]] for name, entry in entries.items() if entry["dtype"] in DTYPES}


def has_unknown(path: Path) -> bool:
    """Whether a safetensors file has tensors of types that aren't in [`DTYPES`].

    Raises:
        ValueError: This is no safetensors file.
    """
    with header_of(path) as (entries, _):
        return any(entry["dtype"] not in DTYPES for entry in entries.values())


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of one component: what its index names, else the file without a variant in its name."""
    indices = sorted(folder.glob("*.safetensors.index*.json"), key=lambda p: (len(p.name), p.name))
    for index in indices:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        found = [folder / name for name in names if (folder / name).is_file()]
        if found:
            return found
    files = sorted(folder.glob("*.safetensors"), key=lambda p: (len(p.name), p.name))
    return files[:1]


def checkpoint_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtypes of a component's weights by name; empty where no file is there.

    Raises:
        ValueError: A file is no safetensors file.
    """
    found: dict[str, torch.dtype] = {}
    for path in checkpoint_files(folder):
        found |= read_header(path)
    return found


def dtype_of(name: str, dtypes: dict[str, torch.dtype]) -> torch.dtype | None:
    """A parameter's dtype in a checkpoint, whose names may have another prefix; the commonest one where none fits.

    Example:
        >>> dtype_of("model.norm.weight", {"norm.weight": torch.float32, "up.weight": torch.float16})
        torch.float32
    """
    rest = name
    while rest:
        if rest in dtypes:
            return dtypes[rest]
        rest = rest.partition(".")[2]
    longer = [other for other in dtypes if other.endswith("." + name)]
    if longer:
        return dtypes[min(longer, key=len)]
    common = Counter(d for d in dtypes.values() if d.is_floating_point).most_common(1)
    return common[0][0] if common else None
