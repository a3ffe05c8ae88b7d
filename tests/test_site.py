"""The documentation as a site: every link leads somewhere, every page is in it as it was meant, and so is the API."""

import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stts_hf
from stts_hf.cli.main import COMMANDS
from tests.conftest import REPOSITORY

REPO_URL = "https://github.com/owner/name"
WITHOUT_DOCS = "the site needs the extra `docs`: pip install 'stts-hf[docs]'"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip(WITHOUT_DOCS)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"REPO_URL": REPO_URL}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.fixture(scope="module")
def api(site) -> dict[str, str]:
    """The page of each name."""
    return {page.parent.name: page.read_text() for page in site.glob("api/*/index.html")}


def documented(api: dict[str, str], path: str) -> str:
    """What the page of a name says, from its heading."""
    found = re.search(rf'<h1 id="{re.escape(path)}".*?</article>', api.get(path.rpartition(".")[2], ""), re.S)
    return found[0] if found else ""


def words(page: str) -> str:
    """Text alone, without tags, marks of code and more than one space."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", page)).replace("`", ""))


@pytest.mark.slow
def test_every_page_is_in_the_site(site):
    pages = [page.stem for page in (REPOSITORY / "docs").glob("*.md")] + ["CONTRIBUTING", "SECURITY", "CHANGELOG"]
    assert [name for name in pages if name != "index" and not (site / name / "index.html").is_file()] == []


@pytest.mark.slow
def test_pages_and_links_to_code_lead_into_the_repository(site):
    page = (site / "study" / "index.html").read_text()
    assert f'href="{REPO_URL}/edit/main/docs/study/README.md"' in page
    assert f'href="{REPO_URL}/blob/main/examples/study"' in page
    assert "/edit/main/" not in (site / "commands" / "run" / "index.html").read_text()  # which is made


@pytest.mark.slow
def test_each_command_has_a_page_with_its_help(site):
    pages = {path.parent.name: words(path.read_text()) for path in site.glob("commands/*/index.html")}
    assert set(pages) == set(COMMANDS)
    assert [name for name, page in pages.items() if f"usage: stts-hf {name}" not in page] == []


@pytest.mark.slow
def test_lists_and_code_are_set_as_such(site):
    """Python-Markdown wants four spaces within an item, where GitHub takes two, and a blank line before a list."""
    pages = {page.relative_to(site): page.read_text() for page in site.rglob("index.html")}
    assert len(pages) > 30
    marks = re.compile(r"^(?:<p>)?\s*(?:[-*] |\d+\. |```|\|).*", re.M)
    shown = {name: re.sub(r"<pre.*?</pre>", "", page, flags=re.S) for name, page in pages.items()}
    assert {str(name): found for name, page in shown.items() if (found := marks.findall(page))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", stts_hf.__all__)
def test_every_public_name_is_in_the_api_with_its_docstring(api, name):
    thing = getattr(stts_hf, name)
    first = words(inspect.cleandoc(thing.__doc__).split("\n\n")[0]).strip()
    assert first
    assert first in words(documented(api, f"{thing.__module__}.{name}"))


@pytest.mark.slow
def test_the_api_shows_shapes_defaults_and_errors(api):
    """Among them an argument that shares its line with others, and a field written as transformers writes them."""
    answer = documented(api, "stts_hf.inference.requests.Answer")
    assert "(T, n) bool, which blocks were kept" in words(answer)
    converting = documented(api, "stts_hf.checkpoints.convert.convert_checkpoint")
    rows = [words(row).strip() for row in re.findall(r"<tr.*?</tr>", converting, re.S)]
    assert any(row.startswith("packing str | None in place of the source's") for row in rows)
    assert "PushRefused" in words(documented(api, "stts_hf.checkpoints.push.push_checkpoint"))
    settings = documented(api, "stts_hf.modeling.settings_stts.PruningSettings")
    items = [words(item).strip() for item in re.findall(r"<li>.*?</li>", settings, re.S)]
    assert any(item.startswith("selector_seed (int, optional, defaults to 0): Seed of") for item in items)


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site):
    page = (site / "index.html").read_text()
    assert "fonts.googleapis" not in page
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page
