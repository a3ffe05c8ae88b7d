"""The site beyond `docs/`: pages of the root, of each command and of each public name, and links to files."""

import ast
import contextlib
import io
import os
import re
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.structure.files import File

from stts_hf.cli.main import COMMANDS, build_parser
from stts_hf.versions import __version__

DOCS = Path(__file__).parent
# Of the repository, on GitHub, if it is known: with it pages have an edit link, and links to code lead there.
REPO_URL = os.environ.get("REPO_URL", "").rstrip("/")
ROOT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
GUIDES = {
    "run": "tutorial_asking.md",
    "explain": "explain.md",
    "predict": "predict.md",
    "calibrate": "budget.md",
    "visualize": "visualize.md",
    "demo": "demo.md",
    "convert": "checkpoints.md",
    "doctor": "checkpoints.md#checking-a-folder",
    "push": "hub.md#pushing",
    "bench": "benchmark.md",
    "train": "training.md",
    "eval": "evaluation.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?: +options: \{(.*)\}\n)?", re.M)  # of mkdocstrings, in api.md


def on_config(config: Any) -> Any:
    """The version below each page; commands before the reference, the pages of the API's names in it."""
    config.copyright = f"stts-hf {__version__}"
    if REPO_URL:
        config.edit_uri = f"{REPO_URL}/edit/main/docs/"
        config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": REPO_URL, "name": "Repository"}]
    place = next(index for index, section in enumerate(config.nav) if "Reference" in section)
    pages = [{name: f"api/{name}.md"} for name in api_pages()]
    config.nav[place]["Reference"] = [
        {"API": ["api.md", *pages]} if "API" in page else page for page in config.nav[place]["Reference"]
    ]
    config.nav.insert(place, {"Commands": [{name: f"commands/{name}.md"} for name in COMMANDS]})
    return config


def on_files(files: Any, config: Any) -> Any:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(DOCS.parent / name)))
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name)))
    for name, content in api_pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def api_pages() -> dict[str, str]:
    """A page for each name in api.md."""
    found = _DIRECTIVE.findall((DOCS / "api.md").read_text())
    return {
        path.rpartition(".")[2]: f"::: {path}\n    options: {{heading_level: 1, {options}}}\n"
        for path, options in found
    }


def api_line(directive: re.Match[str]) -> str:
    """A link to a name's page, with the first sentence of its docstring."""
    module, _, name = directive[1].rpartition(".")
    tree = ast.parse((DOCS.parent / "src" / module.replace(".", "/")).with_suffix(".py").read_text())
    node: Any = next(node for node in tree.body if getattr(node, "name", None) == name)
    sentence = re.split(r"(?<=[.:;])\s", " ".join((ast.get_docstring(node) or "").split()), maxsplit=1)[0]
    return f"- [`{name}`](api/{name}.md): {sentence.rstrip('.:;')}\n"


def command_page(name: str) -> str:
    """What `stts-hf NAME --help` prints, and a link to the guide."""
    with (
        mock.patch.dict("os.environ", COLUMNS="100"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
    ):
        build_parser(name).parse_args([name, "--help"])
    guide = f"See [the guide](../{GUIDES[name]}).\n\n" if name in GUIDES else ""
    return f"# stts-hf {name}\n\n{guide}{textwrap.indent(printed.getvalue(), '    ')}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of pages of the root start there; a link to code, which is no page, leads into the repository, or becomes
    its path."""
    name = page.file.src_uri
    if name == "api.md":
        return _DIRECTIVE.sub(api_line, markdown)
    here = DOCS.parent if name in ROOT_PAGES else (DOCS / name).parent

    def rewrite(link: re.Match[str]) -> str:
        text, target, heading = link[1], (here / link[2]).resolve(), link[3] or ""
        if target.name in ROOT_PAGES and target.parent == DOCS.parent:
            steps = "../" * name.count("/")
            return f"[{text}]({steps}{target.name}{heading})"
        if target.is_relative_to(DOCS):
            return link[0] if name not in ROOT_PAGES else f"[{text}]({target.relative_to(DOCS)}{heading})"
        path = str(target.relative_to(DOCS.parent))
        if REPO_URL:
            return f"[{text}]({REPO_URL}/blob/main/{path}{heading})"
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(rewrite, markdown)
