"""Removes each ordering rule of the engine in turn and checks that the tests notice.

    python tests/mutants/run.py               # all mutants
    python tests/mutants/run.py "free event"  # those whose name has this text

Each mutant is a copy of the package with one change, tested in a process of its own. It is caught when the tests fail.
The exit status is 1 when one survives, or when a mutant's text isn't in the code any more.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = ["sd15_controlnet-auto-50", "sd15_controlnet-speed-90", "flux-auto-50", "flux-speed-30"]
#: The quickest tests that must notice, in the order in which they usually do.
TESTS = [
    "tests/test_ordering_rules.py",
    "tests/test_engine_callers.py",
    "tests/test_engine_edits.py",
    "tests/test_engine_weights.py",
    "tests/test_engine.py",
    "tests/test_skipped_layers.py",
    "tests/test_devices.py",
    "tests/test_interrupts.py",
    "tests/test_reader.py",
    "tests/test_lora.py::test_adapters_change_between_steps[sd15-memory-resident]",
    *(f"tests/test_pipelines_on_sim.py::test_any_budget_is_kept_and_changes_no_bit[{case}]" for case in BUDGETS),
]
TIMEOUT = 300

UNCHANGED = Mutant("unchanged", "errors.py", "import difflib", "import difflib")


def outcome(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests noticed a mutant, and by which test."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "diffusers_layerwise"
        shutil.copytree(ROOT / "diffusers_layerwise", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutant.file
        text = path.read_text()
        for old, new in mutant.changes:
            if text.count(old) != 1:
                return False, f"its text occurs {text.count(old)} times in {mutant.file}"
            text = text.replace(old, new)
        path.write_text(text)
        tests = [str(ROOT / test) for test in TESTS if (ROOT / test.partition("::")[0]).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", "-p", "no:cacheprovider"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *tests]
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        try:
            # The working directory comes first on the path of `python -m`: the mutated package is imported.
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return True, "the tests hang"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1 and bool(failed), failed[0][:110] if failed else done.stdout[-200:].strip()


def main() -> int:
    """Runs the mutants, two at a time."""
    wanted = [m for m in MUTANTS if not sys.argv[1:] or any(text in m.name for text in sys.argv[1:])]
    started = time.monotonic()
    failing, how = outcome(UNCHANGED)
    if failing or "passed" not in how:
        print(f"the tests fail without a mutant: {how}")
        return 1
    survived = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for mutant, (caught, how) in zip(wanted, pool.map(outcome, wanted), strict=True):
            survived += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'}  {mutant.name}: {how}", flush=True)
    print(f"mutants: {len(wanted) - survived} of {len(wanted)} caught in {time.monotonic() - started:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
