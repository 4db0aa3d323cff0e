"""A device without memory: code runs on the meta device as on an accelerator, and its bytes and FLOPs are counted.

Two modes see every operation. Tensors on the host are real and computed as usual, so schedulers, tokenizers and image
processing are exact. Tensors on the meta device stand for the accelerator's: they have shapes, and values where these
are small and known (see `twins.py`). What is read from others on the host is zeros.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .flops import Cost, attention_flops, moved_bytes, product_flops
from .live import LiveBytes
from .twins import FACTORIES, Twins, mapped, tensors_in

META = torch.device("meta")
#: Elements up to which an operation that has no meta version is run on zeros on the host to learn its shapes.
RUNNABLE = 1 << 26

aten = torch.ops.aten

_SILENT = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
_SILENT |= {aten.detach, aten.alias, aten.lift_fresh, aten.set_, aten.resize_}
"""Operations that start no kernel."""

_SHAPED_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs on the meta device.

    Attributes:
        live (`LiveBytes`): Bytes of tensors that are alive.
        cost (`Cost`): Where the next operation's cost goes; the caller replaces it at will.
        guesses (`Counter`): Values that were asked for and aren't known, by operation.
        last (`str`): The last operation, for messages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes()
        self.twins = Twins(self.live)
        self.cost = Cost()
        self.guesses: Counter[str] = Counter()
        self.last = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, so the guard around each operation is spared."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        target = kwargs.get("device")
        inputs = tensors_in(args, kwargs)
        if not any(t.is_meta for t in inputs) and (target is None or torch.device(target).type != "meta"):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.last = str(func)
            special = _SPECIAL.get(func)
            if special is not None:
                result = special(self, func, args, kwargs)
                if result is not NotImplemented:
                    return result
            result = self._run(func, args, kwargs, inputs)
            self._count(func, args, kwargs, inputs, result)
            return result

    # ------------------------------------------------------------------ running
    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        known = not random and (bool(inputs) or func in FACTORIES) and self.twins.known(inputs)
        values = self._values(func, args, kwargs) if known else None
        changed = [t for t in _written(func, args, kwargs) if t.is_meta]
        if changed and (values is None or any(self.twins.of(t) is None for t in changed)):
            for tensor in changed:
                self.twins.forget(tensor)
        if values is not None and _SHAPED_BY_VALUES & set(func.tags):
            return self._like(values)
        result = self._shapes(func, args, kwargs)
        if values is not None and not changed:
            for tensor, value in zip(tensors_in(result), tensors_in(values), strict=False):
                if tensor.is_meta and tensor.shape == value.shape and self.twins.of(tensor) is None:
                    self.twins.keep(tensor, value)
        return result

    def _values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on known values, on the host; in-place ones change the twins. None where it fails."""
        real_args, real_kwargs = mapped(args, self.twins.of), mapped(kwargs, self.twins.of)
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        numbers = [a for a in args if isinstance(a, int)]
        sizes = [a for a in args if isinstance(a, (list, tuple)) and all(isinstance(n, int) for n in a)]
        count = 1
        for n in [*numbers, *(n for size in sizes for n in size)]:
            count *= max(1, abs(n))
        if func in FACTORIES and count > RUNNABLE:
            return None
        try:
            return func(*real_args, **real_kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            return None

    def _like(self, values: Any) -> Any:
        def like(value: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
            self.twins.keep(made, value)
            return made

        return mapped(values, like)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if sum(t.numel() for t in tensors_in(args, kwargs)) > RUNNABLE:
                raise NotImplementedError(f"{func} has no version for shapes alone: {error}") from error
        except RuntimeError as error:
            if "is not on the expected device" not in str(error):
                raise
            self.guesses["host tensors used on the device"] += 1
            return func(*mapped(args, _moved), **mapped(kwargs, _moved))
        zeros = [mapped(v, lambda t: torch.zeros(t.shape, dtype=t.dtype)) for v in (args, kwargs)]
        if zeros[1].get("device") is not None:
            zeros[1]["device"] = torch.device("cpu")
        result = func(*zeros[0], **zeros[1])
        return mapped(result, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META))

    def _count(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], result: Any) -> None:
        outputs = [t for t in tensors_in(result) if t.is_meta]
        for tensor in outputs:
            self.live.see(tensor)
        if func._overloadpacket in _SILENT:
            return
        before = {t.untyped_storage()._cdata for t in inputs if t.is_meta}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in before]
        if not fresh and not func._schema.is_mutable:
            return  # a view
        flops = product_flops(func, args, kwargs, result)
        dtype = next((t.dtype for t in inputs if t.is_floating_point()), None)
        written = fresh if not func._schema.is_mutable else outputs[:1]
        self.cost.add_operation(flops, dtype, moved_bytes(t for t in [*inputs, *written] if t.is_meta))

    # ------------------------------------------------------------------ the way to the host
    def read(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fake tensor on the host: its value, or zeros."""
        value = self.twins.of(tensor)
        if value is None:
            return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype)
        return value.clone() if dtype is None else value.to(dtype, copy=True)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty(tensor.shape, dtype=tensor.dtype, device=META)


# ---------------------------------------------------------------------- operations of their own
def _to_copy(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Copies between host and device."""
    source = args[0]
    target = torch.device(kwargs.get("device") or source.device)
    if source.is_meta and target.type != "meta":
        return device.read(source, kwargs.get("dtype"))
    if source.is_meta or target.type != "meta":
        return NotImplemented
    result = func(*args, **kwargs)
    device.live.see(result)
    device.twins.keep(result, source)
    return result


def _copy_in_place(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """`copy_` between host and device, or into a device tensor whose value becomes known."""
    target, source = args[:2]
    if not target.is_meta:
        return target.copy_(device.read(source))
    value = device.twins.of(source)
    if value is not None and device.twins.of(target) is None and target.is_contiguous():
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        if whole:
            device.twins.keep(target, value.expand(target.shape))
            return target
    return NotImplemented


def _scalar(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """`.item()`."""
    value = device.twins.of(args[0])
    if value is None:
        device.guesses["item"] += 1
        value = torch.zeros((), dtype=args[0].dtype)
    return func(value)


def _equal(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    values = [device.twins.of(t) for t in args[:2]]
    if any(value is None for value in values):
        device.guesses["equal"] += 1
        return bool(args[0].shape == args[1].shape)
    return func(*values)


def _index(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing with a known mask: by the positions that it holds."""
    indices: list[Any] = []
    changed = False
    for index in args[1]:
        value = device.twins.of(index) if isinstance(index, torch.Tensor) and index.dtype == torch.bool else None
        if value is None:
            indices.append(index.to(META) if isinstance(index, torch.Tensor) and not index.is_meta else index)
            changed = changed or indices[-1] is not index
            continue
        changed = True
        indices += [p.to(META) for p in value.nonzero(as_tuple=True)]
    if not changed or device.twins.known(tensors_in(args)):
        return NotImplemented
    result = device._shapes(func, (args[0], indices, *args[2:]), kwargs)
    if func._schema.is_mutable:
        device.twins.forget(args[0])
    device._count(func, (args[0], indices, *args[2:]), kwargs, tensors_in(args), result)
    return result


def _identity(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


_Special = Callable[[FakeDevice, Any, Any, Any], Any]
_SPECIAL: dict[Any, _Special] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_in_place,
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten.index.Tensor: _index,
    aten.index_put.default: _index,
    aten.index_put_.default: _index,
    aten._pin_memory.default: _identity,
}


# ---------------------------------------------------------------------- functions above the dispatcher
class Functions(TorchFunctionMode):
    """Functions that an accelerator runs as one kernel and the meta device would take apart.

    Args:
        device (`FakeDevice`): Where their cost goes.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _replaced(F, "scaled_dot_product_attention", self._attention):
                return func(*args, **kwargs)
        if func in (torch.rms_norm, F.rms_norm) and args[0].is_meta:
            return self._rms_norm(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple, int, float, bool)):
            return _from_host(func, args, kwargs)
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and args[0].is_meta:
            return func(args[0].to("cpu"), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention in one kernel: its memory is its output, laid out (batch, length, heads, width) as fused kernels
        do; a mask of booleans is first made one of numbers."""
        if not query.is_meta:
            fused: torch.Tensor = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return fused
        mask = None
        if attn_mask is not None:
            mask = torch.empty_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        *outer, width = (*query.shape[:-1], value.shape[-1])
        if len(outer) == 3:
            result = torch.empty(outer[0], outer[2], outer[1], width, dtype=query.dtype, device=META).transpose(1, 2)
        else:
            result = torch.empty(*outer, width, dtype=query.dtype, device=META)
        cost = self.device.cost
        cost.attention += attention_flops(query.shape, key.shape, value.shape, is_causal)
        read = [query, key, value, result] + ([] if mask is None else [mask])
        cost.attention_bytes += moved_bytes(read)
        cost.kernels += 1
        self.device.last = "scaled_dot_product_attention"
        return result

    def _rms_norm(
        self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        """RMS norm in one kernel, which also keeps the reciprocal root of each row."""
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        rows = x.shape[: x.dim() - len(shape)]
        torch.empty(*rows, dtype=torch.float32, device=META)
        result = torch.empty(x.shape, dtype=dtype, device=META)
        self.device.cost.add_operation(0, None, moved_bytes([x, result]))
        return result


def _from_host(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.tensor(...)`, which reads scalars below the modes' sight: made on the host, then moved."""
    kwargs = dict(kwargs)
    target = kwargs.pop("device", None)
    made = func(mapped(args[0], lambda t: t.item() if t.numel() == 1 else t.tolist()), *args[1:], **kwargs)
    return made if target is None else made.to(target)


def _autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Autocast knows no meta device: a block for it is made for the host, where nothing of it runs."""
    if device_type == "meta":
        device_type, args, kwargs = "cpu", (), {"enabled": False}
    _AUTOCAST(self, device_type, *args, **kwargs)


_AUTOCAST = torch.amp.autocast.__init__
_GENERATOR = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _Generator(metaclass=_AnyGenerator):
    """Generators that a pipeline makes for its device: the meta device has none, so they are the host's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _GENERATOR("cpu" if torch.device(device).type == "meta" else device)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


#: What is replaced is the process's own, so plans take turns.
_TURN = threading.RLock()


@contextlib.contextmanager
def faked(device: FakeDevice) -> Iterator[None]:
    """Runs a block with the meta device as the accelerator."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_TURN)
        stack.enter_context(torch.inference_mode(False))  # tensors of that mode bypass what counts them
        stack.enter_context(torch.no_grad())
        # Where a mask's content isn't known, all of it is taken: the most that can come out.
        stack.enter_context(_replaced(fx_config, "meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(_replaced(torch.amp.autocast, "__init__", _autocast))
        stack.enter_context(_replaced(torch, "Generator", _Generator))
        stack.enter_context(Functions(device))
        stack.enter_context(device)
        yield
