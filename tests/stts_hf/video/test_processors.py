"""Videos for a native processor: what it makes of files read by seeking is what it makes of whole decoded ones."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLProcessor
from transformers.processing_utils import VideosKwargs

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import NativeReader, RasterReader, block_grids, grid_name, probe, process, read_source
from tests.checkpoints import TINIES
from tests.clips import decode_everything, frame_number, read_tensor, write_clip
from tests.modeling.test_video_sources import send, serving

TEXT = "<|vision_start|><|video_pad|><|vision_end|>"
TEXTS = {backbone: ["<|video|>" if backbone == "molmo2" else TEXT] for backbone in TINIES}


@pytest.fixture(scope="module")
def native(hub_configs) -> Qwen3VLProcessor:
    return Qwen3VLProcessor.from_pretrained(hub_configs / "stts-qwen3-vl-tiny")


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    """By backbone, in the package's classes."""
    loaded: dict[str, Any] = {
        name: AutoProcessor.from_pretrained(path) for name, path in TINIES.items() if name != "molmo2"
    }
    return loaded | {"molmo2": STTSProcessor.from_pretrained(TINIES["molmo2"])}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {
        "wide": write_clip(folder / "wide.mp4", 70, fps=20, size=(96, 160)),  # 7 frames, an odd number
        "tall": write_clip(folder / "tall.mkv", 50, size=(128, 64)),
        "large": write_clip(folder / "large.mp4", 100, fps=10, size=(288, 400)),  # above the pixel budget
        "slow": write_clip(folder / "slow.mp4", 90, fps=1, size=(64, 64)),  # above the frame budget
        "two": write_clip(folder / "two.mp4", 2),
        "one": write_clip(folder / "one.mp4", 1),
    }


def seconds_of(processor, inputs):
    """The times in the prompt."""
    return [
        float(time) for time in re.findall(r"<([\d.]+) seconds>", processor.tokenizer.decode(inputs["input_ids"][0]))
    ]


def read_clip_with(reader, path):
    with VideoFile(path) as file:
        return read_source(reader, file, None, "video")


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("names", [["wide"], ["large"], ["slow"], ["two"], ["tall", "wide"]], ids="+".join)
def test_a_file_is_what_the_native_processor_makes_of_all_its_frames(native, clips, names):
    """Which frames, when, in which size, their pixels: all native code's own, which samples from the whole array."""
    text, image = [TEXT * len(names) + "<|image_pad|>"], Image.new("RGB", (90, 60), (9, 99, 200))
    ours = process(native, text=text, videos=[clips[name] for name in names], images=[image], return_tensors="pt")
    decoded, metadata = [], []
    for name in names:
        frames, shown = read_tensor(clips[name])
        decoded.append(frames)
        metadata.append({"total_num_frames": len(frames), "fps": shown.fps})
    options = {"do_sample_frames": True, "video_metadata": metadata, "return_tensors": "pt"}
    assert_same(ours, native(text=text, videos=decoded, images=[image], **options))


def test_times_are_true_where_the_rate_varies(native, tmp_path):
    times = [0.0, 0.1, 0.2, 0.3, 3.0, 3.5, 4.0, 6.0]
    clip = write_clip(tmp_path / "uneven.mkv", times=times)
    inputs = process(native, text=[TEXT], videos=[clip], return_tensors="pt", return_metadata=True)
    shown = inputs.pop("video_metadata")[0]
    chosen = [times[index] for index in shown.frames_indices]
    assert shown.timestamps == pytest.approx(chosen)
    pairs = [*chosen, chosen[-1]][: len(chosen) + len(chosen) % 2]
    means = [(first + second) / 2 for first, second in zip(pairs[::2], pairs[1::2], strict=True)]
    assert seconds_of(native, inputs) == pytest.approx(means, abs=0.051)  # one decimal


@pytest.mark.parametrize("form", ["array", "tensors", "pictures", "files", "bytes", "row"])
def test_a_video_may_come_in_any_form(native, clips, form, tmp_path):
    path = clips["wide"]
    frames, _ = read_tensor(path)
    pictures = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames[::10]]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    array, metadata = frames.permute(0, 2, 3, 1).numpy(), {"video_metadata": [{"fps": 20.0, "total_num_frames": 70}]}
    given, options = {
        "array": (array, metadata),
        "tensors": (list(frames), metadata),
        "pictures": (pictures, {}),
        "files": ([str(tmp_path / f"{number}.png") for number in range(7)], {}),
        "bytes": (path.read_bytes(), {}),
        "row": ({"bytes": None, "path": str(path)}, {}),
    }[form]
    inputs = process(native, text=[TEXT], videos=[given], return_tensors="pt", return_metadata=True, **options)
    expected = process(native, text=[TEXT], videos=[path], return_tensors="pt", return_metadata=True)
    assert inputs["video_grid_thw"].tolist() == expected["video_grid_thw"].tolist()
    shown = inputs["video_metadata"][0]
    if form in ("pictures", "files"):  # all of them, two per second
        assert shown.timestamps == [0.5 * number for number in range(7)]
    else:
        assert torch.equal(inputs["pixel_values_videos"], expected["pixel_values_videos"])
        assert shown.frames_indices == expected["video_metadata"][0].frames_indices


def test_decoded_frames_keep_the_times_that_come_with_them(native, tmp_path):
    clip = write_clip(tmp_path / "uneven.mkv", times=[*(number / 10 for number in range(30)), 5.0, 6.0, 8.0])
    frames, metadata = read_tensor(clip)
    ours = process(native, text=[TEXT], videos=[frames], video_metadata=[metadata], return_tensors="pt")
    assert_same(ours, process(native, text=[TEXT], videos=[clip], return_tensors="pt"))


@pytest.mark.parametrize("backbone", TINIES)
def test_files_and_arrays_of_both_layouts_may_be_mixed(processors, backbone, clips):
    frames, _ = read_tensor(clips["wide"])
    videos = [clips["wide"], frames, frames.permute(0, 2, 3, 1).numpy()]
    call: dict[str, Any] = {"video_metadata": [None, {"fps": 20.0}, {"fps": 20.0}], "return_tensors": "pt"}
    together = process(processors[backbone], text=TEXTS[backbone] * 3, videos=videos, **call)
    alone = process(
        processors[backbone], text=TEXTS[backbone], videos=[frames], **call | {"video_metadata": {"fps": 20.0}}
    )
    pixels, expected = together["pixel_values_videos"], alone["pixel_values_videos"]
    assert torch.equal(pixels[len(expected) :], torch.cat([expected] * 2))


def test_a_picture_is_a_video_of_one_frame(native):
    picture = Image.new("L", (64, 32), 99)
    alone, listed = (
        process(native, text=[TEXT], videos=[video], return_tensors="pt") for video in (picture, [picture])
    )
    assert alone["video_grid_thw"][0, 0] == 1
    assert_same(alone, listed)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in_videos_kwargs"])
@pytest.mark.parametrize("options", [{"num_frames": 4}, {"fps": 1}], ids=str)
def test_settings_hold_for_one_call(native, clips, options, beside):
    call = options if beside else {"videos_kwargs": options}
    inputs = process(native, text=[TEXT], videos=[clips["large"]], return_tensors="pt", **call)
    assert inputs["video_grid_thw"][0, 0] == (5 if 1 in options.values() else 2)
    again = process(native, text=[TEXT], videos=[clips["large"]], return_tensors="pt")
    assert again["video_grid_thw"][0, 0] == 10


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in_videos_kwargs"])
def test_what_decides_a_size_is_the_native_processors_in_a_call(native, clips, beside):
    """Frames without resizing, or under the cap of each frame's pixels, are those that native code makes."""
    decoded, shown = read_tensor(clips["large"])
    metadata = [{"total_num_frames": 100, "fps": shown.fps}]
    capped = copy.copy(native)
    capped.video_processor = copy.copy(native.video_processor)
    capped.video_processor.max_video_tokens = 40  # a small frame's; native code takes it from here alone
    text, image = [TEXT + "<|image_pad|>"], Image.new("RGB", (64, 32), (9, 99, 200))
    for options in ({"do_resize": False}, {"cap_pixels_per_frame": True}):
        call = (options if beside else {"videos_kwargs": options}) | {"return_tensors": "pt"}
        ours = process(capped, text=text, videos=[clips["large"]], images=[image], **call)
        assert_same(ours, capped(text=text, videos=[decoded], images=[image], video_metadata=metadata, **call))
        assert ours["video_grid_thw"].tolist() != [[10, 12, 16]]  # without the option


def test_a_checkpoint_may_show_every_frame(native, clips):
    every = copy.copy(native)
    every.video_processor = copy.copy(native.video_processor)
    every.video_processor.do_sample_frames = False
    inputs = process(every, text=[TEXT], videos=[clips["wide"]], return_tensors="pt")
    assert inputs["video_grid_thw"][0, 0] == 35
    assert probe(every, str(clips["wide"]))[0].tolist() == inputs["video_grid_thw"][0].tolist()


@pytest.mark.parametrize("name", ["large", "slow"])
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_scaling_fills_up_what_pruning_takes(native, clips, name, ratio):
    """Of a large video by resolution, of a long one by frames; never more, and less by rounding to blocks alone."""

    def blocks(**options):
        inputs = process(native, text=[TEXT], videos=[clips[name]], return_tensors="pt", **options)
        ((tubelets, rows, columns),) = block_grids(native, inputs)
        return tubelets, rows * columns

    tubelets, per_tubelet = blocks()
    more, larger = blocks(test_time_scaling=True, pruning_ratio=ratio)
    kept, before = num_kept_blocks(more, larger, ratio), tubelets * per_tubelet
    if name == "slow" and ratio == 0.5:
        assert (more, larger) == (45, per_tubelet)  # all 90 frames
    elif name == "slow" and ratio == 0.9:
        assert more == 45
    else:
        assert 0.8 * before < kept <= 1.05 * before
        assert larger > per_tubelet if name == "large" else more > tubelets


@pytest.mark.parametrize("backbone", TINIES)
@pytest.mark.parametrize("name", ["wide", "large", "one"])
def test_what_a_file_becomes_is_known_before(processors, backbone, clips, name):
    processor = processors[backbone]
    grid, shown = probe(processor, str(clips[name]))
    inputs = process(processor, text=TEXTS[backbone], videos=[clips[name]], return_tensors="pt", return_metadata=True)
    assert grid.tolist() == inputs[grid_name(processor)][0].tolist()
    assert shown.timestamps == inputs["video_metadata"][0].timestamps


def test_a_frame_is_the_one_that_its_index_says(native, clips):
    settings = copy.copy(native.video_processor)
    settings.do_resize = False
    frames, shown = read_clip_with(NativeReader(settings, {}), clips["wide"])
    assert [frame_number(frame.permute(1, 2, 0).numpy()) for frame in frames] == shown.frames_indices


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"test_time_scaling": True}, "needs the pruning_ratio"),
        ({"test_time_scaling": True, "pruning_ratio": 1.0}, "at most 0.999, got 1.0"),
        ({"videos": ["gone.mp4"]}, "There is no video file 'gone.mp4'"),
        ({"videos": [3]}, "no video file <class 'int'>"),
        ({"videos": [[]]}, r"videos\[0\] has no frames"),
        ({"videos": [[np.zeros((32, 32, 3)), np.zeros((48, 32, 3))]]}, r"\(32, 32, 3\), \(48, 32, 3\)"),
        ({"num_frames": 0}, "num_frames must be a whole number of at least 1, got 0"),
        ({"min_frames": "a"}, "min_frames must be a whole number of at least 1, got 'a'"),
        ({"max_fps": 0}, "max_fps must be a number above 0, got 0"),
        ({"videos_kwargs": {"fps": -1}}, "fps must be a number above 0, got -1"),
        ({"fps": 1, "videos_kwargs": {"fps": 1}}, "fps is given twice"),
    ],
)
def test_bad_input_is_refused(native, clips, options, said):
    with pytest.raises(ValueError, match=said):
        process(native, **({"text": [TEXT], "videos": [clips["two"]], "return_tensors": "pt"} | options))


@pytest.mark.parametrize("way", ["of the processor", "of a call", "probe"])
def test_a_download_ends_at_its_limit(native, way):
    processor = copy.copy(native)
    processor.video_processor = copy.copy(native.video_processor)
    options: dict[str, Any] = {"max_download_bytes": 1000} if way == "of a call" else {}
    if way != "of a call":
        processor.video_processor.max_download_bytes = 1000
    answer, said = (lambda handler: send(handler, bytes(2000))), "max_download_bytes=1000"
    with serving(answer) as url, pytest.raises(ValueError, match=said):
        probe(processor, url) if way == "probe" else process(processor, text=[TEXT], videos=[url], **options)


class Decoder:
    """Does what torchcodec's `VideoDecoder` is asked for here."""

    def __init__(self, path, start: float = 0.0, channels_last: bool = False):
        times, pictures, duration = decode_everything(path)
        self.times, self.pictures = [start + float(time) for time in times], pictures
        self.metadata = SimpleNamespace(average_fps=25.0, begin_stream_seconds=start, duration_seconds=float(duration))
        self.channels_last = channels_last

    def __len__(self) -> int:
        return len(self.pictures)

    def get_frame_at(self, index: int) -> SimpleNamespace:
        picture = torch.from_numpy(self.pictures[index])
        data = picture if self.channels_last else picture.permute(2, 0, 1)
        return SimpleNamespace(data=data, pts_seconds=self.times[index])


@pytest.mark.parametrize(("backbone", "channels_last"), list(zip(TINIES, (False, True, False), strict=True)))
def test_a_decoder_of_torchcodec_is_what_its_file_is(processors, backbone, clips, channels_last):
    options: dict[str, Any] = {"text": TEXTS[backbone], "return_tensors": "pt", "return_metadata": True}
    videos = (Decoder(clips["tall"], 3.0, channels_last), clips["tall"])
    ours, of_file = (process(processors[backbone], videos=[video], **options) for video in videos)
    shown, expected = ours.pop("video_metadata")[0], of_file.pop("video_metadata")[0]
    assert shown.timestamps == pytest.approx(expected.timestamps)
    assert_same(ours, of_file)


@pytest.mark.parametrize("backbone", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("size", [(1, 1), (10, 8000)], ids=["1x1", "8000x10"])
def test_clips_of_extreme_sizes_are_shown_or_refused_by_the_native_rule(backbone, size, tmp_path):
    """As the native processor does with the same frames, decoded before: the same inputs, or the same error."""
    processor = AutoProcessor.from_pretrained(TINIES[backbone])
    path = write_clip(tmp_path / "clip.mp4", 8, fps=4, size=size, pix_fmt="yuv444p")
    video = {"videos": [read_tensor(path)[0]], "video_metadata": [{"total_num_frames": 8, "fps": 4.0}]}
    options = {"text": [TEXT], "return_tensors": "pt"}
    try:
        theirs = processor(**options, **video, do_sample_frames=True)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            process(processor, videos=[path], **options)
    else:
        assert_same(process(processor, videos=[path], **options), theirs)


@pytest.mark.parametrize(
    "sizes",
    [{"max_image_size": {"longest_edge": 48}, "size": {"longest_edge": 96}}, {"size": {"height": 48, "width": 48}}],
)
def test_the_size_of_a_rasters_frames_has_either_name(sizes):
    settings = SimpleNamespace(do_sample_frames=True, do_resize=True, valid_kwargs=VideosKwargs, **sizes)
    assert RasterReader(settings, {})._size(3, 20, 30) == (48, 48)


def test_fewer_frames_than_a_tubelet_are_refused_where_native_code_divides_by_them(hub_configs, tmp_path):
    processor = AutoProcessor.from_pretrained(hub_configs / "stts-qwen2-5-vl-tiny")
    clip = write_clip(tmp_path / "clip.mp4", 8, fps=4)
    with pytest.raises(ValueError, match="less than the 2 frames of a tubelet"):
        process(processor, text=["<|vision_start|><|video_pad|><|vision_end|>"], videos=[str(clip)], num_frames=1)
