"""Bad input to Qwen3-VL: each one error that names the argument, what it was, and what would be right.

`test_inputs.py` has what is refused of every backbone alike.
"""

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import DynamicCache
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig

from stts_hf.auto_classes import CONFIGS
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration
from tests import tiny
from tests.tiny_qwen3_vl import (
    Image,
    Video,
    batch,
    pack,
    sample,
    samples,
    text_of,
    tiny_config,
    tiny_model,
)

ROWS: list[list[Any]] = [[3, Video(3), 5], [2, Image(), Video(2, 1, 3), 9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=["forward", "generate"])
def call(request, model):
    if request.param == "forward":
        return model
    return lambda **inputs: model.generate(**text_of(inputs), max_new_tokens=2, pad_token_id=0)


def without(name: str):
    return lambda inputs: {key: value for key, value in inputs.items() if key != name}


def change(name: str, edit):
    return lambda inputs: inputs | {name: edit(inputs[name])}


BAD: dict[str, tuple[Any, str]] = {
    "token-types-of-molmo2": (
        change("mm_token_type_ids", lambda types: types.clamp_max(1)),
        r"`mm_token_type_ids` must be 2 for placeholders of videos .* but 24 tokens differ",
    ),
    "video-grids-missing": (without("video_grid_thw"), "`pixel_values_videos` needs `video_grid_thw`, but it is None"),
    "image-grids-missing": (without("image_grid_thw"), "`pixel_values` needs `image_grid_thw`, but it is None"),
    "grids-that-do-not-divide": (
        change("video_grid_thw", lambda grids: grids + torch.tensor([0, 1, 0])),
        r"`video_grid_thw` is .* must be multiples of `spatial_merge_size` = 2",
    ),
    "image-grids-that-do-not-divide": (
        change("image_grid_thw", lambda grids: grids + torch.tensor([0, 0, 1])),
        r"`image_grid_thw` is .* must be multiples of `spatial_merge_size` = 2",
    ),
    "grids-of-nothing": (change("video_grid_thw", lambda grids: grids * 0), "every video needs at least one frame"),
    "more-tubelets-than-the-text-has": (
        change("video_grid_thw", lambda grids: torch.tensor([[9, 2, 4], [1, 2, 12]])),
        "`video_grid_thw` needs runs of",
    ),
    "fewer-tubelets-than-the-text-has": (
        change("video_grid_thw", lambda grids: torch.tensor([[1, 12, 6], [2, 2, 6]])),
        "`video_grid_thw` needs runs of",
    ),
    "tubelets-of-other-videos": (
        change("video_grid_thw", lambda grids: torch.tensor([[3, 4, 6], [1, 4, 6]])),
        "`video_grid_thw` needs runs of",
    ),
    "image-grids-of-nothing": (change("image_grid_thw", lambda grids: grids * 0), "every image needs at least one"),
    "grids-of-two-columns": (
        change("video_grid_thw", lambda grids: grids[:, :2]),
        r"has shape \(2, 2\), but must be \(videos, 3\)",
    ),
    "features-beside-grids": (
        lambda inputs: {n: v for n, v in inputs.items() if "pixel" not in n} | {"mm_encoder_outputs": {"video": 0}},
        "`mm_encoder_outputs` came with .*grids.* Pass the pixels instead",
    ),
    "fewer-patches-than-grids": (
        change("pixel_values_videos", lambda pixels: pixels[:-1]),
        r"`pixel_values_videos` has shape \(95, 96\), but `video_grid_thw` .* make it \(96, 96\)",
    ),
    "patches-of-another-size": (
        change("pixel_values_videos", lambda pixels: pixels[:, :-1]),
        r"`pixel_values_videos` has shape \(96, 95\), .* make it \(96, 96\)",
    ),
    "a-processor-of-molmo2": (
        lambda inputs: tiny.build_inputs([[3, tiny.Video(2), 4]]),
        "`pixel_values_videos` needs `video_grid_thw`, but it is None; pass all that the processor returns",
    ),
    "positions-of-two-axes": (
        lambda inputs: inputs | {"position_ids": torch.zeros(2, *inputs["input_ids"].shape, dtype=torch.long)},
        r"`position_ids` has shape \(2, 2, .* but must be \(3, 2, (\d+)\)",
    ),
    "positions-that-do-not-count": (
        lambda inputs: inputs | {"position_ids": 2 * (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)},
        r"`position_ids` \(batch, length\) with images or videos must count .* of row 0 do not grow by 1",
    ),
}


@pytest.mark.parametrize(("edit", "message"), BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(call, edit, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(**edit(batch(samples(ROWS))))


def test_a_processor_of_qwen_does_not_serve_molmo2():
    inputs = batch(samples(ROWS))
    with pytest.raises(ValueError, match="needs `image_token_pooling`, but it is None"):
        tiny.tiny_model()(**inputs)


def test_a_text_with_one_run_for_all_tubelets_is_refused(call):
    inputs = text_of(sample([3, Video(3), 5], timestamps=False))
    with pytest.raises(ValueError, match="`video_grid_thw` needs runs of"):
        call(**inputs)


def test_grids_of_images_in_another_order_are_refused(call):
    inputs = sample([3, Image(), 2, Image(1, 2), 5])
    inputs["image_grid_thw"] = inputs["image_grid_thw"].flip(0)
    with pytest.raises(ValueError, match="`image_grid_thw` needs runs of"):
        call(**inputs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pixel_values_videos", "`mm_token_type_ids` must be 2 .* in this call, .* but 24 tokens differ"),
        ("pixel_values", "`mm_token_type_ids` must be 2 .* in this call, .* but 6 tokens differ"),
    ],
)
def test_pixels_that_are_missing_beside_others_are_named(call, name, message):
    with pytest.raises(ValueError, match=message):
        call(**without(name)(batch(samples(ROWS))))


def test_packed_samples_fill_no_cache_and_are_not_gone_on_with(model):
    packed = pack(samples(ROWS))
    with pytest.raises(ValueError, match=r"no `past_key_values`"):
        model(**packed, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="`position_ids` start over"):
        model.generate(**text_of(packed), max_new_tokens=2)
    length = packed["input_ids"].shape[1]
    whole = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"`attention_mask` .* padding mask"):
        model(**packed, attention_mask=whole, packed_rows=True)
    order = packed.pop("position_ids")
    with pytest.raises(ValueError, match="need `position_ids` that start over"):
        model(**packed, packed_rows=True)
    four = torch.cat([order[None], torch.zeros(3, *order.shape, dtype=torch.long)])
    with pytest.raises(ValueError, match="`position_ids` start over"):
        model.generate(**text_of(packed), position_ids=four, max_new_tokens=2)


def test_the_last_layer_cannot_prune():
    with pytest.raises(StrictDataclassClassValidationError, match=r"`pruning_layer` is 5, but .* from 0 to 4"):
        tiny_config(pruning_layer=5)


@pytest.mark.parametrize("settings", [{}, {"pruning_ratio": 0.3}], ids=["", "settings"])
def test_the_vision_config_of_stock_is_refused(settings):
    with pytest.raises(
        StrictDataclassClassValidationError, match="'qwen3_vl_vision', but must be 'stts_qwen3_vl_vision'"
    ):
        STTSQwen3VLConfig(vision_config=Qwen3VLVisionConfig(), **settings)


@pytest.mark.parametrize("loads", [STTSQwen3VLConfig, STTSQwen3VLForConditionalGeneration])
@pytest.mark.parametrize("kind", ["stts", "molmo2", "qwen3_vl_moe", "llama"])
def test_checkpoints_of_others_are_refused(loads, kind, tmp_path):
    if kind == "stts":
        tiny.tiny_config().save_pretrained(tmp_path)
    elif kind == "qwen3_vl_moe":
        Qwen3VLMoeConfig().save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ValueError, match=f"is a '{kind}' model, but must be an STTS or dense Qwen3-VL checkpoint"):
        loads.from_pretrained(tmp_path)


@pytest.mark.parametrize("loads", [STTSConfig, STTSForConditionalGeneration])
@pytest.mark.parametrize("kind", ["stts_qwen3_vl", "qwen3_vl"])
def test_the_class_of_molmo2_refuses_qwens_checkpoints(loads, kind, tmp_path):
    (tiny_config() if kind == "stts_qwen3_vl" else Qwen3VLConfig()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is a '{kind}' model, but must be an STTS or Molmo2 checkpoint"):
        loads.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_every_backbone_refuses_another_family(config, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="is a 'llama' model, but must be an STTS or"):
        config.from_pretrained(tmp_path)
