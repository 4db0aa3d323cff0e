"""What the user asked for, as a runtime gets it."""

from __future__ import annotations

import dataclasses

from .auto import Policy
from .config import Mode, Residency


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the user asked for, and for what: a pipeline (whose calls begin and end) or a bare module.

    Args:
        mode (`Mode`): The mode.
        budget (`int`, *optional*): All device bytes that may be used; None reads the free memory at the first pass.
        reserve (`int`, *optional*): Bytes of the budget for activations; None: the default until they are measured.
        residency (`Residency`): How long resident groups stay.
        has_calls (`bool`): A pipeline: uses end with its call.
        policy (`Policy`, *optional*): What mode `"auto"` goes by; None in every other mode and for a bare module.
    """

    mode: Mode
    budget: int | None
    reserve: int | None
    residency: Residency
    has_calls: bool
    policy: Policy | None = None
