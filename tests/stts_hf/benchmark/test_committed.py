"""Every committed page is what the code makes of the samples beside it."""

from pathlib import Path

import pytest

from stts_hf.benchmark import report

BENCHMARKS = Path(__file__).parents[3] / "docs" / "benchmarks"
# Of `make gpu` some parts are no benchmarks and have pages of their own.
FOLDERS = sorted(path.parent for path in BENCHMARKS.glob("*/result.json") if '"preset"' in path.read_text())


def test_there_are_committed_results():
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_page_is_what_its_samples_say(folder):
    expected = report.markdown(report.read_result(folder))
    command = f"stts-hf bench --render --output docs/benchmarks/{folder.name}"
    assert (folder / report.PAGE).read_text() == expected, f"not what the code renders; run: {command}"
