"""The backbones that the tests of all of them run over."""

from typing import Any

import pytest

from tests.backbones import EVERY, Backbone
from tests.modeling.reference import Float64


@pytest.fixture(scope="module", params=EVERY, ids=lambda backbone: backbone.name)
def backbone(request) -> Backbone:
    return request.param


@pytest.fixture(scope="module")
def any_model(backbone) -> Any:
    """A tiny model of the backbone, with a trained scorer."""
    return backbone.model()


@pytest.fixture
def float64_model(backbone) -> Any:
    """The same in float64, for the whole test. The fast kernels of experts lack float64."""
    with Float64():
        model = backbone.model().double()
        model.set_experts_implementation("eager")
        yield model
