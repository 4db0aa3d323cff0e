"""Device memory runs out at any allocation: the result is right, or the error says what to do; the next call is right.

Each allocation of ours fails in turn, and each module in a model; and a device with a limit really has no more.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise.host as host
import factory
import models
from diffusers_layerwise import OffloadHandle
from diffusers_layerwise.attempt import Snapshot
from diffusers_layerwise.errors import is_named
from diffusers_layerwise.shortage import smaller_limit
from diffusers_layerwise.transfer import Transfer
from models import make, numbers, run, stream

#: They count the device's bytes, some of which diffusers' models keep for good: conftest.py puts them first.
pytestmark = pytest.mark.slow

MOST = 60
"""More allocations than any call of a module here makes; so many of a pipeline's fail one by one."""
NAMED = r"The device memory of sim:0 ran out (in '\w+'|outside of all components) \(not host memory\)"


def slow(value: object) -> Any:
    """A parameter that only the whole run takes."""
    return pytest.param(value, marks=pytest.mark.slow)


class Failures:
    """Makes `times` allocations of ours in a row fail, from the nth on; `met` says whether it came to that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int, times: int = 1) -> None:
        self.met = False
        self.count = 0
        self._undo = monkeypatch.undo
        original = Transfer.new_buffer

        def new_buffer(transfer: Transfer, size: int) -> torch.Tensor:
            self.count += 1
            if nth <= self.count < nth + times:
                self.met = True
                raise torch.OutOfMemoryError("made up")
            return original(transfer, size)

        monkeypatch.setattr(Transfer, "new_buffer", new_buffer)

    def __enter__(self) -> Failures:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()


@contextlib.contextmanager
def failing_modules(root: nn.Module, nth: int) -> Iterator[list[int]]:
    """The nth module that is called raises, in place of the kernel whose result has no room."""
    count = [0]

    def fail(*_: object) -> None:
        count[0] += 1
        if count[0] == nth:
            raise torch.OutOfMemoryError("made up")

    hooks = [part.register_forward_hook(fail) for part in root.modules() if part is not root]
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()


def result(call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """What a call gives; None for an error, which has to be the one with everything in it."""
    found: list[torch.Tensor] = []
    error = caught(lambda: found.append(call()))
    if error is None:
        return found[0]
    assert is_named(error)
    assert type(error) is torch.OutOfMemoryError
    assert re.match(NAMED, str(error))
    assert "memory_budget=" in str(error)
    return None


def caught(call: Callable[[], Any]) -> torch.OutOfMemoryError | None:
    """The error of a call that ran out of memory."""
    try:
        call()
    except torch.OutOfMemoryError as error:
        return error
    return None


def settled_bytes(sim: ModuleType, handle: OffloadHandle, others: int = 0) -> int:
    """Device bytes between calls, which have to be what is counted, and no more than the plan has.

    `others` are what a pipeline keeps there itself, such as its scheduler's time steps.
    """
    sim.synchronize()
    held = handle._runtime.transfer.held_bytes
    if sim.mem(0)["allocated"] - others != held:
        gc.collect()  # an error's traceback
    assert sim.mem(0)["allocated"] - others == held <= handle.plan.peak_bytes
    return held


def others(sim: ModuleType, handle: OffloadHandle) -> int:
    """Device bytes that aren't ours."""
    gc.collect()
    return sim.mem(0)["allocated"] - handle._runtime.transfer.held_bytes


# ---- allocations of ours


@pytest.mark.parametrize("times", [1, *map(slow, [2, 3]), 5])
@pytest.mark.parametrize("warm", [0, 1, 3])
@pytest.mark.parametrize(("mode", "share"), [("memory", None), ("auto", None), ("auto", 0.5), ("speed", 0.8)])
def test_each_allocation_for_a_module_fails_in_turn(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, share: float | None, warm: int, times: int
) -> None:
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    config = {"residency": "use"}  # a module's residents stay, and so would be allocated in the first call only
    for nth in range(1, MOST):
        with stream(module, mode, share=share, config=config if warm else None) as handle:
            for _ in range(warm):
                run(module, x)
            if warm:
                handle.release()
            with Failures(monkeypatch, nth, times) as failures:
                found = result(lambda: run(module, x))
            assert found is None or torch.equal(found, expected)
            for _ in range(2):
                assert torch.equal(run(module, x), expected)
            settled_bytes(sim, handle)
            assert handle.report().peak_seen <= handle.plan.peak_bytes
        assert sim.mem(0)["allocated"] == 0
        if not failures.met:
            return
    pytest.fail("allocations without end")


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("options", ["memory", "whole", *map(slow, ["auto, half", "lasting", "all"])])
@pytest.mark.parametrize("name", ["sd15", slow("wan")])
def test_each_allocation_in_a_pipeline_call_fails_in_turn(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, options: str, times: int
) -> None:
    pipe = factory.CASES[name].build()
    expected = factory.run(name, pipe)
    with enable(pipe, options):
        for _ in range(2):
            factory.run(name, pipe)
        with Failures(monkeypatch, 0, 0) as failures:
            factory.run(name, pipe)
    count = failures.count
    assert count or options == "all"
    # Each of the first ones, some of the rest, the last, and none.
    for nth in sorted({*range(1, min(MOST, count)), *range(MOST, count, max(1, count // 20)), count, count + 1}):
        handle = enable(pipe, options)
        for _ in range(2):
            factory.run(name, pipe)
        kept = others(sim, handle)
        with Failures(monkeypatch, nth, times) as failures:
            found = result(lambda: factory.run(name, pipe))
        assert failures.met is (1 <= nth <= count)
        assert found is None or torch.equal(found, expected)
        assert torch.equal(factory.run(name, pipe), expected)
        assert settled_bytes(sim, handle, kept) == 0 or options in ("lasting", "all", "whole")
        report = handle.report()
        assert report.peak_seen <= handle.plan.peak_bytes
        handle.remove()


def weights_of(pipe: DiffusionPipeline) -> int:
    return sum(p.numel() * p.element_size() for m in factory.modules_of(pipe).values() for p in m.parameters())


def enable(pipe: DiffusionPipeline, options: str) -> OffloadHandle:
    half: dict[str, Any] = {"memory_budget": weights_of(pipe) // 2, "config": {"activation_reserve": 0}}
    ways: dict[str, dict[str, Any]] = {
        "memory": {"mode": "memory"},
        "auto, half": half,
        "lasting": half | {"config": {"activation_reserve": 0, "residency": "lasting"}},
        "all": {"mode": "auto"},
        "whole": {"components": {"all": "layerwise", "=vae": "resident", "=text_encoder": "offload"}, "mode": "memory"},
    }
    return pipe.enable_layerwise_offload(onload_device="sim", **ways[options])


def test_a_smaller_plan_stays_in_force_and_is_in_the_notes(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    handle = enable(pipe, "auto, half")
    for _ in range(2):
        factory.run("sd15", pipe)
    before = handle.plan.peak_bytes
    with Failures(monkeypatch, 8) as failures:
        assert torch.equal(factory.run("sd15", pipe), expected)
    assert failures.met
    assert torch.equal(factory.run("sd15", pipe), expected)
    smaller = handle.plan.peak_bytes
    assert smaller < before
    for _ in range(3):
        assert torch.equal(factory.run("sd15", pipe), expected)
        assert handle.plan.peak_bytes <= smaller
    notes = [note for note in handle.report().notes if "device memory of sim:0 ran short" in note]
    assert len(notes) == 1


def test_what_idle_components_hold_is_given_up_for_the_one_in_use(sim: ModuleType) -> None:
    """Lasting residents fill the device; somebody else then takes memory that the plan counts on."""
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    handle = enable(pipe, "all")
    for _ in range(2):
        assert torch.equal(factory.run("sd15", pipe), expected)
    handle.release()
    cap = weights_of(pipe) // 2
    sim.configure(cap=cap)
    for _ in range(3):
        assert torch.equal(factory.run("sd15", pipe), expected)
        assert sim.mem(0)["allocated"] <= cap
    assert handle.plan.peak_bytes <= cap


# ---- allocations of the model


@pytest.mark.parametrize(("mode", "share"), [("memory", None), ("auto", None), ("auto", 0.5)])
@pytest.mark.parametrize("warm", [0, 3])
def test_each_module_runs_out_of_memory_in_turn(sim: ModuleType, mode: str, share: float | None, warm: int) -> None:
    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    for nth in range(1, MOST):
        with stream(module, mode, share=share) as handle:
            for _ in range(warm):
                run(module, x)
            peak = handle.plan.peak_bytes
            with failing_modules(module, nth) as count:
                found = result(lambda: run(module, x))
            assert (found is None) == (count[0] >= nth and handle.plan.peak_bytes == peak)
            assert found is None or torch.equal(found, expected)
            for _ in range(3):
                assert torch.equal(run(module, x), expected)
            settled_bytes(sim, handle)
        assert sim.mem(0)["allocated"] == 0
        if count[0] < nth:
            return
    pytest.fail("modules without end")


@pytest.mark.parametrize("name", ["flux", *map(slow, ["sd15", "wan"])])
@pytest.mark.parametrize("options", ["memory", *map(slow, ["auto, half", "all"])])
def test_a_component_of_a_pipeline_runs_out_of_memory(sim: ModuleType, name: str, options: str) -> None:
    pipe = factory.CASES[name].build()
    expected = factory.run(name, pipe)
    found: list[torch.Tensor] = []
    for part, component in factory.modules_of(pipe).items():
        for nth in (1, 30):
            handle = enable(pipe, options)
            factory.run(name, pipe)
            kept = others(sim, handle)
            with failing_modules(component, nth):
                error = caught(lambda: found.append(factory.run(name, pipe)))
            if error is None:
                assert torch.equal(found.pop(), expected)
            else:
                assert f"The device memory of sim:0 ran out in '{part}' (not host memory)" in str(error)
                assert error.__cause__ is not None
                assert ("enable_vae_tiling" in str(error)) == (part == "vae")
                del error
            assert torch.equal(factory.run(name, pipe), expected)
            assert settled_bytes(sim, handle, kept) == 0 or options == "all"
            handle.remove()


class Wide(models.MlpStack):
    """Needs as many bytes for one activation as it is told."""

    def forward(self, x: torch.Tensor, spare: int = 0, cache: list[Any] | None = None) -> torch.Tensor:
        """Puts `x` into the cache half-way."""
        x = super().forward(x)
        if cache is not None:
            cache.append(x)
        torch.empty(spare, dtype=torch.uint8, device=x.device)
        return x + torch.rand(x.shape, device=x.device)


def wide(sim: ModuleType) -> tuple[Wide, torch.Tensor, int, torch.Tensor]:
    """A module, its input, the bytes of its weights, and its result from seed 0."""
    module, x = make(Wide), numbers(3, models.WIDTH)
    torch.manual_seed(0)
    expected = run(module, x.to("cpu"))
    return module, x, sum(p.numel() * 4 for p in module.parameters()), expected


def seeded(module: nn.Module, *args: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return run(module, *args)


@pytest.mark.parametrize("budget", [None, 2])
def test_a_forward_without_room_is_repeated_under_a_smaller_plan(sim: ModuleType, budget: int | None) -> None:
    """With the random numbers that it would have had; and the next call needs no repetition."""
    module, x, weights, expected = wide(sim)
    sim.configure(cap=2 * weights)
    handle = stream(module, "auto", memory_budget=None if budget is None else budget * weights)
    assert torch.equal(seeded(module, x), expected)
    assert handle.plan.peak_bytes > weights
    assert torch.equal(seeded(module, x, weights * 3 // 2), expected)
    after = sim.mem(0)["ooms"]
    assert handle.plan.peak_bytes < weights // 2
    for _ in range(2):
        assert torch.equal(seeded(module, x, weights * 3 // 2), expected)
    assert sim.mem(0)["ooms"] == after
    handle.remove()


def test_a_forward_that_filled_a_cache_is_not_repeated_but_the_next_one_has_room(sim: ModuleType) -> None:
    module, x, weights, expected = wide(sim)
    sim.configure(cap=2 * weights)
    handle = stream(module, "auto")
    assert torch.equal(seeded(module, x), expected)
    cache: list[Any] = []
    with pytest.raises(torch.OutOfMemoryError, match=r"The plan was made smaller, at most .*: call again\."):
        seeded(module, x, weights * 3 // 2, cache)
    assert len(cache) == 1  # once
    assert torch.equal(seeded(module, x, weights * 3 // 2, []), expected)
    handle.remove()


def test_a_forward_under_diffusers_hooks_is_not_repeated(sim: ModuleType) -> None:
    module, x, weights, _ = wide(sim)
    sim.configure(cap=2 * weights)
    with stream(module, "auto") as handle:
        module._diffusers_hook = object()
        seeded(module, x)
        with pytest.raises(torch.OutOfMemoryError, match="call again"):
            seeded(module, x, weights * 3 // 2)
        seeded(module, x, weights * 3 // 2)
        assert handle.plan.peak_bytes < weights // 2
    sim.configure(cap=0)


def test_a_forward_that_moved_a_buffer_is_not_repeated(sim: ModuleType) -> None:
    class Counting(Wide):
        """Counts its calls in a buffer."""

        def forward(self, x: torch.Tensor, spare: int = 0) -> torch.Tensor:
            """One more."""
            self.shift.add_(1)
            return super().forward(x, spare)

    module, x = make(Counting), numbers(3, models.WIDTH)
    weights = sum(p.numel() * 4 for p in module.parameters())
    before = module.shift[0].item()
    sim.configure(cap=2 * weights)
    with stream(module, "auto"):
        with pytest.raises(torch.OutOfMemoryError, match="call again"):
            seeded(module, x, weights * 3 // 2)
        seeded(module, x, weights * 3 // 2)
    assert module.shift[0].item() == pytest.approx(before + 2)


def test_a_device_that_is_too_small_for_an_activation_is_named_each_time_and_works_for_less(sim: ModuleType) -> None:
    module, x, weights, expected = wide(sim)
    sim.configure(cap=2 * weights)
    handle = stream(module, "auto")
    for turn in range(3):
        with pytest.raises(torch.OutOfMemoryError, match=NAMED) as caught:
            seeded(module, x, weights * 5)
        assert "That plan is the smallest" in str(caught.value)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        smallest = int(re.search(r"memory_budget=(\d+)", str(caught.value))[1])  # type: ignore[index]
        assert turn or smallest <= handle.plan.peak_bytes
        assert torch.equal(seeded(module, x), expected)
    handle.remove()
    sim.configure(cap=0)
    with stream(module, "auto", memory_budget=smallest):
        assert torch.equal(seeded(module, x), expected)
    with pytest.raises(torch.OutOfMemoryError):
        stream(module, "auto", memory_budget=smallest - 1)


def test_failed_activations_are_not_kept_while_the_forward_is_repeated(sim: ModuleType) -> None:
    """What the failed forward held in local variables would take the room that was made."""

    class Hoarding(Wide):
        """Keeps a large activation while it asks for one more."""

        def forward(self, x: torch.Tensor, spare: int = 0) -> torch.Tensor:
            """Two of them at once."""
            kept = torch.empty(spare, dtype=torch.uint8, device=x.device)
            return super().forward(x, spare) + 0 * kept.numel()

    module, x = make(Hoarding), numbers(3, models.WIDTH)
    weights = sum(p.numel() * 4 for p in module.parameters())
    sim.configure(cap=2 * weights)
    with stream(module, "auto"):
        expected = seeded(module, x)
        assert torch.equal(seeded(module, x, weights * 3 // 4), expected)


def test_a_vae_that_overflows_within_a_call_names_tiling(sim: ModuleType) -> None:
    """`vae.decode` is no `forward`, so it isn't repeated."""
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    pipe.enable_layerwise_offload(mode="auto", onload_device="sim")
    with failing_modules(pipe.vae.decoder, 3), pytest.raises(torch.OutOfMemoryError, match="enable_vae_tiling"):
        factory.run("sd15", pipe)
    assert torch.equal(factory.run("sd15", pipe), expected)


# ---- host memory


def test_host_memory_that_cannot_be_locked_is_called_host_memory(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    monkeypatch.setattr(host.platform, "new_pinned", refuse)
    with stream(module) as handle:
        for _ in range(3):
            assert torch.equal(run(module, x), expected)
        text = str(handle.report())
        assert "of host memory could not be page-locked, so copies go through" in text
        assert "device memory" not in text


def test_weights_stay_where_they_are_when_host_memory_runs_out(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(host.Chunk):
        """No host memory of any kind."""

        def __init__(self, *_: object, **__: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")

    module, x = make(models.MlpStack), numbers(3, models.WIDTH)
    expected = run(module, x)
    monkeypatch.setattr(host, "Chunk", Refusing)
    with stream(module) as handle:
        for _ in range(3):
            assert torch.equal(run(module, x), expected)
        assert "of host memory could not be allocated, so weights stay where they were loaded" in str(handle.report())


# ---- the decisions


def test_the_next_plan_is_smaller_and_never_below_the_smallest() -> None:
    assert smaller_limit(10, 100, 60) == 60
    assert smaller_limit(10, 100, 100) == 99
    assert smaller_limit(10, 100, 0) == 10
    assert smaller_limit(10, 10, 0) is None
    assert smaller_limit(10, 8, 0) is None


@pytest.mark.parametrize(
    ("change", "unchanged"),
    [
        (lambda a: None, True),
        (lambda a: a["x"].add_(1), False),
        (lambda a: a["nest"][0].append(1), False),
        (lambda a: a["nest"][0].__setitem__(0, None), False),
        (lambda a: a["nest"][1].mul_(2), False),
        (lambda a: a.update(y=1), False),
        (lambda a: a.pop("x"), False),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_snapshot_notices_changes_in_place(mode: Any, change: Callable[[Any], Any], unchanged: bool) -> None:
    arguments = {"x": torch.ones(2), "nest": ([torch.ones(1)], torch.ones(3)), "n": 3, "text": "a", "none": None}
    before = Snapshot(arguments)
    with mode():
        change(arguments)
    assert before.is_unchanged() == unchanged


def test_what_a_snapshot_cannot_see_counts_as_changed() -> None:
    with torch.inference_mode():
        assert not Snapshot([torch.ones(2)]).is_unchanged()
    assert not Snapshot((1, object())).is_unchanged()
    assert not Snapshot({"generator": torch.Generator()}).is_unchanged()
