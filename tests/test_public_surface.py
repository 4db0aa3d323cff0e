"""The public names, signatures and attributes, and what importing the package does not do."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise
from diffusers_layerwise import (
    LayerwiseOffloadConfig,
    LayerwiseOffloadError,
    OffloadHandle,
    OffloadPlan,
    OffloadProfile,
    apply_layerwise_offload,
    disable_layerwise_offload,
    enable_layerwise_offload,
    register_layers,
    register_profile,
)
from diffusers_layerwise.config import Mode
from diffusers_layerwise.plan import Choice
from factory import CASES

NAMES = """
    Hardware LayerwiseOffloadConfig LayerwiseOffloadError OffloadHandle OffloadPlan OffloadProfile PredictedPlan
    apply_layerwise_offload disable_layerwise_offload enable_layerwise_offload from_pretrained plan_layerwise_offload
    register_layers register_profile
""".split()


def shape(function: Any) -> str:
    """A signature without annotations: names, kinds and defaults."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_public_names() -> None:
    assert sorted(diffusers_layerwise.__all__) == NAMES
    assert all(hasattr(diffusers_layerwise, name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    assert len(inspect.getdoc(getattr(diffusers_layerwise, name)) or "") > 40


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            enable_layerwise_offload,
            "(pipe, components=None, mode='auto', *, onload_device=None, memory_budget=None, config=None)",
        ),
        (disable_layerwise_offload, "(pipe)"),
        (
            apply_layerwise_offload,
            "(module, mode='auto', *, onload_device=None, memory_budget=None, config=None)",
        ),
        (register_layers, "(module_class, names)"),
        (register_profile, "(pipeline_class, profile)"),
        (OffloadHandle.report, "(self)"),
        (OffloadHandle.timeline, "(self, component=None, number=None)"),
        (OffloadHandle.record_timeline, "(self)"),
        (OffloadHandle.release, "(self)"),
        (OffloadHandle.remove, "(self)"),
        (OffloadHandle.refresh, "(self, name=None)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signatures(function: Any, expected: str) -> None:
    assert shape(function) == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name.islower()])
def test_every_parameter_and_result_has_a_type(name: str) -> None:
    function = getattr(diffusers_layerwise, name)
    assert set(function.__annotations__) == {*inspect.signature(function).parameters, "return"}


def test_pipeline_methods_are_the_functions() -> None:
    assert DiffusionPipeline.enable_layerwise_offload is enable_layerwise_offload
    assert DiffusionPipeline.disable_layerwise_offload is disable_layerwise_offload
    assert isinstance(DiffusionPipeline.__dict__["layerwise_offload"], property)


def test_handle_attributes() -> None:
    own = {name for name in vars(OffloadHandle) if not name.startswith("_")}
    assert own == {"plan", "report", "timeline", "record_timeline", "refresh", "release", "remove"}
    assert hasattr(OffloadHandle, "__enter__")
    assert hasattr(OffloadHandle, "__exit__")


def test_the_pipeline_shows_its_handle_until_it_is_disabled() -> None:
    pipe = CASES["sd15"].build()
    assert pipe.layerwise_offload is None
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    assert isinstance(handle, OffloadHandle)
    assert isinstance(handle.plan, OffloadPlan)
    assert pipe.layerwise_offload is handle
    assert handle.__enter__() is handle
    assert pipe.disable_layerwise_offload() is None
    assert pipe.layerwise_offload is None


def test_config_fields_and_defaults() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(LayerwiseOffloadConfig)}
    assert fields == {
        "prefetch": None,
        "resident": None,
        "placement": "stall",
        "group_size": None,
        "residency": None,
        "host": None,
        "activation_reserve": None,
        "device_map": None,
        "host_memory_budget": "auto",
        "checkpoint": None,
        "embeddings": None,
        "adapters": None,
    }


def test_profile_fields_and_defaults() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(OffloadProfile)}
    assert fields == {
        "layerwise_modes": ("auto", "memory"),
        "prefetch": None,
        "keep_resident_min_free_gib": 45.0,
        "keep_resident_components": (),
        "reason": "",
        "source": "",
    }


def test_modes_and_choices() -> None:
    assert [mode.value for mode in Mode] == ["auto", "memory", "speed", "manual"]
    assert [choice.value for choice in Choice] == ["layerwise", "resident", "offload", "skip"]


def test_the_error_is_a_runtime_error() -> None:
    assert issubclass(LayerwiseOffloadError, RuntimeError)
    assert not issubclass(LayerwiseOffloadError, torch.OutOfMemoryError)


def test_a_bare_module_needs_one_line() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with apply_layerwise_offload(module, "memory", onload_device="cpu") as handle, torch.no_grad():
        module(torch.ones(1, 8))
        assert handle.report().moved_bytes > 0


def test_the_version_is_a_literal() -> None:
    """The build reads it from the file without importing the package."""
    tree = ast.parse(files(diffusers_layerwise).joinpath("__init__.py").read_text())
    found = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert found == [diffusers_layerwise.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+([.-]?\w+)?", found[0])


def test_types_are_shipped() -> None:
    assert files(diffusers_layerwise).joinpath("py.typed").is_file()


PROBE = """
import os, sys, threading
import torch, diffusers, accelerate
from diffusers import DiffusionPipeline
from accelerate.hooks import ModelHook

threads, tasks = threading.active_count(), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0
touched = []
for name in ("Stream", "Event"):
    setattr(torch, name, lambda *args, _name=name, **kwargs: touched.append(_name))
for name in ("_lazy_init", "init"):
    setattr(torch.cuda, name, lambda *args, _name=name, **kwargs: touched.append("cuda." + _name))
call, before = DiffusionPipeline.__dict__.get("__call__"), set(vars(DiffusionPipeline))

import diffusers_layerwise

assert not touched, touched
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads, threading.enumerate()
if os.path.isdir("/proc"):
    assert len(os.listdir("/proc/self/task")) == tasks
assert DiffusionPipeline.__dict__.get("__call__") is call
print(*sorted(set(vars(DiffusionPipeline)) - before))
"""


def test_importing_initialises_no_device_and_starts_no_thread() -> None:
    root = Path(diffusers_layerwise.__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, cwd=root, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["disable_layerwise_offload", "enable_layerwise_offload", "layerwise_offload"]
