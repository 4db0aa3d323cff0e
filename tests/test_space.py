"""The Space: its pipeline under ZeroGPU's rules, and its page in a browser."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zero_gpu

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_thread")
SPACE = ROOT / "examples" / "space"
DIGITS = ROOT / "examples" / "digits"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PROMPT, STEPS = "a red seven", 2
MIB = 2**20


@pytest.fixture(scope="module")
def painter() -> Any:
    """The Space's module that has no page."""
    spec = importlib.util.spec_from_file_location("space_painter", SPACE / "painter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


@functools.cache
def stock(painter: Any, device: str) -> Any:
    """The pipeline without layerwise offload."""
    return painter.load(str(DIGITS)).to(device)


def resident(painter: Any, device: str = "cpu", seed: int = 0) -> np.ndarray:
    """What the stock pipeline paints."""
    pipe = stock(painter, device)
    output = pipe(PROMPT, num_inference_steps=STEPS, generator=torch.Generator("cpu").manual_seed(seed))
    return pixels(painter.enlarged(output.images[0]))


# ---- without a page


@pytest.mark.parametrize(("mode", "budget"), [("memory", 2 * MIB), ("auto", 2 * MIB), ("speed", 64 * MIB)])
def test_paints_what_the_stock_pipeline_paints_and_tells_how(painter: Any, mode: str, budget: int) -> None:
    space = painter.Painter(painter.load(str(DIGITS)))
    image, line, report, timeline = space.paint(PROMPT, mode, budget, STEPS, 0)
    assert np.array_equal(pixels(image), resident(painter))
    assert "of the device" in line
    assert f"mode {mode}" in report
    assert timeline.startswith("<iframe")


def test_requests_at_the_same_time_get_their_own_settings(painter: Any) -> None:
    space = painter.Painter(painter.load(str(DIGITS)))
    wanted = [("memory", 2 * MIB, 0), ("auto", 2 * MIB, 1), ("speed", 64 * MIB, 2)]
    found: dict[int, Any] = {}

    def ask(mode: str, budget: int, seed: int) -> None:
        found[seed] = space.paint(PROMPT, mode, budget, STEPS, seed)

    threads = [threading.Thread(target=ask, args=each) for each in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(zero_gpu.PATIENCE)
    for mode, _, seed in wanted:
        image, _, report, _ = found[seed]
        assert np.array_equal(pixels(image), resident(painter, seed=seed))
        assert f"mode {mode}" in report


def test_a_budget_that_is_too_small_is_said_and_the_next_request_works(painter: Any) -> None:
    space = painter.Painter(painter.load(str(DIGITS)))
    with pytest.raises(torch.OutOfMemoryError, match="smallest"):
        space.paint(PROMPT, "auto", 1000, STEPS, 0)
    assert np.array_equal(pixels(space.paint(PROMPT, "auto", 2 * MIB, STEPS, 0)[0]), resident(painter))


def test_settings_that_stay_keep_what_was_learned(painter: Any) -> None:
    space = painter.Painter(painter.load(str(DIGITS)))
    space.paint(PROMPT, "auto", 2 * MIB, STEPS, 0)
    handle = space.pipe.layerwise_offload
    space.paint(PROMPT, "auto", 2 * MIB, STEPS, 1)
    assert space.pipe.layerwise_offload is handle
    space.paint(PROMPT, "memory", 2 * MIB, STEPS, 1)
    assert space.pipe.layerwise_offload is not handle


# ---- ZeroGPU's rules


@needs_fork
def test_under_zerogpu_a_forked_worker_paints_and_its_parent_touches_no_device(
    sim: ModuleType, painter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = zero_gpu.Worker(lambda: None, lambda seed: resident(painter, "sim", seed))
    expected = [other.call(seed) for seed in (0, 1)]
    other.stop()
    monkeypatch.setattr(painter, "HOST", "pageable")  # as SPACES_ZERO_GPU has it
    model = tmp_path / "digits"
    shutil.copytree(DIGITS, model)
    gc.collect()  # what earlier tests left behind doesn't go in between
    threads, before = set(threading.enumerate()), (sim.mem(0), sim.counters())
    with zero_gpu.parent(sim) as unpatch:
        space = painter.Painter(painter.load(str(model)))
        held = {name: weight.data_ptr() for name, weight in space.pipe.unet.named_parameters()}
        shutil.rmtree(model)  # files of the hub's cache may go once they are loaded

        def paint(*args: Any) -> tuple[np.ndarray, str, str, bool, str]:
            image, _, report, timeline = space.paint(*args)
            after = {name: weight.data_ptr() for name, weight in space.pipe.unet.named_parameters()}
            shared = after == held and sim.mem(0)["registered"] == 0
            return pixels(image), report, timeline, shared, str(space.pipe._execution_device)

        for _ in range(2):  # two workers of one parent
            worker = zero_gpu.Worker(unpatch, paint)
            for mode, budget, seed in (("auto", 2 * MIB, 0), ("memory", 2 * MIB, 1), ("memory", 2 * MIB, 0)):
                image, report, timeline, shared, device = worker.call(PROMPT, mode, budget, STEPS, seed)
                assert np.array_equal(image, expected[seed])
                assert "layerwise offload on sim" in report
                assert "unet on sim" in timeline
                assert device.startswith("sim")
                assert shared, "a worker made a copy of weights that all workers share"
            worker.stop()
        assert not space.pipe.layerwise_offload.report().copies
    assert (sim.mem(0), sim.counters()) == before
    assert not set(threading.enumerate()) - threads


def test_the_stand_in_notices_who_uses_a_device(sim: ModuleType) -> None:
    with zero_gpu.parent(sim):
        for use in (
            lambda: torch.empty(1, device="sim"),
            lambda: torch.ones(1).to("sim"),
            lambda: torch.Stream(device="sim"),
            lambda: torch.ones(1).pin_memory(),
            sim.synchronize,
        ):
            with pytest.raises(zero_gpu.DeviceReached):
                use()
        assert sim.mem_get_info()[0] == zero_gpu.TOLD[0]
    assert sim.mem_get_info() != zero_gpu.TOLD
    torch.empty(1, device="sim")


REAL = """
import spaces, torch, threading
from painter import Painter, load
space = Painter(load({model!r}))
assert not torch.cuda.is_initialized()
ours = [each for each in threading.enumerate() if type(each).__name__ != "TMonitor"]  # that one is a bar's
assert len(ours) == 1, ours
assert str(space.pipe._execution_device) == "cuda:0", space.pipe._execution_device
try:
    torch.cuda.init()
except RuntimeError as error:
    print("parent:", str(error).split(" (")[0])
"""


@pytest.mark.slow
@needs_fork
def test_under_the_real_package_nothing_is_initialised_before_a_worker(tmp_path: Path) -> None:
    """The parent's side can be had without a device. The worker's side needs one; the stand-in's test is for that."""
    if torch.version.cuda is None:
        pytest.skip("spaces replaces parts of a CUDA build of torch; this build has none")
    pytest.importorskip("spaces", reason='needs spaces: pip install -e ".[space]"')
    address = "http://127.0.0.1:9"  # where devices are lent: nobody is asked before a request
    environment = {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": address, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", REAL.format(model=str(DIGITS))],
        cwd=SPACE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SPACE)]), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "parent: Low-level CUDA init" in done.stdout


# ---- what is uploaded


def front_matter() -> dict[str, str]:
    text = (SPACE / "README.md").read_text()
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert found is not None
    return dict(line.split(": ", 1) for line in found[1].splitlines())


def test_the_readme_says_what_a_space_has_to_know() -> None:
    matter = front_matter()
    assert matter["sdk"] == "gradio"
    assert matter["license"] == "apache-2.0"
    assert (SPACE / matter["app_file"]).is_file()
    assert re.fullmatch(r"\d+\.\d+\.\d+", matter["sdk_version"])


def test_requirements_have_versions_and_are_those_of_the_package() -> None:
    lines = [line for line in (SPACE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    asked = {re.split(r"[<>=]", line)[0] for line in lines}
    assert all(re.search(r"[=>]=\d", line) for line in lines)
    text = (ROOT / "pyproject.toml").read_text()
    lists = [
        re.search(rf"^{name} = \[(.*?)\]", text, re.DOTALL | re.MULTILINE) for name in ("dependencies", "examples")
    ]
    needed = {name for found in lists if found for name in re.findall(r'"([\w-]+)', found[1])}
    assert {"torch", "transformers", "pillow"} <= needed
    assert asked >= needed


# ---- the page


@pytest.fixture
def paint(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page's button calls."""
    pytest.importorskip("gradio")
    monkeypatch.syspath_prepend(str(SPACE))
    monkeypatch.setitem(sys.modules, "spaces", None)  # it patches torch for good
    spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    assert spec is not None
    assert spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    page = app.make_page(app.Painter(app.load(str(DIGITS))), str(DIGITS))
    return next(each.fn for each in page.fns.values() if each.api_name == "paint")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": 0.001}, "smallest"),
        ({"budget": 0.0}, "memory_budget must be more than 0 bytes"),
        ({"budget": None}, "empty"),
        ({"seed": None}, "empty"),
        ({"steps": None}, "empty"),
        ({"seed": 10**30}, "Overflow"),
        ({"steps": 0}, "1 step"),
        ({"prompt": None}, "prompt"),
        ({"mode": None}, "mode must be one of"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
)
def test_what_can_t_be_painted_is_said_to_who_asked(paint: Any, changed: dict[str, Any], message: str) -> None:
    """Gradio shows the text of its own errors alone."""
    import gradio

    wanted = {"prompt": PROMPT, "mode": "auto", "budget": 2.0, "steps": STEPS, "seed": 0}
    with pytest.raises(gradio.Error) as raised:
        paint(**{**wanted, **changed})
    assert message in str(raised.value.message)
    assert np.array_equal(pixels(paint(**wanted)[0]), resident(sys.modules["painter"]))


def chromium() -> str:
    """A browser of the system's, or a skip that says why."""
    if importlib.util.find_spec("gradio") is None or importlib.util.find_spec("playwright") is None:
        pytest.skip('needs gradio and playwright: pip install -e ".[space]"')
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("needs a browser: none of chromium, chromium-browser and google-chrome is here; CHROMIUM names one")
    return found


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The Space, in a process of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    settings |= {"OMP_NUM_THREADS": "1", "MODEL": "", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w+") as log:
        server = subprocess.Popen(
            [sys.executable, SPACE / "app.py"], cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log
        )
        try:
            address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            while True:
                try:
                    opener.open(address, timeout=5).close()
                    break
                except OSError:
                    over = server.poll() is not None or time.monotonic() > deadline
                    assert not over, (folder / "log").read_text()
                    time.sleep(0.3)
            yield address
        finally:
            server.kill()
            server.wait()


def ask(page: Any, mode: str) -> str:
    """Presses the button and waits for the report of that mode."""
    page.get_by_label(mode, exact=True).check()
    page.get_by_role("button", name="Paint").click()
    page.locator(".report", has_text=f"mode {mode}:").wait_for(timeout=120_000)
    return str(page.locator(".report").inner_text())


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_paints_and_shows_report_and_timeline(tmp_path: Path, theme: str) -> None:
    browser_path = chromium()
    from playwright.sync_api import sync_playwright

    with served(tmp_path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=theme).new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.get_by_role("button", name="Paint").wait_for()
        for mode in ("memory", "auto"):
            report = ask(page, mode)
            assert all(name in report for name in ("unet", "vae", "text_encoder", "planned"))
            picture = page.locator("img").first
            picture.wait_for()
            assert page.evaluate("e => e.complete && e.naturalWidth", picture.element_handle()) >= 256
        frame = page.frame_locator(".timeline iframe")
        frame.locator("svg.tl rect.run").first.wait_for(state="attached")
        wide = frame.locator("html").evaluate("e => [e.scrollWidth, innerWidth, e.scrollHeight, innerHeight]")
        assert wide[0] <= wide[1], "the timeline scrolls sideways"
        assert wide[2] <= wide[3], "the timeline scrolls"
        for width in (1440, 1024, 420):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"scrolls sideways at {width}"
        assert not errors
        browser.close()
