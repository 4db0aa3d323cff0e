"""Building the simulated device, and its speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import simdev as sim
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from simdev.testing import fresh_device, on_device, pinned

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    with fresh_device():
        yield


def test_long_queues_stay_quick_to_check() -> None:
    """Nothing that is checked at each kernel may grow with the number of kernels before it."""
    stream, slot, source, ones = sim.Stream(), on_device(8, 8), pinned(8, 8), on_device(8, 8)

    def use_slot(times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            stream.wait_stream(sim.current_stream())
            with sim.stream(stream):
                slot.copy_(source, non_blocking=True)
            sim.current_stream().wait_stream(stream)
            ones @ slot
        return time.process_time() - start

    seconds = [use_slot(500) for _ in range(12)]
    assert min(seconds[-3:]) < 3 * min(seconds[:3])
    sim.current_stream().synchronize()
    assert sim.check_pending() == (0, 0, 0, 0)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with this package on its path."""
    path = os.pathsep.join([str(Path(sim.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_a_compiler_importing_says_what_is_missing(tmp_path: Path) -> None:
    """An ImportError, so that test modules can skip with its text."""
    result = run_python("import simdev", SIMDEV_BUILD=str(tmp_path), CXX="no-such-compiler")
    assert result.returncode == 1
    assert "Unavailable: the simulated device is not available: no C++ compiler ('no-such-compiler'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_availability_can_be_asked_without_building(tmp_path: Path) -> None:
    """By loading the file that knows, and nothing else."""
    toolchain = Path(sim.__file__).parent / "toolchain.py"
    code = f"import runpy; print(runpy.run_path({str(toolchain)!r})['available']())"
    missing = run_python(code, SIMDEV_BUILD=str(tmp_path), CXX="no-such-compiler")
    assert missing.stdout.startswith('(False, "no C++ compiler'), missing.stderr
    assert list(tmp_path.iterdir()) == []
    assert sim.available() == (True, "")


def test_compiled_library_is_found_again(tmp_path: Path) -> None:
    """Once built, it needs no compiler any more."""
    result = run_python("import simdev; print(simdev.device_count())", PATH=str(tmp_path))
    assert result.stdout.strip() == "1", result.stderr


@pytest.mark.slow
def test_two_processes_can_build_at_once(tmp_path: Path) -> None:
    """One of them compiles, the other waits and takes the result."""
    command = [sys.executable, "-c", "import simdev; print(simdev.OPS_TAKEN)"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sim.__file__).parents[1]), "SIMDEV_BUILD": str(tmp_path)}
    builders = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [builder.communicate(timeout=280)[0].strip() for builder in builders]
    assert outputs == [str(sim.OPS_TAKEN)] * 2
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert list(tmp_path.rglob("build-*")) == []
