"""The table of memory in README, and how far its formula is from what benchmarks measured."""

import re

import pytest

from examples import memory
from tests.conftest import REPOSITORY


def test_the_formula_is_at_most_a_quarter_below_what_was_measured():
    """It leaves out what is short-lived or small; more than a quarter would make README's table useless."""
    for line in memory.check():
        computed, measured = map(int, re.findall(r"(\d+) MiB", line))
        assert 0.75 <= computed / measured <= 1.01, line


@pytest.mark.slow
def test_readme_has_the_table_that_the_command_prints():
    page = (REPOSITORY / "README.md").read_text()
    assert [line for line in memory.table() if line not in page] == []
