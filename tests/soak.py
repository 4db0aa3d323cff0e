"""Random operations on one pipeline, seeded: what changes it, how it is streamed, what goes wrong, and the check after.

What the image depends on is kept as a list of edits, which a fresh resident pipeline can be given as well. Everything
else (how it is streamed, what failed) must not show in an image.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise as package
import factory
from diffusers_layerwise import LayerwiseOffloadError, conflicts, host
from diffusers_layerwise.binding import Binding
from diffusers_layerwise.errors import is_named
from diffusers_layerwise.group import Group
from diffusers_layerwise.schedule import Schedule
from diffusers_layerwise.transfer import Transfer
from factory.autoencoders import tiny_vae_kl
from factory.inputs import image_tensor
from factory.text import tiny_clip_text
from factory.unets import tiny_unet_sd
from factory.vision import tiny_clip_image_processor, tiny_clip_vision
from lora import copied, factors, ip_adapter

CASE = "sd15"
Edit = Callable[[DiffusionPipeline], Any]
MAKERS: dict[str, Callable[[], nn.Module]] = {"unet": tiny_unet_sd, "vae": tiny_vae_kl, "text_encoder": tiny_clip_text}
SCHEDULERS = """
    DDIMScheduler EulerDiscreteScheduler EulerAncestralDiscreteScheduler DPMSolverMultistepScheduler
    UniPCMultistepScheduler HeunDiscreteScheduler LCMScheduler
""".split()
LORA = {"unet", "text_encoder"}
PACKAGE = str(Path(package.__file__).parent)
#: Steps of ours that an interrupt may cut short.
STEPS = [(host, "move_extent"), (Binding, "bind"), (Binding, "point_at"), (Binding, "point_home")]
STEPS += [(Group, "start_onload"), (Schedule, "adopt")]


@dataclasses.dataclass
class Entry:
    """Something that was done to the pipeline, the components in which it still shows, and the bytes it keeps."""

    text: str
    edit: Edit
    alive: set[str]
    kept: int = 0


class Interrupt(KeyboardInterrupt):
    """One that was injected."""


class Unequal(AssertionError):
    """An image that isn't the one of the resident pipeline, or something left behind."""


def made(name: str, seed: int) -> nn.Module:
    """A component with weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        module = MAKERS[name]().eval()
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return module


def saved(folder: Path) -> None:
    """Checkpoints that components are loaded from, as maps of their files."""
    for name in MAKERS:
        for seed in range(2):
            made(name, seed).save_pretrained(folder / f"{name}-{seed}")


def loaded(folder: Path, name: str, seed: int) -> nn.Module:
    """A component whose weights are views of a file."""
    kind: Any = type(MAKERS[name]())
    module: nn.Module = kind.from_pretrained(folder / f"{name}-{seed}").eval()
    return module


def assigned(name: str, make: Callable[[], nn.Module]) -> Edit:
    """An edit that swaps a component for a new one."""
    return lambda pipe: setattr(pipe, name, make())


def with_ip_adapter(pipe: DiffusionPipeline) -> None:
    """Loads an IP-Adapter, with an image encoder of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        encoder = tiny_clip_vision().eval()
    pipe.register_modules(image_encoder=encoder, feature_extractor=tiny_clip_image_processor())
    checkpoint = ip_adapter(pipe.unet, encoder.config.projection_dim)
    pipe.load_ip_adapter(checkpoint, subfolder=None, weight_name=None, image_encoder_folder=None)
    pipe.set_ip_adapter_scale(0.8)


def anonymous_bytes() -> int:
    """Host memory of the process that is in no file, without what the allocator keeps for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def tensor_bytes() -> int:
    """Host memory of all tensors that are alive, each once."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def descriptors() -> list[str]:
    """Files that the process holds open, but for the list itself."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(path for path in found if not path.startswith(("/proc/", "pipe:", "socket:", "anon_inode:")))


def running() -> list[str]:
    """Threads of ours and of tests."""
    return sorted(t.name for t in threading.enumerate() if type(t).__name__ != "TMonitor")


class Soak:
    """One pipeline and what is done to it.

    Args:
        sim (`ModuleType`): The simulated device.
        seed (`int`): Everything follows from it.
        folder (`Path`): Where the checkpoints are ([`saved`]).
    """

    def __init__(self, sim: ModuleType, seed: int, folder: Path) -> None:
        self.sim = sim
        gc.collect()
        #: What earlier tests left: some models keep tables on the device for good, in caches of their methods.
        self.others = sim.mem(0)["allocated"]
        self.rng = random.Random(seed)
        self.folder = folder
        self.told: list[str] = []
        self.entries: list[Entry] = []
        self.adapters: dict[str, set[str]] = {}
        self.is_fused = self.is_off = self.has_ip = self.is_qkv = False
        self.from_file: set[str] = set()
        self.options: dict[str, Any] | None = None
        self.calls = 0
        self.gone: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._reference: DiffusionPipeline | None = None
        self.pipe = factory.CASES[CASE].build()

    def say(self, text: str) -> None:
        """Writes an operation down, for the replay."""
        self.told.append(f"{len(self.told):4d} (call {self.calls}) {text}")

    @property
    def has_chain(self) -> bool:
        """Whether a part of the pipeline is under model offload."""
        return conflicts.has_chain(self.pipe)

    # ------------------------------------------------------------------ what an image depends on
    def fresh(self) -> DiffusionPipeline:
        """A new resident pipeline with all that was done to this one."""
        pipe = factory.CASES[CASE].build()
        for entry in self.entries:
            entry.edit(pipe)
        return pipe

    def reference(self) -> DiffusionPipeline:
        """The same, made once for each state."""
        if self._reference is None:
            self._reference = self.fresh()
        return self._reference

    def edit(self, text: str, edit: Edit, alive: set[str], replaces: str | None = None, kept: int = 0) -> bool:
        """Does it to both; what the resident pipeline refuses isn't done. Returns whether it was."""
        if replaces is not None:
            for entry in self.entries:
                entry.alive.discard(replaces)
            self.entries = [entry for entry in self.entries if entry.alive]
            self._reference = None
        reference = self.reference()
        before = list(self.entries)
        self._reference = None
        try:
            edit(reference)
        except (ValueError, RuntimeError, AttributeError, KeyError) as error:
            self.say(f"{text}: refused by diffusers ({type(error).__name__}: {str(error)[:60]})")
            return False
        self.say(text)
        try:
            edit(self.pipe)
        except (torch.OutOfMemoryError, LayerwiseOffloadError) as error:
            self.entries = before
            if not self._may_be_refused():
                raise
            self.say(f"  refused: {str(error)[:80]}")
            self.disable()
            edit(self.pipe)
        self.entries.append(Entry(text, edit, set(alive), kept))
        self._reference = reference
        return True

    def _may_be_refused(self) -> bool:
        """A budget, or a host tier that what arrives can't have."""
        return self.options is not None and ("memory_budget" in self.options or "host" in str(self.options))

    def swap(self) -> None:
        """Another component of the same kind, from memory or from a file."""
        name = self.rng.choice(list(MAKERS))
        if name in LORA and self.adapters and (self.is_fused or self.rng.random() < 0.5):
            self.unload()
        # What was done to adapters shows in both of the components, so it is over once both have gone.
        is_tied = name in LORA and any(entry.alive & LORA == LORA for entry in self.entries)
        if self.has_ip and (is_tied or name == "unet"):
            self.unload_ip()
        if self.is_qkv:
            self.qkv()
        if self.has_chain:
            self.unchain()
        for each in sorted(LORA) if is_tied else [name]:
            self._swap(each)
        if is_tied:
            self.adapters, self.is_off = {}, False

    def _swap(self, name: str) -> None:
        is_on_cpu = self.options is not None and self.options["onload_device"] == "cpu"
        seed, is_mapped = self.rng.randrange(2), self.rng.random() < 0.5 and not is_on_cpu
        old, folder = getattr(self.pipe, name), self.folder
        make = (lambda: loaded(folder, name, seed)) if is_mapped else (lambda: made(name, seed))
        if self.edit(f"swap {name}, {seed}, {is_mapped=}", assigned(name, make), {name}, replaces=name):
            self.gone.append((name, weakref.ref(old)))
            self.from_file = self.from_file - {name} | ({name} if is_mapped else set())
            self._to_device()

    def _to_device(self) -> None:
        """An ordinary pipeline on the device wants what arrives there as well."""
        if self.pipe.layerwise_offload is not None or self.has_chain:
            return
        modules = factory.modules_of(self.pipe).values()
        places = [{p.device.type for p in module.parameters()} for module in modules]
        if {"sim"} in places:
            for module, found in zip(modules, places, strict=True):
                if found == {"cpu"}:  # as a whole: within one component there has to be one device
                    module.to("sim")

    def scheduler(self) -> None:
        """Another scheduler."""
        kind = getattr(diffusers, self.rng.choice(SCHEDULERS))
        self.edit(
            f"scheduler {kind.__name__}",
            lambda pipe: setattr(pipe, "scheduler", kind.from_config(dict(pipe.scheduler.config))),
            {"scheduler"},
            replaces="scheduler",
        )

    def load(self) -> None:
        """Loads a LoRA, or another into the same adapter."""
        if self.is_fused or self.is_qkv:
            return
        name, seed = self.rng.choice("abc"), self.rng.randrange(100)
        is_swap = name in self.adapters
        parts = ["unet"] if is_swap else self.rng.choice([["unet"], ["unet"], ["unet", "text_encoder"]])
        if is_swap and self.adapters[name] != {"unet"}:
            return
        rank = 4 if is_swap else self.rng.choice([4, 4, 16])
        if is_swap and getattr(self, f"rank_{name}", 4) != 4:
            return
        checkpoint = factors(factory.CASES[CASE].build(), parts, seed, rank=rank)

        def edit(pipe: DiffusionPipeline) -> None:
            pipe.load_lora_weights(copied(checkpoint), adapter_name=name, **({"hotswap": True} if is_swap else {}))

        text = f"load LoRA {name}, seed {seed}, rank {rank}, {parts}, {is_swap=}"
        if self.edit(text, edit, LORA, kept=sum(value.nbytes for value in checkpoint.values())):
            self.adapters[name] = set(parts)
            setattr(self, f"rank_{name}", rank)

    def choose(self) -> None:
        """Mixes adapters."""
        if not self.adapters or self.is_fused:
            return
        names = self.rng.sample(sorted(self.adapters), self.rng.randint(1, len(self.adapters)))
        weights = [self.rng.choice([0.3, 0.7, 1.0]) for _ in names]
        self.edit(f"set_adapters {names} {weights}", lambda pipe: pipe.set_adapters(names, weights), LORA)

    def switch(self) -> None:
        """Switches them off or on."""
        if self.adapters and not self.is_fused:
            verb = self.rng.choice(["disable_lora", "enable_lora"])
            if self.edit(verb, lambda pipe: getattr(pipe, verb)(), LORA):
                self.is_off = verb == "disable_lora"

    def delete(self) -> None:
        """Deletes one of several."""
        if len(self.adapters) > 1 and not self.is_fused:
            name = self.rng.choice(sorted(self.adapters))
            if self.edit(f"delete_adapters {name}", lambda pipe: pipe.delete_adapters(name), LORA):
                del self.adapters[name]

    def fuse(self) -> None:
        """Fuses them, or takes them apart again."""
        if not self.adapters:
            return
        parts = sorted({part for found in self.adapters.values() for part in found})
        if self.is_fused:
            if self.edit(f"unfuse_lora {parts}", lambda pipe: pipe.unfuse_lora(components=parts), LORA):
                self.is_fused = False
        elif self.is_off:
            return  # a call would take them out of the weights again, which no list of edits has
        elif self.edit(f"fuse_lora {parts}", lambda pipe: pipe.fuse_lora(components=parts, lora_scale=0.5), LORA):
            self.is_fused = True

    def unload(self) -> None:
        """Unloads all of them; what was fused stays in the weights."""
        if self.adapters and self.edit("unload_lora_weights", lambda pipe: pipe.unload_lora_weights(), LORA):
            self.adapters, self.is_fused, self.is_off = {}, False, False

    def ip(self) -> None:
        """An IP-Adapter comes, or goes."""
        if self.has_ip:
            self.unload_ip()
        elif not (self.is_qkv or self.has_chain) and self.edit("load IP-Adapter", with_ip_adapter, {"unet"}):
            self.has_ip = True
            self._to_device()

    def unload_ip(self) -> None:
        """It goes."""
        if self.edit("unload IP-Adapter", lambda pipe: pipe.unload_ip_adapter(), {"unet"}):
            self.has_ip = False

    def qkv(self) -> None:
        """Fuses projections, or takes them apart."""
        if self.adapters or self.has_ip:
            return
        verb = "unfuse_qkv_projections" if self.is_qkv else "fuse_qkv_projections"
        if self.edit(verb, lambda pipe: getattr(pipe, verb)(), {"unet", "vae"}):
            self.is_qkv = not self.is_qkv

    def tiling(self) -> None:
        """The VAE works in tiles or slices, or not."""
        verb = self.rng.choice(["enable_tiling", "disable_tiling", "enable_slicing", "disable_slicing"])
        self.edit(f"vae.{verb}", lambda pipe: getattr(pipe.vae, verb)(), {"vae"})

    def scale(self) -> None:
        """Edits a weight in place."""
        name = self.rng.choice(list(MAKERS))
        nth, factor = self.rng.randrange(1000), self.rng.choice([0.9, 1.1])

        def edit(pipe: DiffusionPipeline) -> None:
            parameters = list(getattr(pipe, name).parameters())
            with torch.no_grad():
                parameters[nth % len(parameters)].mul_(factor)

        self.edit(f"scale weight {nth} of {name} by {factor}", edit, {name})

    def convert(self) -> None:
        """To another dtype and back: exact by way of a wider one, rounded by way of a narrower."""
        if self.has_chain:
            return
        dtype = self.rng.choice([torch.float64, torch.bfloat16])
        if self.edit(
            f"to {dtype} and back", lambda pipe: pipe.to(dtype).to(torch.float32), {"unet", "vae", "text_encoder"}
        ):
            self.from_file = set()

    # ------------------------------------------------------------------ how it is streamed
    def enable(self) -> None:
        """Layerwise offload, in one of its ways."""
        options = self._ways()
        self.say(f"enable {options}")
        try:
            self.pipe.enable_layerwise_offload(**options)
        except torch.OutOfMemoryError as error:
            smallest = int(str(error).split("memory_budget=")[1].split()[0])
            options["memory_budget"] = smallest
            self.say(f"  with the smallest budget that works, {smallest}")
            self.pipe.enable_layerwise_offload(**options)
        except LayerwiseOffloadError as error:
            if "host" not in str(options):
                raise
            self.say(f"  refused: {str(error)[:80]}")
            return
        self.options = options

    def _ways(self) -> dict[str, Any]:
        rng = self.rng
        mode = rng.choice(["auto", "memory", "speed", "manual"])
        parts: list[Any] = [
            "all",
            ["unet", "vae"],
            ["all", "!vae"],
            "dit",
            {"unet": {"resident": 0.5}, "vae": "offload"},
        ]
        parts += [{"all": "layerwise", "text_encoder": "resident"}, {"unet": "resident", "vae": "layerwise"}]
        parts += [None] if mode != "manual" else []
        if self.from_file:
            name, tier = rng.choice(sorted(self.from_file)), rng.choice(["mapped", "file"])
            parts += [{"all": "layerwise", name: {"host": tier}}] * 4
        options: dict[str, Any] = {"components": rng.choice(parts), "mode": mode, "onload_device": "sim"}
        if rng.random() < 0.5:
            modules = factory.modules_of(self.pipe).values()
            weights = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
            options["memory_budget"] = int(weights * rng.choice([0.3, 0.5, 0.8, 1.2, 2.0]))
        config: dict[str, Any] = {"activation_reserve": 0} if rng.random() < 0.7 else {}
        for key, values in {
            "residency": ["use", "lasting"],
            "host": ["pinned", "pageable"],
            "group_size": ["16KiB", "64KiB", "layer"],
            "adapters": ["resident", "streamed"],
            "placement": ["stall", "spread", "prefix"],
            "prefetch": [1, 2, 3] if "memory_budget" not in options else [],
            "embeddings": ["host", "device"],
        }.items():
            if values and rng.random() < 0.3:
                config[key] = rng.choice(values)
        if rng.random() < 0.1 and not self.from_file:
            options["onload_device"] = "cpu"
            options.pop("memory_budget", None)
        return options | ({"config": config} if config else {})

    def disable(self) -> None:
        """The ordinary pipeline again, by one of the calls for it."""
        handle = self.pipe.layerwise_offload
        if handle is None:
            return
        way = self.rng.choice(["disable", "remove"])
        self.say(way)
        self.pipe.disable_layerwise_offload() if way == "disable" else handle.remove()
        self.options = None
        self._to_device()

    def keep(self) -> None:
        """Refreshes, releases or reports."""
        handle = self.pipe.layerwise_offload
        if handle is not None:
            verb = self.rng.choice(["refresh", "release", "report"])
            self.say(verb)
            str(getattr(handle, verb)())

    def chain(self) -> None:
        """Model offload on, or everything off."""
        if self.has_chain:
            self.unchain()
        elif self.options is None or self.options["onload_device"] == "sim":
            self.say("enable_model_cpu_offload")
            self.pipe.enable_model_cpu_offload(device="sim")

    def unchain(self) -> None:
        """Ends every offload."""
        self.say("remove_all_hooks")
        self.pipe.remove_all_hooks()
        self.options = None
        self.pipe.to("cpu")

    def move(self) -> None:
        """The pipeline goes to another device."""
        if self.has_chain or (self.options is not None and self.from_file):
            return
        device = self.rng.choice(["cpu", "sim"])
        if device == "cpu" and self.options is not None and "memory_budget" in self.options:
            return
        self.say(f"to {device}")
        self.pipe.to(device)
        if self.options is not None:
            self.options["onload_device"] = device
        elif device == "sim":
            self.from_file = set()

    def collect(self) -> None:
        """Cycles are collected."""
        self.say("gc")
        gc.collect()

    # ------------------------------------------------------------------ calls
    def arguments(self) -> dict[str, Any]:
        """Sizes, steps, batch, prompt."""
        rng = self.rng
        size = rng.choice([32, 32, 48, 64])
        found = {
            "height": size,
            "width": rng.choice([size, 32]),
            "num_inference_steps": rng.choice([1, 2, 2, 3]),
            "num_images_per_prompt": rng.choice([1, 1, 2]),
            "prompt": rng.choice(["a fox", "a painting of a squirrel eating a burger", "snow"]),
            "guidance_scale": rng.choice([1.0, 7.5]),
            "seed": rng.randrange(3),
        }
        return found | ({"ip_adapter_image": image_tensor()} if self.has_ip else {})

    def run(self, pipe: DiffusionPipeline, arguments: dict[str, Any]) -> torch.Tensor:
        """One call."""
        return factory.run(CASE, pipe, **arguments)

    def expected(self, arguments: dict[str, Any]) -> torch.Tensor:
        """What the resident pipeline makes of the same."""
        reference = self.reference()
        if self.from_file:  # a CPU's kernels round differently where weights aren't aligned, as in a file
            reference.to("sim")
        found = self.run(reference, arguments)
        if self.from_file:
            self._reference = None
        return found

    def prepare(self) -> None:
        """An ordinary pipeline with mapped weights computes on the device, for the reason in [`expected`]."""
        if self.pipe.layerwise_offload is None and not self.has_chain and self.from_file:
            self.say("to sim")
            self.pipe.to("sim")
            self.from_file = set()

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Equal in every bit."""
        if not torch.equal(found, expected):
            raise Unequal(f"the image of call {self.calls} differs: {(found - expected).abs().max()} at most")

    def call(self) -> None:
        """A call whose image has to be right."""
        self.prepare()
        arguments = self.arguments()
        shown = {k: v for k, v in arguments.items() if k != "ip_adapter_image"}
        self.calls += 1
        self.say(f"call {shown}")
        expected = self.expected(arguments)
        try:
            found = self.run(self.pipe, arguments)
        except torch.OutOfMemoryError as error:
            if self.options is None or "memory_budget" not in self.options or not is_named(error):
                raise
            self.say(f"  the budget is too small now: {str(error)[:80]}")
            self.disable()
            self.prepare()
            found = self.run(self.pipe, arguments)
        self.check(found, expected)
        handle = self.pipe.layerwise_offload
        if handle is not None and handle.report().peak_seen > handle.plan.peak_bytes:
            raise Unequal(f"{handle.report().peak_seen} bytes were held, {handle.plan.peak_bytes} were planned")

    def threads(self) -> None:
        """Calls from other threads, which take turns."""
        self.prepare()
        count = 2 if self.pipe.layerwise_offload is not None else 1
        arguments = self.arguments()
        self.calls += 1
        self.say(f"call in {count} threads { ({k: v for k, v in arguments.items() if k != 'ip_adapter_image'}) }")
        expected = self.expected(arguments)
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(self.run(self.pipe, arguments))
            except BaseException as error:
                found.append(error)

        workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            if worker.is_alive():
                raise Unequal("a thread hangs")
        for result in found:
            if isinstance(result, torch.OutOfMemoryError) and self.options and "memory_budget" in self.options:
                continue
            if isinstance(result, BaseException):
                raise result
            self.check(result, expected)

    def fault(self) -> None:
        """A call in which something goes wrong; if it ends well, its image is right. Then a good one."""
        self.prepare()
        arguments = self.arguments()
        kinds = [
            self._callback,
            self._scheduler,
            self._module,
            self._module_memory,
            self._memory,
            self._step,
            self._any,
        ]
        text, around, more = self.rng.choice(kinds)(arguments)
        self.calls += 1
        self.say(f"fault: {text}, { ({k: v for k, v in arguments.items() if k != 'ip_adapter_image'}) }")
        expected = self.expected(arguments)
        try:
            with around:
                found = self.run(self.pipe, arguments | more)
        except (Interrupt, ZeroDivisionError, torch.OutOfMemoryError) as error:
            self.say(f"  ended in {type(error).__name__}")
        else:
            self.say("  ended well")
            self.check(found, expected)
        if self.has_chain:
            # What accelerate's chain leaves on the device after an error is its own matter.
            self.unchain()
        self.call()

    def _callback(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        kind = self.rng.choice([ZeroDivisionError, Interrupt])

        def end(*_: Any) -> dict[str, Any]:
            raise kind

        return f"callback raises {kind.__name__}", contextlib.nullcontext(), {"callback_on_step_end": end}

    def _scheduler(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        nth = self.rng.randint(1, 2)
        return f"scheduler.step {nth} raises", failing(self.pipe.scheduler, "step", nth, ZeroDivisionError), {}

    def _parts(self) -> list[nn.Module]:
        name = self.rng.choice(sorted(factory.modules_of(self.pipe)))
        module = getattr(self.pipe, name)
        return [part for part in module.modules() if part is not module and not list(part.children())]

    def _module(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        parts = self._parts()
        nth, call = self.rng.randrange(len(parts)), self.rng.randint(1, 3)
        return f"leaf {nth} of {len(parts)} is interrupted in call {call}", raising(parts[nth], call, Interrupt), {}

    def _module_memory(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        parts = self._parts()
        nth, call = self.rng.randrange(len(parts)), self.rng.randint(1, 2)
        text = f"leaf {nth} of {len(parts)} has no memory in call {call}"
        return text, raising(parts[nth], call, torch.OutOfMemoryError), {}

    def _memory(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        nth, times = self.rng.randint(1, 12), self.rng.choice([1, 2, 5])
        text = f"allocations {nth} to {nth + times - 1} fail"
        return text, failing(Transfer, "new_buffer", nth, torch.OutOfMemoryError, times), {}

    def _step(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        owner, name = self.rng.choice(STEPS)
        nth = self.rng.randint(1, 40)
        return f"{name} {nth} is interrupted", failing(owner, name, nth, Interrupt), {}

    def _any(self, arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        nth = int(10 ** self.rng.uniform(0, 4))
        return f"interrupt at the package's function call {nth}", interrupted(nth), {}

    # ------------------------------------------------------------------ all of it
    def step(self) -> None:
        """Some operations, then a call."""
        edits = [self.swap, self.scheduler, self.load, self.load, self.choose, self.switch, self.delete, self.fuse]
        edits += [self.unload, self.ip, self.qkv, self.tiling, self.scale, self.convert]
        ways = [self.enable, self.enable, self.enable, self.keep, self.disable, self.chain, self.move, self.collect]
        for _ in range(self.rng.choice([0, 1, 1, 2, 3])):
            self.rng.choice(edits if self.rng.random() < 0.5 else ways)()
        self.rng.choices([self.call, self.fault, self.threads], [6, 4, 1])[0]()

    def rest(self) -> int:
        """Everything off, on the host; what was swapped out is gone, and nothing is left on the device.

        Returns:
            The bytes that all tensors take on the host, without what the list of edits keeps.
        """
        self.say("everything off")
        self.pipe.remove_all_hooks()
        self.pipe.disable_layerwise_offload()
        self.options = None
        self.pipe.to("cpu")
        self.pipe.scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)  # it keeps its steps
        self._reference = None
        self.sim.synchronize()
        gc.collect()
        left = [name for name, ref in self.gone if ref() is not None]
        if left:
            raise Unequal(f"swapped out, but still there: {left}")
        self.gone.clear()
        left_over = self.sim.mem(0)["allocated"] - self.others
        if left_over:
            raise Unequal(f"{left_over} bytes are left on the device")
        return tensor_bytes() - sum(entry.kept for entry in self.entries)


def failing(owner: Any, name: str, nth: int, kind: type[BaseException], times: int = 1) -> Any:
    """A context in which the nth call of a function raises, and those after it."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        original, count = getattr(owner, name), [0]
        is_own = name in vars(owner)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if nth <= count[0] < nth + times:
                raise kind("made up")
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    return around()


@contextlib.contextmanager
def raising(part: nn.Module, nth: int, kind: type[BaseException]) -> Iterator[None]:
    """The nth call of a module raises, after it ran."""
    count = [0]

    def raise_(*_: object) -> None:
        count[0] += 1
        if count[0] == nth:
            raise kind("made up")

    hook = part.register_forward_hook(raise_)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def interrupted(nth: int) -> Iterator[None]:
    """An interrupt at the entry of the nth function of the package that this thread calls."""
    count = [0]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            count[0] += 1
            if count[0] == nth:
                sys.setprofile(None)
                raise Interrupt(f"in {frame.f_code.co_qualname}" if hasattr(frame.f_code, "co_qualname") else "")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
