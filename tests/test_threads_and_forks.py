"""Threads take turns; forked children work where the device allows it; dropped pipelines leave nothing."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

import factory
import models
from models import make, numbers, run, stream

pytestmark = pytest.mark.usefixtures("one_thread")
PATIENCE = 120
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Runs all at the same time; their results, or their exceptions."""
    found: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def work(index: int) -> None:
        gate.wait(PATIENCE)
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    return found


def in_child(call: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    """What a forked child makes of a call; the text of the error when it raises. A child that hangs is ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _send(call, writer)
    os.close(writer)
    received, deadline = b"", time.monotonic() + PATIENCE
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        received += piece
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    found: torch.Tensor | str = torch.load(io.BytesIO(received), weights_only=True)
    return found


def _send(call: Callable[[], torch.Tensor], writer: int) -> None:
    """In the child: the result goes into the pipe, and nothing of the parent's is torn down."""
    try:
        torch.set_num_threads(1)  # the parent's worker threads don't exist here
        try:
            found: torch.Tensor | str = call()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        page = io.BytesIO()
        torch.save(found, page)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(page.getvalue())
        os._exit(0)
    finally:
        os._exit(1)


# ---- threads


@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_two_threads_on_one_pipeline_take_turns(sim: ModuleType, mode: str) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = [factory.run("sd15", pipe, seed=seed) for seed in range(2)]
    config = {"activation_reserve": 0}
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim", memory_budget="600KiB", config=config)
    for _ in range(3):
        found = in_threads([lambda seed=seed: call(pipe, seed) for seed in range(2)])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), found


def call(pipe: DiffusionPipeline, seed: int = 0, name: str = "sd15") -> torch.Tensor:
    """One call without global random numbers, which threads would share."""
    case = factory.CASES[name]
    result = pipe(**case.call_kwargs(), **factory.generator_kwargs(pipe, seed))
    return case.output(result).detach().cpu()


@pytest.mark.parametrize("both", [False, True])
def test_two_threads_on_two_pipelines_that_share_modules_take_turns(sim: ModuleType, both: bool) -> None:
    """The newer handle governs what both have, also while the older pipeline calls it."""
    first, other = (factory.CASES["sd15"].build() for _ in range(2))
    parts = first.components | {"text_encoder": other.text_encoder, "scheduler": other.scheduler}
    second = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    expected = factory.run("sd15", first)
    first.enable_layerwise_offload(mode="memory", onload_device="sim")
    if both:
        second.enable_layerwise_offload(mode="memory", onload_device="sim")
    else:
        second.enable_layerwise_offload("vae", "memory", onload_device="sim")
    for _ in range(4):
        found = in_threads([lambda: call(first), lambda: call(second)])
        assert [isinstance(f, torch.Tensor) and torch.equal(f, expected) for f in found] == [True, True], found


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_each_call_comes_from_a_thread_of_its_own(sim: ModuleType, name: str) -> None:
    pipe = factory.CASES[name].build()
    expected = factory.run(name, pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(3):
        assert torch.equal(in_threads([lambda: call(pipe, name=name)])[0], expected)
    assert torch.equal(factory.run(name, pipe), expected)


def test_threads_on_streams_of_their_own_are_ordered(sim: ModuleType) -> None:
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    given = x.to("sim")
    sim.synchronize()
    with stream(module):

        def work() -> torch.Tensor:
            with sim.stream(sim.Stream()), torch.no_grad():
                return module(given)

        for _ in range(3):
            found = in_threads([work, work])
            sim.synchronize()
            assert all(torch.equal(f.cpu(), expected) for f in found), found


# ---- forks


@needs_fork
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_a_child_that_was_forked_before_the_first_call_works(sim: ModuleType, name: str, device: str) -> None:
    pipe = factory.CASES[name].build()
    expected = factory.run(name, pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device=device)

    def twice() -> torch.Tensor:
        assert torch.equal(factory.run(name, pipe), expected)
        return factory.run(name, pipe)

    assert torch.equal(in_child(twice), expected)
    assert torch.equal(factory.run(name, pipe), expected)


@needs_fork
def test_a_forked_worker_of_multiprocessing_works() -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        writer.send_bytes(factory.run("sd15", pipe).numpy().tobytes())

    worker = context.Process(target=work)
    worker.start()
    try:
        assert reader.poll(PATIENCE), "the worker hangs"
        assert reader.recv_bytes() == expected.numpy().tobytes()
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    finally:
        worker.kill()


@needs_fork
def test_a_child_that_was_forked_after_a_call_on_an_accelerator_is_told_to_spawn(sim: ModuleType) -> None:
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode="auto", onload_device="sim", config={"residency": "lasting"})
    factory.run("sd15", pipe)
    with stream(module):
        run(module, x)
        for work in (lambda: run(module, x), lambda: factory.run("sd15", pipe)):
            found = in_child(work)
            assert isinstance(found, str)
            assert found.startswith("LayerwiseOffloadError: This process was forked after sim:0 had been used")
            assert "'spawn'" in found
    assert torch.equal(factory.run("sd15", pipe), expected)


@needs_fork
@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_a_child_that_was_forked_after_a_call_on_the_cpu_works(mode: str) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode=mode, onload_device="cpu", memory_budget="600KiB")
    for _ in range(2):
        factory.run("sd15", pipe)
    assert torch.equal(in_child(lambda: factory.run("sd15", pipe)), expected)
    assert torch.equal(factory.run("sd15", pipe), expected)


@needs_fork
def test_a_child_that_was_forked_in_the_middle_of_another_threads_call_finds_no_locked_lock() -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    inside, go_on = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(PATIENCE)

    hook = next(iter(pipe.unet.down_blocks)).register_forward_hook(pause)
    found: list[torch.Tensor] = []
    worker = threading.Thread(target=lambda: found.append(call(pipe)), daemon=True)
    worker.start()
    assert inside.wait(PATIENCE)
    child = in_child(lambda: call(pipe))
    go_on.set()
    worker.join(PATIENCE)
    hook.remove()
    assert torch.equal(child, expected)
    assert torch.equal(found[0], expected)


@needs_fork
def test_a_child_that_is_forked_within_a_call_finishes_it() -> None:
    """The thread that forks holds the lock, and goes on in the child."""
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    results: list[Any] = []

    def fork_here(*_: object) -> dict[str, Any]:
        if not results:
            results.append(None)
            results[0] = in_child(lambda: call(pipe))
        return {}

    assert torch.equal(factory.run("sd15", pipe, callback_on_step_end=fork_here), expected)
    assert torch.equal(results[0], expected)


# ---- garbage


def threads() -> list[threading.Thread]:
    """All but the one that tqdm starts with the first progress bar of a process."""
    return [thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("residency", ["use", "lasting"])
@pytest.mark.parametrize("mode", ["memory", "auto"])
def test_a_dropped_pipeline_leaves_no_device_memory_no_pinned_memory_and_no_thread(
    sim: ModuleType, mode: str, residency: str, failed: bool
) -> None:
    gc.collect()
    before, running = sim.mem(0), threads()
    pipe = factory.CASES["sd15"].build()
    handle = pipe.enable_layerwise_offload(
        mode=mode, onload_device="sim", memory_budget="600KiB", config={"residency": residency, "activation_reserve": 0}
    )
    for _ in range(2):
        factory.run("sd15", pipe)
    if failed:
        with pytest.raises(ZeroDivisionError):
            factory.run("sd15", pipe, callback_on_step_end=lambda *_: 1 // 0)
    ghosts = [weakref.ref(handle._runtime), weakref.ref(handle), weakref.ref(pipe.unet), weakref.ref(pipe)]
    del pipe, handle
    gc.collect()
    sim.synchronize()  # pinned memory lives until its copies are over
    assert [ghost() for ghost in ghosts] == [None] * 4
    after = sim.mem(0)
    kept = ("allocated", "pinned", "registered")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert threads() == running


@pytest.mark.parametrize(("mode", "share"), [("memory", None), ("auto", None), ("auto", 0.5)])
@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_memory_of_a_dropped_module_is_not_lent_out_under_a_copy_in_flight(
    sim: ModuleType, mode: str, share: float | None, calls: int
) -> None:
    """The next pass's first groups are on their way when the module goes."""
    gc.collect()
    before = sim.mem(0)["allocated"]
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    stream(module, mode, share=share)
    for _ in range(calls):
        run(module, x)
    del module
    gc.collect()
    others = [torch.zeros(1 << 12, device="sim") for _ in range(8)]
    assert all(bool((other == 0).all()) for other in others)
    del others
    assert sim.mem(0)["allocated"] == before
