"""How fast a device is: presets from vendors' sheets, and what was measured on this machine."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import cache, platform
from .config import format_bytes
from .errors import nearest
from .flops import Cost, attention_flops
from .simulate import LATENCY, Link

FILE = "hardware.json"
#: What is assumed of a vendor's peak: long matrix products reach 0.6 (data centre cards) to 0.75 of the dense peak
#: (GeForce cards, whose peak with float32 sums is half of what their units can do), fused attention about 0.45,
#: elementwise kernels 0.8 of the memory's bandwidth. Measure the machine (`diffusers-layerwise hardware`) to know.
MATMUL, MATMUL_GEFORCE, ATTENTION, MEMORY = 0.6, 0.75, 0.45, 0.8
#: Host to device over 16 lanes: pinned memory reaches about 0.8 of the link's raw rate; pageable memory is staged.
PINNED = {3: 12e9, 4: 22e9, 5: 45e9}
PAGEABLE = {3: 4e9, 4: 6e9, 5: 8e9}
DISK = 3e9
LAUNCH = 5e-6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its way to the host. Rates are what real work reaches, not peaks.

    Args:
        name (`str`): The device.
        memory (`int`): Bytes of device memory.
        pinned, pageable (`float`): Host to device bytes per second.
        matmul (`dict[str, float]`): FLOP/s of matrix products by dtype (`"bfloat16"`, `"float16"`, `"float32"`).
        attention (`float`): FLOP/s of fused attention.
        bandwidth (`float`): Bytes per second of device memory.
        disk (`float`): Bytes per second read from disk.
        launch (`float`): Seconds to start one kernel.
        source (`str`): Where these come from.

    Example:
        >>> find("rtx 4090").memory
        25757220864
    """

    name: str
    memory: int
    pinned: float
    pageable: float
    matmul: dict[str, float]
    attention: float
    bandwidth: float
    disk: float
    launch: float
    source: str

    @property
    def link(self) -> Link:
        """The link from pinned memory and the disk, as the simulation takes them."""
        return Link(self.pinned, LATENCY, self.disk)

    def seconds(self, cost: Cost) -> float:
        """Seconds of some work: products and attention at the slower of their FLOPs and bytes (the roofline model,
        Williams et al. 2009), all else by bytes; and never faster than its kernels can be started."""
        products = sum(count / self._rate(dtype) for dtype, count in cost.matmul.items())
        busy = max(products, cost.matmul_bytes / self.bandwidth)
        busy += max(cost.attention / self.attention, cost.attention_bytes / self.bandwidth)
        busy += cost.other_bytes / self.bandwidth
        return max(busy, cost.kernels * self.launch)

    def _rate(self, dtype: str) -> float:
        found = self.matmul.get(dtype)
        return found if found is not None else self.matmul.get("float32", min(self.matmul.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Hardware:
        """The inverse of [`to_dict`].

        Raises:
            ValueError: A field is missing or unknown.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != fields:
            raise ValueError(f"hardware needs the fields {', '.join(sorted(fields))}, got {values!r}.")
        return cls(**values)

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in self.matmul.items())
        return "\n".join(
            [
                f"{self.name}: {format_bytes(self.memory)}",
                f"  matrix products: {rates} TFLOP/s; attention {self.attention / 1e12:.1f} TFLOP/s",
                f"  memory {self.bandwidth / 1e9:.0f} GB/s; host to device {self.pinned / 1e9:.1f} GB/s pinned, "
                f"{self.pageable / 1e9:.1f} GB/s pageable; disk {self.disk / 1e9:.1f} GB/s; "
                f"launch {self.launch * 1e6:.1f} us",
                f"  source: {self.source}",
            ]
        )


def _preset(
    name: str, gib: float, half: float, single: float, memory: float, lanes: int, source: str, has_bf16: bool = True
) -> Hardware:
    """From a sheet: GiB, dense 16 bit and float32 TFLOP/s, GB/s of memory, PCIe generation."""
    share = MATMUL_GEFORCE if name.startswith("RTX") else MATMUL
    reached = half * 1e12 * share
    matmul = {"float16": reached, "float32": single * 1e12 * share}
    matmul["bfloat16"] = reached if has_bf16 else matmul["float32"]
    note = f"{source}; {share} of the peak for products, {ATTENTION} for attention, {MEMORY} of the memory's bandwidth"
    return Hardware(
        name,
        int(gib * 2**30),
        PINNED[lanes],
        PAGEABLE[lanes],
        matmul,
        half * 1e12 * ATTENTION,
        memory * 1e9 * MEMORY,
        DISK,
        LAUNCH,
        f"{note}; PCIe {lanes}.0 x16; disk and launch assumed",
    )


AMPERE, ADA, BLACKWELL = "NVIDIA GA102 whitepaper", "NVIDIA Ada whitepaper", "NVIDIA RTX Blackwell whitepaper"
PRESETS = {
    preset.name: preset
    for preset in (
        _preset("RTX 3060 12GB", 11.76, 25.6, 12.7, 360, 4, f"{AMPERE} and GeForce RTX 3060 specifications"),
        _preset("RTX 4070", 11.99, 58.3, 29.1, 504, 4, f"{ADA} and GeForce RTX 4070 specifications"),
        _preset("RTX 4090", 23.99, 165.2, 82.6, 1008, 4, ADA),
        _preset("RTX 5090", 31.84, 209.5, 104.8, 1792, 5, BLACKWELL),
        _preset("A10G", 22.3, 70, 35, 600, 4, "NVIDIA A10G datasheet (AWS G5)"),
        _preset("L4", 22.5, 121, 30.3, 300, 4, "NVIDIA L4 datasheet"),
        _preset("T4", 14.7, 65, 8.1, 320, 3, "NVIDIA T4 datasheet (no bfloat16 units)", has_bf16=False),
        _preset("A100", 79.2, 312, 19.5, 2039, 4, "NVIDIA A100 80GB SXM datasheet"),
        _preset("H100", 79.2, 989.4, 66.9, 3350, 5, "NVIDIA H100 SXM datasheet"),
        _preset("H200", 139.8, 989.4, 66.9, 4800, 5, "NVIDIA H200 SXM datasheet"),
    )
}
"""Devices by name. The memory is what a driver reports, a little less than the label says."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


def find(name: str) -> Hardware:
    """A preset by name, whatever its case and blanks, or by the name that a driver reports.

    Raises:
        ValueError: No such preset; the message has the nearest one.
    """
    wanted = _plain(name)
    plain = {_plain(key): preset for key, preset in PRESETS.items()}
    plain |= {key.removesuffix("12gb"): preset for key, preset in list(plain.items())}
    if wanted in plain:
        return plain[wanted]
    # A driver's name says more: "NVIDIA A100-SXM4-80GB". Not "RTX 4070 Ti", which is another card.
    for key, preset in sorted(plain.items(), key=lambda item: -len(item[0])):
        rest = wanted.removeprefix(key)
        if rest != wanted and not key.startswith("rtx") and re.fullmatch(r"(sxm\d?|pcie|hbm3e?|[0-9]+gb)*", rest):
            return preset
    hint = nearest(name, PRESETS) or nearest(name.upper(), PRESETS)
    raise ValueError(
        f"hardware has no preset {name!r}.{hint} The presets are {', '.join(PRESETS)}. To use this machine's own "
        f"device, run `diffusers-layerwise hardware` once and leave hardware out."
    )


# ---------------------------------------------------------------------- measuring
def store(hardware: Hardware) -> Path | None:
    """Keeps a measurement; the newest for each device counts. Returns the file, or None where none can be written."""
    held = cache.read(FILE)
    held = held if isinstance(held, dict) else {}
    return cache.write(FILE, held | {hardware.name: hardware.to_dict()})


def load(name: str | None = None) -> Hardware | None:
    """What was measured of a device on this machine, or None. Without a name: of the default device."""
    held = cache.read(FILE)
    name = platform.device_name(platform.default_device()) if name is None else name
    try:
        return Hardware.from_dict(held[name])
    except (KeyError, TypeError, ValueError):
        return None


def measure(device: torch.device | str | None = None, seconds: float = 4.0) -> Hardware:
    """Measures a device: matrix products, attention, copies, kernel starts, and reads from disk.

    Args:
        device (`torch.device`, *optional*): The accelerator by default, else the CPU.
        seconds (`float`): About how long it may take.
    """
    place = platform.default_device() if device is None else platform.indexed(torch.device(device))
    part = seconds / 8
    size = 256 if place.type == "cpu" else 8192
    with torch.no_grad():
        matmul = {
            str(dtype).removeprefix("torch."): _products(place, dtype, size, part)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }
        attention = _attention(place, 512 if place.type == "cpu" else 4096, part)
        data = torch.ones((4 if place.type == "cpu" else 256) * 2**20, dtype=torch.uint8)
        onto = torch.empty_like(data, device=place)
        bandwidth = _rate(2 * data.numel(), lambda: onto.add_(1), onto, part)
        pageable = _rate(data.numel(), lambda: onto.copy_(data), onto, part)
        pinned = pageable if place.type == "cpu" else _pinned(data, onto, part)
        tiny = torch.zeros(1, device=place)
        launch = 1 / _rate(1, lambda: tiny.add_(1), tiny, part / 2)
    memory = platform.free_memory(place) or platform.host_memory()
    name, source = platform.device_name(place), f"measured with torch {torch.__version__}"
    return Hardware(name, memory, pinned, pageable, matmul, attention, bandwidth, _disk(), launch, source)


def _rate(amount: float, work: Callable[[], Any], result: torch.Tensor, seconds: float) -> float:
    """Units per second of repeated work. Reading one element of the result waits for all of it."""
    work()
    result.flatten()[0].item()
    count, begin = 1, time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(count):
            work()
        result.flatten()[0].item()
        spent = time.perf_counter() - start
        if spent > seconds / 3 or time.perf_counter() - begin > seconds:
            return amount * count / spent
        count *= 2


def _products(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    a = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return _rate(2 * size**3, lambda: torch.mm(a, a, out=out), out, seconds)


def _attention(device: torch.device, length: int, seconds: float) -> float:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.ones(1, 16, length, 64, dtype=dtype, device=device)
    out = [q]

    def work() -> None:
        out[0] = F.scaled_dot_product_attention(q, q, q)

    return _rate(attention_flops(q.shape, q.shape, q.shape), work, q, seconds)


def _pinned(data: torch.Tensor, onto: torch.Tensor, seconds: float) -> float:
    locked = platform.new_pinned(data.numel(), onto.device)
    return _rate(data.numel(), lambda: onto.copy_(locked, non_blocking=True), onto, seconds)


def _disk(nbytes: int = 64 << 20) -> float:
    """Bytes per second of reading a fresh file. The system may serve it from memory, so this is at best."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\0" * nbytes)
        file.flush()
        begin = time.perf_counter()
        Path(file.name).read_bytes()
        return nbytes / (time.perf_counter() - begin)


def resolve(hardware: Hardware | str | None, notes: list[str]) -> Hardware:
    """The hardware that an argument means. None: what was measured here, the preset of the device that is here, or a
    common card, which a note says.

    Raises:
        TypeError, ValueError: It is neither a [`Hardware`] nor the name of one.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, str):
        return find(hardware)
    if hardware is not None:
        raise TypeError(f"hardware must be a Hardware or the name of a preset, got {hardware!r}.")
    device = platform.default_device()
    name = platform.device_name(device)
    measured = load(name)
    if measured is not None and device.type != "cpu":
        return measured
    if device.type != "cpu":
        try:
            return find(name)
        except ValueError:
            pass
    notes.append("no device was named or measured: times are for an RTX 4090 (pass hardware)")
    return PRESETS["RTX 4090"]
