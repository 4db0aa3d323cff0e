"""Ways to quantise the linear layers of a module, one for each package that does it; None where it isn't installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

Quantise = Callable[[nn.Module], None]

#: Layers that are left alone: the last ones are small and sensitive, as diffusers' own loaders have it.
LEFT_OUT = ("proj_out", "norm_out")


def linears(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of each linear layer that is quantised; GGUF packs 32 numbers at a time."""
    found = []
    for path, parent in module.named_modules():
        for name, layer in parent.named_children():
            left_out = any(part in f"{path}.{name}" for part in LEFT_OUT)
            if type(layer) is nn.Linear and layer.in_features % 32 == 0 and not left_out:
                found.append((parent, name, layer))
    return found


def torchao(config: str, **options: object) -> Quantise:
    """torchao's weight-only and dynamic schemes."""

    def quantise(module: nn.Module) -> None:
        from torchao import quantization

        chosen = getattr(quantization, config)(**options)
        wanted = {id(layer) for _, _, layer in linears(module)}
        quantization.quantize_(module, chosen, filter_fn=lambda layer, _: id(layer) in wanted)

    return quantise


def quanto(weights: str) -> Quantise:
    """optimum-quanto's schemes."""

    def quantise(module: nn.Module) -> None:
        from optimum import quanto as package

        package.quantize(module, weights=getattr(package, weights), exclude=[f"*{name}*" for name in LEFT_OUT])
        package.freeze(module)

    return quantise


def bitsandbytes(bits: int) -> Quantise:
    """bitsandbytes' linear layers: NF4 with nested statistics, or LLM.int8()."""

    def quantise(module: nn.Module) -> None:
        from bitsandbytes import nn as package

        for parent, name, layer in linears(module):
            if layer.in_features % 64:
                continue  # its kernels for the CPU want whole blocks
            bias = layer.bias is not None
            new: nn.Linear
            if bits == 4:
                new = package.Linear4bit(
                    layer.in_features, layer.out_features, bias, compute_dtype=layer.weight.dtype, quant_type="nf4"
                )
            else:
                new = package.Linear8bitLt(layer.in_features, layer.out_features, bias, has_fp16_weights=False)
            new.load_state_dict(layer.state_dict())
            setattr(parent, name, new.to("cpu").eval())

    return quantise


def gguf(kind: str) -> Quantise:
    """diffusers' layers for GGUF checkpoints."""

    def quantise(module: nn.Module) -> None:
        import gguf as package
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
        from gguf import quants

        quant_type = getattr(package.GGMLQuantizationType, kind)
        for parent, name, layer in linears(module):
            packed = torch.from_numpy(quants.quantize(layer.weight.detach().float().numpy(), quant_type).copy())
            bias = layer.bias is not None
            new = GGUFLinear(layer.in_features, layer.out_features, bias, compute_dtype=layer.weight.dtype)
            new.weight = GGUFParameter(packed, quant_type=quant_type)
            new.bias = layer.bias
            setattr(parent, name, new.eval())

    return quantise


#: Name, its package, the devices that its kernels run on here, how.
KINDS: dict[str, tuple[str, tuple[str, ...], Quantise]] = {
    "torchao int8 weight-only": ("torchao", ("sim", "cpu"), torchao("Int8WeightOnlyConfig")),
    "torchao int8 dynamic": ("torchao", ("sim", "cpu"), torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int4 weight-only": ("torchao", ("sim", "cpu"), torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao fp8 weight-only": ("torchao", ("sim", "cpu"), torchao("Float8WeightOnlyConfig")),
    "quanto int8": ("optimum.quanto", ("sim", "cpu"), quanto("qint8")),
    "quanto int4": ("optimum.quanto", ("sim", "cpu"), quanto("qint4")),
    "quanto fp8": ("optimum.quanto", ("sim", "cpu"), quanto("qfloat8")),
    "bitsandbytes 4 bit": ("bitsandbytes", ("cpu",), bitsandbytes(4)),
    "bitsandbytes 8 bit": ("bitsandbytes", ("cpu",), bitsandbytes(8)),
    "GGUF Q8_0": ("gguf", ("sim", "cpu"), gguf("Q8_0")),
    "GGUF Q4_0": ("gguf", ("sim", "cpu"), gguf("Q4_0")),
}


def quantise(module: nn.Module, kind: str) -> nn.Module:
    """Quantises a module's linear layers in place; skips the test where the package is missing."""
    package, _, function = KINDS[kind]
    try:
        found = importlib.util.find_spec(package)
    except ImportError:
        found = None
    if found is None:
        pytest.skip(f"needs {package}")
    with torch.no_grad():
        function(module)
    return module.eval()
