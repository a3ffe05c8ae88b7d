"""What the site needs beyond `docs/`: the pages of the root, and links to files that are no pages."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(DOCS.parent / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of pages of the root start there; a link to code, which is no page, becomes its path."""
    name = page.file.src_uri
    here = DOCS.parent if name in ROOT_PAGES else (DOCS / name).parent

    def rewrite(link: re.Match[str]) -> str:
        text, target, heading = link[1], (here / link[2]).resolve(), link[3] or ""
        if target.name in ROOT_PAGES and target.parent == DOCS.parent:
            steps = "../" * name.count("/")
            return f"[{text}]({steps}{target.name}{heading})"
        if target.is_relative_to(DOCS):
            return link[0] if name not in ROOT_PAGES else f"[{text}]({target.relative_to(DOCS)}{heading})"
        path = str(target.relative_to(DOCS.parent))
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(rewrite, markdown)
