"""The backbones that the tests of all of them run over."""

from typing import Any

import pytest

from tests.backbones import EVERY, Backbone


@pytest.fixture(scope="module", params=EVERY, ids=lambda backbone: backbone.name)
def backbone(request) -> Backbone:
    return request.param


@pytest.fixture(scope="module")
def any_model(backbone) -> Any:
    """A tiny model of the backbone, with a trained scorer."""
    return backbone.model()
