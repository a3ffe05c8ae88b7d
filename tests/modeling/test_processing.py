"""`STTSProcessor`: prompts with true timestamps, mixed batches, and a life through save and load."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor

from stts_hf import register_auto_classes
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from tests.clips import decode_everything, numbered_frame, write_clip
from tests.version_marks import since_transformers_5_23

SPECIAL = [
    "<pad>",
    "<|im_end|>",
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<low_res_im_start>",
    "<im_low>",
    "<frame_start>",
    "<frame_end>",
    "<|image|>",
    "<|video|>",
]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<|video|>{% elif part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
SIZE = {"height": 28, "width": 28}  # 2 x 2 patches, one block of them per frame
BLOCKS = 1


def tiny_tokenizer(special=SPECIAL):
    vocabulary = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz0123456789 .?")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"<unk>": len(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=special[2:],
    )


@pytest.fixture(scope="module")
def processor():
    return STTSProcessor(
        Molmo2ImageProcessor(size=SIZE, max_crops=1, overlap_margins=[0, 0]),
        STTSVideoProcessor(size=SIZE, num_frames=8),
        tiny_tokenizer(),
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {
        "short": write_clip(folder / "short.mp4", 50),
        "long": write_clip(folder / "long.mkv", 300),
        "late": write_clip(folder / "late.ts", 50, start=7.0),
        "uneven": write_clip(folder / "uneven.mkv", times=[0, 0.11, 0.42, 1.73, 1.79, 3.2, 3.25, 5.0]),
    }


def prompt_of(processor, inputs, row=0):
    return processor.tokenizer.decode(inputs["input_ids"][row])


def stamps(prompt):
    """The times written before the frames."""
    return re.findall(r"(\d+\.\d) ?<frame_start>", prompt)


@pytest.mark.parametrize("name", ["short", "long", "late", "uneven"])
def test_timestamps_are_those_of_the_frames_shown(processor, clips, name):
    inputs = processor(text="<|video|>what?", videos=str(clips[name]), return_tensors="pt", return_metadata=True)
    times, _, _ = decode_everything(clips[name])
    shown = inputs["video_metadata"][0].frames_indices
    assert stamps(prompt_of(processor, inputs)) == [f"{float(times[index]):.1f}" for index in shown]


def test_array_without_file_keeps_native_timestamps(processor):
    frames = np.stack([numbered_frame(number) for number in range(10)])
    inputs = processor(text="<|video|>", videos=frames, video_metadata={"total_num_frames": 10, "fps": 2.0})
    # 5 s at 2 fps ask for 10 frames, the budget is 8.
    assert stamps(prompt_of(processor, inputs)) == ["0.0", "0.5", "1.0", "1.5", "2.5", "3.0", "3.5", "4.5"]


def test_one_placeholder_per_block_of_every_frame(processor, clips):
    inputs = processor(text="<|video|>what?", videos=str(clips["long"]), return_tensors="pt")
    patch = processor.tokenizer.convert_tokens_to_ids("<im_patch>")
    assert inputs["video_grids"].tolist() == [[8, 1, 1]]
    assert (inputs["input_ids"] == patch).sum() == 8 * BLOCKS == len(inputs["video_token_pooling"])


def test_batch_of_videos_of_different_lengths_equals_one_by_one(processor, clips):
    texts = ["<|video|>what?", "<|video|>and this one?"]
    videos = [str(clips["short"]), str(clips["uneven"])]
    together = processor(text=texts, videos=videos, padding=True, return_tensors="pt")
    alone = [processor(text=text, videos=video, return_tensors="pt") for text, video in zip(texts, videos, strict=True)]
    assert torch.equal(together["pixel_values_videos"], torch.cat([inputs["pixel_values_videos"] for inputs in alone]))
    for row, inputs in enumerate(alone):
        unpadded = together["input_ids"][row][together["attention_mask"][row].bool()]
        assert torch.equal(unpadded, inputs["input_ids"][0])


def test_image_in_one_row_and_video_in_the_next(processor, clips):
    image = Image.fromarray(numbered_frame(3))
    texts = ["<|image|>what?", "<|video|>what?", "no picture"]
    inputs = processor(text=texts, images=[image], videos=[str(clips["short"])], padding=True, return_tensors="pt")
    lone_image = processor(text=texts[0], images=[image], return_tensors="pt")
    lone_video = processor(text=texts[1], videos=[str(clips["short"])], return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], lone_image["pixel_values"])
    assert torch.equal(inputs["pixel_values_videos"], lone_video["pixel_values_videos"])
    assert inputs["input_ids"].shape == inputs["mm_token_type_ids"].shape
    assert inputs["mm_token_type_ids"].any(dim=1).tolist() == [True, True, False]


def test_chat_batch_in_which_only_the_second_has_a_video(processor, clips):
    words = {"type": "text", "text": "what moves?"}
    conversations = [
        [{"role": "user", "content": [words]}],
        [{"role": "user", "content": [{"type": "video", "path": str(clips["short"])}, words]}],
    ]
    inputs = processor.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    assert inputs["mm_token_type_ids"].any(dim=1).tolist() == [False, True]
    assert inputs["video_grids"].tolist() == [[5, 1, 1]]


@pytest.mark.parametrize("videos", [[], [[]], [[], []]], ids=str)
def test_empty_lists_of_videos_are_no_video(processor, videos):
    """A batch may hold a list of videos for each text."""
    assert set(processor(text="hello", videos=videos)) == {"input_ids", "attention_mask", "mm_token_type_ids"}


@since_transformers_5_23
def test_a_placeholder_beside_empty_lists_of_videos_is_refused(processor):
    with pytest.raises(ValueError, match="no videos were passed"):
        processor(text="<|video|>", videos=[[], []])


@pytest.mark.parametrize("settings", [{"num_frames": 3}, {"videos_kwargs": {"num_frames": 3}}], ids=str)
def test_sampling_settings_per_call(processor, clips, settings):
    inputs = processor(text="<|video|>", videos=clips["long"], **settings)  # a `Path`
    assert len(stamps(prompt_of(processor, inputs))) == 3


def test_settings_of_other_processors_are_refused(processor, clips):
    for options in ({"max_frames": 4}, {"videos_kwargs": {"max_frames": 4}}):
        with pytest.raises(ValueError, match=r"STTSVideoProcessor has no `max_frames`\. Pass `num_frames` instead"):
            processor(text="<|video|>", videos=str(clips["short"]), **options)


def test_two_videos_in_one_text_are_refused(processor, clips):
    with pytest.raises(ValueError, match="At most one video"):
        processor(text="<|video|><|video|>", videos=[str(clips["short"]), str(clips["long"])])


def test_tokenizer_without_the_special_tokens_is_refused():
    with pytest.raises(ValueError, match=r"lacks image or video tokens, .*<frame_start>"):
        STTSProcessor(
            Molmo2ImageProcessor(),
            STTSVideoProcessor(),
            tiny_tokenizer([token for token in SPECIAL if token != "<frame_start>"]),
        )


def test_saved_config_holds_every_setting(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["processor_class"] == "STTSProcessor"
    assert saved["use_frame_special_tokens"] is True
    assert saved["video_use_col_tokens"] is False
    video = saved["video_processor"]
    assert (video["num_frames"], video["max_fps"]) == (8, 2)
    assert (video["test_time_scaling"], video["pruning_ratio"]) == (False, 0.5)


def test_what_was_saved_loads_with_its_settings(processor, clips, tmp_path):
    changed = STTSProcessor(
        processor.image_processor,
        STTSVideoProcessor(size=SIZE, num_frames=6),
        processor.tokenizer,
        chat_template=TEMPLATE,
        use_frame_special_tokens=False,
    )
    changed.save_pretrained(tmp_path)
    register_auto_classes()  # or transformers asks whether to run the folder's code
    loaded: Any = STTSProcessor.from_pretrained(tmp_path)
    assert (loaded.video_processor.num_frames, loaded.use_frame_special_tokens) == (6, False)
    text, video = "<|video|>what?", str(clips["long"])
    assert loaded(text=text, videos=video)["input_ids"] == changed(text=text, videos=video)["input_ids"]
