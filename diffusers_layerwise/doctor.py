"""What a machine has to say before anything is offloaded on it: a report to read, and to paste into an issue."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform as system
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import hardware as devices
from . import hostmemory, platform, weight_cache
from .config import format_bytes
from .errors import LayerwiseOffloadError
from .files import Source
from .planning import plan_layerwise_offload

PACKAGES = ("diffusers", "accelerate", "transformers", "safetensors", "peft", "torchao", "bitsandbytes", "gguf")
QUANTO = "optimum-quanto"
#: Seconds that measuring a device may take.
SECONDS = 2.0
#: Below this, copies set the pace of nearly everything: a link of few lanes, or one shared by several devices.
SLOW_LINK = 8e9
#: ZeroGPU lends a device to forked workers only; the parent may not ask for one.
ZERO_GPU = "SPACES_ZERO_GPU"


@dataclasses.dataclass(frozen=True)
class Checkup:
    """What was found.

    Args:
        rows (`tuple[tuple[str, str], ...]`): What was looked at and what it said, in order.
        problems (`tuple[str, ...]`): What is in the way, each with what to do about it.
        plan (`str`, *optional*): What would be chosen for the folder, or why nothing can be said.
        folder (`str`, *optional*): Which folder that is.
        where (`str`): On which device the plan is.
    """

    rows: tuple[tuple[str, str], ...]
    problems: tuple[str, ...] = ()
    plan: str | None = None
    folder: str | None = None
    where: str = "on this machine"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"found": dict(self.rows), "problems": list(self.problems), "folder": self.folder, "plan": self.plan}

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{name:<{width}}  {value}" for name, value in self.rows]
        if self.plan is not None:
            lines += ["", f"{self.folder} {self.where}:", *(f"  {line}" for line in self.plan.splitlines())]
        lines += ["", *([f"- {problem}" for problem in self.problems] or ["nothing is in the way"])]
        return "\n".join(lines)


def examine(
    folder: str | Path | None = None, device: torch.device | str | None = None, seconds: float = SECONDS
) -> Checkup:
    """Looks at versions, device, link, memory and, for a pipeline's folder, at what would be chosen there.

    Args:
        folder (`str` or `Path`, *optional*): A pipeline's folder, with `model_index.json`.
        device (`torch.device`, *optional*): The accelerator by default, else the CPU.
        seconds (`float`): How long measuring the device may take; 0 leaves it out.

    Raises:
        ValueError: The device isn't there.

    Example:
        >>> print(examine("FLUX.1-dev"))
    """
    place = platform.default_device() if device is None else _indexed(device)
    problems: list[str] = []
    rows = [*_versions(), *_device(place, problems)]
    is_lent = os.environ.get(ZERO_GPU, "").lower() in ("1", "t", "true")  # as the package `spaces` reads it
    if is_lent:
        rows.append(("ZeroGPU", "a device is lent to each call's worker; nothing was measured"))
    measured = None if is_lent or seconds <= 0 else devices.measure(place, seconds)
    if measured is not None:
        rows += _speeds(measured, place, problems)
    if not is_lent:
        rows += _pinning(place, problems)
    rows += [*_host(problems), *_files(folder, problems)]
    known = measured if place.type != "cpu" else None
    plan = None if folder is None else _chosen(folder, known, problems)
    where = "on this machine" if place.type != "cpu" else "on an RTX 4090, as there is no accelerator here"
    return Checkup(tuple(rows), tuple(problems), plan, None if folder is None else str(folder), where)


def _indexed(device: torch.device | str) -> torch.device:
    try:
        found = platform.indexed(torch.device(device))
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {str(device)!r} can't be used: {str(error).splitlines()[0]}") from error
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, str]]:
    yield "diffusers-layerwise", _version("diffusers-layerwise") or "not installed, used from its folder"
    yield "Python", f"{system.python_version()} on {system.platform()}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    yield "torch", f"{torch.__version__}{f' ({build})' if build else ''}"
    held = [(name, _version(name)) for name in (*PACKAGES, QUANTO)]
    yield "packages", ", ".join(f"{name} {version}" for name, version in held if version)


def _device(device: torch.device, problems: list[str]) -> Iterator[tuple[str, str]]:
    free, total = platform.free_memory(device), platform.total_memory(device)
    memory = f", {format_bytes(free)} of {format_bytes(total)} free" if free is not None and total is not None else ""
    yield "device", f"{platform.device_name(device)} ({device}){memory}"
    default = platform.streaming_default(device)
    yield "by default", str(default)
    if device.type == "cpu":
        has_build = torch.version.cuda or torch.version.hip
        why = "its driver isn't found: see that `nvidia-smi` works" if has_build else "this build of torch is for CPUs"
        problems.append(
            f"No accelerator: {why}. If the machine has one, install torch for it (pytorch.org/get-started); on a CPU "
            f"only checkpoints larger than memory gain from offloading."
        )
    elif not default.is_on:
        problems.append(
            f"mode='auto' doesn't stream on {device}: {default.reason}. Pass memory_budget to have it do so."
        )


def _speeds(measured: devices.Hardware, device: torch.device, problems: list[str]) -> Iterator[tuple[str, str]]:
    rates = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in measured.matmul.items())
    yield "matrix products", f"{rates} TFLOP/s"
    if device.type == "cpu":
        return
    yield "link", f"{measured.pinned / 1e9:.1f} GB/s from page-locked memory, {measured.pageable / 1e9:.1f} from other"
    if measured.pinned < SLOW_LINK:
        problems.append(
            f"The link is slow ({measured.pinned / 1e9:.1f} GB/s): look whether the card sits in a slot of 16 lanes "
            f"(`nvidia-smi -q | grep -A9 'PCI'`), and give as large a memory_budget as you can."
        )


def _pinning(device: torch.device, problems: list[str]) -> Iterator[tuple[str, str]]:
    if device.type == "cpu":
        return
    reason = platform.try_pinning(device)
    yield "page-locking", f"{'works' if reason is None else f'fails: {reason}'} (ulimit -l: {_lockable()})"
    if reason is not None:
        problems.append(
            "Memory can't be page-locked, so copies are slower: raise `ulimit -l`, or the container's limit."
        )


def _lockable() -> str:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return "no limit"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "no limit" if limit == resource.RLIM_INFINITY else format_bytes(limit)


def _host(problems: list[str]) -> Iterator[tuple[str, str]]:
    available, limit, processes = (
        hostmemory.available_memory(),
        hostmemory.memory_limit(),
        hostmemory.local_processes(),
    )
    budget = hostmemory.automatic_budget(available, processes)
    total = platform.host_memory()
    yield (
        "host memory",
        f"{format_bytes(total)}, {'unknown' if available is None else format_bytes(available)} available",
    )
    yield "control group", "no limit" if limit is None else f"limit {format_bytes(limit)}"
    if budget is not None:
        shared = f", a {processes}th of what there is" if processes > 1 else ""
        yield "for weights", f"{format_bytes(budget)} (host_memory_budget='auto'{shared})"
    if limit is not None and total and limit < total // 2:
        problems.append(
            f"The control group allows {format_bytes(limit)} of the machine's {format_bytes(total)}. Weights beyond it "
            f"are read from their files in each pass; raise the container's memory limit to avoid that."
        )


def _files(folder: str | Path | None, problems: list[str]) -> Iterator[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU", f"{cores} cores, {torch.get_num_threads()} threads of torch"
    yield "direct reads", _direct_reads(folder, problems)
    cached = sum(entry.nbytes for entry in weight_cache.entries())
    yield "weight cache", f"{format_bytes(cached)} in {weight_cache.root()}"
    if not _is_writable(weight_cache.root()):
        problems.append(
            f"{weight_cache.root()} can't be written to, so nothing converted or measured is kept: set XDG_CACHE_HOME."
        )


def _direct_reads(folder: str | Path | None, problems: list[str]) -> str:
    """Whether files there can be read past the page cache: one of the folder's, or one made for it."""
    # A component's files lie one level down: all that is below some folder could be a whole disk.
    found = (path for pattern in ("*", "*/*") for path in Path(folder or ".").glob(f"{pattern}.safetensors"))
    path = next(found, None) if folder is not None else None
    try:
        with contextlib.ExitStack() as stack:
            place = path or Path(stack.enter_context(tempfile.NamedTemporaryFile()).name)
            is_direct = Source(str(place)).direct is not None
    except OSError as error:
        # A link of the hub's cache to a download that never ended, a file of somebody else, or no temporary folder.
        if path is None:
            mend = "point TMPDIR at a folder that can be written to"
        else:
            mend = "see that it may be read, or download it again"
        problems.append(f"{path or 'A temporary file'} can't be read: {error.strerror or error}. To mend it, {mend}.")
        return f"unknown: {error.strerror or error}"
    return f"{'work' if is_direct else 'not on this file system: through the page cache'} ({place.parent.resolve()})"


def _is_writable(path: Path) -> bool:
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


def _chosen(folder: str | Path, measured: devices.Hardware | None, problems: list[str]) -> str:
    """What `mode="auto"` would do with a folder's pipeline here."""
    try:
        return str(plan_layerwise_offload(folder, hardware=measured))
    except (LayerwiseOffloadError, torch.OutOfMemoryError, ValueError, TypeError, OSError) as error:
        problems.append(f"{folder} can't be planned: {error}")
        return "no plan, see below"
