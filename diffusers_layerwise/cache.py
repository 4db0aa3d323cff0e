"""Small JSON files that are kept between runs, in the user's cache folder; written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = "diffusers_layerwise"


def cache_folder() -> Path:
    """The package's cache folder: `$XDG_CACHE_HOME` where set, else the platform's. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / FOLDER
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / FOLDER
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / FOLDER / "Cache"
    return Path.home() / ".cache" / FOLDER


def digest(*parts: Any) -> str:
    """A key for values: the hash of their JSON form, or of their text where they have none."""
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(name: str) -> Any:
    """A file's content, or None when it isn't there or can't be read."""
    try:
        return json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        return None


def write(name: str, value: Any) -> Path | None:
    """Writes a file in one step. A folder that can't be written to is no error: then nothing is kept."""
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return None
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return None
    return path
