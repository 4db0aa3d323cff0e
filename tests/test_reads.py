"""Weights that a parent reads without calling their owner are found in the source, and stay resident."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

import diffusers_layerwise as dl
from diffusers_layerwise.discovery import discover
from diffusers_layerwise.reads import weights_read

WIDTH = 32


class Pool(nn.Module):
    """Reads its projections as HunyuanDiT's attention pool does."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.q_proj.weight, self.q_proj.bias) + x @ self.k_proj.weight

    def fuse(self) -> torch.Tensor:
        return torch.cat([self.q_proj.weight, self.out.weight])


class Asks(nn.Module):
    """Asks for a dtype in every pass as T5 does, and looks at a weight without reading it."""

    def __init__(self) -> None:
        super().__init__()
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.wo.weight, torch.Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


class Listed(nn.Module):
    """Reads weights of the elements of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return x @ self.heads[0].weight + x @ self.heads[1].weight


class Model(nn.Module):
    """All of them, behind a stack that makes them small enough to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.parts = nn.ModuleList([Pool(), Asks(), Listed()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in [*self.blocks, *self.parts]:
            x = module(x)
        return x


@pytest.mark.parametrize(
    ("kind", "names"), [(Pool, {"q_proj", "k_proj"}), (Asks, set()), (Listed, {"heads"}), (nn.Linear, set())]
)
def test_only_weights_whose_data_is_read_are_found(kind: type[nn.Module], names: set[str]) -> None:
    assert weights_read(kind) == names


def test_a_class_without_source_has_none() -> None:
    kind = type("Made", (nn.Module,), {"forward": eval("lambda self, x: self.child.weight @ x")})
    assert weights_read(kind) == frozenset()


def test_weights_read_by_a_parent_are_no_unit() -> None:
    component = discover(Model(), "model")
    units = {unit.name for unit in component.units}
    assert "parts.0.out" in units
    assert "parts.1.wo" in units
    assert not units & {"parts.0.q_proj", "parts.0.k_proj", "parts.2.heads.0", "parts.2.heads.1"}


@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_a_model_whose_parents_read_weights_is_bit_identical(sim: ModuleType, mode: str) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = model(x)
        budget = sum(p.numel() * p.element_size() for p in model.parameters()) * 9 // 10
        with dl.apply_layerwise_offload(model, mode, onload_device="sim", memory_budget=budget):
            for _ in range(4):
                assert torch.equal(model(x).cpu(), expected)
