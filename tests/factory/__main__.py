"""`python -m factory [--roundtrip] [--influence] [name ...]`: run the cases and print a table."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections import Counter
from fnmatch import fnmatch
from functools import partial

import torch
from diffusers import DiffusionPipeline

from factory.core import CASES, IDLE, KNOWN_BROKEN, NO_RELOAD, PipelineCase, modules_of, run


def roundtrip(case: PipelineCase, pipe: DiffusionPipeline, expected: torch.Tensor) -> str:
    """Save, load and run again; empty when the output is the same."""
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        loaded = DiffusionPipeline.from_pretrained(folder)
        loaded.set_progress_bar_config(disable=True)
        again = run(case, loaded)
    return "" if torch.equal(again, expected) else f"differs after loading by {(again - expected).abs().max():.2e}"


def influence(case: PipelineCase, pipe: DiffusionPipeline, expected: torch.Tensor) -> str:
    """Change each component's weights in turn; names those whose effect on the output is not as the tags say."""
    wrong = []
    for name, module in modules_of(pipe).items():
        saved = [parameter.data for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data = parameter.data * 1.25
        if torch.equal(run(case, pipe), expected) != (IDLE + name in case.tags):
            wrong.append(name)
        for parameter, data in zip(module.parameters(), saved, strict=True):
            parameter.data = data
    return f"idle or not, against its tags: {', '.join(wrong)}" if wrong else ""


class Passes:
    """Counts the forward passes of each component."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.counts: Counter[str] = Counter()
        self.handles = [
            module.register_forward_hook(partial(self._count, name)) for name, module in modules_of(pipe).items()
        ]

    def _count(self, name: str, *_: object) -> None:
        self.counts[name] += 1

    def stop(self) -> int:
        """Remove the hooks; the largest count."""
        for handle in self.handles:
            handle.remove()
        return max(self.counts.values(), default=0)


def check(case: PipelineCase, options: argparse.Namespace) -> tuple[str, str]:
    """Run one case; returns the numbers of its row and what is wrong with it."""
    start = time.perf_counter()
    pipe = case.build()
    built = time.perf_counter()
    first = run(case, pipe)
    ran = time.perf_counter()
    faults = []
    passes = Passes(pipe)
    if not torch.equal(first, run(case, pipe)):
        faults.append("two runs differ")
    count = passes.stop()
    if not torch.equal(first, run(case, case.build())):
        faults.append("two builds differ")
    if not bool(torch.isfinite(first.float()).all()):
        faults.append("not finite")
    spread = float(first.float().std())
    if not spread > 0:
        faults.append("constant output")
    if options.roundtrip and NO_RELOAD not in case.tags:
        faults.append(roundtrip(case, pipe, first))
    if options.influence:
        faults.append(influence(case, pipe, first))
    params = sum(p.numel() for module in modules_of(pipe).values() for p in module.parameters())
    row = f"{built - start:6.2f} {ran - built:6.2f} {params:10,d} {count:6d} {spread:8.1e} {tuple(first.shape)}"
    return row, "; ".join(filter(None, faults))


def _quiet() -> None:
    """Keep the libraries' progress bars and warnings out of the table."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def main() -> int:
    """Print the table; the exit status says whether every case is in order."""
    parser = argparse.ArgumentParser(prog="python -m factory", description="Run the tiny pipelines.")
    parser.add_argument("names", nargs="*", help="cases, or patterns such as 'flux*' (default: all)")
    parser.add_argument("--roundtrip", action="store_true", help="also save, load and compare")
    parser.add_argument("--influence", action="store_true", help="also see that each component changes the output")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    _quiet()
    cases = [
        case for case in CASES.values() if not options.names or any(fnmatch(case.name, name) for name in options.names)
    ]
    failed = 0
    print(f"{'name':34s} {'ok':3s} {'build':>6s} {'run':>6s} {'params':>10s} {'passes':>6s} {'std':>8s} shape")
    for case in cases:
        try:
            row, fault = check(case, options)
        except Exception as error:
            row, fault = "", f"{type(error).__name__}: {str(error)[:300]}"
            if options.trace:
                print("".join(traceback.format_tb(error.__traceback__)[-2:]))
        failed += bool(fault)
        print(f"{case.name:34s} {'no' if fault else 'yes':3s} {row} {fault}", flush=True)
        gc.collect()
    classes = {case.pipeline_class for case in cases}
    print(f"{len(cases)} cases of {len(classes)} pipeline classes, {failed} with faults")
    if not options.names:
        print(*(f"left out: {name}: {reason}" for name, reason in KNOWN_BROKEN.items()), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
