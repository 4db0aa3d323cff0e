"""Weights that a CPU uses where they are mapped: read ahead into the page cache, only when they aren't there."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from diffusers_layerwise import apply_layerwise_offload, readahead
from diffusers_layerwise.files import PAGE, FileMapping, file_mappings
from models import run
from test_checkpoint_files import chain, linux_only, stored, x

pytestmark = linux_only
MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(address, bytes, advice) of everything that is asked for."""
    found: list[tuple[int, int, int]] = []
    real = readahead._Run._ask

    def ask(self: Any, piece: tuple[int, int], advice: int) -> None:
        found.append((*piece, advice))
        real(self, piece, advice)

    monkeypatch.setattr(readahead._Run, "_ask", ask)
    return found


def drop(path: Path) -> None:
    """Drops a file from this process's page tables and from the page cache."""
    libc = ctypes.CDLL(None)
    for m in file_mappings():
        if m.path == str(path):
            libc.madvise(ctypes.c_void_p(m.start), ctypes.c_size_t(m.stop - m.start), 21)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def finish(handle: Any) -> None:
    """Waits for the thread."""
    thread = handle._runtime._ahead._thread
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()


def test_a_part_of_the_files_that_is_missing_is_seen_and_what_does_not_fit_is_left_alone() -> None:
    assert not readahead.is_worthwhile([True] * 3, 10, 100)
    assert readahead.is_worthwhile([True, True, False], 10, 100)
    assert readahead.is_worthwhile([False], 10, None)
    assert not readahead.is_worthwhile([False], 101, 100)


def test_ranges_are_whole_pages_of_files_in_order_of_use() -> None:
    mapping = FileMapping(10 * PAGE, 90 * PAGE, 0, 1, 1, "file")
    memory = [(20 * PAGE + 8, 21 * PAGE + 8), (21 * PAGE + 8, 22 * PAGE), (12 * PAGE, 12 * PAGE + 5), (PAGE, 2 * PAGE)]
    assert readahead.mapped_ranges(memory, [mapping]) == [(20 * PAGE, 22 * PAGE), (12 * PAGE, 13 * PAGE)]


@pytest.mark.parametrize("pages", [[1], [3, 500, 1], [64] * 40, [10_000]])
def test_samples_are_pages_from_all_over(pages: list[int]) -> None:
    ranges = [(i << 40, (i << 40) + n * PAGE) for i, n in enumerate(pages)]
    found = readahead.samples(ranges)
    assert 1 <= len(found) <= 2 * readahead.SAMPLES
    assert all(any(a <= at < b for a, b in ranges) and at % PAGE == 0 for at in found)
    assert found[0] == ranges[0][0]
    flat = [sum(pages[: at >> 40]) + (at & (1 << 40) - 1) // PAGE for at in found]
    step = max(1, sum(pages) // readahead.SAMPLES)
    assert all(b - a == step for a, b in itertools.pairwise(flat))
    assert sum(pages) - flat[-1] <= step


def test_weights_that_are_not_cached_are_asked_for_and_others_are_not(
    asked: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    module = models.make(models.Chain, 6, 256)
    path = stored(module, tmp_path)
    numbers = models.numbers(2, 256)
    expected = run(module, numbers)
    handle = apply_layerwise_offload(module, onload_device="cpu")
    for _ in range(3):
        assert torch.equal(run(module, numbers), expected)
    finish(handle)
    assert asked == []
    drop(path)
    assert torch.equal(run(module, numbers), expected)
    finish(handle)
    assert {advice for *_, advice in asked} == {3, 22}
    covered = sorted((at, at + count) for at, count, advice in asked if advice == 22)
    for parameter in (p for block in module.blocks for p in block.parameters()):
        at, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        assert any(a <= at < b for a, b in covered)
        assert any(a < end <= b for a, b in covered)
    asked.clear()
    assert torch.equal(run(module, numbers), expected)
    finish(handle)
    assert asked == []
    handle.remove()


def test_weights_stay_views_of_the_file_and_edits_stay_edits(asked: list[tuple[int, int, int]], tmp_path: Path) -> None:
    module = chain(tmp_path)
    handle = apply_layerwise_offload(module, onload_device="cpu")
    run(module, x())
    with torch.no_grad():
        module.blocks[2].lin.weight.add_(1)
    expected = run(module, x())
    before = [p.data_ptr() for p in module.parameters()]
    drop(tmp_path / "model.safetensors")
    assert torch.equal(run(module, x()), expected)
    finish(handle)
    assert [p.data_ptr() for p in module.parameters()] == before
    assert torch.equal(run(module, x()), expected)
    assert asked
    handle.remove()


@pytest.mark.parametrize("how", ["release", "remove"])
def test_the_thread_ends_with_the_handle(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    handle = apply_layerwise_offload(module, onload_device="cpu")
    monkeypatch.setattr(readahead.ReadAhead, "_is_cached", lambda self, address: False)
    monkeypatch.setattr(readahead._Run, "__call__", lambda self: self._end.wait(30))
    assert torch.equal(run(module, x()), expected)
    thread = handle._runtime._ahead._thread
    assert thread is not None
    assert torch.equal(run(module, x()), expected)
    assert handle._runtime._ahead._thread is thread
    getattr(handle, how)()
    assert not thread.is_alive()
