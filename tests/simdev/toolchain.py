"""Building the simulated device's C++ part, once for each PyTorch and each state of its sources.

This file imports nothing from its package, so it can be loaded by path to ask `available()` where importing the
package would fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

MODULE_NAME = "simdev_native"
SOURCE_FOLDER = Path(__file__).resolve().parent / "csrc"
COMPILER_FLAGS = ["-O1"]


class Unavailable(ImportError):
    """The simulated device cannot be built here; `reason` says what is missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the simulated device is not available: {reason}")
        self.reason = reason


class BuildError(RuntimeError):
    """The compiler is there, but it does not accept the sources."""


def _compiler() -> str:
    """Returns the C++ compiler that a build would call."""
    return os.environ.get("CXX", "c++").split()[0]


def source_files() -> list[Path]:
    """Returns every C++ file, in a fixed order."""
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in {".cpp", ".h"})


def _fingerprint() -> str:
    """Returns a short digest of all that decides what the compiled library looks like."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.implementation.cache_tag, _compiler(), *COMPILER_FLAGS):
        digest.update(str(part).encode() + b"\0")
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    """Returns the folder that holds the compiled libraries of all versions."""
    chosen = os.environ.get("SIMDEV_BUILD")
    if chosen:
        return Path(chosen)
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root) / "simdev"
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root()) / "simdev"


def library_path() -> Path:
    """Returns where the compiled library for this PyTorch and these sources is, or will be."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    version = torch.__version__.replace("+", "-")
    return _cache_root() / f"torch-{version}-{_fingerprint()}" / f"{MODULE_NAME}{suffix}"


def _search_path() -> str:
    """Returns PATH with the interpreter's own folder added: ninja is there when no environment is activated."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """Sets PATH for the time of a build."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = _search_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _missing_tool() -> str:
    """Returns what keeps a build from working, or an empty string."""
    compiler = _compiler()
    if shutil.which(compiler, path=_search_path()) is None:
        return f"no C++ compiler ({compiler!r} is not on PATH)"
    if shutil.which("ninja", path=_search_path()) is None:
        return "no ninja (pip install ninja)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "no Python headers (Python.h)"
    return ""


def available() -> tuple[bool, str]:
    """Returns whether importing the package can work, and if not, why. Builds nothing."""
    try:
        if library_path().is_file():
            return True, ""
    except OSError as error:
        return False, f"no folder to build in ({error})"
    reason = _missing_tool()
    return not reason, reason


@contextlib.contextmanager
def _only_one_builder(folder: Path) -> Iterator[None]:
    """Lets one process at a time build into a folder. The lock goes with its process, so a killed build blocks nobody.

    Where there are no such locks, two processes may build side by side: each does so in a folder of its own and puts
    a whole library in place, so that is only a waste of time.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for abandoned in folder.glob("build-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        yield


def _compile(target: Path) -> ModuleType:
    """Compiles the sources, loads the result and moves it to `target`, where it appears whole or not at all."""
    from torch.utils.cpp_extension import load

    verbose = os.environ.get("SIMDEV_VERBOSE") == "1"
    sources = [str(path) for path in source_files() if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder, _build_environment():
        try:
            module = load(MODULE_NAME, sources, extra_cflags=COMPILER_FLAGS, build_directory=folder, verbose=verbose)
        except (RuntimeError, OSError) as error:
            raise BuildError(f"compiling the simulated device failed: {error}") from error
        assert module.__file__ is not None
        os.replace(module.__file__, target)
    return module


def _load_compiled(path: Path) -> ModuleType:
    """Loads a library that was compiled before."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def load_native() -> ModuleType:
    """Returns the compiled module, building it first when there is none for these sources yet."""
    target = library_path()
    if target.is_file():
        return _load_compiled(target)
    usable, reason = available()
    if not usable:
        raise Unavailable(reason)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"no folder to build in ({error})") from error
    with _only_one_builder(target.parent):
        if target.is_file():
            return _load_compiled(target)
        return _compile(target)
