"""Bars for long work of the host, which obey diffusers' and the hub's switches, and what is logged."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.utils import are_progress_bars_disabled

import diffusers_layerwise
import factory
import models
import test_checkpoint_files
from diffusers_layerwise import progress
from diffusers_layerwise.log import get_logger
from diffusers_layerwise.progress import Setting, bar, delay_of, options_for, using
from factory import CASES
from models import run, stream

PACKAGE = Path(diffusers_layerwise.__file__).parent


class Terminal(io.StringIO):
    """Lines can be taken back there."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Where bars go that are no pipeline's, with everything being long work."""
    found = Terminal()
    monkeypatch.setattr(progress, "LONG_BYTES", 1)
    monkeypatch.setattr(progress, "SHORT_BYTES", 1)
    token = progress._setting.set(Setting({"file": found}))
    yield found
    progress._setting.reset(token)


def screen(text: str) -> str:
    """What a terminal shows in the end: a line is written over after a return, and the one above after `ESC [A`."""
    rows: list[list[str]] = [[]]
    row, column = 0, 0
    for part in re.findall(r"\x1b\[A|.|\n|\r", text):
        if part == "\x1b[A":
            row = max(0, row - 1)
        elif part == "\n":
            row, column = row + 1, 0
            rows += [[]] if row == len(rows) else []
        elif part == "\r":
            column = 0
        else:
            rows[row] += [" "] * (column - len(rows[row]) + 1)
            rows[row][column] = part
            column += 1
    return "\n".join("".join(line).rstrip() for line in rows)


def pipe_with(file: io.StringIO, **options: Any) -> DiffusionPipeline:
    """A small pipeline with options for its bars."""
    pipe = CASES["flux"].build()
    pipe.set_progress_bar_config(file=file, ncols=90, **options)
    return pipe


# ---- decisions
def test_only_what_takes_long_is_shown() -> None:
    assert delay_of(0) is None
    assert delay_of(progress.SHORT_BYTES - 1) is None
    assert delay_of(progress.SHORT_BYTES) == progress.PATIENCE == 1.0
    assert delay_of(progress.LONG_BYTES - 1) == progress.PATIENCE
    assert delay_of(progress.LONG_BYTES) == 0.0


@pytest.mark.parametrize(
    ("is_call", "can_nest", "left"),
    [(False, True, True), (False, False, True), (True, True, False), (True, False, None)],
)
def test_in_a_call_bars_stand_below_the_steps_and_go_away_or_there_are_none(
    is_call: bool, can_nest: bool, left: bool | None
) -> None:
    found = options_for("packing", 2 << 30, Setting({"leave": True}, is_call), can_nest)
    assert (None if found is None else found["leave"]) == left


def test_options_of_the_pipelines_bar_count_but_for_what_they_say_of_steps() -> None:
    given = {
        "ncols": 60,
        "colour": "red",
        "disable": True,
        "desc": "denoising",
        "total": 50,
        "unit": "step",
        "initial": 3,
    }
    found = options_for("vae: packing", 2 << 30, Setting(given), True)
    assert found == {
        "ncols": 60,
        "colour": "red",
        "disable": True,
        "desc": "vae: packing",
        "total": 2 << 30,
        "unit": "B",
        "unit_scale": True,
        "unit_divisor": 1024,
        "delay": 0.0,
    }


# ---- bars
def test_a_bar_is_tqdms_and_reaches_its_end(terminal: Terminal) -> None:
    with bar("transformer: packing", 4 << 20) as advance:
        for _ in range(4):
            advance(1 << 20)
    text = terminal.getvalue()
    assert "transformer: packing: 100%|" in text
    assert "4.00M/4.00M" in text


def test_short_work_makes_no_bar_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers_logging, "tqdm", lambda **_: pytest.fail("a bar was made"))
    with bar("packing", progress.SHORT_BYTES - 1) as advance:
        advance(1)


def test_what_is_over_within_a_second_is_not_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_BYTES", 1 << 40)
    with bar("packing", 64 << 20) as advance:
        advance(64 << 20)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize("kind", ["none", "closed"])
def test_work_is_done_where_no_bar_can_be_written(kind: str, is_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without a console has no stderr."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else closed)
    monkeypatch.setattr(diffusers_logging, "tqdm", lambda **_: pytest.fail("a bar was made"))
    done: list[int] = []
    with progress.using(object(), is_call), bar("packing", 2 << 30) as advance:
        advance(1)
        done.append(1)
    assert done == [1]


def test_an_exception_ends_the_bar(terminal: Terminal) -> None:
    with contextlib.suppress(KeyError), bar("packing", 8) as advance:
        advance(1)
        raise KeyError
    assert terminal.getvalue().endswith("\n")


@contextlib.contextmanager
def _diffusers_off() -> Iterator[None]:
    diffusers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()


@contextlib.contextmanager
def _hub_off() -> Iterator[None]:
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _environment_off() -> Iterator[None]:
    """The hub reads `HF_HUB_DISABLE_PROGRESS_BARS` when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        # By its name: `huggingface_hub.utils.tqdm` is the class of that name as well.
        module = sys.modules[are_progress_bars_disabled.__module__]
        patch.setattr(module, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield


@contextlib.contextmanager
def _pipeline_off() -> Iterator[None]:
    with using(pipe_with(progress._setting.get().options["file"], disable=True), is_call=False):
        yield


@contextlib.contextmanager
def _other_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: 1)
        yield


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "diffusers.utils.logging.disable_progress_bar": _diffusers_off,
    "huggingface_hub.utils.disable_progress_bars": _hub_off,
    "HF_HUB_DISABLE_PROGRESS_BARS": _environment_off,
    "set_progress_bar_config(disable=True)": _pipeline_off,
    "another process of several": _other_rank,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_obeyed(switch: str, terminal: Terminal) -> None:
    with SWITCHES[switch](), bar("packing", 64) as advance:
        advance(64)
    assert terminal.getvalue() == ""
    with bar("packing", 64) as advance:
        advance(64)
    assert "packing" in terminal.getvalue()


# ---- what is shown
def test_packing_in_a_call_is_shown_below_the_steps_and_taken_back(terminal: Terminal, sim: ModuleType) -> None:
    pipe = pipe_with(terminal)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("flux", pipe)
    assert "transformer: packing" in terminal.getvalue()
    left = screen(terminal.getvalue())
    assert "packing" not in left
    assert "100%" in left


def test_nothing_of_ours_tears_the_steps_apart_in_a_log_file(terminal: Terminal, sim: ModuleType) -> None:
    file = io.StringIO()
    pipe = pipe_with(file)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("flux", pipe)
    assert "packing" not in file.getvalue()
    assert "it/s" in file.getvalue() or "s/it" in file.getvalue()


def test_a_pipeline_without_bars_shows_none_of_ours(terminal: Terminal, sim: ModuleType) -> None:
    pipe = pipe_with(terminal, disable=True).to("sim")
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("flux", pipe)
    handle.release()
    factory.run("flux", pipe)
    pipe.disable_layerwise_offload()
    assert terminal.getvalue() == ""


def test_moving_to_the_host_and_back_is_shown(terminal: Terminal, sim: ModuleType) -> None:
    pipe = pipe_with(terminal).to("sim")
    pipe.enable_layerwise_offload(["transformer"], mode="memory", onload_device="sim")
    assert "transformer: moving to the host: 100%" in terminal.getvalue()
    factory.run("flux", pipe)
    pipe.disable_layerwise_offload()
    assert "transformer: moving back: 100%" in terminal.getvalue()


def test_reading_files_for_a_comparison_is_shown(terminal: Terminal, tmp_path: Path) -> None:
    module = test_checkpoint_files.chain(tmp_path)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    with stream(module, device="cpu", config={"host": "file", "checkpoint": str(tmp_path)}):
        assert "Chain: comparing with its files: 100%" in terminal.getvalue()


def test_converting_a_checkpoint_is_shown(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    CASES["flux"].build().save_pretrained(tmp_path / "pipe")
    terminal.truncate(0)
    diffusers_layerwise.from_pretrained(tmp_path / "pipe", torch_dtype=torch.bfloat16)
    text = terminal.getvalue()
    assert "transformer: converting to bfloat16: 100%" in text
    assert "reading diffusion_pytorch_model.safetensors: 100%" in text


def test_results_are_the_same_with_bars(terminal: Terminal, sim: ModuleType) -> None:
    module, x = models.make(models.SkipUNet), models.numbers(2, models.WIDTH)
    expected = run(module, x)
    handle = stream(module)
    for _ in range(3):
        assert torch.equal(run(module, x), expected)
        handle.release()
    handle.remove()
    assert torch.equal(run(module, x), expected)
    assert "SkipUNet: packing: 100%" in terminal.getvalue()


# ---- what is logged
def test_every_logger_is_below_diffusers_own() -> None:
    """`logging.get_logger(__name__)` of diffusers sets up a name outside of its own tree, which nothing governs."""
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusers")
            for alias in node.names
        }
        assert "logging" not in imported or path.stem in ("log", "progress"), path.name
        calls = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert not any(call in ("warnings.warn", "logging.getLogger", "print") for call in calls) or path.stem in (
            "cli",
            "log",
        ), path.name
    assert get_logger("diffusers_layerwise.fitting").name == "diffusers.diffusers_layerwise.fitting"


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.records.append(record)


@pytest.fixture
def said() -> Iterator[Said]:
    """What reaches diffusers' own logger; its verbosity is as before afterwards."""
    found, before = Said(), diffusers_logging.get_verbosity()
    diffusers_logging.add_handler(found)
    yield found
    diffusers_logging.remove_handler(found)
    diffusers_logging.set_verbosity(before)


@pytest.mark.parametrize("verbosity", ["info", "warning", "error"])
def test_the_verbosity_of_diffusers_counts(said: Said, verbosity: str) -> None:
    getattr(diffusers_logging, f"set_verbosity_{verbosity}")()
    logger = get_logger("diffusers_layerwise.sample")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "said")
    found = {record.levelname.lower() for record in said.records}
    levels = ["info", "warning", "error"]
    assert found == set(levels[levels.index(verbosity) :])


def decisions(said: Said) -> list[str]:
    """The lines that say what becomes of a component, once each."""
    lines = [r.getMessage() for r in said.records if r.name.startswith("diffusers.diffusers_layerwise")]
    assert all(record.levelno == logging.INFO for record in said.records if "resident" in record.getMessage())
    return [line for line in lines if "; peak " in line]


def test_one_line_for_each_component_says_what_was_decided(said: Said, sim: ModuleType) -> None:
    diffusers_logging.set_verbosity_info()
    pipe = CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(
        mode="manual", components={"transformer": {"resident": 0.5}}, onload_device="sim"
    )
    factory.run("flux", pipe)
    lines = decisions(said)
    assert len(lines) == len(handle.plan.components)
    (line,) = [line for line in lines if line.startswith("transformer: ")]
    kept, layers = handle.plan.component("transformer").layers()
    assert line.startswith(f"transformer: {kept} of {layers} layers resident, {layers - kept} streamed")


def test_so_it_does_for_a_module_without_a_pipeline(said: Said, sim: ModuleType) -> None:
    diffusers_logging.set_verbosity_info()
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    stream(module, mode="speed", share=0.5)
    for _ in range(8):
        run(module, x)
    lines = decisions(said)
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("MlpStack: ") and " layers resident, " in line for line in lines)
    run(module, x)
    assert decisions(said) == lines


def test_nothing_is_said_by_default(said: Said, sim: ModuleType) -> None:
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    stream(module)
    for _ in range(4):
        run(module, x)
    assert said.records == []
