"""Which children's weights a module, or its attention processor, reads without calling them: found in their source.

`F.multi_head_attention_forward(..., self.q_proj.weight)` or `torch.cdist(z, self.embedding.weight)` never run a hook on
the child, so nothing would load it. Such children stay resident while their component is in use.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Iterator, Sequence

from torch import nn

#: Where a call from outside enters a module; methods that these call on `self` are followed.
ENTRIES = ("forward", "encode", "decode")
PROCESSOR_ENTRIES = ("__call__", "forward")
WEIGHTS = ("weight", "bias")
#: Attributes of a weight that don't read its data. T5 asks for `self.wo.weight.dtype` in every pass.
HARMLESS = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_floating_point", "type"}
HARMLESS |= {"element_size", "is_quantized", "layout", "is_meta", "__class__"}
#: Functions that look at a tensor without reading its data.
LOOKS = {"isinstance", "hasattr", "type", "id"}


#: Weak: a class made in a function would be kept alive, and with it what its methods refer to.
_known: weakref.WeakKeyDictionary[type[nn.Module], frozenset[str]] = weakref.WeakKeyDictionary()
_processors: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Names of children whose `weight` or `bias` a class reads on its way through `forward`.

    Args:
        kind (`type`): A module class. Where its source can't be had, nothing is found.
    """
    if kind not in _known:
        _known[kind] = _weights_read(kind, ENTRIES, "self")
    return _known[kind]


def weights_read_by(processor: object) -> frozenset[str]:
    """Names of an attention module's children whose `weight` or `bias` its processor reads.

    Args:
        processor: What diffusers' attention modules have as `processor`: it is called with the module.
    """
    kind = type(processor)
    if kind.__module__ == "builtins":
        return frozenset()
    if kind not in _processors:
        _processors[kind] = _weights_read(kind, PROCESSOR_ENTRIES, _first_argument(kind))
    return _processors[kind]


def _first_argument(kind: type) -> str:
    method = next((found for name in PROCESSOR_ENTRIES if (found := kind.__dict__.get(name)) is not None), None)
    try:
        return list(inspect.signature(method).parameters)[1]  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError):
        return "attn"


def _weights_read(kind: type, entries: Sequence[str], owner: str) -> frozenset[str]:
    found: set[str] = set()
    waiting, seen = list(entries), set(entries)
    while waiting:
        method = getattr(kind, waiting.pop(), None)
        if method is None or getattr(method, "__module__", "").startswith("torch.nn.modules.module"):
            continue
        for node in _nodes(method):
            child = _weight_of(node, owner)
            if child is not None:
                found.add(child)
            called = _called_on_self(node)
            if called is not None and called not in seen:
                seen.add(called)
                waiting.append(called)
    return frozenset(found)


def _nodes(method: object) -> Iterator[ast.AST]:
    """All nodes of a method's source, but not the weights whose data isn't read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))  # type: ignore[arg-type]
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError, ValueError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and node.attr in HARMLESS:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKS:
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _weight_of(node: ast.AST, name: str) -> str | None:
    """`child` for the expressions `self.child.weight` and `self.child[...].weight`, where `name` is `self`."""
    if not isinstance(node, ast.Attribute) or node.attr not in WEIGHTS:
        return None
    owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
    return _attribute_of(owner, name)


def _called_on_self(node: ast.AST) -> str | None:
    return _attribute_of(node.func, "self") if isinstance(node, ast.Call) else None


def _attribute_of(node: ast.AST, name: str) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
        return node.attr
    return None
