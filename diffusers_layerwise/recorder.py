"""Runs a pipeline or a module on the fake device and writes down its trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .discovery import Component, discover
from .errors import raised_in
from .fake import FakeDevice, faked
from .flops import Cost, total
from .repeats import Given, Leavings, bytes_of, call_key, is_replayable, lists_in, made, own, shape_of, state_of
from .trace import Leaf, PassTrace, Trace, TracedComponent, TracedUnit, Use

#: Methods by which pipelines enter a component.
ENTRIES = ("forward", "encode", "decode", "get_text_features", "get_image_features")
#: Methods that only autoencoders have.
CODING = ("encode", "decode")
#: What diffusers' autoencoders call to join tiles, row by row: thousands of operations for a large video.
JOINS = ("blend_v", "blend_h", "blend_t")
#: Modules from which on a part of a component is worth looking at whether it was called alike before.
LARGE = 8


@dataclasses.dataclass
class _Part:
    """A stretch of operations: their cost, and the most bytes alive."""

    cost: Cost
    high: int = 0

    def add(self, other: _Part) -> None:
        self.cost.add(other.cost)
        self.high = max(self.high, other.high)

    def again(self, higher: int) -> _Part:
        """The same work with so many more bytes alive."""
        return _Part(total([self.cost]), self.high + higher if self.high else 0)


def _part() -> _Part:
    return _Part(Cost())


@dataclasses.dataclass
class _Open:
    """The pass that is under way."""

    name: str
    base: int
    head: _Part = dataclasses.field(default_factory=_part)
    uses: list[tuple[int, _Part, _Part]] = dataclasses.field(default_factory=list)
    stack: list[int] = dataclasses.field(default_factory=list)

    def take(self, part: _Part) -> None:
        """Books a part where it belongs: to the module that runs, else to the gap after the last one."""
        if self.stack:
            self.uses[self.stack[-1]][1].add(part)
        elif self.uses:
            self.uses[-1][2].add(part)
        else:
            self.head.add(part)

    def closed(self) -> PassTrace:
        """The pass as data, with bytes counted from its beginning."""

        def above(part: _Part) -> int:
            return max(0, part.high - self.base)

        uses = tuple(Use(leaf, b.cost, g.cost, above(b), above(g)) for leaf, b, g in self.uses)
        return PassTrace(uses, self.head.cost, above(self.head), self.base)

    def take_all(self, other: _Open, higher: int) -> None:
        """Books the uses of a stretch that ran by itself, with so many more bytes alive than it had then."""
        self.take(other.head.again(higher))
        self.uses += [(leaf, busy.again(higher), gap.again(higher)) for leaf, busy, gap in other.uses]


class Recorder:
    """Listens to components while they run on a fake device.

    Args:
        device (`FakeDevice`): The device.
        modules (`Mapping[str, nn.Module]`): The components, without weights; they are hooked.
    """

    def __init__(self, device: FakeDevice, modules: Mapping[str, nn.Module]) -> None:
        self.device = device
        self.sequence: list[tuple[str, int]] = []
        self.outside = _part()
        self.components: dict[str, TracedComponent] = {}
        self._open: _Open | None = None
        self._implicit = False
        self._depth = 0
        self._replays: dict[Any, tuple[str, int, Any, int]] = {}
        self._parts: dict[Any, tuple[_Open, Leavings]] = {}
        seen: set[int] = set()
        for name, module in modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                self.components[name] = self._hook(name, module)
        self._cut()  # what building them took

    def __deepcopy__(self, memo: Any) -> Recorder:
        """One recorder listens to a scheduler and its copies."""
        return self

    # ------------------------------------------------------------------ hooks
    def _hook(self, name: str, module: nn.Module) -> TracedComponent:
        found = discover(module, name, allow_meta=True)
        leaves = find_leaves(found)
        for index, (_, part) in enumerate(leaves):
            if part is not module:
                part.register_forward_pre_hook(self._before(name, index), prepend=True)
                part.register_forward_hook(self._after)
        if any(callable(getattr(type(module), coding, None)) for coding in CODING):
            self._hook_parts(name, module, {id(part) for _, part in leaves})
        own = next((i for i, (_, part) in enumerate(leaves) if part is module), None)
        for entry in ENTRIES:
            method = getattr(module, entry, None)
            if callable(method) and getattr(type(module), entry, None) is not None:
                module.__dict__[entry] = self._entry(name, method, own)
        units = tuple(TracedUnit(u.name, u.layer, u.size, u.can_gather) for u in found.units)
        kinds = tuple(leaf for leaf, _ in leaves)
        return TracedComponent(name, type(module).__name__, found.weights, found.fixed_size, units, kinds)

    def _hook_parts(self, name: str, module: nn.Module, triggers: set[int]) -> None:
        """Takes the calls of an autoencoder's decoder apart, of which there is one for each tile and each few frames.

        Not other models: transformers collects hidden states of layers aside, which a call that isn't run would miss.
        """
        for child, part in module.named_children():
            if id(part) not in triggers and sum(1 for _ in part.modules()) >= LARGE:
                part.__dict__["forward"] = self._part(name, child, part, part.forward)
        for join in JOINS:
            if callable(method := getattr(module, join, None)):
                module.__dict__[join] = self._part(name, join, module, method)

    def _before(self, name: str, leaf: int) -> Callable[..., None]:
        def before(_module: nn.Module, _args: Any) -> None:
            self.use(name, leaf)

        return before

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.done()

    def _entry(self, name: str, method: Callable[..., Any], own: int | None) -> Callable[..., Any]:
        @functools.wraps(method)
        def entry(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            key = call_key(self.device, name, method.__name__, args, kwargs)
            if key in self._replays:
                return self._replay(*self._replays[key])
            self._depth += 1
            self._begin(name)
            before = self.device.live.now
            try:
                if own is not None:
                    self.use(name, own)
                result = method(*args, **kwargs)
                if own is not None:
                    self.done()
            except Exception as error:
                self._blame(name, error)
                raise
            finally:
                self._depth -= 1
                kind = self._end()
            if key is not None and is_replayable(self.device, result):
                # Tables that it keeps for later passes are in its own peak already, and are there when it is repeated.
                kept = max(0, self.device.live.now - before - bytes_of(result))
                self._replays[key] = (name, kind, shape_of(result), kept)
            return result

        return entry

    def _part(self, name: str, child: str, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """A component's part, which isn't run again for a call like an earlier one of the same pass or another."""

        @functools.wraps(method)
        def forward(*args: Any, **kwargs: Any) -> Any:
            opened = self._open
            if opened is None or opened.name != name or opened.stack:
                return method(*args, **kwargs)
            self._book()
            key = call_key(self.device, name, child, args, kwargs)
            lists = list(lists_in((args, kwargs)))
            if key in self._parts:
                done, leavings = self._parts[key]
                opened.take_all(done, self.device.live.now - done.base)
                result = leavings.leave((args, kwargs), lists)
                self._book()
                return result
            self._open = inner = _Open(name, self.device.live.now)
            given, before = Given((args, kwargs)), state_of(module)
            try:
                result = method(*args, **kwargs)
            finally:
                self._book()
                self._open = opened
                opened.take_all(inner, 0)
            if key is not None and state_of(module) == before:
                found = Leavings.of(self.device, result, given, lists)
                if found is not None:
                    self._parts[key] = (inner, found)
            return result

        return forward

    def _blame(self, name: str, error: Exception) -> None:
        if self.components[name].error is None:
            self.components[name].error = self._why(error)

    def _why(self, error: Exception) -> str:
        """The operation at which an error came, and its first line."""
        first = next(iter(str(error).splitlines()), "")
        return f"tracing stopped at {self.device.last}: {type(error).__name__}: {first}"

    # ------------------------------------------------------------------ passes and uses
    def _cut(self) -> _Part:
        part = _Part(self.device.cost, self.device.live.take_high())
        self.device.cost = Cost()
        return part

    def _book(self) -> None:
        part = self._cut()
        if self._open is None:
            self.outside.add(part)
        else:
            self._open.take(part)

    def _begin(self, name: str) -> None:
        self._end()
        self._book()
        self._open = _Open(name, self.device.live.now)

    def _end(self) -> int:
        """Closes the pass that is open; returns its kind."""
        self._book()
        opened, self._open, self._implicit = self._open, None, False
        if opened is None:
            return 0
        passes = self.components[opened.name].passes
        passes.append(opened.closed())
        self.sequence.append((opened.name, len(passes) - 1))
        return len(passes) - 1

    def use(self, name: str, leaf: int) -> None:
        """A module with weights begins."""
        if self._open is None or (self._implicit and self._open.name != name):
            self._begin(name)  # a part of a component that is called by itself
            self._implicit = True
        opened = self._open
        self._book()
        if opened is not None and opened.name == name:
            opened.uses.append((leaf, _part(), _part()))
            opened.stack.append(len(opened.uses) - 1)

    def done(self) -> None:
        """It has run."""
        self._book()
        if self._open is not None and self._open.stack:
            self._open.stack.pop()

    def step(self) -> None:
        """A step of the scheduler."""
        if self._implicit:
            self._end()
        self._book()
        self.sequence.append(("", 0))

    def finish(self) -> None:
        """The call is over."""
        if self._open is not None:
            self._end()
        self._book()

    def _replay(self, name: str, kind: int, shape: Any, kept: int) -> Any:
        """A pass like an earlier one, which left so many bytes behind: counted, not run."""
        self._end()
        done = self.components[name].passes[kind]
        done.count += 1
        done.base = max(done.base, self.device.live.now - kept)
        self.sequence.append((name, kind))
        return made(shape)

    def trace(self, pipeline: str, notes: list[str], error: Exception | None = None) -> Trace:
        """What was recorded."""
        if self.device.guesses:
            asked = ", ".join(f"{count} of {name}" for name, count in sorted(self.device.guesses.items()))
            notes = [*notes, f"values that depend on the weights were taken for 0 ({asked})"]
        why = None if error is None else self._why(error)
        components = list(self.components.values())
        return Trace(pipeline, components, self.sequence, self.outside.cost, self.outside.high, why, notes)


# ---------------------------------------------------------------------- leaves
def find_leaves(component: Component) -> list[tuple[Leaf, nn.Module]]:
    """A component's modules with weights, each once: unit roots, and modules whose weights stay resident."""
    units = {id(module): unit for unit in component.units for module in unit.triggers}
    inside: set[int] = set()
    found: list[tuple[Leaf, nn.Module]] = []
    lists = {n for n, m in component.module.named_children() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    for path, module in component.module.named_modules():
        if id(module) in inside:
            continue
        unit = units.get(id(module))
        is_leaf = bool(module._parameters) and not any(True for child in module.children() for _ in child.parameters())
        if unit is None and not is_leaf:
            continue
        inside.update(id(part) for part in module.modules())
        weights = [p for p in module.parameters() if p is not None]
        nbytes = sum(p.numel() * p.element_size() for p in weights)
        top = path.split(".")
        block = ".".join(top[:2]) if len(top) > 1 and top[0] in lists else None
        index = None if unit is None else unit.index
        found.append((Leaf(path, type(module).__name__, len(weights), nbytes, index, block), module))
    return found


# ---------------------------------------------------------------------- entry points
def trace_module(module: nn.Module, call: Callable[[nn.Module], Any], name: str = "module") -> Trace:
    """Traces one module without weights.

    Args:
        module (`nn.Module`): On the meta device; it is hooked, so it is of no further use.
        call (`Callable`): Calls it, with inputs made on the meta device.
        name (`str`): Its name in the result.
    """
    device = FakeDevice()
    for tensor in [*module.parameters(), *module.buffers()]:
        device.live.own(tensor.data)
    recorder = Recorder(device, {name: module})
    error: Exception | None = None
    with faked(device):
        try:
            result = call(module)
            recorder.finish()
            del result
        except Exception as failed:
            error = failed
    return recorder.trace(type(module).__name__, [], error)


def trace_pipeline(pipe: Any, device: FakeDevice, call: Mapping[str, Any], notes: list[str]) -> Trace:
    """Runs a call of a pipeline without weights. What fails is in the trace, unless the pipeline refuses the arguments.

    Args:
        pipe (`DiffusionPipeline`): As [`from_folder`] or [`from_pipeline`] makes it.
        device (`FakeDevice`): Its device.
        call (`Mapping`): The call's arguments.
        notes (`list[str]`): What was assumed so far.
    """
    modules = {name: value for name, value in pipe.components.items() if isinstance(value, nn.Module)}
    recorder = Recorder(device, modules)
    scheduler = getattr(pipe, "scheduler", None)
    if hasattr(scheduler, "step"):
        _mark_steps(scheduler, recorder)
    if hasattr(pipe, "video_processor") and call.get("output_type") is None:
        call = {**call, "output_type": "pt"}  # frames as arrays are work of the host alone: gigabytes of zeros
    # A plan leaves random numbers and the user's functions alone.
    call = {name: own(value) for name, value in call.items() if not (name.startswith("callback") and callable(value))}
    error: Exception | None = None
    with faked(device):
        try:
            result = pipe(**call)
            recorder.finish()
            del result
        except Exception as failed:
            if raised_in(failed, "check_inputs"):
                raise
            error = failed
            recorder.finish()
    return recorder.trace(type(pipe).__name__, notes, error)


def _mark_steps(scheduler: Any, recorder: Recorder) -> None:
    """Makes a scheduler, and whatever copies of it a pipeline makes, tell the recorder of each step."""
    for name, marked in (("step", _step), ("set_timesteps", _set_timesteps)):
        method = getattr(scheduler, name, None)
        if method is not None:
            # A partial object, not a closure: a deep copy of the scheduler gets one that is bound to the copy.
            setattr(scheduler, name, functools.update_wrapper(functools.partial(marked, scheduler, recorder), method))


def _step(scheduler: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    result = type(scheduler).step(scheduler, *args, **kwargs)
    recorder.step()
    return result


def _set_timesteps(scheduler: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """Makes a scheduler's tables on the host, since some schedulers read them there while they make them."""
    asked = kwargs.get("device")
    if asked is not None:
        kwargs["device"] = "cpu"
    result = type(scheduler).set_timesteps(scheduler, *args, **kwargs)
    if asked is not None and isinstance(scheduler.__dict__.get("timesteps"), torch.Tensor):
        scheduler.timesteps = scheduler.timesteps.to(asked)
    return result
