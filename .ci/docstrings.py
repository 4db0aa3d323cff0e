"""Docstrings in Hugging Face's style, read as Google's: an extension of griffe, which the API reference is made with.

``name (`int`, *optional*): text`` becomes ``name: text``, since the signature has the type. Several names before one
text get a line each. ``Example:`` is a section of code. ``Returns:`` goes where it only repeats the signature's type.
``[`Name`]`` becomes code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^( +)((?:`?\w+`?(?: \([^)]*`[^)]*\))?)(?:, `?\w+`?(?: \([^)]*`[^)]*\))?)*): (.*)$")
_NAME = re.compile(r"`?(\w+)`?(?: \([^)]*\))?")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$")


def as_google(text: str) -> str:
    """A docstring (without the indentation of its code) in Google's style."""
    lines, section, depth = [], "", 0
    for line in text.splitlines():
        head = _SECTION.match(line)
        if head:
            section, depth = head[1], 0
            lines.append({"Example": "Examples:"}.get(section, line))
            continue
        if section in ("Args", "Attributes", "Raises") and line.strip():
            depth = depth or len(line) - len(line.lstrip())
            entry = _ENTRY.match(line)
            if entry and len(entry[1]) == depth:
                lines += [f"{entry[1]}{name}: {entry[3]}" for name in _names(entry[2])]
                continue
        lines.append(line)
    text = re.sub(r"^Returns:\n +`[^`\n]+`\n?", "", "\n".join(lines), flags=re.MULTILINE)
    return re.sub(r"\[(`[^`\]]+`)\](?![(\[])", r"\1", text)


def _names(text: str) -> list[str]:
    return [match[1] for match in _NAME.finditer(text)]


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)
