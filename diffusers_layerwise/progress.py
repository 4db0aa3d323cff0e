"""Progress bars for long work of the host, in diffusers' way: its bars, its switches, the pipeline's own options."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from diffusers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled  # type: ignore[attr-defined]

from .ranks import is_initialized

#: From so many bytes on work is shown at once; less than the second number is never shown.
LONG_BYTES, SHORT_BYTES = 1 << 30, 16 << 20
#: Seconds after which anything between them is shown.
PATIENCE = 1.0
#: What the user's options for the pipeline's bar can't say of ours, which count something else.
OWN = ("iterable", "total", "desc", "initial", "unit", "unit_scale", "unit_divisor", "delay", "bar_format", "postfix")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Whose work it is: `options` are what `set_progress_bar_config` was given, `is_call` tells a pipeline's call."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_call: bool = False


_setting: contextvars.ContextVar[Setting] = contextvars.ContextVar("setting", default=Setting())  # noqa: B039


def delay_of(count: int) -> float | None:
    """Seconds after which work on so many bytes is shown; None: never.

    Example:
        >>> delay_of(20 << 30), delay_of(200 << 20), delay_of(1 << 20)
        (0.0, 1.0, None)
    """
    if count < SHORT_BYTES:
        return None
    return 0.0 if count >= LONG_BYTES else PATIENCE


def options_for(what: str, count: int, setting: Setting, can_nest: bool) -> dict[str, Any] | None:
    """How a bar for some work is made; None where there is none.

    In a pipeline's call the bar stands below that of its steps and goes away with the work. Where lines can't be taken
    back (a log file), it would tear that one apart, and there is none.

    Args:
        what (`str`): The work.
        count (`int`): Its bytes.
        setting (`Setting`): Whose work it is.
        can_nest (`bool`): Whether bars are drawn where they can stand below each other.

    Example:
        >>> options_for("packing", 2 << 30, Setting({"leave": True}, is_call=True), can_nest=True)["leave"]
        False
    """
    delay = delay_of(count)
    if delay is None or (setting.is_call and not can_nest):
        return None
    options = {name: value for name, value in setting.options.items() if name not in OWN}
    if setting.is_call:
        options |= {"leave": False, "position": None}
    return {
        **options,
        "desc": what,
        "total": count,
        "unit": "B",
        "unit_scale": True,
        "unit_divisor": 1024,
        "delay": delay,
    }


@contextlib.contextmanager
def using(pipe: Any, is_call: bool) -> Iterator[None]:
    """A time in which long work is that of a pipeline, whose options for its own bars count."""
    options = getattr(pipe, "_progress_bar_config", None)
    token = _setting.set(Setting(options if isinstance(options, dict) else {}, is_call))
    try:
        yield
    finally:
        _setting.reset(token)


@contextlib.contextmanager
def bar(what: str, count: int) -> Iterator[Callable[[int], object]]:
    """Shows work on so many bytes, if it takes long. Gives what is to be called with the bytes that are done.

    Args:
        what (`str`): The work, such as `"transformer: packing"`.
        count (`int`): All bytes of it.

    Example:
        >>> with bar("packing", 2 << 30) as advance:
        ...     advance(1 << 30)
    """
    setting, options = _setting.get(), None
    file = setting.options.get("file") or sys.stderr
    # A program without a console has no stderr. The work is what counts: it is done without a bar then.
    can_write = file is not None and not getattr(file, "closed", False)
    if delay_of(count) is not None and can_write and _is_on():
        options = options_for(what, count, setting, _can_nest(file))
    if options is None:
        yield lambda _: None
        return
    with logging.tqdm(**options) as shown:
        yield shown.update


def _is_on() -> bool:
    """Bars are shown by one process of several, unless diffusers or the hub were told to show none."""
    if are_progress_bars_disabled() or not logging.is_progress_bar_enabled():
        return False
    return not (is_initialized() and torch.distributed.get_rank() != 0)


def _can_nest(file: Any) -> bool:
    """A terminal, or a notebook, where each bar is a widget."""
    if any("notebook" in kind.__module__ for kind in logging.tqdm_lib.tqdm.__mro__):
        return True
    return bool(getattr(file, "isatty", lambda: False)())
