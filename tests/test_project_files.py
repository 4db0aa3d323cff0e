"""The files around the package: what README, CI and the docs say must agree."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

import diffusers_layerwise

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def readme_commands() -> list[str]:
    """The shell commands in the README that install the package."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [block.strip() for block in blocks if "pip install -e" in block]


def ci_commands() -> dict[str, str]:
    """What .ci/run assigns to `quickstart` and `tests`."""
    return dict(re.findall(r"^(quickstart|tests)='(.*)'$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE))


def test_ci_runs_the_two_commands_of_the_readme_word_for_word() -> None:
    commands = ci_commands()
    assert readme_commands() == [commands["quickstart"], commands["tests"]]
    script = (ROOT / ".ci/run").read_text()
    for name in commands:
        assert f'bash -c "${name}"' in script


@pytest.mark.parametrize("name", ["run", "run-full"])
def test_ci_scripts_are_executable_and_stop_at_the_first_failure(name: str) -> None:
    script = ROOT / ".ci" / name
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


def test_changelog_has_an_entry_for_the_version() -> None:
    assert f"## [{diffusers_layerwise.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in headings(other), f"{target}: no such heading in {other.name}"


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_each_mutant_s_text_is_in_the_code_once() -> None:
    spec = importlib.util.spec_from_file_location("catalogue", ROOT / "tests" / "mutants" / "catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    catalogue = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(catalogue)
    package = ROOT / "diffusers_layerwise"
    texts = [(m.name, (package / m.file).read_text().count(old)) for m in catalogue.MUTANTS for old, _ in m.changes]
    assert [name for name, count in texts if count != 1] == []
