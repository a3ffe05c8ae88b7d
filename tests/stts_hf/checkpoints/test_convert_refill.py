"""A training checkpoint converted without options, first-fit-descending with refill, against loops and stock Molmo2.

The authors' logits are without refill. So the naive vision tower, which `test_naive.py` holds to their refilled
features, feeds stock Molmo2's text model; without refill that pair must give the authors' own logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Molmo2ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from stts_hf.checkpoints.convert import convert_checkpoint
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from tests.fixture_files import checkpoint_forms, pooling_table, read_safetensors
from tests.naive import NaiveGeometry, naive_vision_tower, weights_from_original
from tests.stts_hf.checkpoints.convert_files import write_base
from tests.stts_hf.checkpoints.original_weights import native_weights, read_original
from tests.stts_hf.checkpoints.test_convert_original import stock_config

LOGIT_TOLERANCE = 1e-4  # what the project promises; 2e-6 was measured
FORMS = checkpoint_forms()


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, STTSForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("refill")
    base = write_base(folder / "base")
    folders = {form.name: convert_checkpoint(form, folder / form.name, base=base).folder for form in FORMS}
    return {name: STTSForConditionalGeneration.from_pretrained(path).eval() for name, path in folders.items()}


def reference_logits(model: STTSForConditionalGeneration, form: Path, refill: bool) -> tuple[torch.Tensor, int]:
    """Logits (L', vocabulary) and the number of dropped patches that stayed on as context; settings are the model's."""
    expected, _ = read_safetensors(form.parent / "expected.safetensors")
    config, original = model.config, read_original(form)
    vision = config.vision_config
    (rows, columns), window = (side // vision.patch_size for side in vision.image_size), (3, 3)
    assert tuple(vision.pooling_size) == window
    frames = len(expected["pixel_patches"])
    prefix = "vision_backbone."
    output = naive_vision_tower(
        weights_from_original({n.removeprefix(prefix): w for n, w in original.items() if n.startswith(prefix)}),
        NaiveGeometry(
            vision.num_attention_heads,
            vision.pruning_layer,
            config.adapter_config.vision_feature_layer or (),
            (rows, columns),
            config.adapter_config.num_attention_heads,
        ),
        expected["pixel_patches"],
        [frames],
        pooling_table(frames, (rows, columns), window),
        vision.pruning_ratio,
        refill=refill,
    )
    keep = torch.ones_like(expected["input_ids"], dtype=torch.bool)
    keep[expected["input_ids"] == config.image_patch_id] = output.keep_masks[0].flatten()

    text = Molmo2ForConditionalGeneration(stock_config(config.to_dict())).eval()
    weights = {name: weight for name, weight in native_weights(original).items() if ".scorer." not in name}
    text.load_state_dict(weights)
    features: Any = (output.pooled_features,)  # of each video, as stock Molmo2 has it
    logits = text(
        input_ids=expected["input_ids"][keep][None],
        mm_token_type_ids=expected["mm_token_type_ids"][keep][None],
        position_ids=keep.nonzero().T,
        attention_mask=torch.ones(1, int(keep.sum()), dtype=torch.int64),  # or gaps in the positions cut the sequence
        mm_encoder_outputs={"video": BaseModelOutputWithPooling(pooler_output=features)},
    ).logits[0]
    return logits, output.num_refilled_patches


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@torch.no_grad()
def test_a_default_conversion_gives_the_logits_of_loops_with_refill(converted, form):
    model = converted[form.name]
    expected, _ = read_safetensors(form.parent / "expected.safetensors")
    frames = len(expected["pixel_patches"])
    logits = model(
        input_ids=expected["input_ids"][None],
        mm_token_type_ids=expected["mm_token_type_ids"][None],
        pixel_values_videos=expected["pixel_patches"],
        video_token_pooling=pooling_table(frames, (27, 27), (3, 3)),
        video_grids=torch.tensor([[frames, 9, 9]]),
    ).logits[0]
    reference, refilled = reference_logits(model, form, refill=True)
    assert refilled > 0, "no frame is alone in its bin, so nothing was shown"
    torch.testing.assert_close(logits, reference, rtol=0, atol=LOGIT_TOLERANCE)


@torch.no_grad()
def test_the_reference_without_refill_is_the_authors(converted):
    expected, _ = read_safetensors(FORMS[0].parent / "expected.safetensors")
    with_refill, without = (reference_logits(converted[FORMS[0].name], FORMS[0], refill)[0] for refill in (True, False))
    torch.testing.assert_close(without, expected["logits_original_positions"], rtol=0, atol=LOGIT_TOLERANCE)
    assert (with_refill - without).abs().max() > 100 * LOGIT_TOLERANCE  # so a forgotten refill would be seen
