"""Two things that the site needs and GitHub, which shows the same files, does not: pages outside `docs/` get a place in
it, and links to code, which the site does not have, become text. mkdocs calls it, see `mkdocs.yml`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

OTHERS = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/README.md": "tests.md",
    "tp/embedded/README.md": "model-card.md",
}
"""Pages outside `docs/`, and what they are called on the site."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside `docs/`."""
    for source, name in OTHERS.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Has links lead to the site's pages."""
    sources = {name: source for source, name in OTHERS.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not path:
            return match[0]
        wanted = os.path.normpath(os.path.join(os.path.dirname(source), path))
        place = OTHERS.get(wanted, os.path.relpath(wanted, "docs"))
        if files.get_file_from_path(place) is None and (ROOT / wanted).exists():  # else mkdocs says what is missing
            return text
        return f"{image}[{text}]({place}{'#' if anchor else ''}{anchor})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(linked, part) for part in parts[::2]]
    return "".join(parts)
