"""Pipelines without weights: from a folder's configs, or as a copy of one that is loaded; every weight on meta."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from .compiled import is_wrapper, plain, uncompile
from .config import format_bytes
from .errors import LayerwiseOffloadError
from .fake import META, FakeDevice, faked
from .headers import checkpoint_dtypes, dtype_of
from .parts import find
from .standins import stand_in

#: Assumed where neither a file, a config nor the caller says.
DTYPE = torch.bfloat16
INDEX = "model_index.json"
#: What a model on the hub is called: its owner and a name.
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: Attributes by which accelerate and diffusers hang hooks on a module.
HOOKS = ("_hf_hook", "_old_forward", "_diffusers_hook")


def from_folder(
    folder: Path, device: FakeDevice, dtype: torch.dtype | None, notes: list[str]
) -> DiffusionPipeline | None:
    """Builds a pipeline from a folder in diffusers' layout; weight files aren't needed.

    Args:
        folder (`Path`): Has `model_index.json` and a folder with a config for each component.
        device (`FakeDevice`): Where it will run.
        dtype (`torch.dtype`, *optional*): As `torch_dtype` of `from_pretrained`; None takes that of the files.
        notes (`list[str]`): Gets a line for each component that is assumed or left out.

    Raises:
        LayerwiseOffloadError: The folder is no such pipeline, a component's config can't be read, or it is quantised.
    """
    index = read_index(folder)
    cls = pipeline_class(index)
    values: dict[str, Any] = {}
    assumed = _assumed_dtype(folder, notes) if dtype is None else dtype
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            if not name.startswith("_"):
                values[name] = entry
            continue
        if len(entry) != 2:
            raise LayerwiseOffloadError(f"{INDEX} should name library and class of {name!r}, got {entry!r}.")
        values[name] = (
            None if entry[0] is None else _component(folder, name, entry, cls, device, (dtype, assumed), notes)
        )
    expected, optional = cls._get_signature_keys(cls)
    for name in set(expected) - set(values):
        values[name] = None
    accepted = {*expected, *optional}
    try:
        pipe: DiffusionPipeline = cls(**{name: value for name, value in values.items() if name in accepted})
    except Exception as error:
        # What a class says of a wrong component names neither it nor the file.
        raise LayerwiseOffloadError(
            f"{cls.__name__} can't be made of what {folder / INDEX} names for it: {type(error).__name__}: {error}. "
            f"Download that file again, or build the pipeline yourself and pass it instead of the folder."
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def read_index(folder: Path) -> dict[str, Any]:
    """A folder's `model_index.json`.

    Raises:
        LayerwiseOffloadError: There is none, or it is none of diffusers'.
    """
    path = folder / INDEX
    if not path.is_file():
        raise LayerwiseOffloadError(_no_index(folder))
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise LayerwiseOffloadError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(index, dict) or "_class_name" not in index:
        raise LayerwiseOffloadError(f"{path} names no pipeline class ('_class_name'); it is no diffusers pipeline.")
    return index


def _no_index(folder: Path) -> str:
    name = folder.as_posix()
    if folder.exists():
        what = f"{name!r} has no {INDEX}, so it is no pipeline in diffusers' layout"
        return f"{what}. Pass the folder that save_pretrained wrote, or that of a downloaded snapshot."
    if not HUB_NAME.fullmatch(name):
        return f"The folder {name!r} doesn't exist. Pass a pipeline's folder, which has a {INDEX}."
    return (
        f"The folder {name!r} doesn't exist. Of a model on the hub, pass a download of its configs, which are small: "
        f"hf download {name} --exclude '*.safetensors' --local-dir {folder.name}"
    )


def pipeline_class(index: dict[str, Any]) -> Any:
    """The pipeline class that an index names.

    Raises:
        LayerwiseOffloadError: This diffusers has no such class.
    """
    import diffusers

    name = index["_class_name"]
    name = name[-1] if isinstance(name, list) else name
    cls = getattr(diffusers, str(name), None)
    if cls is None:
        raise LayerwiseOffloadError(
            f"{INDEX} asks for the pipeline class {name!r}, which diffusers {diffusers.__version__} doesn't have. "
            f"Update diffusers, or build the pipeline yourself and pass it instead of the folder."
        )
    if not (isinstance(cls, type) and issubclass(cls, DiffusionPipeline) and cls is not DiffusionPipeline):
        raise LayerwiseOffloadError(f"{INDEX} asks for {name!r}, which is no pipeline class that can be called.")
    return cls


def _component(
    folder: Path,
    name: str,
    entry: list[Any],
    cls: Any,
    device: FakeDevice,
    dtypes: tuple[torch.dtype | None, torch.dtype],
    notes: list[str],
) -> Any:
    kind = _component_class(entry, cls)
    place = folder / name
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        _refuse_quantised_files(name, place)
        try:
            with faked(device), META:
                module = _module(kind, place)
            fit_dtypes(module, place, *dtypes)
        except Exception as error:
            raise LayerwiseOffloadError(
                f"{name!r} ({entry[1]}) can't be built from its config in {str(place)!r}: {type(error).__name__}: "
                f"{error}"
            ) from error
        to_meta(module, device)
        return module.eval()
    loader = getattr(kind, "from_pretrained", None)
    if loader is not None and place.is_dir():
        try:
            return loader(str(place), local_files_only=True)
        except Exception as error:
            notes.append(f"{name}: a stand-in, since {entry[1]} can't be loaded ({type(error).__name__}: {error})")
    return stand_in(name, str(entry[1]), place, notes)


def _component_class(entry: list[Any], cls: Any) -> Any:
    library, name = str(entry[0]), str(entry[1])
    from diffusers import pipelines

    module = getattr(pipelines, library, None) if hasattr(pipelines, library) else None
    try:
        module = module or importlib.import_module(library)
    except ImportError:
        module = importlib.import_module(cls.__module__)
    found = getattr(module, name, None)
    return found if found is not None else getattr(module, name.removesuffix("Fast"), None)


def _module(kind: Any, place: Path) -> nn.Module:
    """A component of random... that is, of no weights at all: its constructor under the meta device."""
    if hasattr(kind, "load_config"):
        made: nn.Module = kind.from_config(kind.load_config(str(place), local_files_only=True))
        return made
    config = kind.config_class.from_pretrained(str(place), local_files_only=True)
    found: nn.Module = kind._from_config(config, dtype=torch.float32)
    return found


def fit_dtypes(module: nn.Module, place: Path, dtype: torch.dtype | None, assumed: torch.dtype) -> None:
    """Gives weights and buffers the dtypes that loading would: the caller's, else the files', else the assumed one.

    Modules that a class keeps in float32 stay so, unless a file says otherwise.
    """
    dtypes = checkpoint_dtypes(place) if place.is_dir() else {}
    default = dtype or assumed
    kept = _kept_in_float32(module, default)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for owner, name, tensor in held_tensors(module):
        if not tensor.is_floating_point():
            continue
        wanted = default
        if dtype is None and dtypes:
            wanted = dtype_of(name, dtypes) or default
        elif any(part in name.split(".") for part in kept):
            wanted = torch.float32
        short = name.rpartition(".")[2]
        if short in owner._non_persistent_buffers_set or not wanted.is_floating_point or wanted is tensor.dtype:
            continue
        if id(tensor) not in made:  # tied weights stay tied
            made[id(tensor)] = (tensor, _empty_like(tensor, wanted))
        _put(owner, short, made[id(tensor)][1])


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the modules that loading in a dtype keeps in float32.

    diffusers keeps them in any other dtype; transformers in float16 alone, but for those it calls strict.
    """
    if dtype is torch.float32:
        return ()
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    strict = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    is_diffusers = hasattr(type(module), "load_config")
    return (*strict, *(kept if is_diffusers or dtype is torch.float16 else ()))


def _assumed_dtype(folder: Path, notes: list[str]) -> torch.dtype:
    """The dtype of components without files: what most configs say, the same for all, as `torch_dtype` gives it."""
    lacking = [p.parent for p in sorted(folder.glob("*/config.json")) if not checkpoint_dtypes(p.parent)]
    said: Counter[torch.dtype] = Counter()
    for place in lacking:
        try:
            config = json.loads((place / "config.json").read_text())
        except ValueError:
            continue
        found = getattr(torch, str(config.get("torch_dtype") or config.get("dtype")).removeprefix("torch."), None)
        said.update([found] if isinstance(found, torch.dtype) else [])
    dtype = said.most_common(1)[0][0] if said else DTYPE
    if lacking:
        why = "as most configs say" if said else "since neither files nor configs say"
        notes.append(f"weights without files are taken for {str(dtype).removeprefix('torch.')}, {why} (pass dtype)")
    return dtype


def held_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(owner, full name, tensor) of every parameter and buffer, also of those that modules share."""
    for path, owner in list(module.named_modules(remove_duplicate=True)):
        for held in (owner._parameters, owner._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    yield owner, f"{path}.{name}" if path else name, tensor


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter or buffer of the same shape on meta."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=META)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _put(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    if name in owner._parameters:
        owner._parameters[name] = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[name] = value


def to_meta(module: nn.Module, device: FakeDevice) -> None:
    """Puts what is left on the host on meta (small buffers keep their values there) and takes all of it for weights."""
    made: dict[int, torch.Tensor] = {}
    for owner, name, tensor in held_tensors(module):
        short = name.rpartition(".")[2]
        if not tensor.is_meta:
            if id(tensor) not in made:
                made[id(tensor)] = _empty_like(tensor, tensor.dtype)
                if short in owner._buffers:
                    device.twins.keep(made[id(tensor)], tensor)
            _put(owner, short, made[id(tensor)])
    for owner, name, tensor in held_tensors(module):
        plain = tensor.data
        device.live.own(plain)
        if name.rpartition(".")[2] in owner._parameters:
            device.twins.forget(plain)
    module.requires_grad_(False)


def from_pipeline(pipe: DiffusionPipeline, device: FakeDevice, memo: dict[int, Any] | None = None) -> DiffusionPipeline:
    """A copy of a loaded pipeline whose modules have no weights. The original isn't touched.

    Schedulers are copied, since a call changes them, and so are pipelines within it; tokenizers and processors are
    shared. Hooks stay behind.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.
        device (`FakeDevice`): Where the copy will run.
        memo (`dict`, *optional*): What was copied so far, by id: pipelines within it share its modules.

    Raises:
        LayerwiseOffloadError: A component is quantised.
    """
    for name, value in pipe.components.items():
        if isinstance(value, nn.Module):
            refuse_quantised(name, plain(value))
    made = object.__new__(type(pipe))
    made.__dict__.update(pipe.__dict__)
    made.__dict__.pop("_layerwise_offload", None)
    memo = {} if memo is None else memo
    for name, value in {**pipe.__dict__, **pipe.components}.items():
        if isinstance(value, DiffusionPipeline):
            made.__dict__[name] = from_pipeline(value, device, memo)
        elif id(value) in memo and memo[id(value)] is not None:
            made.__dict__[name] = memo[id(value)]
        elif isinstance(value, nn.Module):
            made.__dict__[name] = from_module(plain(value), device, memo)
        elif hasattr(value, "set_timesteps") or hasattr(value, "step"):
            made.__dict__[name] = copy.deepcopy(value, memo)
    made.set_progress_bar_config(disable=True)
    return made


def refuse_quantised(name: str, module: nn.Module) -> None:
    """Quantised weights have no stand-in on meta: they would be counted, and computed with, as ordinary ones.

    Raises:
        LayerwiseOffloadError: The module has some.
    """
    held = [(path, owner, tensor) for owner, path, tensor in held_tensors(module)]
    first = next(((path, tensor) for path, owner, tensor in held if _is_quantised(tensor, owner)), None)
    if first is None:
        return
    parts = {id(part.tensor): part.tensor for _, owner, tensor in held for part in find(tensor, owner)}
    total = sum(part.numel() * part.element_size() for part in parts.values())
    raise _cannot_plan(name, f"{first[0]} is a {type(first[1]).__qualname__}", f" of {format_bytes(total)}")


def _is_quantised(tensor: torch.Tensor, owner: nn.Module) -> bool:
    """Whether a tensor stands for more than its own numbers. Shards on a mesh do so as well, and are no such thing."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or hasattr(tensor, "device_mesh"):
        return False
    return not tensor.is_floating_point() or any(part.tensor is not tensor for part in find(tensor, owner))


def _refuse_quantised_files(name: str, place: Path) -> None:
    path = place / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # whoever builds the component says so
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise _cannot_plan(name, f"{path} has a quantization_config{f' ({method})' if method else ''}", "")


def _cannot_plan(name: str, why: str, size: str) -> LayerwiseOffloadError:
    return LayerwiseOffloadError(
        f"{name!r} is quantised ({why}), and quantised weights{size} can't be planned without a device: they would be "
        f"taken for ordinary ones. Call enable_layerwise_offload() on the loaded pipeline instead, which streams them: "
        f"its handle.plan and report() say what they take. Or plan the pipeline as it was before, which needs more."
    )


def from_module(module: nn.Module, device: FakeDevice, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a module with every weight on meta and without anybody's hooks."""
    memo = {} if memo is None else memo
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for tensor in held.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _ghost(tensor, device, held is part._buffers)
        for name, value in part.__dict__.items():
            if name in HOOKS:
                memo[id(value)] = None
            elif is_wrapper(part) and name == "dynamo_ctx":
                memo[id(value)] = value
            elif isinstance(value, torch.Tensor):
                memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device=META) if _derived(value) else value
        if "_hf_hook" in part.__dict__ or "_diffusers_hook" in part.__dict__:
            memo[id(part.__dict__.get("forward"))] = None
    made = copy.deepcopy(module, memo)
    uncompile(made)
    for part in made.modules():
        _drop_own_hooks(part)
        for name in HOOKS:
            part.__dict__.pop(name, None)
        if part.__dict__.get("forward", part) is None:
            del part.__dict__["forward"]
    to_meta(made, device)
    return made


def _drop_own_hooks(part: nn.Module) -> None:
    """Takes off the user's forward hooks, which would see shapes alone; those of torch make weights (`weight_norm`)."""
    for hooks in (part._forward_pre_hooks, part._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__module__", None) or type(hook).__module__
            if owner.partition(".")[0] not in ("torch", "diffusers", "transformers"):
                del hooks[key]


def _derived(value: torch.Tensor) -> bool:
    """Whether a module computed a tensor from its weights (`weight_norm` does), so that it can't be copied."""
    return not value.is_leaf


def _ghost(tensor: torch.Tensor, device: FakeDevice, is_buffer: bool) -> torch.Tensor:
    with torch.no_grad():
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided else torch.empty(tensor.shape, device=META).stride()
        ghost = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=META)
        if is_buffer and not tensor.is_meta and strided:
            device.twins.keep(ghost, tensor.detach().cpu())
    return ghost if is_buffer else nn.Parameter(ghost, requires_grad=False)
