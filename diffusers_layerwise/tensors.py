"""One tensor: the bytes it occupies, tensors that share them, and what can't be moved by bytes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

#: Kernels want 16 to 32 bytes, and torch's own allocators give 256 or more.
ALIGNMENT = 256
#: What the widest loads of CPUs are aligned to, and torch's own memory there.
CACHE_LINE = 64


def align(count: int) -> int:
    """Rounds a byte count up to [`ALIGNMENT`]; at least one unit, so that an empty tensor has a place too."""
    return max(1, -(-count // ALIGNMENT)) * ALIGNMENT


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one, gaps between strides included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def raw_bytes(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A flat uint8 view of `count` bytes from a tensor's first element on; it shares the tensor's memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    found: torch.Tensor = flat.set_(tensor.untyped_storage(), offset, (count,))  # type: ignore[call-overload]
    return found


def view_like(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A view of `buffer` (uint8, flat) at byte `offset` with the dtype, shape and strides of `like`.

    The view's storage offset is never 0 where `offset` isn't: torch.compile specialises on an offset of 0.
    """
    typed = torch.empty(0, dtype=like.dtype, device=buffer.device)
    start, rest = divmod(int(buffer.storage_offset()) + offset, like.element_size())
    if rest:
        raise ValueError(f"byte offset {offset} does not suit {like.dtype}")
    return typed.set_(buffer.untyped_storage(), start, like.shape, like.stride())


def why_not_movable(tensor: torch.Tensor, allow_meta: bool = False) -> str | None:
    """Says why a tensor's bytes can't simply be copied, or None when they can (or could, if it weren't on meta).

    Only tensors of dense layout with memory of their own qualify (see `parts.py` for those inside others); a meta
    tensor has none.
    """
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, whose data lies in inner tensors"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_inference():
        return "was made under torch.inference_mode(), so edits to it can't be noticed; load it outside of that"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype})"
    if tensor.device.type == "meta":
        return None if allow_meta else "is on the meta device and has no data"
    if type(tensor) not in (torch.Tensor, nn.Parameter) and tensor.numel() and not tensor.data_ptr():
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no memory of its own"
    return None


def plain_data(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data` as an ordinary tensor, also where the class of `tensor` has ideas of its own about its methods."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.data.as_subclass(torch.Tensor)


@dataclasses.dataclass(eq=False)
class Entry:
    """One parameter or buffer: the tensor, its host copy, and every (module, name) that holds it.

    `tensor` is never replaced; `tensor.data` points at `host` or at device memory. `on_disk`: `host` is a file's view.
    A tensor inside a quantised parameter `outer` is held by an attribute (or item) `key` of `holder`, and `path` is its
    name below that.
    """

    tensor: torch.Tensor
    owners: list[tuple[nn.Module, str]]
    name: str
    host: torch.Tensor
    is_buffer: bool = False
    on_disk: bool = False
    holder: Any = None
    key: str = ""
    outer: torch.Tensor | None = None
    path: str = ""

    @property
    def held(self) -> torch.Tensor:
        """What the owning modules hold: `tensor`, or the quantised parameter that it is a part of."""
        return self.tensor if self.outer is None else self.outer

    def reader(self) -> Callable[[], Any]:
        """A function that gives what is held in this entry's place now; not `tensor` once somebody replaced it."""
        if isinstance(self.holder, dict):
            return functools.partial(self.holder.get, self.key)
        if self.holder is not None:
            # By name every time: `torch.utils.swap_tensors` gives a parameter another `__dict__`.
            return functools.partial(getattr, self.holder, self.key, None)
        module, name = self.owners[0]
        held: dict[str, Any] = module._buffers if self.is_buffer else module._parameters
        return functools.partial(held.get, name)

    def current(self) -> torch.Tensor | None:
        """What is held in this entry's place now."""
        found: torch.Tensor | None = self.reader()()
        return found


@dataclasses.dataclass(eq=False)
class Extent:
    """One contiguous range of source bytes that moves as a whole, and the entries that view it.

    Nearly always one entry. Views that overlap (halves of a fused matrix) share an extent, so that what was shared
    stays shared and is moved once.

    `lead` is how far it began from a multiple of [`CACHE_LINE`] where it was loaded. Kernels of a CPU round differently
    where weights aren't aligned, as in a file: copies begin at the same distance there, so that results are those of
    the weights in place.
    """

    entries: list[Entry]
    offsets: list[int]
    nbytes: int
    source: torch.Tensor
    lead: int = 0

    @property
    def size(self) -> int:
        """Bytes that the extent takes in a region: `nbytes` behind its lead, rounded up to [`ALIGNMENT`]."""
        return align(self.nbytes + self.lead)

    def shift(self, device: torch.device) -> int:
        """Where in its part of a region the extent begins on a device: accelerators want it aligned."""
        return self.lead if device.type == "cpu" else 0

    def is_as_loaded(self) -> bool:
        """Whether its bytes begin as far from a multiple of [`CACHE_LINE`] as where they were loaded."""
        return self.source.data_ptr() % CACHE_LINE == self.lead


def collect_extents(entries: Iterable[Entry]) -> list[Extent]:
    """Groups entries into extents, in the order of the first entry of each; overlapping ranges are merged."""
    ranges = []
    unplaced = 0  # meta tensors have no address; give each a range of its own
    for position, entry in enumerate(entries):
        if entry.host.is_meta:
            start, unplaced = unplaced, unplaced + align(span(entry.host))
        else:
            start = entry.host.data_ptr() if entry.host.numel() else 0
        ranges.append((start, start + span(entry.host), position, entry))
    extents: dict[int, Extent] = {}
    cluster: list[tuple[int, int, int, Entry]] = []
    end = -1
    for item in sorted(ranges, key=lambda r: (r[0], r[1], r[2])):
        if cluster and item[0] < end and item[3].host.device == cluster[0][3].host.device:
            cluster.append(item)
            end = max(end, item[1])
            continue
        if cluster:
            extents[min(c[2] for c in cluster)] = _extent(cluster)
        cluster, end = [item], item[1]
    if cluster:
        extents[min(c[2] for c in cluster)] = _extent(cluster)
    return [extents[position] for position in sorted(extents)]


def _extent(cluster: list[tuple[int, int, int, Entry]]) -> Extent:
    first = min(c[0] for c in cluster)
    end = max(c[1] for c in cluster)
    entries = [c[3] for c in cluster]
    base = next(c[3].host for c in cluster if c[0] == first)
    with torch.inference_mode(False), torch.no_grad():
        source = raw_bytes(base, end - first)
    lead = source.data_ptr() % CACHE_LINE if base.device.type == "cpu" and end > first else 0
    lead = lead if all(lead % entry.host.element_size() == 0 for entry in entries) else 0
    return Extent(entries, [c[0] - first for c in cluster], end - first, source, lead)


def move_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bytes from host memory to host memory, without a lock on the interpreter and in this thread alone.

    torch's own copy would start a team of threads for each thread that copies, which then spins beside those that
    compute.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Runs a block with neither gradients nor inference mode: a Parameter given an inference tensor becomes one."""
    with torch.inference_mode(False), torch.no_grad():
        yield
