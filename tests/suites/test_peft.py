"""PEFT's common tests, over every backbone with LoRA on the language model: `make test-transformers`."""

import inspect
import sys
import tempfile
from types import SimpleNamespace
from unittest.mock import patch

import torch
from peft import LoraConfig

# Imported for tests of image generation, none of which runs here.
with patch.dict(sys.modules, {"diffusers": SimpleNamespace(StableDiffusionPipeline=type("Pipeline", (), {}))}):
    from peft_tests.testing_common import PeftCommonTester

from tests.backbones import BACKBONES, Backbone, prompt
from tests.suites.exempt import CannotHold, exempt
from tests.suites.models import ROWS, classes_of
from tests.test_peft import TARGETS

CALL = ["self", "model_id", "config_cls", "config_kwargs"]
SETTINGS = {"target_modules": TARGETS, "task_type": "CAUSAL_LM", "init_lora_weights": False}

CANNOT_HOLD = (
    CannotHold(
        ("test_generate_with_mixed_adapter_batches_and_beam_search",),
        "a prompt with a video is longer than the 15 tokens that the test allows",
        "`max_length` is 15, but the prompt alone has",
    ),
    CannotHold(
        ("test_training_layer_indexing",),
        "it needs names of modules in a list, which would be those of the vision tower too",
        "`layers_to_transform` cannot be used when `target_modules` is a str",
    ),
)


def asks_for_no_more(test: object) -> bool:
    """Whether a test takes a model and an adapter's settings alone."""
    parameters = inspect.signature(test).parameters.values() if inspect.isfunction(test) else ()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty] == CALL


def suite(backbone: Backbone) -> type:
    """PEFT's tests are methods `_test_...` that its own test files call; here they are called by their names."""
    head = classes_of(backbone)[1]

    class Suite(PeftCommonTester):
        transformers_class = head

        @classmethod
        def setup_class(cls):
            cls.folder = tempfile.TemporaryDirectory()
            torch.manual_seed(0)
            head(backbone.model().config).save_pretrained(cls.folder.name)

        @classmethod
        def teardown_class(cls):
            cls.folder.cleanup()

        def prepare_inputs_for_testing(self):
            return prompt(backbone.batch(ROWS, "left"))

    def call(name):
        return lambda self: getattr(self, name)(self.folder.name, LoraConfig, SETTINGS)

    for name, _ in inspect.getmembers(PeftCommonTester, asks_for_no_more):
        setattr(Suite, name.removeprefix("_"), call(name))
    exempt(Suite, CANNOT_HOLD)
    return Suite


for of in BACKBONES:
    globals()[f"Test_{of.name}"] = suite(of)
