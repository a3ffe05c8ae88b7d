"""The documentation as a site: every link leads somewhere, every page is in it, and so is the API."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

WITHOUT_DOCS = "the site needs the extra `docs`: pip install 'stts-hf[docs]'"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip(WITHOUT_DOCS)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site(site):
    pages = [page.stem for page in (REPOSITORY / "docs").glob("*.md")] + ["CONTRIBUTING", "SECURITY", "CHANGELOG"]
    assert [name for name in pages if name != "index" and not (site / name / "index.html").is_file()] == []


@pytest.mark.slow
def test_the_api_has_signatures_and_docstrings(site):
    page = (site / "api" / "index.html").read_text()
    for text in ("VideoAssistant", "convert_checkpoint", "prepare_rows", "Answers one question about one video"):
        assert text in page


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site):
    page = (site / "index.html").read_text()
    assert "fonts.googleapis" not in page
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page
