"""The report: documented key by key, versioned, the same facts for people and for programs."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import factory
from diffusers_layerwise import LayerwiseOffloadConfig, OffloadHandle
from diffusers_layerwise.config import format_bytes
from diffusers_layerwise.report import VERSION, ComponentReport, Report
from factory import CASES

ROOT = Path(__file__).resolve().parent.parent
USAGE = (ROOT / "docs" / "usage.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()

KEYS = """
    version mode device budget weights ring_slots ring_slot_bytes peak_predicted peak_seen peak_ever moved_bytes copies
    activation_reserve profile host_budget host_limit host_bytes host_peak disk_bytes components notes
""".split()
COMPONENT_KEYS = """
    name choice weights groups resident_groups streamed_groups resident_bytes streamed_bytes fixed_bytes peak_predicted
    peak_seen moved_bytes host_tier host_bytes pinned_bytes disk_bytes passes hits misses dropped skipped_loads
    skipped_bytes stall step_predicted step_measured activation_peak gathered_bytes read_bytes read_predicted notes
""".split()


@pytest.fixture(scope="module")
def handle() -> OffloadHandle:
    """After three calls of which something streams and something is resident."""
    pipe = CASES["flux"].build()
    handle = pipe.enable_layerwise_offload(
        {"all": {"resident": 0.3}, "=vae": "resident"}, "manual", onload_device="cpu", memory_budget="1MiB"
    )
    for _ in range(3):
        factory.run("flux", pipe)
    return handle


def documented(heading: str) -> list[str]:
    """The keys in the first column of the table below a heading of the usage page."""
    section = USAGE.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)))


def test_keys_are_frozen_for_this_version(handle: OffloadHandle) -> None:
    found = handle.report().to_dict()
    assert found["version"] == VERSION == 1
    assert list(found) == KEYS
    assert all(list(component) == COMPONENT_KEYS for component in found["components"])


def test_every_key_is_documented_and_no_other() -> None:
    assert documented("Keys of the report") == KEYS
    assert documented("Keys of each component") == COMPONENT_KEYS


def texts_in_the_code() -> list[str]:
    """Every string of the package, what is filled into a message left out."""
    nodes = [
        node for path in (ROOT / "diffusers_layerwise").glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_messages_quoted_in_troubleshooting_are_those_of_the_code() -> None:
    texts = texts_in_the_code()
    quoted = [
        re.sub(r"\s+", " ", q)
        for bold in re.findall(r"\*\*(.*?)\*\*", TROUBLES, re.DOTALL)
        for q in re.findall(r"`([^`]+)`", bold)
    ]
    messages = [quote for quote in quoted if not re.fullmatch(r"[\w.]+(\(\w*\))?", quote)]
    assert len(messages) > 25
    wrong = {}
    for message in messages:
        parts = [part.strip() for part in re.split(r"\.\.\.|\[\.\.\.\]", message)]
        missing = [part for part in parts if len(part) > 3 and not any(part in text for text in texts)]
        if missing:
            wrong[message] = missing
    assert not wrong


def test_every_option_is_documented_with_its_default() -> None:
    section = USAGE.split("\n## Configuration\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\|.*\|$", section, flags=re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(LayerwiseOffloadConfig)]


def test_the_text_and_the_attributes_are_the_same_facts(handle: OffloadHandle) -> None:
    report = handle.report()
    assert {field.name for field in dataclasses.fields(Report)} | {"version"} == set(KEYS)
    assert [field.name for field in dataclasses.fields(ComponentReport)] == COMPONENT_KEYS
    assert all(getattr(report, key) == value for key, value in report.to_dict().items() if key in KEYS[1:12])


def test_it_can_be_written_as_json(handle: OffloadHandle) -> None:
    found = handle.report().to_dict()
    again = json.loads(json.dumps(found))
    assert again["components"][0]["name"] == found["components"][0]["name"]
    assert json.dumps(again) == json.dumps(found)


def test_the_numbers_agree_with_each_other(handle: OffloadHandle) -> None:
    report, plan = handle.report(), handle.plan
    assert report.budget == 1 << 20
    assert (report.ring_slots, report.ring_slot_bytes) == (plan.slots, plan.slot_bytes)
    assert report.peak_seen == report.peak_predicted == plan.peak_bytes
    assert report.peak_ever >= report.peak_seen
    assert report.weights == sum(c.weights for c in report.components)
    for component in report.components:
        part = plan.component(component.name)
        assert component.groups == component.resident_groups + component.streamed_groups == len(part.groups)
        assert component.resident_bytes + component.streamed_bytes + component.fixed_bytes >= component.weights
        assert component.peak_seen <= component.peak_predicted <= report.peak_predicted
        assert component.passes >= 3
        assert component.hits + component.misses > 0 or not component.streamed_groups
        assert component.choice == part.choice.value


def test_what_streams_was_moved_and_what_stays_was_not(handle: OffloadHandle) -> None:
    parts = {component.name: component for component in handle.report().components}
    assert parts["vae"].choice == "resident"
    assert (parts["vae"].resident_groups, parts["vae"].streamed_groups) == (1, 0)
    assert parts["transformer"].streamed_groups > parts["transformer"].resident_groups > 0
    assert parts["transformer"].moved_bytes > 3 * parts["transformer"].streamed_bytes
    assert {part.host_tier for part in parts.values()} == {"pageable"}
    assert {part.pinned_bytes for part in parts.values()} == {0}


def test_bytes_moved_are_those_of_the_components_together(handle: OffloadHandle) -> None:
    report = handle.report()
    assert report.moved_bytes == sum(component.moved_bytes for component in report.components)


def test_the_text_has_the_main_facts(handle: OffloadHandle) -> None:
    report = handle.report()
    lines = str(report).splitlines()
    assert lines[0].startswith("layerwise offload on cpu, mode manual: ")
    for size in (report.weights, report.peak_seen, report.peak_predicted, report.budget):
        assert size is not None
        assert format_bytes(size) in lines[0]
    assert f"moved {format_bytes(report.moved_bytes)} in {report.copies} copies" in lines[1]
    assert f"ring of {report.ring_slots} slots of {format_bytes(report.ring_slot_bytes)}" in lines[1]
    assert lines[2].split() == "component weights groups resident streamed passes hits misses stall".split()
    for component, line in zip(report.components, lines[3:], strict=False):
        assert line.split()[:2] == [component.name, component.choice]
        assert f"{component.resident_groups} ({format_bytes(component.resident_bytes)})" in line
        assert f"{component.streamed_groups} ({format_bytes(component.streamed_bytes)})" in line
        assert re.search(rf"  {component.passes} +{component.hits} +{component.misses} ", line)


def test_notes_say_what_was_replaced_and_left_out() -> None:
    pipe = CASES["sd15"].build()
    pipe.enable_model_cpu_offload(device="cpu")
    report = pipe.enable_layerwise_offload(mode="memory", onload_device="cpu").report()
    assert report.notes == tuple(f"{name}: model offload replaced" for name in factory.modules_of(pipe))
    assert "note: unet: model offload replaced" in str(report).splitlines()


def counts(report: Any) -> list[tuple[int, int, int]]:
    return [(component.passes, component.hits, component.misses) for component in report.components]


def test_a_report_is_of_its_moment_and_there_is_one_before_the_first_call_and_after_removal() -> None:
    pipe = CASES["sd15"].build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="cpu")
    before = handle.report()
    assert (before.moved_bytes, before.copies, before.peak_seen) == (0, 0, 0)
    assert set(counts(before)) == {(0, 0, 0)}
    assert "budget" not in str(before)
    factory.run("sd15", pipe)
    after = handle.report()
    assert set(counts(before)) == {(0, 0, 0)}
    assert all(passes > 0 for passes, _, _ in counts(after))
    handle.remove()
    assert counts(handle.report()) == counts(after)
