"""The examples run as a newcomer runs them, each in a process of its own, on the small model that comes with them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
DIGITS = EXAMPLES / "digits"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run(name: str, folder: Path, *arguments: str, **environment: str) -> str:
    """What an example prints; its pictures go to `folder`."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bright(path: Path) -> float:
    """How much of a picture is strokes rather than ground."""
    return float((np.asarray(Image.open(path).convert("L")) > 100).mean())


def needs(*packages: str, extra: str) -> None:
    """Skips where a package is missing, and says how to have it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f'needs {", ".join(missing)}: pip install -e ".[{extra}]"')


def test_weights_of_the_digits_are_below_five_megabytes() -> None:
    files = list(DIGITS.rglob("*.safetensors"))
    assert len(files) == 3
    assert sum(path.stat().st_size for path in files) < 5_000_000


def test_every_example_says_what_to_run_is_short_and_is_listed() -> None:
    listed = set(re.findall(r"\[(\w+)\.py\]", (EXAMPLES / "README.md").read_text()))
    assert listed == set(SCRIPTS)
    for name in SCRIPTS:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f"{name}.py" in text or f"{name}:" in text, f"{name} doesn't say what to run"
    for name in set(SCRIPTS) - {"quickstart", "tiny_checkpoint", "train_digits"}:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


def test_quickstart_paints_the_digits_twice_alike(tmp_path: Path) -> None:
    printed = run("quickstart", tmp_path, "--device", "cpu")
    assert "identical" in printed
    sheet = Image.open(tmp_path / "quickstart.png").convert("RGB")
    assert sheet.size == (960, 232)
    rows = [np.asarray(sheet.crop((0, top, 960, top + 96))) for top in (20, 136)]
    assert np.array_equal(*rows)
    for i in range(10):  # each of the ten shows strokes on dark ground
        assert 0.03 < (rows[0][:, i * 96 : i * 96 + 96].max(axis=2) > 100).mean() < 0.5


@pytest.mark.slow
def test_quickstart_takes_prompts_and_a_checkpoint_of_ones_own(tmp_path: Path) -> None:
    printed = run("quickstart", tmp_path, str(DIGITS), "--prompt", "a red 3", "--steps", "2", "--mode", "auto")
    assert "identical" in printed
    assert Image.open(tmp_path / "quickstart.png").size == (96, 232)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["black-forest-labs/FLUX.1-dev"],
            "FLUX.1-dev has no model_index.json: expected a folder of a diffusers pipeline",
        ),
        (["--memory-budget", "lots"], "--memory-budget must be bytes as an int or a text such as '8GiB'"),
        (["--device", "nowhere"], "--device nowhere can't be used here: "),
        (["--mode", "manual"], "invalid choice: 'manual'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_quickstart_refuses_bad_arguments_before_it_loads_anything(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        quickstart.parse_args()
    assert message in capsys.readouterr().err


def test_quantized_without_torchao_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("")
    with pytest.raises(AssertionError, match="isn't installed: pip install torchao"):
        run("quantized", tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


def test_one_liner(tmp_path: Path) -> None:
    printed = run("one_liner", tmp_path)
    assert "layerwise offload on" in printed
    assert 0.03 < bright(tmp_path / "one_liner.png") < 0.5


@pytest.mark.slow
def test_choose_components(tmp_path: Path) -> None:
    printed = run("choose_components", tmp_path)
    assert printed.count("the same picture") == 4
    assert "please report" not in printed


def test_bigger_than_ram_reads_from_the_files(tmp_path: Path) -> None:
    printed = run("bigger_than_ram", tmp_path)
    read = [float(number) for number in re.findall(r"each pass reads (\S+) MiB", printed)]
    assert sum(read) > 1
    assert 0.03 < bright(tmp_path / "bigger_than_ram.png") < 0.5


@pytest.mark.slow
def test_quantized(tmp_path: Path) -> None:
    needs("torchao", extra="test-quantized")
    assert "the same picture resident: True" in run("quantized", tmp_path)
    assert 0.03 < bright(tmp_path / "quantized.png") < 0.5


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    if importlib.util.find_spec("diffusers_layerwise.compiled") is None:
        pytest.skip("this version doesn't stream compiled modules")
    assert "the same picture resident: True" in run("compile", tmp_path, BACKEND="aot_eager")


@pytest.mark.slow
def test_two_gpus(tmp_path: Path, sim: ModuleType) -> None:
    printed = run("two_gpus", tmp_path)
    assert printed.count("the same picture: True") == 2
    assert "resident on sim:1, as its device map says" in printed


@pytest.mark.slow
def test_training_makes_a_pipeline_that_the_quickstart_runs(tmp_path: Path) -> None:
    needs("sklearn", extra="train")
    run("train_digits", tmp_path, "made", "--vae-steps", "10", "--steps", "10")
    assert "identical" in run("quickstart", tmp_path, "made", "--prompt", "a seven", "--steps", "2")


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    """A folder with a LoRA, random but clearly to be seen."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    import lora

    class Pipe:
        unet = UNet2DConditionModel.from_pretrained(DIGITS / "unet", dtype=torch.bfloat16)

    factors = {key.removeprefix("unet."): value for key, value in lora.factors(Pipe, ["unet"], seed=1).items()}
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=factors, weight_name="mine.safetensors")
    return tmp_path


def test_lora_server_answers_concurrent_requests_in_turn(loras: Path) -> None:
    needs("fastapi", "uvicorn", "httpx", extra="server")
    needs("peft", extra="test")
    script = loras / "client.py"
    script.write_text(CLIENT)
    environment = {"MEMORY_BUDGET": "64MiB", "LORAS": str(loras), "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}"}
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as expected"


CLIENT = """
from concurrent.futures import ThreadPoolExecutor
from fastapi.testclient import TestClient
import lora_server

client = TestClient(lora_server.app)
plain = {"prompt": "a seven", "steps": 4}
wishes = [plain, {**plain, "lora": "mine"}, {**plain, "prompt": "a three"}, {**plain, "lora": "mine"}, plain]

def ask(wish):
    answer = client.post("/paint", json=wish)
    assert answer.status_code == 200, answer.text
    assert answer.content.startswith(b"\\x89PNG")
    return answer.content

alone = [ask(wish) for wish in wishes]
with ThreadPoolExecutor(5) as pool:
    together = list(pool.map(ask, wishes))
assert together == alone
assert alone[0] == alone[4] and alone[1] == alone[3] and len(set(alone)) == 3
missing = client.post("/paint", json={**plain, "lora": "../secret"})
assert missing.status_code == 404 and "mine" in missing.text
assert client.post("/paint", json={"steps": 4}).status_code == 422
assert "layerwise offload on" in client.get("/report").text
print("all as expected")
"""
