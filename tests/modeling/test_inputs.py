"""Bad input: each a `ValueError` that names the argument, what it was, and what would be right."""

import math
from collections.abc import Callable

import pytest
import torch

from stts_hf.modeling.plan_stts import check_finite
from tests.modeling.reference import Inputs
from tests.tiny import PATCH, Image, Part, Video, build_inputs, image_inputs, tiny_config, tiny_model

ROWS: list[list[Part]] = [[3, Video(3), 5], [2, Video(2), 9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=["forward", "generate"])
def call(request, model):
    if request.param == "forward":
        return model
    return lambda **inputs: model.generate(**inputs, max_new_tokens=2)


def take_columns(inputs: Inputs, columns) -> Inputs:
    per_token = ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
    return {name: value[:, columns] if name in per_token else value for name, value in inputs.items()}


def test_text_truncated_in_a_batch(call):
    inputs = build_inputs(ROWS, padding_side="right")
    with pytest.raises(ValueError, match=r"Row 0 .* 16 video placeholder tokens, .* \[27\] tokens"):
        call(**take_columns(inputs, slice(0, 24)))


def test_a_video_too_many(call):
    inputs = build_inputs([[3, Video(3), 5], [2, Video(2), 9]])
    with pytest.raises(ValueError, match=r"`pixel_values_videos` holds 2 videos, .* tokens for 1"):
        call(**{name: value[:1] if name.endswith(("_ids", "_mask")) else value for name, value in inputs.items()})


def test_placeholders_without_the_video(call):
    """Here stock Molmo2 would answer from the bare placeholders; so do we, as it is a valid text-only call there."""
    inputs = build_inputs([[3, Video(3), 5]])
    text = {name: inputs[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    assert call(**text) is not None


def test_a_mask_that_hides_placeholders(call):
    inputs = build_inputs(ROWS)
    inputs["attention_mask"][-1, (inputs["input_ids"][-1] == PATCH).nonzero()[0]] = 0
    with pytest.raises(ValueError, match=r"`attention_mask` hides 1 placeholder tokens of videos or images, but"):
        call(**inputs)


@pytest.mark.parametrize("missing", ["video_grids", "video_token_pooling"])
def test_pixel_values_without_their_companions(call, missing):
    inputs = build_inputs(ROWS)
    del inputs[missing]
    with pytest.raises(ValueError, match=f"`pixel_values_videos` needs `{missing}`, but it is None"):
        call(**inputs)


@pytest.mark.parametrize("beside", ["alone", "beside_a_video"])
@pytest.mark.parametrize("missing", ["image_grids", "image_token_pooling"])
def test_images_without_their_companions(model, missing, beside):
    inputs = image_inputs() if beside == "alone" else build_inputs([[2, Image(), Video(2), 4]])
    del inputs[missing]
    with pytest.raises(ValueError, match=f"`pixel_values` needs `{missing}`, but it is None"):
        model(**inputs)


def test_image_placeholders_that_do_not_match_beside_a_video(call):
    inputs = build_inputs([[2, Image(), Video(2), 4]])
    place = (inputs["input_ids"][0] == PATCH).nonzero()[0]
    inputs["input_ids"][0, place] = 7
    with pytest.raises(ValueError, match=r"Row 0 .* 69 image placeholder tokens, .* `pixel_values` have \[70\] tokens"):
        call(**inputs)


PIXELS, TABLE, GRIDS = "pixel_values_videos", "video_token_pooling", "video_grids"
# What is changed, how, and the values that the message names.
SHAPES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "fewer_frames_than_grids": (PIXELS, lambda pixels: pixels[:-1], "holds 4"),
    "wrong_patch_count": (PIXELS, lambda pixels: pixels[:, :-1], r"\(5, 80, 12\).*\(frames, 81, 12\)"),
    "wrong_patch_size": (PIXELS, lambda pixels: pixels[..., :-1], r"\(5, 81, 11\).*\(frames, 81, 12\)"),
    "not_patches": (PIXELS, lambda pixels: torch.zeros(5, 3, 18, 18, 1), r"\(frames, 81, 12\)"),
    "windows_of_another_size": (TABLE, lambda table: table[:, :4], r"\(45, 4\).*\(45, 9\)"),
    "too_few_windows": (TABLE, lambda table: table[:-1], r"\(44, 9\).*\(45, 9\)"),
    "a_window_of_no_patch": (TABLE, lambda table: table + 1, "from 1 to 405.* 405 patches"),
    "padding_of_another_kind": (TABLE, lambda table: table.where(table > 0, -2), "from -2 to 404"),
    "grids_of_images": (GRIDS, lambda grids: torch.nn.functional.pad(grids, (0, 1)), r"\(2, 4\).*\(videos, 3\)"),
    "no_frames": (GRIDS, lambda grids: grids * torch.tensor([0, 1, 1]), "at least one frame"),
    "nan_pixels": (PIXELS, lambda pixels: pixels.index_fill(0, torch.tensor([1]), math.nan), "NaN or infinite"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_pixels_whose_sum_alone_is_infinite_pass(dtype):
    check_finite(torch.full((1, 4, 3), torch.finfo(dtype).max, dtype=dtype))


def test_infinities_that_cancel_out_do_not_pass():
    with pytest.raises(ValueError, match="NaN or infinite"):
        check_finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize(("name", "edit", "values"), SHAPES.values(), ids=SHAPES.keys())
def test_videos_that_do_not_fit_their_grids(call, name, edit, values):
    inputs = build_inputs(ROWS)
    with pytest.raises(ValueError, match=f"`{name}`.*{values}"):
        call(**inputs | {name: edit(inputs[name])})


@pytest.mark.parametrize("pruning_ratio", [-0.1, 1.01, math.nan, True, "0.5"], ids=str)
@pytest.mark.parametrize("kind", ["video", "text"])
def test_a_ratio_out_of_range(call, kind, pruning_ratio):
    inputs = {"video": build_inputs(ROWS), "text": build_inputs([[6]])}[kind]
    with pytest.raises(ValueError, match=r"`pruning_ratio` is .* but must be a number in \[0, 1\]"):
        call(**inputs, pruning_ratio=pruning_ratio)


@pytest.mark.parametrize("kind", ["video", "image", "text"])
def test_training_without_token_types(kind):
    model = tiny_model().train()
    inputs = {"video": build_inputs(ROWS), "image": image_inputs(), "text": build_inputs([[6]])}[kind]
    del inputs["mm_token_type_ids"]
    with pytest.raises(ValueError, match="`mm_token_type_ids`"):
        model(**inputs)


def test_neither_ids_nor_embeddings(call):
    inputs = build_inputs(ROWS)
    del inputs["input_ids"]
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`; both are None"):
        call(**inputs)


def test_ids_and_embeddings_exclude_each_other_in_forward(model):
    inputs = build_inputs(ROWS)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`; both are given"):
        model(**inputs, inputs_embeds=embeds)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_sequences_without_tokens(call, model, name):
    inputs = build_inputs(ROWS)
    ids = inputs.pop("input_ids")[:, :0]
    inputs[name] = ids if name == "input_ids" else model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=rf"`{name}` has shape .* at least one token"):
        call(**inputs)


@pytest.mark.parametrize("name", ["pixel_values_videos", "video_grids", "video_token_pooling"])
def test_lists_and_arrays_in_place_of_tensors(call, name):
    inputs: Inputs = build_inputs(ROWS)
    inputs[name] = inputs[name].tolist() if name == "video_grids" else inputs[name].numpy()
    with pytest.raises(TypeError, match=rf"`{name}` is a (list|ndarray), but must be a torch.Tensor"):
        call(**inputs)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_length(model, name):
    inputs = build_inputs(ROWS, labels=True)
    labels = inputs.pop("labels")[:, 1:]
    with pytest.raises(ValueError, match=rf"`{name}` has shape .* one entry for every token"):
        model(**inputs, **{name: labels})


def test_a_mask_of_the_wrong_length(call):
    inputs = build_inputs(ROWS)
    length = inputs["input_ids"].shape[1]
    inputs["attention_mask"] = torch.ones(2, length + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"`attention_mask` .*{length + 1}.*{length} new tokens"):
        call(**inputs)


@pytest.mark.parametrize("name", ["position_ids", "mm_token_type_ids"])
def test_other_arguments_of_the_wrong_length(model, name):
    inputs = build_inputs(ROWS, labels=True)
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand(2, -1)
    length = inputs["input_ids"].shape[1]
    inputs[name] = inputs[name][:, 1:]
    with pytest.raises(ValueError, match=rf"`{name}` has shape \(2, {length - 1}\), but must be \(2, {length}\)"):
        model(**inputs)


def test_lengths_of_a_sequence_that_will_be_shortened(model):
    inputs = build_inputs([[3, Video(2), 4]])
    lengths = torch.tensor([0, inputs["input_ids"].shape[1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="`cu_seq_lens_q` describes the sequence before video tokens are dropped"):
        model(**inputs, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


def test_encoder_outputs_beside_a_video(model):
    inputs = build_inputs([[3, Video(2), 4]])
    with pytest.raises(ValueError, match=r"`mm_encoder_outputs` came with pixels.* Pass the pixels instead"):
        model(**inputs, mm_encoder_outputs={"video": object()})


def test_frames_and_videos_may_come_nested(model):
    """Documented: pixel values may be (videos, frames, N, pixels) where all videos are equally long."""
    inputs = build_inputs([[3, Video(2), 4], [3, Video(2), 4]], tiny_config())
    nested = inputs | {"pixel_values_videos": inputs["pixel_values_videos"].unflatten(0, (2, 2))}
    assert torch.equal(model(**nested).logits, model(**inputs).logits)


@pytest.mark.parametrize("with_mask", [True, False])
def test_packed_samples_are_not_gone_on_with(model, with_mask):
    inputs = build_inputs([[3, Video(3), 5, 2, Video(2), 9]])
    length = inputs["input_ids"].shape[1]
    position_ids = torch.arange(length)[None]
    if not with_mask:
        del inputs["attention_mask"]
    assert model.generate(**inputs, position_ids=position_ids, max_new_tokens=1).shape[1] == length + 1
    position_ids = torch.cat([position_ids[:, :20], position_ids[:, : length - 20]], dim=-1)
    with pytest.raises(ValueError, match="`position_ids` start over"):
        model.generate(**inputs, position_ids=position_ids, max_new_tokens=1)


def test_padding_of_any_position_is_not_taken_for_packed_samples(model):
    inputs = build_inputs(ROWS)
    mask = inputs["attention_mask"]
    assert not mask.all()
    position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    expected = model.generate(**inputs, max_new_tokens=2)
    assert torch.equal(model.generate(**inputs, position_ids=position_ids, max_new_tokens=2), expected)


@pytest.mark.parametrize(
    "mask",
    [lambda mask: mask[:, None], lambda mask: mask[:, None, None], lambda mask: {"full_attention": mask}],
    ids=["3d", "4d", "by-layer"],
)
def test_masks_that_are_none_of_padding(model, mask):
    inputs = build_inputs(ROWS)
    inputs["attention_mask"] = mask(inputs["attention_mask"])
    with pytest.raises(ValueError, match="`attention_mask` is of another kind, but must be a padding mask"):
        model(**inputs)


def test_embeddings_beside_a_video(call, model):
    inputs = build_inputs(ROWS)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(ValueError, match=r"`inputs_embeds` .* `input_ids`"):
        call(**inputs)


def test_an_image_behind_an_image_of_embeddings(model):
    """Nothing says which columns of embeddings are an image's, so all may be."""
    inputs = image_inputs()
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    cache = model(**{**inputs, "input_ids": None}, inputs_embeds=embeds, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="`pixel_values` came with `past_key_values` that hold a video or image"):
        model(**inputs, past_key_values=cache)
