"""Fixtures for all tests: the simulated device, what a call costs on it, and skips that say why.

The simulated device is imported here, before anything imports diffusers, which looks for devices once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import compatibility

# Worker processes must order the elements of sets alike, or they would collect the tests in different orders.
os.environ.setdefault("PYTHONHASHSEED", "0")

SIM: ModuleType | None = None
WHY_NO_SIM = ""

if torch.cuda.is_available():
    WHY_NO_SIM = "a process has one accelerator, and here is a real one; hide it (CUDA_VISIBLE_DEVICES='') to run these"
    sys.modules["simdev"] = None  # type: ignore[assignment]  # makes `import simdev` an ImportError, so its tests skip
else:
    try:
        import simdev
        from simdev.testing import fresh_device

        SIM = simdev
    except ImportError as error:
        WHY_NO_SIM = str(error)

Spent = dict[str, int]
Meter = Callable[[Callable[[], Any]], tuple[Any, Spent]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses the simulated device, and skips what needs a real one where there is none.

    What counts a whole device's bytes comes first: some models keep tables there in caches of their classes.
    """
    items.sort(key=lambda item: item.path.name != "test_out_of_memory.py")
    for item in items:
        if "sim" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.sim)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a real accelerator; torch.cuda.is_available() is False"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--compatibility FILE` writes the page of what works with what."""
    parser.addoption("--compatibility", type=Path, help="write docs/compatibility.md of the results")


def pytest_configure(config: pytest.Config) -> None:
    """Collects results for the page, in the process that sees all of them."""
    path = config.getoption("--compatibility")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(compatibility.Results(path))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces and measurements that an earlier state of the code kept in the user's cache aren't what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if SIM is not None:  # processes that tests start find it built
            patch.setenv("SIMDEV_BUILD", str(Path(SIM._C.__file__).parents[1]))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cell(record_property: Callable[[str, Any], None]) -> compatibility.Cell:
    """Says which cell of docs/compatibility.md a test stands for."""
    return compatibility.make_cell(record_property)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """OpenMP's threads don't survive a fork, other threads have another number of them, and each number rounds
    differently."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """The simulated device, fresh, with every race an error; none may have been swallowed by the end of the test."""
    if SIM is None:
        pytest.skip(WHY_NO_SIM)
    with fresh_device():
        SIM.configure(mode="raise")
        yield SIM
        SIM.synchronize()
        assert SIM.races() == []


@pytest.fixture
def meter(sim: ModuleType) -> Meter:
    """Runs a function; returns its result and what it cost: differences of the simulated device's counters."""

    def measure(function: Callable[[], Any]) -> tuple[Any, Spent]:
        sim.synchronize()
        before = sim.counters()
        result = function()
        after = sim.counters()
        sim.synchronize()
        return result, {name: after[name] - before[name] for name in after}

    return measure


@pytest.fixture
def on_stream(sim: ModuleType) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which the caller computes on a stream of its own, ordered after the default one and before it."""

    @contextlib.contextmanager
    def other_stream() -> Iterator[None]:
        outer, inner = sim.current_stream(), sim.Stream()
        inner.wait_stream(outer)
        with sim.stream(inner):
            yield
        outer.wait_stream(inner)

    return other_stream
