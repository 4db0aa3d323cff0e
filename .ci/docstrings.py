"""Docstrings in Hugging Face's style, read as Google's: an extension of griffe, which the API reference is made with.

``name (`int`, *optional*): text`` becomes ``name: text``, since the signature has the type. Several names before one
text get a line each. ``Example:`` is a section of code. ``Returns:`` goes where it only repeats the signature's type.
``[`Name`]`` becomes code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: The head of an entry: its names, each with or without a type.
_ENTRY = re.compile(r"^( +)(`?\w+`?(?: \([^)]*`[^)]*\))?(?:, `?\w+`?(?: \([^)]*`[^)]*\))?)*): ")
_NAME = re.compile(r"`?(\w+)`?(?: \([^)]*\))?")


def as_google(text: str) -> str:
    """A docstring (without the indentation of its code) in Google's style."""
    text = re.sub(r"^Returns:\n +`[^`\n]+`(\n\n?|$)", "", text, flags=re.MULTILINE)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"^(Args|Attributes|Raises):\n((?: +\S.*(?:\n|$))+)", _section, text, flags=re.MULTILINE)
    return re.sub(r"\[(`[^`\]]+`)\](?![(\[])", r"\1", text)


def _section(match: re.Match[str]) -> str:
    """A section with an entry for each name. A line that isn't indented further than the first begins an entry."""
    lines = match[2].rstrip("\n").split("\n")
    depth = len(lines[0]) - len(lines[0].lstrip())
    entries: list[str] = []
    for line in lines:
        if entries and len(line) - len(line.lstrip()) > depth:
            entries[-1] += "\n" + line
        else:
            entries.append(line)
    end = "\n" if match[2].endswith("\n") else ""
    return "\n".join([f"{match[1]}:", *map(_entry, entries)]) + end


def _entry(text: str) -> str:
    """An entry, once for each of its names and without their types."""
    head = _ENTRY.match(text)
    if head is None:
        return text
    return "\n".join(f"{head[1]}{name}: {text[head.end() :]}" for name in _names(head[2]))


def _names(text: str) -> list[str]:
    return [match[1] for match in _NAME.finditer(text)]


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)
