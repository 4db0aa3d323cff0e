"""Several ranks, as processes over gloo: tensor parallel weights stream by their shards, FSDP is refused, and the ranks
of one host can share one copy of the same weights. What each rank does is in `rank_cases.py`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
import rank_cases
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload, shared
from diffusers_layerwise.discovery import discover
from rank_cases import WEIGHTS, Found

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available() or not sys.platform.startswith("linux"),
    reason="needs torch.distributed with gloo, and Linux",
)
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
PARALLEL = ["memory", "auto", "uneven", "edits", "parallelised_later", "fsdp", "fsdp_in_a_pipeline"]
SHARING = ["own_copies", "shared_copy", "mapped_checkpoint", "shared_checkpoint", "shared_residents"]
SHARING += ["shared_edits", "shared_in_part", "shared_pipeline", "owner_leaves"]

Results = dict[str, list[Found]]


@pytest.fixture(scope="module", params=WORLDS)
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the cases found in each rank: starting processes takes longer than running them."""
    return rank_cases.run(PARALLEL, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=WORLDS)
def sharing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same of the cases of shared memory."""
    return rank_cases.run(SHARING, request.param, tmp_path_factory.mktemp("ranks"))


# ---------------------------------------------------------------------- tensor parallel
@pytest.mark.parametrize("name", ["memory", "auto", "uneven"])
def test_a_tensor_parallel_pipeline_streams_its_shards(name: str, parallel: Results, cell: Cell) -> None:
    cell("Several ranks", "tensor parallel (`parallelize_module`)", "before ours")
    for rank, found in enumerate(parallel[name]):
        assert found["equal"] == [True] * 3, (rank, found)
        assert found["shards"] > 8
        assert found["state dict"]
        assert found["within"]
        assert found["weights"] < found["whole"], "a rank counts its own shards"
        assert (found["streamed"] > 0) == (name != "uneven" or rank == 0)


@pytest.mark.parametrize("name", ["memory", "auto", "uneven"])
def test_disabling_leaves_the_same_shards_on_the_same_mesh(name: str, parallel: Results) -> None:
    for found in parallel[name]:
        assert found["same shards"]
        assert found["after"]
        assert not found["hooks left"]


def test_edits_of_sharded_weights_are_kept(parallel: Results) -> None:
    for found in parallel["edits"]:
        assert found == {"equal": [True] * 4, "weights": True}


def test_a_module_may_be_parallelised_after_layerwise_offload(parallel: Results, cell: Cell) -> None:
    cell("Several ranks", "tensor parallel (`parallelize_module`)", "after ours")
    for found in parallel["parallelised_later"]:
        assert found["equal"] == [True] * 3
        assert found["shards"] > 8


# ---------------------------------------------------------------------- refused by name
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fsdp2", "'FSDPChain' can't be streamed: FSDPChain is under fully_shard() (FSDP2)"),
        ("fsdp2 inside", "'Chain' can't be streamed: Chain.blocks.1 is under fully_shard() (FSDP2)"),
        ("fsdp1", "is under FullyShardedDataParallel (FSDP1)"),
        ("a part", "'Linear' can't be streamed: it is a part of a FSDP"),
        ("ddp", "is wrapped in DistributedDataParallel"),
        ("late", "'Chain' can't be streamed: Chain is under fully_shard() (FSDP2)"),
    ],
)
def test_what_gathers_weights_itself_is_refused_by_name(name: str, says: str, parallel: Results, cell: Cell) -> None:
    """Before it, with nothing changed; after it, at the next pass."""
    row = {"fsdp1": "FSDP1", "ddp": "`DistributedDataParallel`"}.get(name, "FSDP2 (`fully_shard`)")
    cell("Several ranks", row, "after ours" if name == "late" else "before ours", "refused")
    for found in parallel["fsdp"]:
        error = found["errors"][name]
        assert error.startswith("LayerwiseOffloadError")
        assert says in error
        assert "CPUOffloadPolicy" in error or name == "ddp"
        assert found["works"].get(name, True)
        assert not found["touched"].get(name, found["late touched"])


def test_a_component_under_fsdp_is_left_alone_beside_others_that_stream(parallel: Results, cell: Cell) -> None:
    cell("Several ranks", "FSDP2, other components selected", "before ours", "right: left alone")
    for found in parallel["fsdp_in_a_pipeline"]:
        assert "'transformer' can't be streamed" in found["error"]
        assert "components=['all', '!transformer']" in found["error"]
        assert not found["touched"]
        assert found["equal"] == [True] * 6
        assert all("transformer: left alone: FSDP" in notes for notes in found["notes"][:2])


def test_data_parallel_on_devices_is_refused_by_name() -> None:
    module = nn.DataParallel(models.make(models.Chain))
    with pytest.raises(LayerwiseOffloadError, match=r"is wrapped in nn\.DataParallel.*Use the module inside it"):
        apply_layerwise_offload(module, onload_device="cpu")
    assert not rank_cases.hooked(module)


# ---------------------------------------------------------------------- one copy per host
def total(found: list[Found], name: str) -> float:
    """Memory of all ranks, over the weights."""
    return sum(rank[name]["pss"] for rank in found) / WEIGHTS


@pytest.mark.parametrize("name", ["shared_copy", "mapped_checkpoint", "shared_checkpoint"])
def test_ranks_hold_one_copy_of_the_same_weights(name: str, sharing: Results, cell: Cell) -> None:
    cell("Several ranks", "one host copy for all (`host='shared'`, or a mapped checkpoint)", "before ours")
    """The ring of two slots is each rank's own; all else is there once."""
    world = len(sharing[name])
    ring = 2 / rank_cases.DEPTH
    assert total(sharing["own_copies"], "taken") > 0.9 * world
    assert total(sharing[name], "taken") < 1.1 + world * (ring + 0.15)
    assert total(sharing[name], "kept") < 1.1 + world * 0.15
    for found in sharing[name]:
        assert found["equal"] == [True] * 4
        assert found["same objects"]
        assert not found["notes"]


def test_the_report_says_what_is_shared(sharing: Results) -> None:
    world = len(sharing["shared_copy"])
    for found in sharing["shared_copy"]:
        assert set(found["tiers"]) <= {"shared", "pageable"}
        assert found["tiers"]["shared"] > 0.9 * WEIGHTS
        assert found["host bytes"] < 1.1 * WEIGHTS / world + (17 << 20)


def test_residents_on_a_cpu_are_used_where_they_are_shared(sharing: Results) -> None:
    assert all(found["equal"] == [True] * 3 for found in sharing["shared_residents"])


def test_edits_of_one_rank_never_reach_another(sharing: Results) -> None:
    for rank, found in enumerate(sharing["shared_edits"]):
        assert found == {"first": True, "equal": [True] * 3, "differs": rank == 0}


def test_what_differs_in_one_rank_stays_its_own(sharing: Results) -> None:
    world = len(sharing["shared_in_part"])
    layer = rank_cases.WIDTH**2 * 4
    for rank, found in enumerate(sharing["shared_in_part"]):
        assert found["equal"] == [True] * 3
        own = found["tiers"].get("pageable", 0)
        assert (own >= layer) == (rank == world - 1), found
        assert any("this rank's own" in note for note in found["notes"]) == (rank == world - 1)


def test_components_that_ranks_do_not_split_are_shared_beside_one_that_they_do(sharing: Results) -> None:
    for found in sharing["shared_pipeline"]:
        assert found["equal"] == [True] * 3
        assert found["after"]
        assert found["same shards"]


def test_a_copy_outlives_who_wrote_it(sharing: Results) -> None:
    for found in sharing["owner_leaves"]:
        assert found["equal"] == [True] * 2
        assert found["tiers"]["shared"] > 0.9 * WEIGHTS


def test_sharing_needs_a_process_group() -> None:
    module = models.make(models.Chain)
    with pytest.raises(LayerwiseOffloadError, match=r"config\.host='shared' for 'Chain'.*init_process_group"):
        apply_layerwise_offload(module, onload_device="cpu", config={"host": "shared"})
    assert not rank_cases.hooked(module)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank; gives its store."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def extents_of(module: nn.Module) -> list[Any]:
    return [extent for unit in discover(module, "chain").units for extent in unit.extents]


@pytest.mark.parametrize("fate", ["died", "withdrawn", "closed", "writable", "shorter"])
def test_a_copy_that_can_not_be_had_is_made_anew(fate: str, alone: Any) -> None:
    """Whoever was to write it is gone, has given up, has closed it, or has left something else under its number."""
    meeting = shared._Rendezvous("chain", extents_of(models.make(models.Chain)))
    mine = f"{os.getpid()} {shared._started(os.getpid())} x"
    alone.compare_set(f"{meeting._key}/0", "", "4194305 1 x" if fate == "died" else mine)
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2048 if fate == "shorter" else 4096)
    if fate == "shorter":
        fcntl.fcntl(fd, shared._ADD_SEALS, shared._SEALS)
    inode = os.fstat(fd).st_ino
    if fate == "closed":
        os.close(fd)
    if fate != "died":
        alone.set(f"{meeting._key}/0/copy", "" if fate == "withdrawn" else f"{os.getpid()} {fd} {inode}")
    found = meeting.meet(4096)
    assert isinstance(found, shared._Offer)
    assert found.key == f"{meeting._key}/1/copy"
    found.close()
    if fate != "closed":
        os.close(fd)


def test_a_copy_can_not_be_written_to(alone: Any) -> None:
    module = models.make(models.Chain)
    apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
    key = shared._Rendezvous("Chain", extents_of(models.make(models.Chain)))._key
    process, fd, _ = alone.get(f"{key}/0/copy").decode().split()
    with pytest.raises(OSError, match="not permitted"):
        os.write(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR), b"x")


def test_a_host_without_room_for_the_copy_keeps_its_own(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of it was written by then; the note says why there is none."""
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    write, calls = os.pwrite, []

    def full(fd: int, data: Any, place: int) -> int:
        calls.append(place)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with torch.no_grad():
        expected = module(x)
        handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "shared"})
        for _ in range(3):
            assert torch.equal(module(x), expected)
    (note,) = handle.report().components[0].notes
    assert "No space left" in note
    handle.remove()
    with torch.no_grad():
        assert torch.equal(module(x), expected)


def test_shared_weights_are_memory_to_a_later_offload(alone: Any) -> None:
    """The map of a file without a name isn't taken for one of a checkpoint."""
    module, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    with torch.no_grad():
        expected = module(x)
        for host in ("shared", "pageable", "shared", None):
            handle = apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": host})
            for _ in range(3):
                assert torch.equal(module(x), expected)
            assert set(handle.report().components[0].host_bytes) == {host or "pageable"}
            handle.remove()
        with pytest.raises(LayerwiseOffloadError, match="none of its weights is in a checkpoint file"):
            apply_layerwise_offload(module, "memory", onload_device="cpu", config={"host": "file"})


@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_shared_weights_stream_to_an_accelerator(mode: str, alone: Any, sim: ModuleType) -> None:
    resident = models.make(models.MlpStack).to("sim")
    module, x = models.make(models.MlpStack), models.numbers(4, models.WIDTH)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    budget = None if mode == "memory" else size * 2 // 3
    config = {"host": "shared"}
    handle = apply_layerwise_offload(module, mode, onload_device="sim", memory_budget=budget, config=config)
    with torch.no_grad():
        for step in range(5):
            if step == 3:
                for each in (module, resident):
                    each.blocks[2].up.weight.mul_(2)
                    each.blocks[4].down.bias.data.add_(1)
            assert torch.equal(module(x).cpu(), resident(x.to("sim")).cpu())
    assert handle.report().components[0].host_tier == "shared"
    assert handle.report().components[0].streamed_bytes > 0


# ---------------------------------------------------------------------- shards on the simulated device
@pytest.fixture
def group(sim: ModuleType) -> Iterator[None]:
    """A group of two ranks of which only this one is there: what they exchange stays as it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Column(nn.Module):
    """A layer twice as wide as the stack, of which each of two ranks has half."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(models.WIDTH, 2 * models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what this rank's half makes of `x`."""
        return x + torch.tanh(self.lin(x))


def columns(kind: str) -> nn.Module:
    """Columns in a row, split on a mesh of a kind of device; the weights lie on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    mesh = init_device_mesh(kind, (2,))
    module = models.make(models.Blocks, [models.make(Column, seed=seed) for seed in range(5)])

    def split(_: str, layer: nn.Module, mesh: Any) -> None:
        for name, parameter in list(layer._parameters.items()):
            half = parameter.detach().chunk(2)[0].clone()
            sharded = DTensor.from_local(half.to(kind), mesh, [Shard(0)], run_check=False)
            layer.register_parameter(name, nn.Parameter(sharded, requires_grad=False))

    def whole(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    for block in module.blocks:
        distribute_module(block.lin, mesh, split, whole, lambda _, out, mesh: out.to_local())
    return module


@pytest.mark.parametrize(("mode", "share"), [("memory", None), ("auto", 0.6)])
def test_shards_stream_to_the_simulated_device(mode: str, share: float | None, group: None, sim: ModuleType) -> None:
    resident, streamed = columns("sim"), columns("sim")
    before = {name: (id(p), p.placements, p.device_mesh) for name, p in streamed.named_parameters()}
    local = {name: p._local_tensor.cpu() for name, p in streamed.named_parameters()}
    seen: list[tuple[str, str]] = []
    layer = streamed.blocks[2].lin
    layer.register_forward_pre_hook(
        lambda m, _: seen.append((m.weight.device.type, m.weight._local_tensor.device.type))
    )
    size = sum(tensor.numel() * tensor.element_size() for tensor in local.values())
    budget = None if share is None else int(size * share)
    handle = apply_layerwise_offload(streamed, mode, onload_device="sim", memory_budget=budget)
    x = models.numbers(4, models.WIDTH)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(streamed(x).cpu(), resident(x.to("sim")).cpu())
            assert {p._local_tensor.device.type for p in streamed.parameters()} <= {"cpu", "sim"}
    assert seen[-1] == ("sim", "sim")
    assert handle.report().components[0].streamed_bytes > 0
    assert handle.report().peak_seen <= handle.plan.peak_bytes < size
    handle.release()
    assert {p._local_tensor.device.type for p in streamed.parameters()} == {"cpu"}
    assert {p.device.type for p in streamed.parameters()} == {"cpu"}
    handle.remove()
    after = {name: (id(p), p.placements, p.device_mesh) for name, p in streamed.named_parameters()}
    assert after == before
    assert all(torch.equal(p._local_tensor.cpu(), local[name]) for name, p in streamed.named_parameters())
    assert {p.device.type for p in streamed.parameters()} == {"sim"}


def test_a_shard_on_a_mesh_of_another_kind_of_device_is_refused_by_name(group: None) -> None:
    module = columns("cpu")
    with pytest.raises(LayerwiseOffloadError, match=r"blocks\.0\.lin\.weight is a shard on a mesh of 'cpu' devices"):
        apply_layerwise_offload(module, "memory", onload_device="sim")
    assert not rank_cases.hooked(module)


def test_an_edit_of_a_shard_while_it_is_loaded_is_kept(group: None, sim: ModuleType) -> None:
    """In use, or with its copy on the way: only the counter of the whole tensor tells it."""
    sim.configure(mode="poison")  # lists the write under the copy, which is repeated, and shows NaN to whoever reads it
    resident, streamed = columns("sim"), columns("sim")
    apply_layerwise_offload(streamed, "memory", onload_device="sim")
    x = models.numbers(4, models.WIDTH)

    def edit(module: nn.Module) -> None:
        def used(layer: Any, *_: object) -> None:
            layer.weight.add_(0.25)

        def on_its_way(*_: object) -> None:
            module.blocks[3].lin.weight.mul_(1.5)

        module.blocks[1].lin.register_forward_hook(used)
        module.blocks[2].lin.register_forward_hook(on_its_way)

    edit(resident)
    edit(streamed)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(streamed(x).cpu(), resident(x.to("sim")).cpu())
    pairs = zip(streamed.parameters(), resident.parameters(), strict=True)
    assert all(torch.equal(a._local_tensor.cpu(), b._local_tensor.cpu()) for a, b in pairs)
    sim.reset()


def test_a_forward_beside_other_ranks_is_not_repeated(group: None, sim: ModuleType) -> None:
    """Out of memory in one of them: the others would wait for what is exchanged once, not twice."""
    from diffusers_layerwise.attempt import Attempt

    module = columns("sim")
    assert not Attempt(module, torch.device("sim", 0), ()).is_repeatable()
    dist.destroy_process_group()
    assert Attempt(module, torch.device("sim", 0), ()).is_repeatable()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
