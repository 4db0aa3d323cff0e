"""What callers may do around a streamed module: change streams and grad modes, and meet exceptions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import models
from diffusers_layerwise import LayerwiseOffloadError
from models import run, stream


def test_caller_may_change_streams_between_and_within_passes(sim: ModuleType, on_stream: Callable[[], Any]) -> None:
    class Hopping(models.Chain):
        """Its second half runs on a stream of its own."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Two blocks here, two there."""
            x = self.blocks[1](self.blocks[0](x))
            with on_stream():
                return self.blocks[3](self.blocks[2](x))

    x = models.numbers(2, models.WIDTH)
    for kind in (models.Chain, Hopping):
        chain = models.make(kind)
        expected = run(models.make(models.Chain), x)
        stream(chain)
        for index in range(6):
            with on_stream() if index % 2 else contextlib.nullcontext():
                assert torch.equal(run(chain, x), expected)


@pytest.mark.parametrize("mode", ["memory", "speed", "manual"])
def test_passes_on_streams_that_nothing_else_orders_are_right(mode: str, sim: ModuleType) -> None:
    """What one stream waited for (fixed and resident weights) is not there yet for another one."""
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    expected = run(module, x)
    stream(module, mode, config={"resident": 2} if mode == "manual" else None)
    streams = [sim.Stream(), sim.Stream(), sim.current_stream()]
    results = []
    for index in range(9):
        with sim.stream(streams[index % 3]), torch.no_grad():
            results.append(module(x))
    sim.synchronize()
    assert all(torch.equal(result.cpu(), expected) for result in results)


def test_no_grad_and_inference_mode_take_turns(sim: ModuleType) -> None:
    module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
    expected = run(module, x)
    stream(module)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(module(x).cpu(), expected)
        assert not any(t.is_inference() for t in [*module.parameters(), *module.buffers()])


@pytest.mark.xfail(reason="tensors made under inference_mode have no version counter, which discovery reads")
def test_module_built_under_inference_mode_streams(sim: ModuleType) -> None:
    with torch.inference_mode():
        module, x = models.make(models.MlpStack), models.numbers(2, models.WIDTH)
        expected = run(module, x)
    stream(module)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(module(x).cpu(), expected)


def test_second_thread_that_calls_the_module_meanwhile_does_not_disturb_the_first(sim: ModuleType) -> None:
    class Waiting(torch.nn.Linear):
        """Once its weight is there, gives the other thread the time for a pass of its own."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Waits in the first thread only."""
            if threading.current_thread().name == "first":
                inside.set()
                done.wait(0.5)
            return super().forward(x)

    inside, done = threading.Event(), threading.Event()
    x = models.numbers(2, models.WIDTH)
    layers = [torch.nn.Linear, Waiting, torch.nn.Linear, torch.nn.Linear]
    module = models.make(lambda: models.Blocks([kind(models.WIDTH, models.WIDTH) for kind in layers]))
    expected = run(module, x)
    stream(module)
    assert torch.equal(run(module, x), expected)
    results: list[torch.Tensor] = []
    first = threading.Thread(target=lambda: results.append(run(module, x)), name="first")
    first.start()
    inside.wait(10)
    results.append(run(module, x))
    done.set()
    first.join()
    assert len(results) == 2
    assert all(torch.equal(result, expected) for result in results)


def test_call_with_gradients_is_refused_by_name_and_leaves_the_next_one_right(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    expected = run(chain, x)
    stream(chain)
    with pytest.raises(LayerwiseOffloadError, match=r"'Chain' streams its layers .* its weights require"):
        chain(x)
    assert torch.equal(run(chain, x), expected)
    chain.requires_grad_(False)
    with pytest.raises(LayerwiseOffloadError, match="an input require"):
        chain(x.requires_grad_())
    assert torch.equal(chain(x.detach()).cpu(), expected)


class Fragile(models.Chain):
    """Raises before or after a block when asked to."""

    def forward(self, x: torch.Tensor, fails_at: int = -1, error: type[BaseException] | None = None) -> torch.Tensor:
        """Runs the blocks; inside the one numbered `fails_at`, raises `error`."""
        for index, block in enumerate(self.blocks):
            if index == fails_at and error is not None:
                block.lin.register_forward_hook(lambda *_: _raise(error))
            x = block(x)
        return x


def _raise(error: type[BaseException]) -> None:
    raise error("on purpose")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("warm", [0, 1, 3])
@pytest.mark.parametrize("layer", range(4))
def test_exception_in_any_layer_leaves_the_next_call_right(
    layer: int, warm: int, error: type[BaseException], sim: ModuleType
) -> None:
    chain, x = models.make(Fragile), models.numbers(2, models.WIDTH)
    expected = run(chain, x)
    handle = stream(chain)
    for _ in range(warm):
        run(chain, x)
    with pytest.raises(error):
        run(chain, x, fails_at=layer, error=error)
    chain.blocks[layer].lin._forward_hooks.clear()
    for _ in range(3):
        assert torch.equal(run(chain, x), expected)
        assert handle._runtime.transfer.held_bytes == handle.plan.peak_bytes
    handle.release()
    assert handle._runtime.transfer.held_bytes == 0


def test_out_of_memory_while_the_ring_is_allocated_leaves_the_next_call_right(sim: ModuleType) -> None:
    chain, x = models.make(models.Chain), models.numbers(2, models.WIDTH)
    expected = run(chain, x)
    handle = stream(chain, memory_budget=1 << 20)
    sim.configure(cap=4096)
    with pytest.raises(torch.OutOfMemoryError):
        run(chain, x)
    assert handle._runtime.transfer.held_bytes == 0
    sim.configure(cap=0)
    for _ in range(3):
        assert torch.equal(run(chain, x), expected)
    assert handle._runtime.transfer.held_bytes == handle.plan.peak_bytes
