"""Which embedding tables stay on the host, where their rows are looked up: only those travel. Pure.

A table of 256,000 tokens is gigabytes, and a prompt reads a few hundred rows of it. Looking them up on the host costs
one wait for the token numbers; loading the table costs its bytes on the link and in the ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .config import Embeddings
from .plan import Choice, ComponentSpec, UnitSpec
from .selection import is_denoiser

#: Smaller tables are loaded faster than the host can wait for the numbers of the rows.
LEAST_BYTES = 16 << 20


def gathered(specs: Sequence[ComponentSpec], only_asked: bool = False) -> list[ComponentSpec]:
    """The same components, with the tables that stay on the host taking no bytes of the device. Idempotent.

    Args:
        specs (`Sequence[ComponentSpec]`): The components. What is moved as a whole, has residents of its own, or has
            a device map keeps its tables.
        only_asked (`bool`): Only where the config asks for it.
    """
    return [_without_tables(spec, only_asked) for spec in specs]


def _without_tables(spec: ComponentSpec, only_asked: bool) -> ComponentSpec:
    if spec.choice is not Choice.LAYERWISE or spec.mapped:
        return spec
    units = tuple(
        dataclasses.replace(unit, size=0, gathered=unit.size) if _stays(spec, unit, only_asked) else unit
        for unit in spec.units
    )
    return dataclasses.replace(spec, units=units) if any(unit.size for unit in units) else spec


def _stays(spec: ComponentSpec, unit: UnitSpec, only_asked: bool) -> bool:
    if not unit.can_gather or not unit.size:
        return False
    asked = spec.config.embeddings
    if asked is not None or only_asked:
        return asked is Embeddings.HOST
    # A denoiser runs in every step, in which the host shouldn't wait for the device.
    return unit.size >= LEAST_BYTES and spec.config.resident is None and not is_denoiser(spec.name)
