"""README and docs: commands exist, links lead somewhere. tests/test_blocks.py runs their blocks."""

import re
import shlex
from pathlib import Path

import pytest

from examples.study import __main__ as study
from stts_hf.cli.main import build_parser
from tests.conftest import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken_by_the_parser(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "stts-hf" in words:
                arguments = words[words.index("stts-hf") + 1 :]
                assert build_parser().parse_args(arguments).command == arguments[0], line
            if "examples.study" in words:
                study.build_parser().parse_args(words[words.index("examples.study") + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        if path.startswith("http"):
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)", file.read_text(), re.M)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    named = re.findall(r"(?<![\w/])(?:tests|src|modeling|examples)/[\w/.-]+\.(?:py|yaml|md|json)\b", page.read_text())
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_picture_is_made_by_make_pictures():
    """But for drawings."""
    shown = {path.name for path in (REPOSITORY / "docs").iterdir() if path.suffix in (".png", ".jpg")}
    made = (REPOSITORY / "examples" / "pictures.py").read_text()
    assert [name for name in sorted(shown) if f'"{name}"' not in made] == []


def test_readme_stays_within_110_lines():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 110


def test_every_promise_of_security_names_its_test():
    rows = re.findall(r"^\|.*\|(.*)\|$", (REPOSITORY / "SECURITY.md").read_text(), re.M)[2:]
    assert len(rows) > 10
    assert [row for row in rows if "`tests/" not in row] == []
