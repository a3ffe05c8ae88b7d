"""The fixtures of all backbones."""

from tests.modeling.conftest import any_model as any_model
from tests.modeling.conftest import backbone as backbone
