"""Makes a site of pages that also read well in the repository: what links to sources, and what lies outside of docs.

MkDocs calls the functions ``on_...`` here by their names (``hooks`` in ``mkdocs.yml``).
"""

import os
import re
from collections.abc import Set
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

ELSEWHERE = {
    "index.md": ROOT / "README.md",
    "pages.md": DOCS / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "vulnerabilities.md": ROOT / "SECURITY.md",
}
"""Pages of the site whose files have another name or place."""

LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere."""
    readme = files.get_file_from_path("README.md")
    if readme is not None:
        files.remove(readme)
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=source.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page to where the site has what they name, and write code in tables as MkDocs reads it."""
    return turned_links(with_plain_bars(markdown), page.file.src_uri, {file.src_uri for file in files})


def with_plain_bars(markdown: str) -> str:
    """The text with ``|`` instead of ``\\|`` in code in tables, where only GitHub needs the backslash."""
    row = re.compile(r"^\|.*\|$", re.MULTILINE)
    return row.sub(lambda found: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), found[0]), markdown)


def turned_links(markdown: str, page: str, on_site: Set[str]) -> str:
    """The text of a page with links as the site needs them; what the site does not have stays as text.

    Args:
        page: as the site calls it; its links begin where its file lies.
        on_site: all files of the site.
    """
    folder = ELSEWHERE.get(page, DOCS / page).parent
    places = {source: place for place, source in ELSEWHERE.items()}

    def turned(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        path = Path(os.path.normpath(folder / target))
        if not path.exists():
            return link[0]
        place = places.get(path) or (path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else None)
        if place is None or place not in on_site:
            return str(text)
        return f"{image}[{text}]({os.path.relpath(place, Path(page).parent)}{anchor or ''})"

    return LINK.sub(turned, markdown)
