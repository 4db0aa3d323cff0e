"""How fast a step can be at best, with so much memory for weights: two lower bounds.

The simple one: what isn't kept on the device has to cross the link in every pass, max(compute, (weights - memory) /
bandwidth). It is out of reach where layers are uneven, because weights are used in a fixed order. So take any run of
consecutive layers. When it begins, at most `memory` bytes are on the device, so before its last layer can start the
rest of its weights must be copied, (bytes of the run - memory) / bandwidth; and all computation outside the run comes
on top. The largest value over all runs is the order bound. It holds for every schedule, however clever.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from measure import Forward


@dataclass(frozen=True)
class Uses:
    """A pass of the resident model: for each use of a module with weights, its bytes and the seconds until the next.

    A module counts its bytes at its first use, and not at all when it owns weights next to submodules that do (which
    may be used later than it is entered); both can only lower the bound.
    """

    nbytes: torch.Tensor
    seconds: torch.Tensor


def trace_uses(sim: Any, module: nn.Module, forward: Forward) -> Uses:
    """Run one pass of the resident model with a timing event at each module that owns weights."""
    marks: list[tuple[nn.Module, Any]] = []

    def mark(part: nn.Module, _: Any) -> None:
        event = sim.Event(enable_timing=True)
        event.record()
        marks.append((part, event))

    hooks = [part.register_forward_pre_hook(mark) for part in module.modules() if _owned(part)]
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    with torch.no_grad():
        begin.record()
        forward.call()
        end.record()
    sim.synchronize()
    for hook in hooks:
        hook.remove()
    times = [begin.elapsed_time(event) / 1e3 for _, event in marks] + [begin.elapsed_time(end) / 1e3]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    seconds[-1] += times[0]  # what precedes the first use follows the last one when pass follows pass
    first = {part: index for index, (part, _) in reversed(list(enumerate(marks)))}
    nbytes = [_owned(part) if first[part] == index else 0 for index, (part, _) in enumerate(marks)]
    return Uses(torch.tensor(nbytes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64))


def _owned(part: nn.Module) -> int:
    own = sum(p.numel() * p.element_size() for p in part.parameters(recurse=False))
    return own if own == sum(p.numel() * p.element_size() for p in part.parameters()) else 0


def simple_bound(compute: float, weights: int, memory: int, bandwidth: float) -> float:
    """max(compute, (weights - memory) / bandwidth)."""
    return max(compute, (weights - min(memory, weights)) / bandwidth)


def order_bound(uses: Uses, memory: int, bandwidth: float, cyclic: bool) -> float:
    """The largest (bytes of a run - memory) / bandwidth + computation outside the run, over all runs.

    Args:
        uses: The pass.
        memory: Bytes of weights that can be on the device when a run begins.
        bandwidth: Bytes per second.
        cyclic: Pass follows pass, so that a run may go on into the next pass.
    """
    count, total = len(uses.nbytes), float(uses.seconds.sum())
    zero = torch.zeros(1, dtype=torch.float64)
    nbytes = torch.cat([zero, torch.cat([uses.nbytes, uses.nbytes]).cumsum(0)])
    seconds = torch.cat([zero, torch.cat([uses.seconds, uses.seconds]).cumsum(0)])
    best = total
    for start in range(count):
        last = start + count if cyclic else count
        copied = (nbytes[start + 1 : last + 1] - nbytes[start] - memory).clamp(min=0) / bandwidth
        # The run's last layer may compute after its copy, so its time counts as outside.
        outside = total - (seconds[start:last] - seconds[start])
        needed = torch.where(copied > 0, copied + outside, zero)
        best = max(best, float(needed.max()))
    return best
