"""README and docs: the first lines run as they stand, commands exist, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from examples.study import __main__ as study
from stts_hf.cli.main import build_parser
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.conftest import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture
def here(hub_configs, tmp_path, monkeypatch):
    """A checkout with a clip, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub_configs").symlink_to(hub_configs)
    write_sample_clip(tmp_path / "clip.mp4", seconds=1.0, fps=8, size=(64, 96))


def test_the_first_lines_of_python_answer(here, capsys):
    three_lines, by_transformers = blocks(REPOSITORY / "README.md", "python")
    exec(three_lines, {})
    assert capsys.readouterr().out.strip()
    names: dict = {}
    exec(by_transformers, names)
    assert capsys.readouterr().out.strip()
    # 0, 0.25, 0.5, 0.75 s and the end: floor(0.5 * 80) are dropped.
    assert names["output"].keep_mask[0].sum() == 80 - 40
    assert names["model"].config.vision_config.selector == "cosine"


def test_the_python_of_asking_runs(here):
    names: dict = {}
    for block in blocks(REPOSITORY / "docs" / "asking.md", "python"):
        exec(block, names)
    assert [turn.question for turn in names["talk"].turns] == ["Which way does it move?", "And then?"]
    assert len(names["answers"]) == 2
    with pytest.raises(ValueError, match="was released"):
        names["clip"].ask("What?")


def test_the_python_of_many_videos_runs(here, capsys):
    (block,) = blocks(REPOSITORY / "docs" / "predict.md", "python")
    names: dict = {}
    exec(block, names)
    assert names["row"]["error"] is None
    assert capsys.readouterr().out.strip() == names["row"]["answer"]


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


def test_every_promise_of_security_names_its_test():
    rows = re.findall(r"^\|.*\|(.*)\|$", (REPOSITORY / "SECURITY.md").read_text(), re.M)[2:]
    assert len(rows) > 10
    assert [row for row in rows if "`tests/" not in row] == []
