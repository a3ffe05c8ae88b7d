"""`STTSVideoProcessor`: what may be passed, what is refused, and pixels equal to the native processor's."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor
from transformers.video_utils import VideoMetadata

from stts_hf.modeling import video_processing_stts
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.modeling.video_reading_stts import resize
from tests.clips import decode_everything, numbered_frame, read_clip, write_clip

SIZE = {"height": 42, "width": 42}  # 3 x 3 patches, one block of them per frame
PATCHES = 9


@pytest.fixture
def processor():
    return STTSVideoProcessor(size=SIZE)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4", 200)


def frames_of(count):
    return np.stack([numbered_frame(number) for number in range(count)])


def shown(processor, videos, **kwargs):
    """Indices of the frames shown, per video."""
    outputs = processor(videos, return_metadata=True, **kwargs)
    indices = [list(metadata.frames_indices) for metadata in outputs["video_metadata"]]
    assert outputs["video_grids"][:, 0].tolist() == [len(one) for one in indices]
    return indices


def native_pixels(frames, **kwargs):
    native = Molmo2VideoProcessor(size=SIZE, do_rescale=True, do_normalize=True)
    return native([frames], do_sample_frames=False, return_tensors="pt", **kwargs)["pixel_values_videos"]


def test_pixels_of_a_file_equal_the_native_ones(processor, clip):
    _, pictures, _ = decode_everything(clip)
    outputs = processor(str(clip), return_tensors="pt", return_metadata=True)
    indices = outputs["video_metadata"][0].frames_indices
    assert indices == [0, 12, 25, 37, 50, 62, 75, 87, 100, 112, 125, 137, 150, 162, 175, 187, 199]
    assert torch.equal(outputs["pixel_values_videos"], native_pixels(np.stack([pictures[i] for i in indices])))


def test_pixels_of_an_array_equal_the_native_ones(processor):
    frames = frames_of(6)
    outputs = processor(frames, do_sample_frames=False, return_tensors="pt")
    assert torch.equal(outputs["pixel_values_videos"], native_pixels(frames))


def test_large_frame_is_resized_as_native_does():
    frame = np.random.default_rng(0).integers(0, 256, (2160, 3840, 3), dtype=np.uint8)
    small = resize(torch.from_numpy(frame).permute(2, 0, 1), (42, 42)).permute(1, 2, 0).numpy()
    assert torch.equal(native_pixels(small[None]), native_pixels(frame[None]))


def test_videos_of_several_sizes_equal_the_native_ones(processor, monkeypatch):
    videos = [frames_of(5), np.ascontiguousarray(frames_of(4)[:, :, :100])]
    native = Molmo2VideoProcessor(size=SIZE, do_rescale=True, do_normalize=True)
    expected = native(videos, do_sample_frames=False, return_tensors="pt")
    monkeypatch.setattr(video_processing_stts, "_PIXELS_AT_ONCE", 2 * 96 * 128)  # two frames
    outputs = processor(videos, do_sample_frames=False, return_tensors="pt")
    assert outputs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(outputs[name], tensor)
        assert outputs[name].dtype == tensor.dtype


def test_native_preprocessing_sees_one_frame_at_a_time(processor, monkeypatch):
    seen: list[tuple[int, ...]] = []
    native = Molmo2VideoProcessor._preprocess

    def noted(self, videos, **kwargs):
        seen.extend(tuple(video.shape) for video in videos)
        return native(self, videos, **kwargs)

    monkeypatch.setattr(Molmo2VideoProcessor, "_preprocess", noted)
    frames = np.zeros((3, 378, 378, 3), dtype=np.uint8)
    processor(frames, do_sample_frames=False, size={"height": 378, "width": 378})
    assert seen == [(1, 3, 378, 378)] * 3


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 17),
        ({"num_frames": 5}, 5),
        ({"max_fps": 0.5}, 5),
        ({"max_fps": None}, 64),
        ({"fps": 1}, 9),
        ({"num_frames": 5, "test_time_scaling": True, "pruning_ratio": 0.3}, 8),
        ({"do_sample_frames": False}, 200),
    ],
    ids=str,
)
def test_settings_per_call_and_in_the_config(clip, settings, count):
    (per_call,) = shown(STTSVideoProcessor(size=SIZE), str(clip), **settings)
    (configured,) = shown(STTSVideoProcessor(size=SIZE, **settings), str(clip))
    assert per_call == configured
    assert len(per_call) == count
    assert per_call[-1] == 199


def test_num_frames_of_a_call_beats_fps_of_the_config(clip):
    assert len(shown(STTSVideoProcessor(size=SIZE, fps=1), str(clip), num_frames=3)[0]) == 3


def test_arrays_are_sampled_by_their_frame_rate(processor):
    metadata = {"total_num_frames": 50, "fps": 25.0}
    assert shown(processor, frames_of(50), video_metadata=metadata) == [[0, 12, 25, 38, 49]]


def test_arrays_without_metadata_count_as_two_frames_a_second(processor):
    assert shown(processor, frames_of(6)) == [[0, 1, 2, 3, 4, 5]]
    assert shown(processor, frames_of(9), num_frames=5) == [[0, 2, 4, 6, 8]]


def test_files_of_images_in_a_chat_are_the_frames_of_one_video(processor, tmp_path):
    paths = [str(tmp_path / f"{index}.png") for index in range(3)]
    frames = frames_of(3)
    for path, frame in zip(paths, frames, strict=True):
        Image.fromarray(frame).save(path)
    read = processor([[paths]], do_sample_frames=False)  # as `apply_chat_template` nests them
    expected = processor([frames], do_sample_frames=False)
    assert torch.equal(read["pixel_values_videos"], expected["pixel_values_videos"])


def test_frames_decoded_before_keep_their_times(processor, clip):
    frames, metadata = read_clip(clip, lambda _: [0, 1.7, 5])
    outputs = processor(
        np.stack(frames), video_metadata=[metadata], do_sample_frames=False, return_metadata=True, return_tensors="pt"
    )
    assert outputs["video_metadata"][0].timestamps == [0.0, 1.68, 5.0]
    assert outputs["video_metadata"][0].frames_indices == [0, 42, 125]


def test_native_hook_samples_by_the_settings(processor):
    metadata = VideoMetadata(total_num_frames=50, fps=25.0)
    assert processor.sample_frames(metadata).tolist() == [0, 12, 25, 38, 49]
    assert processor.sample_frames(metadata, num_frames=2).tolist() == [0, 49]


def test_save_and_load_keeps_the_settings(tmp_path):
    saved = STTSVideoProcessor(size=SIZE, num_frames=12, max_fps=1.5, test_time_scaling=True, pruning_ratio=0.3)
    saved.save_pretrained(tmp_path)
    loaded = STTSVideoProcessor.from_pretrained(tmp_path)
    assert loaded.to_dict() == saved.to_dict()
    assert (loaded.num_frames, loaded.max_fps, loaded.test_time_scaling, loaded.pruning_ratio) == (12, 1.5, True, 0.3)


BAD_SETTINGS = [
    ({"num_frames": 0}, "num_frames must be"),
    ({"max_fps": True}, "max_fps must be"),
    ({"num_frames": None, "max_fps": None}, "Set num_frames"),
    ({"max_fps": -1}, "max_fps must be"),
    ({"fps": float("nan")}, "fps must be"),
    ({"test_time_scaling": True, "pruning_ratio": 1.5}, "pruning_ratio. is .*must be"),
    ({"test_time_scaling": True, "pruning_ratio": 1.0}, "needs pruning_ratio of at most 0.999"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_setting_is_refused_per_call_and_in_the_config(processor, clip, settings, message):
    with pytest.raises(ValueError, match=message):
        processor(str(clip), **settings)
    with pytest.raises(ValueError, match=message):
        STTSVideoProcessor(**settings)


def test_size_of_another_kind_is_refused(processor, clip):
    with pytest.raises(ValueError, match="size must have 'height' and 'width'"):
        processor(str(clip), size={"shortest_edge": 42})


def test_num_frames_and_fps_in_one_call_are_refused(processor, clip):
    with pytest.raises(ValueError, match="exclude each other"):
        processor(str(clip), num_frames=5, fps=1)


def test_no_videos_are_refused(processor):
    with pytest.raises(ValueError, match="videos holds no video"):
        processor([])


@pytest.mark.parametrize(
    ("video", "named"),
    [
        (b"the bytes of a file", "b'the bytes"),
        (None, "None"),
        ({"bytes": b"x", "path": None}, "{'bytes'"),
        (np.zeros((0, 96, 128, 3), np.uint8), r"shape=\(0, "),
    ],
    ids=["bytes", "none", "row", "no frames"],
)
def test_other_forms_than_files_and_frames_are_refused_by_name(processor, video, named):
    with pytest.raises(ValueError, match=f"{named}.* Pass a path, an "):
        processor([video])


def test_a_frame_rate_of_zero_is_refused(processor):
    with pytest.raises(ValueError, match=r"fps of video_metadata .*0\.0"):
        processor(np.zeros((6, 96, 128, 3), np.uint8), video_metadata=[{"total_num_frames": 6, "fps": 0.0}])


@pytest.mark.gpu
def test_device_is_passed_on(processor, clip):
    outputs = processor(str(clip), device="cuda", return_tensors="pt")
    assert outputs["pixel_values_videos"].device.type == "cuda"
    on_cpu = processor(str(clip), return_tensors="pt")["pixel_values_videos"]
    # Both round to whole pixel values, so they differ by at most one of 255 steps where a half was rounded.
    assert (outputs["pixel_values_videos"].cpu() - on_cpu).abs().max() <= 2 / 255 + 1e-6


@pytest.mark.parametrize("total", [3, 60])
def test_metadata_of_another_number_of_frames_is_refused(processor, total):
    with pytest.raises(ValueError, match=rf"total_num_frames={total} for a video of 6 frames"):
        processor(frames_of(6), video_metadata={"total_num_frames": total, "fps": 2.0})
