"""The package's own error, and how its messages are built."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

import torch


class LayerwiseOffloadError(RuntimeError):
    """A conflict or a runtime problem of layerwise offload: what happened, to which component, and what to call next.

    Wrong arguments raise `ValueError` or `TypeError` instead, and memory that does not suffice raises
    `torch.OutOfMemoryError`.
    """


class WrongLayersError(LayerwiseOffloadError):
    """A name given to `register_layers` doesn't exist: a mistake in the caller's code, no reason to leave it out."""


_NAMED = "_layerwise_offload_named"


def named_out_of_memory(message: str) -> torch.OutOfMemoryError:
    """An out-of-memory that says all there is to say; whoever catches it further out passes it on as it is."""
    error = torch.OutOfMemoryError(message)
    setattr(error, _NAMED, True)
    return error


def is_named(error: BaseException) -> bool:
    """Whether an error is from [`named_out_of_memory`]."""
    return getattr(error, _NAMED, False)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the valid name closest to `name`, or an empty string where none is near.

    Example:
        >>> nearest("tranformer", ["transformer", "vae"])
        " Did you mean 'transformer'?"
    """
    valid = list(valid)
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if not matches and len(name) > 2:
        matches = [other for other in valid if other.startswith(name)]
    return f" Did you mean {matches[0]!r}?" if matches else ""


def how_to_end(is_bare: bool) -> str:
    """The call that takes layerwise offload off: a bare module's, or a pipeline's."""
    return "handle.remove()" if is_bare else "pipe.disable_layerwise_offload()"


def raised_in(error: BaseException, function: str) -> bool:
    """Whether an error came out of a function of this name, at any depth."""
    return any(frame.f_code.co_name == function for frame, _ in traceback.walk_tb(error.__traceback__))
