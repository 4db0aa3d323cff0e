"""The package's own error, and how its messages are built."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch


class LayerwiseOffloadError(RuntimeError):
    """A conflict or a runtime problem of layerwise offload: what happened, to which component, and what to call next.

    Wrong arguments raise `ValueError` or `TypeError` instead, and memory that does not suffice raises
    `torch.OutOfMemoryError`.
    """


class NamedOutOfMemoryError(torch.OutOfMemoryError):
    """Says which memory ran out, whose, and what to call next. Passed on as it is by whoever catches it further out."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the valid name closest to `name`, or an empty string.

    Example:
        >>> nearest("tranformer", ["transformer", "vae"])
        " Did you mean 'transformer'?"
    """
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
