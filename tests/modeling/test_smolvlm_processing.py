"""SmolVLM2's processor: native prompts and pixels, with videos of unequal length apart from images."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata, load_video

from stts_hf import STTSSmolVLMForConditionalGeneration, register_auto_classes
from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.loading import load_config_and_processor
from stts_hf.cli.main import main
from stts_hf.inference.generate import join_prompts
from stts_hf.video.processors import process
from tests.checkpoints import ALL_TINIES, needs_num2words
from tests.clips import write_clip
from tests.stts_hf.checkpoints.convert_files import write_qwen

pytestmark = needs_num2words
FPS = 5.0
_load: Any = load_video


@pytest.fixture(scope="module")
def ours() -> Any:
    register_auto_classes()
    return AutoProcessor.from_pretrained(ALL_TINIES["smolvlm"])


@pytest.fixture(scope="module")
def native(ours) -> Any:
    settings = ours.video_processor.to_dict()
    kept = settings.keys() - {"video_processor_type", "processor_class", "auto_map", "image_seq_len"}
    video_processor = SmolVLMVideoProcessor(**{name: settings[name] for name in kept})
    return SmolVLMProcessor(ours.image_processor, ours.tokenizer, video_processor, image_seq_len=ours.image_seq_len)


def video(frames: int, seed: int = 0) -> tuple[np.ndarray, VideoMetadata]:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 3, 40, 60), np.uint8)
    return pixels, VideoMetadata(frames, FPS, duration=frames / FPS, frames_indices=list(range(frames)))


def test_a_video_has_the_native_prompt_and_pixels(ours, native):
    frames, metadata = video(7)
    call: dict[str, Any] = {"text": "<video>What?", "videos": [frames], "video_metadata": [metadata]}
    found, expected = (one(**call, return_tensors="pt") for one in (ours, native))
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["pixel_values_videos"], expected["pixel_values"][0])
    assert found["video_grids"].tolist() == [[len(found["pixel_values_videos"]), 4, 4]]
    assert "pixel_values" not in found


def test_videos_of_unequal_length_and_tiled_images_stay_apart(ours, native):
    images = [np.full((200, 90, 3), 90, np.uint8), np.full((64, 64, 3), 9, np.uint8)]
    videos = [video(3), video(6, 1)]
    texts = ["<image> and <video>", "<video>?", "<image>!"]
    call: dict[str, Any] = {"text": texts, "images": [images[:1], [], images[1:]], "padding": True}
    call |= {"videos": [one for one, _ in videos], "video_metadata": [one for _, one in videos]}
    found = ours(**call, do_sample_frames=False, return_tensors="pt")
    assert found["video_grids"].tolist() == [[3, 4, 4], [6, 4, 4]]
    types, places = found["mm_token_type_ids"], found["input_ids"] == ours.image_token_id
    assert torch.equal(types > 0, places)
    assert (types == 2).sum(-1).tolist() == [48, 96, 0]
    tiles = [(row != 0).flatten(1).any(-1).sum() for row in found["pixel_values"]]
    assert (types == 1).sum(-1).tolist() == [16 * int(count) for count in tiles]
    pictures = native(text=["<image>", "<image>"], images=[images[:1], images[1:]], return_tensors="pt", padding=True)
    assert torch.equal(found["pixel_values"][[0, 2]], pictures["pixel_values"])


@pytest.mark.parametrize("size", [(200, 90), (64, 64), (96, 96), (300, 500)])
def test_tokens_of_images_are_counted_without_pixels(ours, size):
    image = np.full((*size, 3), 7, np.uint8)
    (count,) = ours._get_num_multimodal_tokens([size])["num_image_tokens"]
    assert count == ours(text="<image>", images=[[image]])["input_ids"][0].__len__()


@pytest.mark.parametrize("frames", [1, 2, 9, 40, 200])
def test_a_file_gives_the_frames_that_the_native_processor_samples(ours, native, tmp_path, frames):
    clip = write_clip(tmp_path / "clip.mp4", frames, fps=20)
    pixels, metadata = _load(str(clip), backend="pyav")
    call: dict[str, Any] = {"text": ["<video>?"], "return_tensors": "pt"}
    found = process(ours, videos=[clip], **call)
    expected = native(videos=[pixels], video_metadata=[metadata], do_sample_frames=True, **call)
    assert torch.equal(found["pixel_values_videos"], expected["pixel_values"][0])
    assert torch.equal(found["input_ids"], expected["input_ids"])
    few = process(ours, videos=[clip], num_frames=3, max_fps=2, **call)
    chosen = native.video_processor.sample_frames(metadata, num_frames=3, fps=2)
    assert few["video_grids"][0, 0] == len(chosen)


def test_a_square_file_of_the_wanted_size_is_resized_as_natively(ours, native, tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", 20, fps=20, size=(96, 96))
    pixels, metadata = _load(str(clip), backend="pyav")
    found = process(ours, text=["<video>"], videos=[clip], return_tensors="pt")
    expected = native(text=["<video>"], videos=[pixels], video_metadata=[metadata], return_tensors="pt")
    assert torch.equal(found["pixel_values_videos"], expected["pixel_values"][0])


@pytest.mark.slow
def test_a_stock_folder_is_converted(ours, native, tmp_path: Path):
    """Its native processor too, whose class leaves frames to its callers: files are sampled all the same."""
    stock = write_qwen(tmp_path / "stock", "smolvlm")
    processor = copy.deepcopy(native)
    processor.chat_template, processor.video_processor.do_sample_frames = ours.chat_template, False
    processor.save_pretrained(stock)
    expected = AutoModelForImageTextToText.from_pretrained(stock).state_dict()
    assert main(["convert", str(stock), str(tmp_path / "ours"), "--selector", "cosine"]) == 0
    assert not [finding for found in examine(tmp_path / "ours").values() for finding in found]
    weights = STTSSmolVLMForConditionalGeneration.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert len(weights) == len(expected) + 14
    call: dict[str, Any] = {"text": ["<video>"], "videos": [write_clip(tmp_path / "clip.mp4", 20, fps=20)]}
    converted = load_config_and_processor(str(tmp_path / "ours"))[1]
    assert torch.equal(
        *(process(some, **call, return_tensors="pt")["pixel_values_videos"] for some in (converted, ours))
    )


def test_it_is_saved_with_its_settings(ours, tmp_path: Path):
    ours.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is type(ours)
    assert (loaded.image_seq_len, loaded.video_processor.image_seq_len) == (16, 16)
    assert loaded.video_processor.num_frames == ours.video_processor.num_frames


def test_images_with_other_numbers_of_tiles_share_a_batch(ours):
    model = STTSSmolVLMForConditionalGeneration.from_pretrained(ALL_TINIES["smolvlm"]).eval()
    sides = ((40, 60), (60, 200), (64, 64))
    images = [np.random.default_rng(seed).integers(0, 256, (*side, 3), np.uint8) for seed, side in enumerate(sides)]
    alone = [ours(text="<image>What is it?", images=[image], return_tensors="pt") for image in images]
    assert len({one["pixel_values"].shape[1] for one in alone}) > 1
    batch = join_prompts(ours, alone)
    with torch.no_grad():
        found, expected = model(**batch).logits, [model(**one).logits[0] for one in alone]
    for row, one in zip(found, expected, strict=True):
        torch.testing.assert_close(row[-len(one) :], one, rtol=0, atol=2e-5)  # 9e-6 was measured


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_frames": 4},
            "`max_frames` is 4, but STTSSmolVLMVideoProcessor has no `max_frames`. Pass `num_frames` ins",
        ),
        ({"videos_kwargs": {"min_frames": 4}}, "has no `min_frames`. Leave it out."),
        ({"image_seq_len": 9}, "`image_seq_len` is 9 in a call, but the model's frames have 16."),
        ({"max_image_size": {"longest_edge": 48}}, "is {'longest_edge': 48} in a call, but the model's frames have"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_no_call_may_change_are_refused(ours, options, message):
    frames: dict[str, Any] = {"text": ["<video>What?"], "videos": [video(3)[0]]}
    for call in (lambda: process(ours, **frames, **options), lambda: ours(**frames, do_sample_frames=False, **options)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_what_the_processor_cannot_be_is_said(ours):
    with pytest.raises(ValueError, match=r"`image_seq_len` is 10, but a frame has a square number of blocks"):
        type(ours.video_processor)(image_seq_len=10)(video(3)[0], do_sample_frames=False)
    as_arrays = ours(text="What?", return_tensors="np")
    assert isinstance(as_arrays["mm_token_type_ids"], np.ndarray)
