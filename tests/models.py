"""Small modules with one difficulty each, for tests of the engine, and how those stream and run them.

All take `(batch, width)` or token numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from diffusers_layerwise import OffloadHandle, apply_layerwise_offload

WIDTH = 32
TOKENS = 24

M = TypeVar("M", bound=nn.Module)


def make(kind: Callable[..., M], *args: object, seed: int = 0, **kwargs: object) -> M:
    """A module in eval mode with weights from a seed; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(*args, **kwargs).eval()


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random numbers from a seed, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random token numbers from a seed, on the CPU."""
    return torch.randint(0, TOKENS, shape, generator=torch.Generator().manual_seed(seed))


class Sealed(torch.Tensor):
    """A tensor that says it wraps another one, but can't be made anew around that."""

    hidden = torch.zeros(1)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Its inner tensors' names, and no way back."""
        return ["hidden"], None


class Block(nn.Module):
    """One linear layer with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the layer makes of `x`."""
        return x + torch.tanh(self.lin(x))


class Chain(nn.Module):
    """Equal blocks, which a call may skip, repeat, reorder or leave early: `order` names them by number."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        """Runs the blocks in order, or those named."""
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return x


class Mlp(nn.Module):
    """Norm, two projections and a residual."""

    def __init__(self, width: int = WIDTH, ratio: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, ratio * width)
        self.down = nn.Linear(ratio * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the layers make of `x`."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class MlpStack(nn.Module):
    """Input and output projections around a stack, a buffer, and a parameter that the root owns itself."""

    def __init__(self, depth: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs all of them; `scale` and `shift` are read around the blocks."""
        x = self.proj_in(x) * self.scale
        for block in self.blocks:
            x = block(x) + self.shift
        return self.proj_out(x * self.scale)


class Stage(nn.Module):
    """Two inner blocks and a change of width, as a UNet has at each resolution."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Mlp(width) for _ in range(2))
        self.sample = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both blocks, then the change of width."""
        for resnet in self.resnets:
            x = resnet(x)
        return self.sample(x)


class SkipUNet(nn.Module):
    """Nested stacks with skip connections; registered in another order than they run, as diffusers' UNets are."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.down_blocks = nn.ModuleList(Stage(width * 2**i, width * 2 ** (i + 1)) for i in range(2))
        self.up_blocks = nn.ModuleList(Stage(width * 2 ** (2 - i) * 2, width * 2 ** (1 - i)) for i in range(2))
        self.mid_block = Stage(width * 4, width * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down, middle, up; each stage up also gets what went into its resolution."""
        skips = []
        for stage in self.down_blocks:
            x = stage(x)
            skips.append(x)
        x = self.mid_block(x)
        for stage in self.up_blocks:
            x = stage(torch.cat([x, skips.pop()], dim=-1))
        return x


class AttentionBlock(nn.Module):
    """`nn.MultiheadAttention`, which reads the weight of its `out_proj` without calling it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over the batch as a sequence, then the MLP."""
        return self.mlp(x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0])


class Blocks(nn.Module):
    """Any blocks, one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the blocks in order."""
        for block in self.blocks:
            x = block(x)
        return x


def attention_stack(depth: int = 3) -> nn.Module:
    """A stack of attention blocks."""
    return Blocks([AttentionBlock() for _ in range(depth)])


def shared_stack(depth: int = 4) -> nn.Module:
    """One and the same block, several times over, among blocks that appear once."""
    shared = Block()
    return Blocks([shared if i % 2 else Block() for i in range(depth)])


def weight_norm_stack(depth: int = 3) -> nn.Module:
    """Linear layers under `weight_norm`: the old one with pre-hooks, and the new one, a parametrisation."""
    blocks: list[nn.Module] = []
    for index in range(depth):
        block = Block()
        if index % 2:
            block.lin = parametrizations.weight_norm(block.lin)
        else:
            block.lin = nn.utils.weight_norm(block.lin)  # type: ignore[no-untyped-call]
        blocks.append(block)
    return Blocks(blocks)


class Doubled(nn.Module):
    """A parametrisation without parameters of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice `x`."""
        return 2 * x


def parametrised_stack(depth: int = 3) -> nn.Module:
    """Linear layers whose weight is computed from another one at each use."""
    blocks = [Block() for _ in range(depth)]
    for block in blocks:
        parametrize.register_parametrization(block.lin, "weight", Doubled())
    return Blocks(blocks)


def transposed_stack(depth: int = 3) -> nn.Module:
    """Linear layers whose weights are stored column by column, and biases that skip every other element."""
    blocks = [Block() for _ in range(depth)]
    for block in blocks:
        block.lin.weight.data = block.lin.weight.data.t().contiguous().t()
        block.lin.bias.data = torch.randn(2 * WIDTH)[::2]
    return Blocks(blocks)


class TiedLanguageModel(nn.Module):
    """An embedding whose table is also the weight of the head."""

    def __init__(self, depth: int = 3, width: int = WIDTH, vocabulary: int = TOKENS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wide_language_model() -> TiedLanguageModel:
    """An embedding table that is many times larger than any layer."""
    return TiedLanguageModel(depth=4, vocabulary=64 * TOKENS)


class Branches(nn.Module):
    """Two stacks of which a call takes one, between layers that always run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.last = Block()

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        """`first`, one of the stacks, `last`."""
        x = self.first(x)
        for block in self.left if left else self.right:
            x = block(x)
        return self.last(x)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "mlp_stack": MlpStack,
    "unet": SkipUNet,
    "attention": attention_stack,
    "shared": shared_stack,
    "weight_norm": weight_norm_stack,
    "parametrised": parametrised_stack,
    "transposed": transposed_stack,
    "branches": Branches,
}
"""Modules that take a `(batch, WIDTH)` tensor of numbers."""

LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {"tied": TiedLanguageModel, "wide": wide_language_model}
"""Modules that take token numbers."""


# ---- how tests stream and run them


def stream(
    module: nn.Module, mode: str = "memory", device: str = "sim", share: float | None = None, **options: Any
) -> OffloadHandle:
    """Layerwise offload; `share` sets the budget to that part of the weights, or what the largest one needs."""
    if share is not None:
        sizes = [p.numel() * p.element_size() for p in module.parameters()]
        options["memory_budget"] = max(int(sum(sizes) * share), max(sizes)) + 8192
    return apply_layerwise_offload(module, mode, onload_device=device, **options)


def run(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The module's output without gradients, on the CPU."""
    with torch.no_grad():
        return module(*args, **kwargs).cpu()


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, the objects themselves, tied ones under each name."""
    return dict(
        [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)],
    )


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all values."""
    return {name: tensor.detach().clone() for name, tensor in tensors(module).items()}
