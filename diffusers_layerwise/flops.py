"""What operations cost, by shapes alone: floating point operations, bytes moved, kernels started. Pure.

A multiply and an add count as two operations, as in vendors' figures and `torch.utils.flop_counter`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


@dataclasses.dataclass
class Cost:
    """The work of some operations.

    Args:
        matmul (`dict[str, int]`): FLOPs of matrix products and convolutions, by dtype (`"bfloat16"`).
        matmul_bytes (`int`): Bytes that these read and write.
        attention, attention_bytes (`int`): The same of scaled dot product attention.
        other_bytes (`int`): Bytes that all other operations read and write.
        kernels (`int`): Operations that start work on the device.
    """

    matmul: dict[str, int] = dataclasses.field(default_factory=dict)
    matmul_bytes: int = 0
    attention: int = 0
    attention_bytes: int = 0
    other_bytes: int = 0
    kernels: int = 0

    @property
    def flops(self) -> int:
        """All floating point operations."""
        return sum(self.matmul.values()) + self.attention

    def add(self, other: Cost) -> None:
        """Takes in another cost."""
        for dtype, count in other.matmul.items():
            self.matmul[dtype] = self.matmul.get(dtype, 0) + count
        self.matmul_bytes += other.matmul_bytes
        self.attention += other.attention
        self.attention_bytes += other.attention_bytes
        self.other_bytes += other.other_bytes
        self.kernels += other.kernels

    def add_operation(self, flops: int, dtype: torch.dtype | None, nbytes: int) -> None:
        """Takes in one kernel: a matrix product when `flops` isn't 0."""
        self.kernels += 1
        if flops:
            name = str(dtype).removeprefix("torch.")
            self.matmul[name] = self.matmul.get(name, 0) + flops
            self.matmul_bytes += nbytes
        else:
            self.other_bytes += nbytes

    def scaled(self, factor: float) -> Cost:
        """So many times the work."""
        matmul = {dtype: round(count * factor) for dtype, count in self.matmul.items()}
        numbers = (self.matmul_bytes, self.attention, self.attention_bytes, self.other_bytes, self.kernels)
        return Cost(matmul, *(round(number * factor) for number in numbers))

    def to_list(self) -> list[Any]:
        """Plain values, for JSON."""
        numbers = (self.matmul_bytes, self.attention, self.attention_bytes, self.other_bytes, self.kernels)
        return [self.matmul, *numbers]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Cost:
        """The inverse of [`to_list`]."""
        return cls(dict(values[0]), *(int(v) for v in values[1:]))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    found = Cost()
    for cost in costs:
        found.add(cost)
    return found


def product_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of a matrix product or convolution by torch's own formulas; 0 for any other operation."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], causal: bool = False) -> int:
    """FLOPs of attention from shapes (..., length, width): two products of all queries with all keys.

    A causal mask skips half of them (FlashAttention, arXiv 2205.14135, counts so).

    Example:
        >>> attention_flops((1, 24, 4608, 128), (1, 24, 4608, 128), (1, 24, 4608, 128))
        260919263232
    """
    rows = 1
    for size in query[:-1]:
        rows *= size
    return 2 * rows * key[-2] * (query[-1] + value[-1]) // (2 if causal else 1)


def moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that reading or writing tensors moves; what an expanded one repeats is read once."""
    found = 0
    for tensor in tensors:
        found += min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    return found
