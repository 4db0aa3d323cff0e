"""The package's modules in their order, and what only some of them may do. Read from the source, nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "diffusers_layerwise"
DESIGN = PACKAGE.parent / "docs" / "design.md"

ORDER = """
    errors log ranks progress device_maps config watch tensors parts adapters casting compiled residence reads
    discovery platform headers files host hostmemory plan selection profiles simulate placement rings gather search
    auto pieces tape transfer staging reader binding group demand measure specs order course ways cuts schedule
    tapes tuning passes checkpoints shared tiers readahead sharing shortage activations clock terms fitting locks
    runtime inputs attempt copies hooks patches registries moves weights_maps dispatched conflicts report lanes page
    figure timeline mapping components slots adoption members handle switches pipeline flops live twins fake
    standins skeleton trace repeats recorder cache tracing hardware cost hostplans predict planning rivals
    weight_cache loading doctor cli __init__ __main__
""".split()
"""Each module imports only from those before it."""

FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES_OF_FILE = 410
MOST_LINES_OF_FUNCTION = 45


def tree_of(path: Path) -> ast.Module:
    """The parsed source."""
    return ast.parse(path.read_text(), filename=str(path))


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) for each import of a module of this package, also below functions and conditions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level == 0 and parts[0] != "diffusers_layerwise":
                continue
            below = parts if node.level else parts[1:]
            names = [below[0]] if below and below[0] else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == "diffusers_layerwise":
                    yield node.lineno, rest.split(".")[0] or "__init__"


def attributes(path: Path) -> Iterator[tuple[int, str]]:
    """(line, source) of every dotted name, which leaves comments and strings out."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of every function and method."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + child.name, child
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    yield from visit(tree_of(path), "")


def length(path: Path, node: ast.FunctionDef) -> int:
    """Lines of a function but for blank ones, its decorators and its docstring, which may be as long as it helps."""
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = range(first.lineno, first.end_lineno + 1) if is_docstring else range(0)
    lines = path.read_text().splitlines()
    return sum(n not in docstring and bool(lines[n - 1].strip()) for n in range(node.lineno, node.end_lineno + 1))


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(path.stem for path in FILES) == sorted(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_module_imports_only_from_those_before_it(path: Path) -> None:
    place = ORDER.index(path.stem)
    wrong = [
        f"{path.name}:{line} imports {name}, which comes after it"
        for line, name in own_imports(path)
        if name not in ORDER[:place]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_of_imports_sees_every_form_of_them(tmp_path: Path) -> None:
    page = tmp_path / "sample.py"
    page.write_text(
        "from . import platform, host\nfrom .plan import cut\nimport diffusers_layerwise.search\n"
        "from diffusers_layerwise.group import Group\nfrom diffusers_layerwise import runtime\nimport torch\n"
        "def f():\n    from .hooks import install\n"
    )
    assert {name for _, name in own_imports(page)} == {
        "platform",
        "host",
        "plan",
        "search",
        "group",
        "runtime",
        "hooks",
    }


def test_the_design_page_lists_the_modules_in_their_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DESIGN.read_text(), flags=re.MULTILINE)
    assert rows == ORDER


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_backends_are_named_in_one_module_only(path: Path) -> None:
    named = [line for line, text in attributes(path) if text.startswith(("torch.cuda", "torch.xpu", "torch.mps"))]
    assert path.stem == "platform" or not named, f"lines {named}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_host_waits_for_the_device_in_two_functions_only(path: Path) -> None:
    """`finish` comes before a rewrite of weights, `await_mark` when the link is measured, once, and when somebody asks
    for a recorded pass: no steady state."""
    waits = {line for line, text in attributes(path) if text.endswith(".synchronize")}
    if path.stem == "staging":
        # In the courier's thread, so that a buffer isn't read into while a copy still reads it: nobody computes there.
        staging = next(node for name, node in functions(path) if name == "Buffer.wait")
        waits -= set(range(staging.lineno, staging.end_lineno + 1))
    if path.stem == "transfer":
        for name, node in functions(path):
            if name in ("Transfer.await_mark", "Transfer.finish"):
                waits -= set(range(node.lineno, node.end_lineno + 1))
    assert not waits


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_leaves_order_to_the_allocator(path: Path) -> None:
    """Memory that another stream uses is kept by events and slots, not by `record_stream`."""
    assert not [line for line, text in attributes(path) if text.endswith(".record_stream")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_FILE
    long = {name: count for name, node in functions(path) if (count := length(path, node)) > MOST_LINES_OF_FUNCTION}
    assert not long
