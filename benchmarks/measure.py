"""Measuring on the simulated device: passes on the virtual clock, and the device bytes that weights take."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
# Ops that run no kernel: allocations (how many there are depends on the offload) and views.
_ALLOCATIONS = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_VIEWS = frozenset(
    "detach alias lift_fresh set_ resize_ record_stream is_pinned _pin_memory view _unsafe_view _reshape_alias reshape "
    "as_strided slice select split split_with_sizes chunk unbind t transpose permute expand squeeze unsqueeze "
    "view_as_real view_as_complex".split()
)


def add_repository_to_path() -> None:
    """Make the package and the tests' simulated device importable from a fresh clone."""
    for folder in (ROOT, ROOT / "tests"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def load_sim() -> Any:
    """The simulated device's module. Import it before diffusers, which looks for accelerators only once."""
    add_repository_to_path()
    import simdev

    return simdev


@dataclass(frozen=True)
class Passes:
    """What a method did in its steady passes, per pass, and the most it ever held."""

    seconds: float
    host_syncs: float
    copies: float
    copied_bytes: float
    copy_seconds: float  # time the copy engine was busy
    peak_bytes: int  # the device's peak over all passes: weights and activations
    output: torch.Tensor


@dataclass(frozen=True)
class Forward:
    """One pass as a call, and what runs before each pass when passes are separate uses of the model."""

    call: Callable[[], Any]
    one_pass: bool = False  # the device is idle before the pass and after it
    end_use: Callable[[], None] | None = None
    floor: int = 0  # device bytes in use that have nothing to do with this model (caches of models before it)


def run_passes(sim: Any, forward: Forward, timed: int = 2, warm: int = 4) -> Passes:
    """Run passes and average the last `timed` ones on the virtual clock.

    The host waits for the device after each of the `warm` passes before them. A real host is never far ahead, because
    a device queues only so many kernels (CUDA: 1024, a third of FLUX's pass); the virtual one would be ahead by whole
    passes, and a method that learns from the times of a pass could not have them in the next one. One more pass
    follows without a wait, to get into step.
    """
    sim.synchronize()
    sim.reset()
    output: Any = None
    marks: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for _ in range(warm):
            _one(sim, forward)
            sim.synchronize()
        _one(sim, forward)
        before = _state(sim)
        for _ in range(timed):
            *mark, output = _one(sim, forward)
            marks.append((mark[0], mark[1]))
        after = _state(sim)
    sim.synchronize()  # timing events can be read once they are complete
    seconds = sum(start.elapsed_time(end) for start, end in marks) / 1e3
    delta = {key: (after[key] - before[key]) / timed for key in after}
    peak = int(sim.mem(0)["active_peak"]) - forward.floor
    result = first_tensor(output).cpu()
    syncs = delta["host_syncs"] - (1 if forward.one_pass else 0)  # ours, in _one
    return Passes(seconds / timed, syncs, delta["h2d_copies"], delta["h2d_bytes"], delta["h2d_busy"], peak, result)


def _one(sim: Any, forward: Forward) -> tuple[Any, Any, Any]:
    """One pass: events on the compute stream before and after it, and its output."""
    if forward.one_pass:
        sim.synchronize()
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    output = forward.call()
    end.record()
    if forward.end_use is not None:
        forward.end_use()
    return start, end, output


def _state(sim: Any) -> dict[str, float]:
    counters = sim.counters()
    state = {key: float(counters.get(key, 0)) for key in ("host_syncs", "h2d_copies", "h2d_bytes")}
    return {**state, "h2d_busy": float(sim.times()["h2d_busy"])}


def first_tensor(value: Any) -> torch.Tensor:
    """The first tensor in a model's output."""
    if isinstance(value, torch.Tensor):
        return value
    return first_tensor(next(iter(value.values())) if isinstance(value, dict) else value[0])


class MemoryTrace(TorchDispatchMode):
    """The device's bytes in use at every op: after each kernel, and around everything between two kernels.

    `after[i]` is what is in use when kernel i has been issued, `before[i]` right before it; `between` lists
    (index of the next kernel, bytes) for the allocations that lie between kernels.
    """

    def __init__(self, sim: Any, floor: int) -> None:
        super().__init__()
        self.sim, self.floor = sim, floor
        self.before: list[int] = []
        self.after: list[int] = []
        self.between: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, used = func._schema.name.split("::")[1], self._used()
        result = func(*args, **(kwargs or {}))
        if name in _VIEWS or not _on_device(result):
            return result
        if name in _ALLOCATIONS or _from_host(args):
            if name != "copy_":  # which fills memory that is there already
                self.between.append((len(self.before), self._used()))
        else:
            self.before.append(used)
            self.after.append(self._used())
        return result

    def _used(self) -> int:
        return int(self.sim.mem(0)["active"]) - self.floor


def _on_device(result: Any) -> bool:
    items = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(item, torch.Tensor) and item.device.type == "sim" for item in items)


def _from_host(args: tuple[Any, ...]) -> bool:
    """Whether an op copies from the host to the device."""
    return any(isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.dim() > 0 for item in args)


def trace_memory(sim: Any, forward: Forward) -> MemoryTrace:
    """Trace one more pass. The mode slows the host, which the virtual clock doesn't see."""
    trace = MemoryTrace(sim, forward.floor)
    with torch.no_grad(), trace:
        _one(sim, forward)
    sim.synchronize()
    return trace


def weight_peak(method: MemoryTrace, resident: MemoryTrace, weights: int) -> int:
    """Most device bytes that weights took in the traced pass: in use, less the activations there at the same kernel.

    The resident run has all `weights` on the device all the time, so what it uses beyond them at kernel i is kernel i's
    activations. For an allocation between two kernels the activations are those right after the first one: what lasts
    until the second one is seen there exactly.
    """
    if len(method.before) != len(resident.before):
        raise RuntimeError(f"{len(method.before)} kernels in the pass, {len(resident.before)} when resident")
    mine, theirs = [*method.before, *method.after], [*resident.before, *resident.after]
    peaks = [used - (reference - weights) for used, reference in zip(mine, theirs, strict=True)]
    earlier = [resident.before[0], *resident.after]
    return max(peaks + [used - (earlier[index] - weights) for index, used in method.between])


def in_use(sim: Any) -> int:
    """Device bytes in use once all garbage is gone."""
    gc.collect()  # hooks make cycles
    sim.synchronize()
    return int(sim.mem(0)["active"])


@contextmanager
def chrome_trace(sim: Any, path: Path | None) -> Iterator[None]:
    """Record a timeline (for chrome://tracing or Perfetto) of what runs inside, when a path is given."""
    if path is None:
        yield
        return
    sim.configure(trace=1)
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        sim.synchronize()
        sim.chrome_trace(str(path))
        sim.configure(trace=0)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "diffusers", "transformers", "accelerate", "diffusers-layerwise"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def median(values: list[float]) -> float:
    """The median; NaN of nothing."""
    if not values:
        return math.nan
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
