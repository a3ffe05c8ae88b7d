"""Files whose bytes were changed, and conversations of any words and media: a right prompt, or one clear error."""

import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from stts_hf import register_auto_classes
from stts_hf.data.encoding import find_control_token
from stts_hf.inference.requests import make_request
from stts_hf.modeling.video_processing_stts import sample_times
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video import processors as frames
from tests.checkpoints import TINIES
from tests.clips import write_clip
from tests.corpus.yardstick import by_libraries_as_far_as_they_get

CODECS = {"mp4": "libx264", "mkv": "mpeg4"}
SHOWN = 3


def _clip(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"clip.{kind}")
        return write_clip(path, 8, fps=8, size=(64, 64), gop=4, codec=CODECS[kind]).read_bytes()


CLIPS = {kind: _clip(kind) for kind in CODECS}


def _pictures(content: bytes, kind: str, start: int | None = None) -> list[tuple[int, np.ndarray]]:
    """What FFmpeg's libraries decode of a file, each frame after its pts, from the packet with the pts `start` on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"clip.{kind}")
        path.write_bytes(content)
        found = by_libraries_as_far_as_they_get(path, start)
        return [(pts, picture) for pts, pictures in found.items() for picture in pictures]


WHOLE = {kind: _pictures(content, kind) for kind, content in CLIPS.items()}


@st.composite
def broken_files(draw: Any) -> tuple[str, bytes]:
    """A clip's kind and its bytes, some of them changed in place, or (in a quarter of files) taken out or doubled."""
    clip = draw(st.sampled_from(sorted(CLIPS)))
    content = bytearray(CLIPS[clip])
    kinds = draw(st.sampled_from([["flip", "fill", "noise"]] * 3 + [["flip", "cut", "double", "end"]]))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(kinds))
        end = min(place + draw(st.integers(1, 40)), len(content))
        if kind == "flip" and content:
            content[place] ^= draw(st.integers(1, 255))
        elif kind == "fill":
            content[place:end] = bytes([draw(st.integers(0, 255))]) * (end - place)
        elif kind == "noise":
            content[place:end] = draw(st.randoms(use_true_random=False)).randbytes(end - place)
        elif kind == "cut":
            del content[place:end]
        elif kind == "double":
            content[place:place] = content[place:end]
        elif kind == "end" and draw(st.booleans()):
            del content[place:]
    return clip, bytes(content)


@given(broken=broken_files())
def test_a_changed_file_is_read_or_refused(broken: tuple[str, bytes]):
    """
    Each frame is one of the whole file, or what FFmpeg's libraries make of the changed one, from its first keyframe on
    too; turned and mirrored where its metadata says so.
    """
    kind, content = broken
    av.logging.set_level(av.logging.PANIC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damage and early ends
        try:
            with VideoFile(content) as file:
                indices = sample_times(file.times, file.duration, SHOWN, 2.0)
                shown, metadata = file.read(indices, (28, 28))
                pictures, every = file.read(None, frames.measure(file, range(len(file.times))))
        except ValueError:
            event("refused")
            return
    event("read")
    assert 1 <= len(shown) == len(metadata.frames_indices or []) <= len(indices)
    assert tuple(shown.shape[1:]) == (3, 28, 28)
    times = metadata.timestamps
    assert all(np.isfinite(times))
    assert all(before < after for before, after in pairwise(times))
    decoded = WHOLE[kind] + _pictures(content, kind) + _pictures(content, kind, int(file.keyframes[0]))
    turned = [(pts, np.rot90(picture, turns)) for pts, picture in decoded for turns in range(4)]
    known = {(pts, view.tobytes()) for pts, picture in turned for view in (picture, picture[::-1])}
    read = [picture.tobytes() for picture in pictures.permute(0, 2, 3, 1).numpy()]
    if file.pts is None:  # frames are counted
        assert set(read) <= {picture for _, picture in known}
    else:
        assert set(zip(file.pts[every.frames_indices].tolist(), read, strict=True)) <= known


register_auto_classes()
PROCESSORS = {name: AutoProcessor.from_pretrained(folder) for name, folder in TINIES.items()}
videos = st.builds(
    lambda count, size, value: np.full((count, *size, 3), value, dtype=np.uint8),
    st.integers(1, 5),
    st.tuples(st.integers(28, 80), st.integers(28, 80)),
    st.integers(0, 255),
)
pictures = st.builds(
    lambda size, value: Image.new("RGB", size, (value, 0, 255 - value)),
    st.tuples(st.integers(28, 90), st.integers(28, 90)),
    st.integers(0, 255),
)
words = st.one_of(st.text(max_size=12), st.sampled_from(["<|video|>", "<|im_end|>", "<im_patch>", "<|vision_end|> a"]))
asked = st.tuples(st.lists(st.one_of(videos, pictures), max_size=2), words)
said = st.lists(words, max_size=2)


@pytest.mark.parametrize("name", TINIES)
@given(first=asked, later=said)
def test_a_conversation_is_encoded_or_refused(name: str, first: tuple[list[Any], str], later: list[str]):
    """Placeholders are as many as the media have blocks, and the words come back."""
    processor: Any = PROCESSORS[name]
    media, text = first
    texts = [text, *later]
    kinds = ["image" if isinstance(one, Image.Image) else "video" for one in media]
    messages = [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}]
    for place, one in enumerate(later):
        role = "user" if place % 2 else "assistant"
        messages.append({"role": role, "content": [{"type": "text", "text": one}]})
    shown = [one for one, kind in zip(media, kinds, strict=True) if kind == "video"]
    images = [one for one, kind in zip(media, kinds, strict=True) if kind == "image"]
    if find_control_token(processor, *texts) is not None:
        with pytest.raises(ValueError, match=r"messages\[\d\] holds '.*', a control token of the model\. Take it out"):
            make_request(processor, messages, shown, images)
        return
    prompt = make_request(processor, messages, shown, images)
    options = {"videos": shown or None, "images": images or None, "return_tensors": "pt"}
    if name == "molmo2" and len(shown) > 1:
        with pytest.raises(ValueError, match="At most one video is supported per sample"):  # of the native processor
            frames.process(processor, text=[prompt.head + prompt.tail], **options)
        return
    inputs = frames.process(processor, text=[prompt.head + prompt.tail], **options)
    blocks = sum(int(np.prod(grid)) for grid in frames.block_grids(processor, inputs)) if shown else 0
    if name == "molmo2":  # whose images have the same placeholders
        patch = processor.tokenizer.convert_tokens_to_ids("<im_patch>")
        placeholders = int((inputs["input_ids"] == patch).sum()) - len(inputs.get("image_token_pooling", ()))
    else:
        placeholders = int((inputs["mm_token_type_ids"] == 2).sum())
        assert bool((inputs["mm_token_type_ids"] == 1).any()) == bool(images)
    assert placeholders == blocks
