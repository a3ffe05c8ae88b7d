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


@pytest.fixture(scope="module")
def float64_model(backbone) -> Any:
    """The same in float64, but for native layers that compute in float32. The fast kernels of experts lack float64."""
    model = backbone.model().double()
    model.set_experts_implementation("eager")
    return model
