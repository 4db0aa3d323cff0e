"""What `mode="auto"` decides: by the platform, a profile, the free memory, and what activations need. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .config import Mode, Residency, format_bytes
from .plan import Choice, ComponentPlan, ComponentSpec, OffloadPlan
from .platform import StreamingDefault
from .profiles import Found
from .search import Request, make_plan, smallest_peak
from .selection import PRECEDENCE, in_group, normalise

#: A step this much longer than its compute still counts as hidden behind it.
HIDDEN = 1.01
#: A plan that leaves less than one part in so many of the budget unused isn't made anew.
CLOSE = 32
OVERRIDE = 'pass memory_budget, components or another mode ("memory", "speed") to have it stream all the same'


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the user left to `mode="auto"`, and what there is to decide it by.

    Args:
        profile (`Found`): The pipeline's profile.
        has_budget, has_components (`bool`): The user gave a budget, or said what is streamed.
        default (`StreamingDefault`, *optional*): What the platform declares; None until it may be asked.
        free (`int`, *optional*): Free bytes of device memory, where they are known and no budget was given.
    """

    profile: Found
    has_budget: bool = False
    has_components: bool = False
    default: StreamingDefault | None = None
    free: int | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What `"auto"` means for a pipeline at the moment.

    Args:
        mode (`Mode`): The mode that plans are made in.
        whole (`tuple[str]`): Components that are moved as a whole for each use instead of streamed.
        resident (`tuple[str]`): Components that stay resident.
        prefetch (`int` or `str`, *optional*): What the ring is made for where something streams.
        notes (`tuple[str]`): Why, for the report.
    """

    mode: Mode
    whole: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    prefetch: int | str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"auto: mode {self.mode.value}"]
        parts += [f"resident {', '.join(self.resident)}"] if self.resident else []
        parts += [f"moved as a whole {', '.join(self.whole)}"] if self.whole else []
        parts += [f"prefetch {self.prefetch}"] if self.prefetch is not None else []
        return "; ".join(parts)


# ---------------------------------------------------------------------- what auto means
def decide(specs: Sequence[ComponentSpec], request: Request, policy: Policy | None) -> Decision:
    """What a mode means for these components.

    Args:
        specs (`Sequence[ComponentSpec]`): The components.
        request (`Request`): What was asked for.
        policy (`Policy`, *optional*): What `"auto"` goes by; without one, and in every other mode, nothing is changed.
    """
    if policy is None or request.mode is not Mode.AUTO or request.budget is None:
        return Decision(request.mode)
    profile = policy.profile.profile
    if not (policy.has_budget or policy.has_components):
        if policy.default is not None and not policy.default.is_on:
            return _without_streaming(specs, request, policy.default)
        enough = profile.enough_free
        if policy.free is not None and enough is not None and policy.free >= enough and _all_fit(specs, request):
            note = f"auto: everything resident{_but_asked(specs)}: {format_bytes(policy.free)} are free, at least "
            note += format_bytes(enough)
            return Decision(Mode.AUTO, notes=(note,))
    # A budget says how much may be used, so a profile can't make less of it. Nor does a shipped one spend it on what
    # saves no time: a VAE that is kept takes room from the denoiser for the whole call, and saves one load of itself.
    mode = Mode.AUTO if policy.has_budget else profile.mode
    notes = [] if mode is Mode.AUTO else [f"auto: mode {mode.value}, as the profile {policy.profile.origin} says"]
    keeps = not policy.has_components and not (policy.has_budget and policy.profile.is_shipped)
    resident = _kept(specs, request, profile.keep_resident_components) if keeps else ()
    prefetch = _prefetch(_as(specs, resident, Choice.RESIDENT), request, profile.prefetch)
    return Decision(mode, (), resident, prefetch, tuple(notes))


def _but_asked(specs: Sequence[ComponentSpec]) -> str:
    """What streams however much is free: that was asked for."""
    mapped = [s.name for s in specs if s.mapped and not all(unit.resident for unit in s.units)]
    text = f" but what the device map of {', '.join(mapped)} streams" if mapped else ""
    own = [s.name for s in specs if s.config.resident is not None and not s.mapped]
    return f"{text}{' and' if text else ' but'} what config['resident'] of {', '.join(own)} streams" if own else text


def carry_out(decision: Decision, specs: Sequence[ComponentSpec], request: Request) -> OffloadPlan:
    """The plan by a decision.

    Raises:
        torch.OutOfMemoryError: No plan fits the budget, as for [`make_plan`].
    """
    treated = _as(_as(specs, decision.whole, Choice.OFFLOAD), decision.resident, Choice.RESIDENT)
    if decision.prefetch is not None:
        treated = _ahead(treated, decision.prefetch)
    return make_plan(treated, dataclasses.replace(request, mode=decision.mode))


def _as(specs: Sequence[ComponentSpec], names: Sequence[str], choice: Choice) -> list[ComponentSpec]:
    """The components with some of them treated otherwise; what a device map governs stays as it is."""
    return [
        dataclasses.replace(s, choice=choice)
        if s.name in names and s.choice is Choice.LAYERWISE and not s.mapped
        else s
        for s in specs
    ]


def _fits(specs: Sequence[ComponentSpec], request: Request) -> bool:
    return request.budget is None or smallest_peak(specs, request.residency) <= request.budget


def _streamed(specs: Sequence[ComponentSpec]) -> list[str]:
    return [s.name for s in specs if s.choice is Choice.LAYERWISE and s.units]


def _all_fit(specs: Sequence[ComponentSpec], request: Request) -> bool:
    return _fits(_as(specs, _streamed(specs), Choice.RESIDENT), request)


def _without_streaming(specs: Sequence[ComponentSpec], request: Request, default: StreamingDefault) -> Decision:
    """Whole components: resident where they fit, the small ones first, else moved for each use.

    One that is larger than the device streams, since nothing else would run.
    """
    by_size = sorted((s for s in specs if s.name in _streamed(specs)), key=lambda s: s.size)
    whole = [s.name for s in by_size]
    while whole and not _fits(_as(specs, whole, Choice.OFFLOAD), request):
        whole.pop()
    resident: list[str] = []
    for name in list(whole):
        rest = [other for other in whole if other != name]
        kept = _as(_as(specs, rest, Choice.OFFLOAD), [*resident, name], Choice.RESIDENT)
        if _fits(kept, request):
            whole, resident = rest, [*resident, name]
    notes = [f"auto: {default}; {OVERRIDE}"]
    notes += [f"{s.name}: streams, since it doesn't fit as a whole" for s in by_size if s.name not in whole + resident]
    return Decision(Mode.AUTO, tuple(whole), tuple(resident), notes=tuple(notes))


def _kept(specs: Sequence[ComponentSpec], request: Request, words: Sequence[str]) -> tuple[str, ...]:
    """The components that a profile keeps resident, in its order, as far as the smallest plan for the rest fits too."""
    found: list[str] = []
    for word in map(normalise, words):
        for name in _streamed(specs):
            if name in found or not (in_group(_bare(name), word) if word in PRECEDENCE else _bare(name) == word):
                continue
            if _fits(_as(specs, [*found, name], Choice.RESIDENT), request):
                found.append(name)
    return tuple(found)


def _bare(name: str) -> str:
    """A component's own name, where several pipelines have one of it."""
    return name.partition(" of ")[0]


def _prefetch(specs: Sequence[ComponentSpec], request: Request, wanted: int | str | None) -> int | str | None:
    """A profile's prefetch where something streams and the ring that it takes fits: it is a hint, never an error."""
    if wanted is None or _all_fit(specs, request):
        return None
    return wanted if _fits(_ahead(specs, wanted), request) else None


def _ahead(specs: Sequence[ComponentSpec], prefetch: int | str) -> list[ComponentSpec]:
    return [
        dataclasses.replace(s, config=dataclasses.replace(s.config, prefetch=prefetch))
        if s.choice is Choice.LAYERWISE and s.config.prefetch is None
        else s
        for s in specs
    ]


# ---------------------------------------------------------------------- room for activations
@dataclasses.dataclass(frozen=True)
class Needs:
    """Device bytes that are needed besides weights: while each component runs, and (`outside`) while none does."""

    by_component: Mapping[str, int]
    outside: int = 0

    @property
    def most(self) -> int:
        """The most at any time."""
        return max([self.outside, *self.by_component.values()])

    def serves(self, now: Needs, slack: int, total: int) -> bool:
        """Whether a plan with room for these is as good for others: they fit, and leave little of the budget unused.

        Args:
            now (`Needs`): The others.
            slack (`int`): One part in so many of them is slack, and needn't fit.
            total (`int`): The budget.
        """
        mine, other = self.by_component, now.by_component
        return mine.keys() == other.keys() and all(
            other[n] - other[n] // slack <= mine[n] <= other[n] + total // CLOSE for n in other
        )


def peak_at(plan: OffloadPlan, name: str | None, need: int) -> int:
    """The most device memory while one component runs, or (None) none does, which needs so much besides weights.

    ring + all fixed + lasting resident groups + those in use + what it needs.
    """
    lasting = sum(c.resident_bytes for c in plan.components if c.residency is Residency.LASTING)
    always = plan.ring_bytes + sum(c.fixed_bytes for c in plan.components) + lasting
    using = {c.name: c.resident_bytes for c in plan.components if c.residency is Residency.USE}
    names = next((n for n in plan.together if name in n), frozenset([name]))
    return always + sum(using.get(each, 0) for each in names if each is not None) + need


def total_peak(plan: OffloadPlan, needs: Needs) -> tuple[int, str]:
    """(bytes, where): the most device memory of a call, weights and activations, and the component at which it is."""
    found = [(peak_at(plan, None, needs.outside), "the pipeline")]
    found += [(peak_at(plan, c.name, needs.by_component.get(c.name, 0)), c.name) for c in plan.components]
    return max(found)


def with_room(
    specs: Sequence[ComponentSpec], request: Request, needs: Needs, make: Callable[[Request], OffloadPlan]
) -> OffloadPlan:
    """The plan for a budget with room for what activations need.

    A plan's reserve is one number, but components need different amounts: first that of the component that streams
    most is tried, which leaves it the most for weights; where another one then exceeds the budget, more.

    Args:
        specs (`Sequence[ComponentSpec]`): The components.
        request (`Request`): With a total.
        needs (`Needs`): What activations need.
        make (`Callable`): Makes the plan for a request.
    """
    total = request.total or 0
    least = smallest_peak(specs, request.residency)
    main = max((s for s in specs if s.choice is Choice.LAYERWISE and s.units), key=lambda s: s.size, default=None)
    first = needs.most if main is None else needs.by_component.get(main.name, needs.most)
    for reserve in (first, needs.most):
        if total - reserve < least:
            continue
        plan = make(dataclasses.replace(request, reserve=reserve))
        if total_peak(plan, needs)[0] <= total:
            return plan
    return make(dataclasses.replace(request, reserve=max(0, total - least)))


# ---------------------------------------------------------------------- what was decided, in words
def describe(plan: OffloadPlan, needs: Needs | None = None) -> list[str]:
    """What a plan decides, one line for each component.

    Args:
        plan (`OffloadPlan`): The plan.
        needs (`Needs`, *optional*): What activations need, where that is known; else what the plan reserves.
    """
    return [_line(plan, component, needs) for component in plan.components]


def _line(plan: OffloadPlan, component: ComponentPlan, needs: Needs | None) -> str:
    own = plan.reserve if needs is None else needs.by_component.get(component.name, plan.reserve)
    peak = peak_at(plan, component.name, own)
    text = f"{component.name}: {_share(component)}"
    if component.step is not None and component.compute and component.largest_streamed:
        slower = component.step / component.compute
        text += ", hides behind compute" if slower <= HIDDEN else f", takes {slower:.1f} times its compute"
    text += f"; peak {format_bytes(peak)}"
    return text if plan.budget is None else f"{text} of {format_bytes(plan.budget + plan.reserve)}"


def _share(component: ComponentPlan) -> str:
    if component.choice is Choice.OFFLOAD:
        return "moved as a whole for each use"
    if not component.largest_streamed:
        return f"all {format_bytes(component.weights)} resident"
    kept, layers = component.layers()
    return f"{kept} of {layers} layers resident, {layers - kept} streamed"
