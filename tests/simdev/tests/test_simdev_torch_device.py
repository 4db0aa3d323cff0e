"""The simulated device as an ordinary PyTorch device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

try:
    import simdev as sim
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from simdev.testing import SIZE, fresh_device, on_device, pinned, upload

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    with fresh_device():
        yield


def test_parameters_keep_their_identity_through_data_swaps() -> None:
    """The way an offload moves a module: the Parameter stays, its data changes."""
    layer = torch.nn.Linear(64, 64)
    parameters = list(layer.parameters())
    homes = [parameter.data.pin_memory() for parameter in parameters]
    base = sim.memory_allocated()
    for parameter, home in zip(parameters, homes, strict=True):
        parameter.data = home.to("sim", non_blocking=True)
    assert sim.memory_allocated() - base == SIZE + 64 * 4
    layer(torch.ones(1, 64, device="sim"))
    for parameter, home in zip(parameters, homes, strict=True):
        parameter.data = home
    assert sim.memory_allocated() == base
    assert all(now is before for now, before in zip(layer.parameters(), parameters, strict=True))
    assert all(parameter.device.type == "cpu" for parameter in parameters)


def test_parameter_data_can_be_a_view_of_a_flat_buffer() -> None:
    """A slot of a ring holds a whole layer; its parameters are views of it."""
    layer, slot = torch.nn.Linear(8, 8), on_device(72)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    slot.copy_(torch.cat([weight.flatten(), bias]))
    with torch.no_grad():
        layer.weight.data = slot[:64].view(8, 8)
        layer.bias.data = slot[64:]
        inputs = torch.randn(2, 8)
        assert torch.equal(layer(inputs.to("sim")).cpu(), F.linear(inputs, weight, bias))


def test_views_of_normal_tensors_under_inference_mode_are_normal_tensors() -> None:
    """A weight's transpose, taken by a linear layer, must not turn into an inference tensor."""
    layer, inputs = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4)
    with torch.no_grad():
        expected = layer(inputs.to("sim")).cpu()
    with torch.inference_mode():
        result = layer(inputs.to("sim")).cpu()
        assert not layer.weight.t().is_inference()
        assert (inputs.to("sim") + 1).is_inference()
    assert torch.equal(result, expected)


def test_tensors_made_outside_inference_mode_inside_it_are_normal() -> None:
    """Slots allocated in the middle of an inference have to serve outside of it too."""
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode():
        with torch.inference_mode(False):
            slot = torch.empty(4, 4, device="sim")
            copy = torch.ones(4, 4).to("sim")
        slot.copy_(copy)
        layer.weight.data = slot
    assert not slot.is_inference()
    assert not copy.is_inference()
    slot.add_(1)
    layer.to("sim")(torch.ones(1, 4, device="sim")).sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), torch.ones(4, 4))


def test_gradients_are_those_of_the_cpu() -> None:
    """Autograd works through kernels, views, attention and copies."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 8), torch.randn(1, 2, 8, 8)
    grads = []
    for device in ("cpu", "sim"):
        leaf = weight.clone().to(device).requires_grad_()
        query = inputs.to(device) @ leaf.t()
        F.scaled_dot_product_attention(query, query, query).square().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [torch.randn, torch.rand, lambda *a, **k: torch.randint(0, 99, a, **k)])
def test_seeded_random_numbers_are_those_of_the_cpu(make: Callable[..., torch.Tensor]) -> None:
    """Through the default generator and through one of the device's own."""
    torch.manual_seed(3)
    expected = make(50)
    torch.manual_seed(3)
    assert torch.equal(make(50, device="sim").cpu(), expected)
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.equal(make(50, device="sim", generator=generator).cpu(), expected)


def test_generator_of_another_device_is_refused() -> None:
    """As CUDA refuses it."""
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.randn(4, device="sim", generator=torch.Generator().manual_seed(0))


def test_generator_state_can_be_saved_and_restored() -> None:
    """So that a run can be repeated from the middle."""
    generator = torch.Generator("sim").manual_seed(1)
    state = generator.get_state()
    first = torch.randn(4, device="sim", generator=generator).cpu()
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device="sim", generator=generator).cpu(), first)


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: F.linear(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.add_(b),
    ],
    ids=["add", "linear", "cat", "where", "add_"],
)
def test_mixing_host_and_device_in_one_operator_is_refused(operation: Callable[..., torch.Tensor]) -> None:
    """Either way round: a forgotten move must not work by accident."""
    here, there = torch.ones(4, 4), torch.ones(4, 4, device="sim")
    for left, right in ((here, there), (there, here)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            operation(left, right)


def test_host_numbers_and_host_indices_are_accepted() -> None:
    """As on CUDA, where they are passed as numbers or copied over."""
    values = torch.arange(8.0).to("sim")
    assert (values * torch.tensor(2.0))[3].item() == 6
    assert values[torch.tensor([1, 5])].tolist() == [1, 5]


def test_storage_resized_to_nothing_gives_its_memory_back() -> None:
    """And can be grown again."""
    tensor, base = on_device(64, 64), sim.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert sim.memory_allocated() == base - SIZE
    tensor.untyped_storage().resize_(SIZE)
    tensor.fill_(3)
    assert sim.memory_allocated() == base
    assert (tensor == 3).all().item()


def test_out_argument_is_resized_on_the_device() -> None:
    """The new memory belongs to the device and is counted there."""
    base, ones = sim.memory_allocated(), torch.ones(8, 8, device="sim")
    out = torch.empty(0, device="sim")
    torch.add(ones, ones, out=out)
    assert out.shape == (8, 8)
    assert sim.memory_allocated() - base == 2 * ones.nbytes


def test_work_on_another_thread_starts_on_the_default_stream() -> None:
    """The current stream is each thread's own."""
    seen = []
    with sim.stream(sim.Stream()):
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join()
    assert seen == [sim.default_stream()]


def test_stream_context_puts_back_stream_and_device() -> None:
    """Also when it was for another device."""
    sim.configure(ndev=2)
    stream = sim.Stream("sim:1")
    with sim.stream(stream):
        assert sim.current_device() == 1
        assert sim.current_stream() == stream
    assert sim.current_device() == 0
    assert sim.current_stream("sim:1") == sim.default_stream("sim:1")


def test_threads_can_share_the_device() -> None:
    """Two threads that allocate, compute and free do not block each other for ever."""
    errors = []

    def work() -> None:
        try:
            with sim.stream(sim.Stream()):
                for _ in range(200):
                    ones = torch.ones(16, 16).to("sim")
                    assert (ones @ ones).sum().item() == 16**3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_safetensors_can_load_to_the_device(tmp_path: Path) -> None:
    """It knows no `sim`, so the tensors are read to the CPU and moved."""
    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.randn(4, 4)
    safetensors.save_file({"weight": weight}, tmp_path / "file.safetensors")
    loaded = safetensors.load_file(tmp_path / "file.safetensors", device="sim")["weight"]
    assert loaded.device.type == "sim"
    assert torch.equal(loaded.cpu(), weight)


def test_reset_ends_everything_in_flight_without_complaint() -> None:
    """After a test that has provoked a race, the next one starts clean."""
    source, stream, target = pinned(64, 64), sim.Stream(), torch.zeros(64, 64).pin_memory()
    weight = upload(source, stream)
    target.copy_(torch.ones(64, 64, device="sim"), non_blocking=True)
    source.zero_()
    target.zero_()
    sim.reset()
    assert sim.check_pending() == (0, 0, 0, 0)
    assert sim.races() == []
    assert sim.times()["total"] == 0
    assert (target == 1).all()
    weight + 1


def test_unknown_settings_are_refused() -> None:
    """A misspelt setting must not be ignored."""
    with pytest.raises(RuntimeError, match="unknown setting bandwith"):
        sim.configure(bandwith=1)
    with pytest.raises(ValueError, match="mode"):
        sim.configure(mode="rise")
    with pytest.raises(RuntimeError, match="ndev"):
        sim.configure(ndev=99)
