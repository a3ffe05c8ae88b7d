"""transformers' common tests of models, over the classes of every backbone: `make test-transformers`."""

import unittest
from typing import Any

import torch
from transformers_tests import test_modeling_common as common
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester

from tests.backbones import BACKBONES, Backbone, prompt
from tests.suites.exempt import CannotHold, exempt
from tests.suites.models import PICTURES, ModelTester, classes_of

CANNOT_HOLD = (
    CannotHold(
        ("test_get_video_features_attentions",),
        "attention within the frames of a video computes no weights",
        "`output_attentions` is True, but attention within the frames",
    ),
    CannotHold(
        ("test_model_outputs_equivalence",),
        "it subtracts outputs to word a message, and `keep_mask` is bool (test_forward_outputs.py tests the same)",
        "the `-` operator, with two bool tensors",
    ),
    CannotHold(
        ("test_inputs_embeds", "test_inputs_embeds_matches_input_ids"),
        "beside videos a prompt is given as ids, which say what each token is (docs/behaviour.md)",
        "`inputs_embeds` came with videos",
    ),
    # Those of `generate`, which the source distribution lacks.
    CannotHold(
        (
            "test_assisted_decoding_matches_greedy_search_0_random",
            "test_assisted_decoding_matches_greedy_search_1_same",
            "test_assisted_decoding_sample",
            "test_beam_sample_generate_dict_output",
            "test_beam_search_generate_dict_output",
            "test_beam_search_generate_dict_outputs_use_cache",
            "test_forward_with_logits_to_keep",
            "test_generate_compilation_all_outputs",
            "test_generate_from_inputs_embeds_with_static_cache",
            "test_generate_with_static_cache",
            "test_greedy_generate_dict_outputs",
            "test_greedy_generate_dict_outputs_use_cache",
            "test_past_key_values_format",
            "test_sample_generate_dict_output",
        ),
        "it takes one length for the ids of a prompt and for what the language model sees of it",
        r"\d+ != \d+|\) != \(|Tuples differ",
    ),
    CannotHold(
        ("test_generate_compile_model_forward_fullgraph",),
        "it cuts all tensors of a batch to a row, patches too",
        r"counts \d+ frames, but|has shape \(1, |too many indices",
    ),
    CannotHold(
        ("test_generate_without_input_ids",),
        "it starts from the bos token of the text model's configuration, where stock has none either",
        "no attribute 'bos_token_id'",
        only=("Test_molmo2", "Test_qwen3_vl"),
    ),
)


class Suite(common.ModelTesterMixin, GenerationTesterMixin):
    model_tester: Any
    _is_composite = True
    skip_test_video_features_output_shape = True  # as many as patches are kept

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class)
        return inputs | {"labels": self.model_tester.inputs["labels"].clone()} if return_labels else inputs

    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        """No token ends an answer, since the tests count tokens."""
        config = self.model_tester.get_config()
        config.get_text_config().eos_token_id = None
        return config, prompt(self.model_tester.make_inputs(batch_size))

    def _logits_scored_by_loss(self, model, logits):
        """Logits (B, L, vocabulary) at the places of the caller's tokens, whose targets the test then makes."""
        kept = self.model_tester.kept_indices[:, :, None].expand(-1, -1, logits.shape[-1])
        whole = logits.new_zeros(len(logits), self.model_tester.seq_length, logits.shape[-1])
        return torch.scatter(whole, 1, kept, logits)

    def _image_features_prepare_config_and_inputs(self):
        inputs = self.model_tester.backbone.batch(PICTURES, "left")
        inputs = {name: value for name, value in inputs.items() if "pixel" in name or name.startswith("image")}
        return self.model_tester.get_config(), inputs

    def _image_features_get_expected_num_attentions(self, model_tester=None):
        return self.model_tester.num_vision_layers

    _video_features_get_expected_num_attentions = _image_features_get_expected_num_attentions

    def test_config(self):
        config_class = type(self.model_tester.get_config())
        ConfigTester(self, config_class=config_class, has_text_modality=False).run_common_tests()


def suite(backbone: Backbone) -> type:
    def set_up(self: Any) -> None:
        self.model_tester = ModelTester(backbone)

    body = {"all_model_classes": classes_of(backbone), "setUp": set_up, "__module__": __name__}
    kind = type(f"Test_{backbone.name}", (Suite, unittest.TestCase), body)
    exempt(kind, CANNOT_HOLD)
    # By these lists the tests know which model has a head.
    base, head = (model_class.__name__ for model_class in classes_of(backbone))
    common.MODEL_MAPPING_NAMES[base] = base
    common.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[head] = head
    return kind


for of in BACKBONES:
    globals()[f"Test_{of.name}"] = suite(of)
