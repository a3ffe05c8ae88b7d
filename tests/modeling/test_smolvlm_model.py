"""STTS on SmolVLM2: what the tests of every backbone do not cover."""

from typing import Any

import pytest
import torch

from tests import tiny_smolvlm
from tests.backbones import prompt
from tests.modeling.reference import CLOSE
from tests.naive_smolvlm import naive_forward, naive_video
from tests.tiny_smolvlm import GRID, Image, Inputs, Part, Video, pack, sample, samples, tiny_config, tiny_model

MIXED: list[Part] = [3, Video(3), 2, Image(), 2, Video(2), 4]
ROWS: list[list[Part]] = [[3, Video(4), 5], MIXED, [2, Image(), 3, Image(), 2], [9]]


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_features_and_gradients_are_the_naive_ones(ratio):
    """In float64, but for the scores' bias: 4e-8 was measured. In float32, gradients that cancel leave rounding."""
    model, inputs = tiny_model().double(), sample([Video(5)])
    pixels, grids = inputs["pixel_values_videos"].double(), inputs["video_grids"]
    found = []
    for name in ("ours", "naive"):
        model.zero_grad()
        if name == "ours":
            features = model.model.get_video_features(pixels, video_grids=grids, pruning_ratio=ratio).pooler_output[0]
        else:
            features = naive_video(model, pixels, ratio).features
        weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
        (features * weights).sum().backward()
        found.append(
            (features, {of: weight.grad for of, weight in model.named_parameters() if weight.grad is not None})
        )
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    assert any(".scorer." in of for of in found[0][1])
    assert found[0][1].keys() == found[1][1].keys()
    for of, gradient in found[1][1].items():
        torch.testing.assert_close(found[0][1][of], gradient, rtol=0, atol=1e-5, msg=of)


def test_features_of_the_model_with_a_head_are_those_of_the_model():
    model, inputs = tiny_model(), sample([Video(3)])
    given = {"pixel_values_videos": inputs["pixel_values_videos"], "video_grids": inputs["video_grids"]}
    ours, inner = (some.get_video_features(**given, pruning_ratio=0.5) for some in (model, model.model))
    assert torch.equal(ours.pooler_output[0], inner.pooler_output[0])


def test_images_lie_among_videos_in_any_order():
    model = tiny_model()
    inputs = sample([2, Image(), Video(2), Image(), 3, Video(1), 4])
    outputs = model(**inputs, pruning_ratio=0.3)
    expected = naive_forward(model, inputs, 0.3)
    assert outputs.kept_indices[0].tolist() == expected.kept
    torch.testing.assert_close(outputs.logits[0], expected.logits, **CLOSE)


def test_features_of_images_may_be_one_tensor(monkeypatch):
    model, inputs = tiny_model(), sample(MIXED)
    with torch.no_grad():
        expected, native = model(**inputs, pruning_ratio=0.5), model.model.encode_images

        def together(vision: Any) -> Any:
            found = native(vision)
            found.pooler_output = torch.stack(list(found.pooler_output))  # (images, tokens, width), as of InternVL
            return found

        monkeypatch.setattr(model.model, "encode_images", together)
        found = model(**inputs, pruning_ratio=0.5)
    assert torch.equal(found.logits, expected.logits)


def test_flash_attention_behind_a_cache_is_refused():
    """It would take gaps in the positions of a pruned video for ends of samples, and see keys of the last one alone."""
    model, first, second = tiny_model(), sample([5]), sample([2, Video(3), 4])
    cache = model(**first, use_cache=True).past_key_values
    model.config.text_config._attn_implementation = "flash_attention_2"
    second["attention_mask"] = torch.ones(1, 5 + second["input_ids"].shape[1], dtype=torch.long)
    with pytest.raises(ValueError, match="'flash_attention_2' of the text model cannot read a pruned video behind"):
        model(**second, past_key_values=cache, pruning_ratio=0.5)


def test_inputs_that_do_not_fit_are_refused():
    model, inputs = tiny_model(), sample(MIXED)
    pixels, grids = inputs["pixel_values_videos"], inputs["video_grids"]
    wrong: list[tuple[Inputs, str]] = [
        ({"mm_token_type_ids": None}, "`mm_token_type_ids` is None"),
        ({"video_grids": grids + torch.tensor([0, 1, 0])}, "`video_grids` is"),
        ({"pixel_values_videos": pixels[1:]}, "`pixel_values_videos` has shape"),
        (
            {"pixel_values_videos": pixels[:, None].expand(-1, 5, -1, -1, -1)},
            "has shape .* these 5 frames are",
        ),  # tiles
        ({"mm_token_type_ids": inputs["mm_token_type_ids"].clamp_max(1)}, "video placeholder tokens for 0"),
    ]
    for change, message in wrong:
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=message):
                call(**prompt(inputs) | change)
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot part"):
        model(**pack(samples(ROWS)))


def test_a_grid_that_blocks_do_not_cover_is_refused():
    model = tiny_model(tiny_config(side=4 * (2 * GRID + 1)))
    inputs: dict[str, Any] = sample([Video(2)])
    inputs["pixel_values_videos"] = torch.zeros(2, 3, 4 * (2 * GRID + 1), 4 * (2 * GRID + 1))
    with pytest.raises(ValueError, match="too few for the 49 patches of a frame"):
        model(**inputs)


def test_a_second_video_follows_a_cache():
    model = tiny_model()
    whole = prompt(sample([3, Video(3), 5, Video(2), 4]))
    first = 3 + 3 * (GRID**2 + 2) + 5
    per_token = ("input_ids", "mm_token_type_ids")
    before = {name: whole[name][:, :first] for name in (*per_token, "attention_mask")}
    after = {name: whole[name][:, first:] for name in per_token} | {"attention_mask": whole["attention_mask"]}
    frames, grids = whole["pixel_values_videos"], whole["video_grids"]
    with torch.no_grad():
        cache = model(**before, pixel_values_videos=frames[:3], video_grids=grids[:1], use_cache=True).past_key_values
        cached = model(**after, pixel_values_videos=frames[3:], video_grids=grids[1:], past_key_values=cache)
        expected = model(**whole)
    torch.testing.assert_close(cached.logits[0], expected.logits[0, -cached.logits.shape[1] :], **CLOSE)


def test_stock_takes_the_same_pixels_as_images():
    inputs = sample(MIXED)
    as_stock = tiny_smolvlm.as_pictures(inputs)
    assert torch.equal(as_stock["pixel_values"][0, [0, 1, 2, 4, 5]], inputs["pixel_values_videos"])
    assert torch.equal(as_stock["pixel_values"][0, 3], inputs["pixel_values"][0, 0])
