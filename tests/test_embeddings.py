"""Embedding tables that stay on the host: the rows are the same, and only they travel."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import models
from diffusers_layerwise import LayerwiseOffloadConfig, gather
from diffusers_layerwise.config import Mode
from diffusers_layerwise.discovery import discover
from diffusers_layerwise.plan import Choice, ComponentSpec, UnitSpec
from diffusers_layerwise.search import Request, make_plan, smallest_peak
from models import run
from test_checkpoint_files import device, stored

__all__ = ["device"]
MIB = 1 << 20
ROWS = 4096
WIDTH = 64


class Encoder(nn.Module):
    """A table, much larger than what follows it."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, **options)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(nn.Embedding):
    """A lookup of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.weight.max()


class Looking(Encoder):
    """Reads its table without calling it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) @ self.embed.weight.t()


def ids(*shape: int) -> torch.Tensor:
    """Numbers of rows."""
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(3))


def scaled() -> Encoder:
    """With a lookup of its own."""
    module = Encoder()
    module.embed = Scaled(ROWS, WIDTH)
    return module


def tied() -> nn.Module:
    """With a head that is the table."""
    return models.TiedLanguageModel(4, WIDTH, ROWS)


def test_only_tables_that_are_only_looked_up_can_stay() -> None:
    for make, can in ((Encoder, 1), (scaled, 0), (Looking, 0), (tied, 0), (lambda: Encoder(max_norm=1.0), 0)):
        found = discover(make(), "text_encoder")
        assert [u.name for u in found.units if u.can_gather] == ["embed"] * can
    assert discover(nn.Embedding(ROWS, WIDTH), "e").units[0].can_gather


@pytest.mark.parametrize("mode", ["memory", "speed", "manual", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (300,)])
def test_rows_are_the_same_and_only_they_travel(device: str, mode: str, shape: tuple[int, ...]) -> None:
    module = models.make(Encoder)
    expected = run(module, ids(*shape))
    handle = models.stream(module, mode, device, config={"embeddings": "host"})
    table = module.embed.weight
    pointer = table.data_ptr()
    for _ in range(4):
        assert torch.equal(run(module, ids(*shape)), expected)
    assert module.embed.weight is table
    assert table.data_ptr() == pointer
    report = handle.report()
    assert report.components[0].gathered_bytes == table.nbytes
    assert report.peak_ever < table.nbytes / 2
    assert report.moved_bytes < table.nbytes
    assert "looked up on the host" in str(handle.plan)
    assert torch.equal(module.state_dict()["embed.weight"].cpu(), models.make(Encoder).embed.weight)
    handle.remove()
    assert torch.equal(run(module, ids(*shape)), expected)


def test_what_is_not_looked_up_alone_is_loaded(sim: ModuleType) -> None:
    for make in (scaled, Looking, tied):
        module = models.make(make)
        expected = run(module, ids(2, 5))
        handle = models.stream(module, config={"embeddings": "host"})
        for _ in range(3):
            assert torch.equal(run(module, ids(2, 5)), expected)
        assert handle.report().components[0].gathered_bytes == 0
        handle.remove()


def test_an_edited_or_replaced_table_is_looked_up_as_it_is_now(device: str) -> None:
    module, plain = models.make(Encoder), models.make(Encoder)
    handle = models.stream(module, device=device, config={"embeddings": "host"})
    run(module, ids(2, 5))
    for each in (module, plain):
        each.embed.weight.data += 1
    assert torch.equal(run(module, ids(2, 5)), run(plain, ids(2, 5)))
    for each in (module, plain):
        each.embed.weight = nn.Parameter(torch.full((ROWS, WIDTH), 0.25))
    for _ in range(3):
        assert torch.equal(run(module, ids(2, 5)), run(plain, ids(2, 5)))
    for each in (module, plain):
        each.embed = models.make(nn.Embedding, ROWS, WIDTH, seed=9)
    for _ in range(3):
        assert torch.equal(run(module, ids(2, 5)), run(plain, ids(2, 5)))
    handle.remove()


def test_a_table_in_a_file_stays_there(device: str, tmp_path: Path) -> None:
    module = models.make(Encoder)
    stored(module, tmp_path)
    expected = run(module, ids(2, 5))
    handle = models.stream(module, device=device, config={"embeddings": "host", "host": "file"})
    for _ in range(3):
        assert torch.equal(run(module, ids(2, 5)), expected)
    part = handle.report().components[0]
    assert sum(count for tier, count in part.host_bytes.items() if tier in ("pinned", "pageable")) < 0.1 * part.weights
    assert part.disk_bytes < module.embed.weight.nbytes
    handle.remove()


# ---- the plan


def spec(name: str = "text_encoder", table: int = 512 * MIB, **options: object) -> ComponentSpec:
    """An encoder with a table."""
    blocks = tuple(UnitSpec(f"b{i}", str(i), 32 * MIB) for i in range(8))
    units = (UnitSpec("embed", None, table, can_gather=True), *blocks)
    config = LayerwiseOffloadConfig.read(options)
    return ComponentSpec(name, units, tuple(range(9)), 0, table + 256 * MIB, config=config)


def kept(found: ComponentSpec, budget: int, mode: Mode = Mode.AUTO) -> int:
    """Bytes of tables that stay on the host."""
    return make_plan([found], Request(mode, budget, 0)).components[0].gathered_bytes


def test_a_large_table_stays_on_the_host_where_not_everything_fits() -> None:
    assert kept(spec(), 200 * MIB) == 512 * MIB
    assert kept(spec(), 2000 * MIB) == 0
    assert kept(spec(embeddings="host"), 2000 * MIB) == 512 * MIB
    assert kept(spec(table=8 * MIB), 100 * MIB) == 0
    assert kept(spec("transformer"), 1100 * MIB, Mode.MEMORY) == 0
    assert kept(spec("transformer", embeddings="host"), 200 * MIB) == 512 * MIB
    assert kept(spec(embeddings="device"), 700 * MIB, Mode.MEMORY) == 0
    # The smallest budget is that of the blocks, and nothing else runs in it.
    assert smallest_peak([spec()]) < 40 * MIB
    assert kept(spec(), smallest_peak([spec()])) == 512 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        make_plan([spec(embeddings="device")], Request(Mode.AUTO, 200 * MIB, 0))


def test_what_a_map_or_an_option_places_is_left_alone() -> None:
    mapped = spec()
    mapped = dataclasses.replace(mapped, units=tuple(dataclasses.replace(u, resident=False) for u in mapped.units))
    whole = dataclasses.replace(spec(), choice=Choice.OFFLOAD)
    only = dataclasses.replace(spec(), units=spec().units[:1], order=(0,))
    for each in (mapped, whole, only, spec(resident=0.5)):
        assert gather.gathered([each])[0].units[0].gathered == 0
    once = gather.gathered([spec()])
    assert gather.gathered(once) == once
