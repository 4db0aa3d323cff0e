"""An exception at any point of a pipeline's call: the next call is bit-identical, and device bytes are the plan's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import factory
from diffusers_layerwise import OffloadHandle
from diffusers_layerwise.plan import Choice

NAMES = ["flux", "sd15", "wan"]
FAULTS: list[type[BaseException]] = [ZeroDivisionError, KeyboardInterrupt]


class Streamed:
    """A pipeline that streams with some residents, after its plan has settled; what it should give; who else holds."""

    def __init__(self, name: str, sim: ModuleType, residency: str) -> None:
        self.name = name
        self.sim = sim
        self.pipe: DiffusionPipeline = factory.CASES[name].build()
        self.expected = factory.run(name, self.pipe)
        sizes = [p.numel() * p.element_size() for m in factory.modules_of(self.pipe).values() for p in m.parameters()]
        config = {"activation_reserve": 0, "residency": residency}
        self.handle: OffloadHandle = self.pipe.enable_layerwise_offload(
            "all", onload_device="sim", memory_budget=sum(sizes) // 2, config=config
        )
        for _ in range(4):
            factory.run(name, self.pipe)
        gc.collect()  # what earlier tests left
        self.held = self.handle._runtime.transfer.held_bytes
        self.others = sim.mem(0)["allocated"] - self.held

    def call(self, **overrides: Any) -> torch.Tensor:
        """One call."""
        return factory.run(self.name, self.pipe, **overrides)

    def check(self) -> None:
        """The next call is right, the plan is kept to, and what lies on the device is what is counted."""
        transfer = self.handle._runtime.transfer
        assert transfer.held_bytes <= self.handle.plan.peak_bytes
        assert torch.equal(self.call(), self.expected)
        report = self.handle.report()
        assert report.peak_seen <= self.handle.plan.peak_bytes <= (report.budget or 0)
        assert transfer.held_bytes == self.held
        if self.sim.mem(0)["allocated"] != self.held + self.others:
            gc.collect()  # the error's traceback
        assert self.sim.mem(0)["allocated"] == self.held + self.others


@contextlib.contextmanager
def failing(owner: Any, attribute: str, fault: type[BaseException], nth: int = 1) -> Iterator[None]:
    """A function of an object raises at its nth call, and only then."""
    original, count = getattr(owner, attribute), [0]
    had = attribute in vars(owner)

    def fail(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise fault
        return original(*args, **kwargs)

    setattr(owner, attribute, fail)
    try:
        yield
    finally:
        setattr(owner, attribute, original) if had else delattr(owner, attribute)
    assert count[0] >= nth, "the fault was never met"


@contextlib.contextmanager
def failing_module(module: nn.Module, fault: type[BaseException]) -> Iterator[list[int]]:
    """A module raises after its first call, while its weights are in use or were just used."""
    count = [0]

    def fail(*_: object) -> None:
        count[0] += 1
        if count[0] == 1:
            raise fault

    hook = module.register_forward_hook(fail)
    try:
        yield count
    finally:
        hook.remove()


def places(streamed: Streamed) -> Iterator[tuple[str, nn.Module]]:
    """The first module of each group that the plan has, in every component."""
    for schedule in streamed.handle._runtime.schedules:
        assert schedule.choice is Choice.LAYERWISE
        for group in schedule.groups:
            unit = next((unit for unit in group.units if unit.index in schedule.order.used), None)
            if unit is not None:
                yield f"{schedule.name}.{unit.name}", unit.triggers[0]


@pytest.mark.parametrize("fault", [FAULTS[0], *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[1:])])
@pytest.mark.parametrize("name", ["sd15", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "wan"))])
def test_each_group_of_each_component_fails_once(sim: ModuleType, name: str, fault: type[BaseException]) -> None:
    streamed = Streamed(name, sim, "use" if fault is KeyboardInterrupt else "lasting")
    found = list(places(streamed))
    assert len({path.split(".")[0] for path, _ in found}) == len(streamed.handle._runtime.schedules)
    met = set()
    for path, module in found:
        with failing_module(module, fault) as count:
            try:
                assert torch.equal(streamed.call(), streamed.expected), path
            except fault:
                assert count[0] == 1
        if count[0]:
            met.add(path.split(".")[0])
            streamed.check()
    assert met == {schedule.name for schedule in streamed.handle._runtime.schedules}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("residency", ["use", "lasting"])
@pytest.mark.parametrize("name", NAMES)
def test_the_scheduler_a_callback_and_the_ends_of_a_call_fail_once(
    sim: ModuleType, name: str, residency: str, fault: type[BaseException]
) -> None:
    streamed = Streamed(name, sim, residency)
    pipe = streamed.pipe
    inside = [(pipe.scheduler, "step", nth) for nth in (1, 2)]
    around = [(pipe, "encode_prompt", 1), (pipe.vae, "decode", 1)]
    for owner, attribute, nth in [*inside, *around]:
        with failing(owner, attribute, fault, nth), pytest.raises(fault):
            streamed.call()
        streamed.check()

    def callback(*_: object) -> dict[str, Any]:
        raise fault

    with pytest.raises(fault):
        streamed.call(callback_on_step_end=callback)
    streamed.check()


def test_the_error_reaches_the_caller_as_it_was_raised(sim: ModuleType) -> None:
    """Nothing of ours is put in its place, or in front of it."""
    streamed = Streamed("sd15", sim, "use")
    thrown = ZeroDivisionError("mine")

    def throw(*_: object) -> None:
        raise thrown

    hook = streamed.pipe.unet.mid_block.register_forward_hook(throw)
    with pytest.raises(ZeroDivisionError) as caught:
        streamed.call()
    hook.remove()
    assert caught.value is thrown
    assert thrown.__cause__ is thrown.__context__ is None
    thrown.__traceback__ = None  # whose frames hold device memory
    del caught
    streamed.check()
