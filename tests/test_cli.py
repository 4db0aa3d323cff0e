"""The command line."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import factory
from diffusers_layerwise import cli, hardware
from diffusers_layerwise.cli import main
from diffusers_layerwise.hardware import PRESETS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pipeline without weight files."""
    place = tmp_path_factory.mktemp("flux")
    factory.CASES["flux"].build().save_pretrained(place)
    for path in place.glob("**/*.safetensors"):
        path.unlink()
    return place


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(folder: Path, *more: str) -> list[str]:
    """The command's arguments."""
    size = ["--height", "16", "--width", "16", "--steps", "2", "--arg", "max_sequence_length=32"]
    return ["plan", str(folder), "--hardware", "rtx 4090", *size, *more]


def test_plan_prints_a_table_a_chart_and_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(folder, "--memory", "8GiB", "--compare")) == 0
    out = capsys.readouterr().out
    for text in ("transformer", "runs from", "budget against seconds", "###", "this plan", "sequential offload"):
        assert text in out


def test_plan_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(folder, "--json", "--compare")) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["smallest_budget"] <= values["resident_budget"]
    assert values["sweep"][0]["budget"] == values["smallest_budget"]
    assert "group offload, leaf, stream" in [rival["name"] for rival in values["compare"]]


def test_plan_knows_host_memory_and_the_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(folder, "--mode", "memory", "--json")) == 0
    free = json.loads(capsys.readouterr().out)
    assert (free["disk_bytes"], free["host_peak_bytes"]) == (0, None)
    assert main(plan(folder, "--mode", "memory", "--host-memory", "100KiB", "--json")) == 0
    tight = json.loads(capsys.readouterr().out)
    parts = {p["name"]: p for p in tight["predictions"]}
    # Nothing can be held beside the staging buffers: the denoiser is read in each of its passes.
    assert parts["transformer"]["disk_bytes"] == parts["transformer"]["streamed_bytes"] * parts["transformer"]["calls"]
    assert tight["disk_bytes"] == sum(p["disk_bytes"] for p in parts.values()) > 0
    assert tight["disk_step_seconds"] > 0
    assert tight["bound"] == "disk"
    assert tight["total_seconds"] > free["total_seconds"]
    assert set(tight["host"]["nbytes"]["transformer"]) == {"file"}
    assert main(plan(folder, "--host-memory", "64GiB")) == 0
    out = capsys.readouterr().out
    assert "host memory" in out
    assert "0 B a call from files" in out


def test_plan_draws(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(plan(folder, "--plot", str(tmp_path / "x.png"))) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "10KiB"], "smallest budget that works"),
        (["--memory", "lots"], "memory_budget must be bytes"),
        (["--hardware", "RTX 4900"], "Did you mean 'RTX 4090'"),
        (["--mode", "fast"], "mode must be one of"),
        (["--arg", "nothing"], "--arg needs NAME=VALUE"),
        (["--arg", "=3"], "--arg needs NAME=VALUE"),
        (["--arg", "hardware=A100"], "use --hardware"),
        (["--arg", "height=32"], "given by its own option already"),
        (["--arg", "prompt=3"], "`prompt` has to be of type"),
        (["--memory", "0"], "must be more than 0 bytes, got '0'"),
        (["--plot", "."], "'.' is a folder"),
        (["--arg", "heigth=3"], "Did you mean 'height'"),
        (["--components", "unett"], "unett"),
    ],
)
def test_what_the_user_can_mend_is_a_message_and_exit_code_2(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan(folder, *arguments)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_folder_that_is_none_and_a_bad_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "model_index.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(tmp_path), "--height", "0"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("value", ["x", "1.5", "-3", "9" * 5000])
def test_a_count_that_is_none_is_said_in_words(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", ".", f"--height={value}"])
    assert "argument --height: must be an integer of 1 or more, such as 20, got" in capsys.readouterr().err


def test_an_index_with_a_component_that_is_none_is_a_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "flux"
    shutil.copytree(folder, place)
    index = json.loads((place / "model_index.json").read_text())
    (place / "model_index.json").write_text(json.dumps({**index, "vae": "x", "transformer": 3}))
    assert main(plan(place)) == 2
    assert "can't be made of what" in capsys.readouterr().err


def test_a_value_that_is_nested_too_deeply_is_text() -> None:
    text = "[" * 100_000
    options = cli._parser().parse_args(["plan", ".", "--arg", f"x={text}"])
    assert cli.call_arguments(options) == {"x": text}


class Pipe(io.RawIOBase):
    """A stream that nobody reads any more, or whose disk is full."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def writable(self) -> bool:
        """As files to write to say."""
        return True

    def write(self, _: object) -> int:
        """Fails."""
        raise self.error


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(32, "Broken pipe"), 0), (OSError(28, "No space"), 2)])
def test_output_that_nobody_takes_is_no_traceback(
    error: OSError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.TextIOWrapper(io.BufferedWriter(Pipe(error)), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["cache"]) == code
    assert ("the output can't be written" in capsys.readouterr().err) == bool(code)
    out.buffer.raw.write = len  # type: ignore[attr-defined]  # what is left in the buffer goes with it


def test_python_m_ends_without_a_word_when_its_reader_has_gone() -> None:
    command = [sys.executable, "-m", "diffusers_layerwise", "cache"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    errors = program.stderr.read()
    assert program.wait() == 0, errors
    assert "BrokenPipe" not in errors


def test_closed_streams_are_written_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["cache"]) == 0
    assert main(["plan", "/nowhere"]) == 2


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"f\xfc\udcff"), ("utf-8", r"fü\udcff")])
def test_names_that_a_stream_has_no_letters_for_are_escaped(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    name = "fü\udcff"  # a byte that is no UTF-8 arrives as this
    monkeypatch.setattr(cli, "run_cache", lambda _: name)
    assert main(["cache"]) == 0
    assert main(["plan", name]) == 2
    out.seek(0)
    err.seek(0)
    assert out.read() == shown + "\n"
    assert "model_index.json" in err.read()


def test_ctrl_c_is_a_word_and_the_shell_s_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_cache", interrupted)
    assert main(["cache"]) == 130
    assert capsys.readouterr().err == "diffusers-layerwise: interrupted\n"


def test_hardware_measures_and_keeps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.devices, "measure", lambda device: PRESETS["L4"])
    assert main(["hardware", "--device", "cpu"]) == 0
    assert "kept in" in capsys.readouterr().out
    assert hardware.load("L4") == PRESETS["L4"]
    assert main(["hardware", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "L4"


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--device", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_python_m_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_layerwise", "plan", "/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "model_index.json" in done.stderr
    assert "Traceback" not in done.stderr
