"""The pages: their code blocks run, on tiny stand-ins for what they load, and their links can be right.

The blocks of a page share a namespace and run in order, on the simulated device. Whatever a page loads is a tiny
pipeline of random weights, of the class that it asks for, and calls are made as small as that; names and arguments are
those of the page. A block that can't run has a comment before it: `<!-- not run: why -->`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import subprocess
import sys
import types
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise
import factory
from diffusers_layerwise import discovery, profiles

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
#: What a page may load, by a part of its name, and the case that stands for it; everything else is Flux.
STANDINS = {
    "stable-diffusion-xl": "sdxl",
    "Wan2.2": "wan_two_stage",
    "Wan2.1": "wan",
    "StableDiffusionXLPipeline": "sdxl",
}
#: Arguments of calls that say how much work they are.
SIZES = ("height", "width", "num_frames", "num_inference_steps", "max_sequence_length")
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n+)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks_of(text: str) -> list[tuple[int, str, str | None]]:
    """The Python blocks of a page: line, code, and why it isn't run."""
    return [
        (text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"]) for match in BLOCK.finditer(text)
    ]


def has_blocks(page: Path) -> bool:
    return bool(blocks_of(page.read_text()))


# ---------------------------------------------------------------------- stand-ins
def case_for(name: str) -> factory.PipelineCase:
    """The case that stands for a repository."""
    return factory.CASES[next((case for part, case in STANDINS.items() if part in name), "flux")]


def shrunk(pipe: DiffusionPipeline, case: factory.PipelineCase) -> DiffusionPipeline:
    """The pipeline, whose calls are as small as the case's whatever they ask for. Unknown arguments are errors."""
    kind = type(pipe)
    small = case.call_kwargs()
    known = inspect.signature(kind.__call__).parameters

    def call(self: Any, *args: Any, **options: Any) -> Any:
        unknown = set(options) - set(known)
        assert not unknown, f"{kind.__name__} takes no {unknown}"
        options |= {key: value for key, value in small.items() if key in SIZES}
        return kind.__call__(self, *args, **options)

    def load_lora_weights(self: Any, name: str, **options: Any) -> None:
        """Random factors instead of a download."""
        from lora import factors

        kind.load_lora_weights(self, factors(case.build(), ["transformer"], seed=len(name)), **options)

    members = {"__call__": call, "load_lora_weights": load_lora_weights, "__module__": kind.__module__}
    pipe.__class__ = type(kind.__name__, (kind,), members)
    return pipe


def stand_in(cls: type, name: Any, *, dtype: Any = None, torch_dtype: Any = None, **options: Any) -> DiffusionPipeline:
    """What `from_pretrained` does here."""
    assert set(options) <= {"variant", "pipeline_class", "cache_limit"}, options
    case = case_for(str(name))
    pipe = case.build()
    assert isinstance(pipe, cls), f"the page loads {name} as {cls.__name__}, and here it is a {type(pipe).__name__}"
    return shrunk(pipe.to(dtype or torch_dtype or torch.float32), case)


class Web:
    """FastAPI and gradio, as far as the pages use them; endpoints are called once each."""

    def __init__(self) -> None:
        self.endpoints: list[Callable[..., Any]] = []

    def get(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def note(function: Callable[..., Any]) -> Callable[..., Any]:
            self.endpoints.append(function)
            return function

        return note

    def modules(self) -> dict[str, types.ModuleType]:
        fastapi: Any = types.ModuleType("fastapi")
        fastapi.FastAPI = lambda lifespan: self
        fastapi.Response = lambda content, media_type: content
        gradio: Any = types.ModuleType("gradio")
        gradio.Interface = lambda function, inputs, outputs: types.SimpleNamespace(
            launch=lambda: self.endpoints.append(function)
        )
        return {"fastapi": fastapi, "gradio": gradio}

    def call_all(self) -> None:
        for function in self.endpoints:
            needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
            assert function(*["a red fox"] * len(needed)) is not None


class MyTransformer(nn.Module):
    """A model of the reader's own."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    web = Web()
    for name, module in web.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return web


@pytest.fixture
def surroundings(
    sim: types.ModuleType, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """Everything that a page finds: patched loaders, a folder of its own, and the names that it takes for granted."""
    folder = tmp_path / "flux"
    factory.CASES["flux"].build().to(torch.bfloat16).save_pretrained(folder)
    case = factory.CASES["flux"]
    plan = diffusers_layerwise.plan_layerwise_offload

    def small_plan(where: Any, **options: Any) -> Any:
        options |= {key: value for key, value in case.call_kwargs().items() if key in SIZES}
        return plan(folder if isinstance(where, str) and not Path(where).exists() else where, **options)

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", classmethod(stand_in))
    monkeypatch.setattr(diffusers_layerwise, "from_pretrained", functools.partial(stand_in, DiffusionPipeline))
    monkeypatch.setattr(diffusers_layerwise, "plan_layerwise_offload", small_plan)
    monkeypatch.setattr("diffusers.utils.export_to_video", lambda frames, path, fps: None)
    for registry in (profiles, discovery):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.chdir(tmp_path)
    sim.configure(ndev=2)
    sim.set_device(0)

    def names() -> dict[str, Any]:
        found = {name: getattr(diffusers, name) for name in ("DiffusionPipeline", "FluxPipeline", "WanPipeline")}
        return found | {
            "__name__": "page",
            "torch": torch,
            "diffusers_layerwise": diffusers_layerwise,
            "apply_layerwise_offload": diffusers_layerwise.apply_layerwise_offload,
            "pipe": stand_in(DiffusionPipeline, "flux", dtype=torch.bfloat16),
            "accelerate": accelerate,
            "module": case.build().transformer,
            "transformer": case.build().transformer,
            "prompt": "a red fox",
            "path": str(folder),
            "MyTransformer": MyTransformer,
            "MyAttention": MyTransformer,
        }

    return names


# ---------------------------------------------------------------------- code
@pytest.mark.parametrize("page", [page for page in PAGES if has_blocks(page)], ids=lambda page: page.stem)
def test_code_blocks_of_a_page_run(page: Path, surroundings: Callable[[], dict[str, Any]], web: Web) -> None:
    """Those that aren't marked; in order, in one namespace."""
    names = surroundings()
    for line, code, reason in blocks_of(page.read_text()):
        if reason is not None:
            assert len(reason) > 8, f"{page.name}:{line}: say why it isn't run"
            continue
        here = re.sub(r'(["\'])cuda(["\':])', r"\1sim\2", code)
        try:
            exec(compile("\n" * (line - 1) + here, str(page), "exec"), names)
            web.call_all()
        except Exception as error:
            pytest.fail(f"{page.name}:{line}: {type(error).__name__}: {error}\n\n{here}")
    pipe = names.get("pipe")
    if isinstance(pipe, DiffusionPipeline):
        pipe.disable_layerwise_offload()


def test_blocks_are_found_with_the_reason_that_they_are_not_run_for() -> None:
    text = "# A\n\n```python\na = 1\n```\n\n<!-- not run: needs two GPUs -->\n```python\nb\n```\n\n```bash\nc\n```\n"
    assert blocks_of(text) == [(4, "a = 1\n", None), (9, "b\n", "needs two GPUs")]


# ---------------------------------------------------------------------- links
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_other_sites_have_a_form_that_can_be_right(page: Path) -> None:
    """Without asking the network: https, a host, no blanks. Links between pages are tested with the project's files."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(((?:[a-z]+:|//)[^)]*)\)", text):
        parts = urllib.parse.urlsplit(target)
        assert parts.scheme == "https", target
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), target
        assert not re.search(r"\s", target), target


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, flags=re.MULTILINE)
    pages = {page.name for page in ROOT.glob("docs/*.md")} | set(load(".ci/site_hooks.py").ADDED.values())
    assert set(listed) == pages
    assert len(listed) == len(pages)


# ---------------------------------------------------------------------- the site
def load(path: str) -> types.ModuleType:
    """A file that is no module of a package."""
    spec = importlib.util.spec_from_file_location("loaded_" + Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_the_docs_folder_lead_to_pages_of_the_site() -> None:
    within = load(".ci/site_hooks.py").within_site
    assert within("[a](../README.md#x) [b](../benchmarks/README.md) [c](usage.md)", False) == (
        "[a](index.md#x) b [c](usage.md)"
    )
    assert within("[a](docs/design.md#words) [b](CHANGELOG.md) [c](examples/quickstart.py)", True) == (
        "[a](design.md#words) [b](changelog.md) [c](examples/quickstart.py)"
    )
    assert within("![a](../docs/x.png)", False) == "![a](../docs/x.png)"


def test_docstrings_in_hugging_faces_style_are_read_as_googles() -> None:
    pytest.importorskip("griffe", reason="comes with the extra `docs`")
    text = (
        "Does it, see [`Mode`].\n\nArgs:\n    a (`int`, *optional*): One\n        or two.\n"
        "    b, c (`str`): Texts:\n        all.\n"
        "    d (`int`), `e` (`str`): Both.\n\nReturns:\n    `int`\n\nRaises:\n    TypeError, ValueError: Bad.\n\n"
        "Example:\n    >>> f(1)"
    )
    assert load(".ci/docstrings.py").as_google(text) == (
        "Does it, see `Mode`.\n\nArgs:\n    a: One\n        or two.\n"
        "    b: Texts:\n        all.\n    c: Texts:\n        all.\n"
        "    d: Both.\n    e: Both.\n\nRaises:\n    TypeError: Bad.\n    ValueError: Bad.\n\n"
        "Examples:\n    >>> f(1)"
    )


def test_the_reference_has_the_whole_public_surface() -> None:
    listed = re.findall(r"^::: diffusers_layerwise\.(\w+)$", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    assert set(listed) == set(diffusers_layerwise.__all__)


@pytest.mark.slow
def test_the_site_is_built_with_no_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="comes with the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "site/recipes/index.html").exists()
