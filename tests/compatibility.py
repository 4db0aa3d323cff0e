"""Makes docs/compatibility.md of the tests' results: run pytest with `--compatibility docs/compatibility.md`.

A test that stands for a cell of a table says so with the `cell` fixture. Nothing in the page is written by hand but the
sentences above the tables.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

Cell = Callable[..., None]

#: Title and what a cell of it stands for, in the order of the page.
TABLES = {
    "Other offloads and switches": "Each cell was tried before the first call and after it, with several selections of "
    "components, two calls each, against the ordinary pipeline's image.",
    "Components that arrive late": "After layerwise offload was enabled on a pipeline that had been under the offload "
    "named above. Two calls, in modes `memory` and `auto`.",
    "Moves": "`.to()` and its relatives, on a pipeline and on one component of it, before any call and after two.",
    "Device maps": "accelerate's maps as residency plans, on two devices, the host and disk; given back afterwards.",
    "LoRA and adapters": "Sixteen changes one after the other (load, mix, hot-swap, fuse, unfuse, delete, unload ...) "
    "with two calls after each, or a change after each step of one call. *before* and *after* enabling.",
    "Caches and switches of models": "Against the resident pipeline with the same cache or switch, two calls each. "
    "*Before ours*: put on before layerwise offload was enabled. What can be taken off again was, in both orders.",
    "Quantised weights": "Against the same quantised component as a resident one on the same device. *sim*: the "
    "simulated device; *cpu*: the CPU as the execution device, for kernels that the simulated one doesn't have.",
    "torch.compile": "Against the same pipeline, resident and compiled with the same backend (eager): no graph breaks, "
    "nothing compiled again after the first call. *Before ours*: compiled before layerwise offload was enabled.",
    "Several ranks": "torch.distributed over gloo on the CPU, in two and in four processes, against the same ranks "
    "without offload.",
    "Schedulers": "Each in a pipeline that uses it, all components streaming in mode `memory`, two calls, on the "
    "simulated device.",
    "Training": "Gradients and train mode on a component that streams.",
    "Pipelines": "`all`: every component streams, in mode `memory`. `dit`: the denoisers stream, the rest is placed on "
    "the device. Two calls with different prompts; then everything is taken off, and each weight is where it was.",
}
HEAD = """# Compatibility

Made by the tests, from their results: each cell is the outcome of one or more of them on the simulated device. *right*
means bit-identical to the ordinary pipeline, without a race. *refused* means an error that names the component and what
to call instead, with nothing changed. The command is `python -m pytest -m "slow or not slow" --compatibility
docs/compatibility.md`.
"""


class Results:
    """Collects cells and writes the page. Of several tests for one cell the worst outcome counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[str, dict[str, dict[str, set[str]]]] = {name: {} for name in TABLES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes a test's outcome."""
        for key, value in report.user_properties:
            if key != "cell" or (report.when != "call" and report.passed):
                continue
            table, row, column, promise = value
            outcome = promise if report.passed else "does not apply" if report.skipped else "FAILS"
            self.tables[table].setdefault(row, {}).setdefault(column, set()).add(outcome)

    def pytest_sessionfinish(self) -> None:
        """Writes the page."""
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "accelerate", "transformers"))
        parts = [HEAD, f"Versions: {versions}, Python {'.'.join(platform.python_version_tuple()[:2])}.\n"]
        for title, text in TABLES.items():
            if self.tables[title]:
                parts += [f"## {title}\n", text + "\n", self._table(self.tables[title])]
        self.path.write_text("\n".join(parts))

    def _table(self, rows: dict[str, dict[str, set[str]]]) -> str:
        columns = sorted({column for row in rows.values() for column in row}, key=_place)
        lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for name in sorted(rows):
            cells = [_worst(rows[name].get(column, set())) for column in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def _place(column: str) -> tuple[int, int, str]:
    """Where a column stands: by mode, before in front of after; results come in any order."""
    first, _, rest = column.partition(",")
    modes = ("auto", "memory", "speed", "manual")
    when = f"{rest or first} "
    return (
        modes.index(first) if first in modes else len(modes),
        0 if "before " in when else 1 if "after " in when else 2,
        column,
    )


def _worst(outcomes: set[str]) -> str:
    if "FAILS" in outcomes:
        return "FAILS"
    others = sorted(outcomes - {"does not apply"})
    return ", ".join(others) if others else "does not apply" if outcomes else ""


def make_cell(record_property: Callable[[str, Any], None]) -> Cell:
    """What the `cell` fixture gives: call it with table, row, column and what is promised."""

    def cell(table: str, row: str, column: str, promise: str = "right") -> None:
        assert table in TABLES
        record_property("cell", (table, row, column, promise))

    return cell
