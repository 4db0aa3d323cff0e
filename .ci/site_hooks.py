"""The site's pages that lie outside of docs/, and the links between them and the others. A hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Files of the repository that are pages of the site too.
ADDED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: What a page may link to outside of docs/, and the page of the site that it becomes.
PAGES = ADDED | {"README.md": "index.md"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for source, name in ADDED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads a page's links to where their targets lie in the site."""
    return within_site(markdown, is_added=page.file.src_uri in ADDED.values())


def within_site(markdown: str, is_added: bool) -> str:
    """Links to files of the repository as links between pages; those to files that are no pages become plain text."""

    def lead(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        if is_added:
            inside = path.removeprefix("docs/")
            if inside != path:
                return f"[{text}]({inside}{anchor})"
        elif path.startswith("../"):
            path = path.removeprefix("../")
        else:
            return match[0]
        return f"[{text}]({PAGES[path]}{anchor})" if path in PAGES else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(((?:\.\./|docs/|[A-Z]+\.md)[^)#\s]*)(#[^)\s]*)?\)", lead, markdown)
