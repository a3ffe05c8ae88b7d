"""The fixtures of all backbones."""

from typing import Any

import pytest

from tests.backbones import BACKBONES, LATER
from tests.modeling.conftest import any_model as any_model


@pytest.fixture(scope="module", params=[*BACKBONES, *LATER], ids=lambda backbone: backbone.name)
def backbone(request) -> Any:
    return request.param
