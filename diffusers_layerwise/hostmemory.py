"""How much host memory weights may take, and in which tier each unit's host copy lies for it. Pure, but for two files
that the system keeps about itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .config import HostTier, format_bytes

#: Left to everybody else when the budget is read from the system: a tenth, at most 4 GiB.
RESERVE_SHARE = 10
RESERVE_MOST = 4 << 30
#: How launchers tell a process how many of its kind run on this host, and share its memory.
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
#: Steps assumed of a component that is used again and again in a call.
STEPS = 20
#: Files of a control group, version 2 and 1: limits, and what counts towards them. Above `high` a process is slowed to
#: a crawl.
_LIMITS = (
    (("memory.max", "memory.high"), "memory.current"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
)
_CACHE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


# ---------------------------------------------------------------------- how much there is
def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process could still take: what is free, within every control group's limit.

    None where the system doesn't say. Memory that only caches files counts as free.

    Args:
        root (`Path`): Where `proc` and `sys` are; for tests.
    """
    free = _meminfo(root / "proc/meminfo")
    rooms = [room for folder in _groups(root) if (room := _room(folder)) is not None]
    found = [*rooms, *([free] if free is not None else [])]
    return max(0, min(found)) if found else None


def memory_limit(root: Path = Path("/")) -> int | None:
    """The tightest limit, in bytes, of this process's control groups; None where there is none."""
    found = [_limit(folder, names) for folder in _groups(root) for names, _ in _LIMITS]
    # Version 1 writes "no limit" as the largest number of whole pages.
    return min((limit for limit in found if limit is not None and limit < 1 << 60), default=None)


def local_processes(environment: Mapping[str, str] | None = None) -> int:
    """How many processes share this host's memory, as far as their launcher says; 1 where it says nothing."""
    environment = os.environ if environment is None else environment
    for name in LOCAL_SIZES:
        value = environment.get(name, "").strip()
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def automatic_budget(available: int | None, processes: int) -> int | None:
    """This process's part of the host memory that is available, less a reserve; None where nothing is known."""
    if available is None:
        return None
    return (available - min(available // RESERVE_SHARE, RESERVE_MOST)) // processes


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that limit memory, version 1 and 2, each with all above it.

    Inside a container the path may be the host's, which isn't there: what is mounted as the top is the container's own.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            tops = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for top in tops:
            parts = [part for part in path.split("/") if part and part != ".."]
            yield from (top.joinpath(*parts[:count]) for count in range(len(parts) + 1))


def _limit(folder: Path, names: Iterable[str]) -> int | None:
    return min((found for name in names if (found := _number(folder / name)) is not None), default=None)


def _room(folder: Path) -> int | None:
    for limit_names, usage_name in _LIMITS:
        limit, usage = _limit(folder, limit_names), _number(folder / usage_name)
        if limit is None or usage is None:
            continue
        stat = dict(pair for line in _lines(folder / "memory.stat") if len(pair := line.split()) == 2)
        wide = [name for name in _CACHE if name.startswith("total_") and name in stat]
        names = wide or [name for name in _CACHE if name in stat]
        return limit - max(0, usage - sum(int(stat[name]) for name in names))
    return None


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


# ---------------------------------------------------------------------- who gets it
@dataclasses.dataclass(frozen=True)
class HostItem:
    """Bytes whose host copy lies in one tier.

    Args:
        component (`str`): Whose they are.
        key (`int`): Which of its units.
        nbytes (`int`): How many.
        uses (`int`): How often they are loaded in a call.
        from_file (`bool`): They can be had from a file, and so need no host memory.
        tier (`HostTier`, *optional*): Where they have to be, or are already.
    """

    component: str
    key: int
    nbytes: int
    uses: int = 1
    from_file: bool = False
    tier: HostTier | None = None


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """Which unit's host copy lies where, and the host memory that follows.

    Attributes:
        budget (`int`, *optional*): Bytes of host memory that weights may take; None where no limit is known.
        tiers (`dict[tuple[str, int], HostTier]`): By component and unit.
        nbytes (`dict[str, dict[str, int]]`): Bytes of each component by tier.
        limit (`int`, *optional*): Bytes of host memory for weights and staging: what was given, or found.

    Example:
        >>> print(handle.plan.host)
    """

    budget: int | None
    tiers: dict[tuple[str, int], HostTier]
    nbytes: dict[str, dict[str, int]]
    limit: int | None = None

    @property
    def held(self) -> int:
        """Bytes of host memory that weights take; what stays in files takes none."""
        return sum(
            count for tiers in self.nbytes.values() for tier, count in tiers.items() if HostTier(tier).takes_memory
        )

    def __str__(self) -> str:
        limit = "no limit known" if self.budget is None else f"of {format_bytes(self.budget)}"
        lines = [f"host memory: {format_bytes(self.held)} {limit}"]
        for name, tiers in self.nbytes.items():
            parts = ", ".join(f"{format_bytes(count)} {tier}" for tier, count in tiers.items() if count)
            lines.append(f"  {name}: {parts or '0 B'}")
        return "\n".join(lines)


def assign_tiers(items: Sequence[HostItem], budget: int | None, kept: HostTier, read: HostTier) -> HostPlan:
    """Decides which units are held in host memory, and which are read from their files at each use.

    What is used most often in a call is held first, since each use saves the same bytes from the disk: streamed units
    of a denoiser, which every step loads, before resident ones and encoders, which a call loads once.

    Args:
        items (`Sequence[HostItem]`): All units of all components; what isn't in a file takes its memory anyway.
        budget (`int`, *optional*): Bytes of host memory for all of them; None: no limit.
        kept (`HostTier`): The tier of what is held.
        read (`HostTier`): The tier of what isn't.

    Example:
        >>> items = [HostItem("unet", 0, 60, uses=20, from_file=True), HostItem("text_encoder", 0, 60, from_file=True)]
        >>> assign_tiers(items, 100, HostTier.PINNED, HostTier.FILE).nbytes
        {'unet': {'pinned': 60}, 'text_encoder': {'file': 60}}
    """
    tiers: dict[tuple[str, int], HostTier] = {}
    left = budget
    waiting = []
    for item in items:
        if item.tier is None and item.from_file:
            waiting.append(item)
            continue
        tier = tiers[item.component, item.key] = item.tier or kept
        left = None if left is None else left - (item.nbytes if tier.takes_memory else 0)
    for item in sorted(waiting, key=lambda item: -item.uses):
        fits = left is None or item.nbytes <= left
        tiers[item.component, item.key] = kept if fits else read
        left = left - item.nbytes if fits and left is not None else left
    return HostPlan(budget, tiers, _by_tier(items, tiers))


def _by_tier(items: Iterable[HostItem], tiers: Mapping[tuple[str, int], HostTier]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for item in items:
        found.setdefault(item.component, Counter())[tiers[item.component, item.key].value] += item.nbytes
    return {name: dict(count) for name, count in found.items()}
