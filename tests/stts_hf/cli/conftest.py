"""What tests of several commands share."""

from pathlib import Path

import pytest

from tests.checkpoints import load_of_one_answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, processor) -> Path:
    """A tiny model that writes one answer, whatever it is asked."""
    folder = tmp_path_factory.mktemp("checkpoint")
    load_of_one_answer().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
