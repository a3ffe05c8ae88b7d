"""The overlay is decoded again and compared block by block, and moment by moment, with the video it was made of."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from stts_hf.visualize import overlay
from stts_hf.visualize.frames import read_frames
from stts_hf.visualize.overlay import write_overlays
from tests.clips import decode_everything, set_display_matrix, shown_at, write_clip

GRID = (3, 4)  # blocks of 32 x 32 pixels in frames of 96 x 128
TIMES = (0.0, 0.25, 0.6, 0.61, 0.9)


def some_masks(number: int, seed: int = 0) -> torch.Tensor:
    """(number, 12), the first all kept."""
    mask = torch.rand(number, 12, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[0] = True
    return mask


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A second at an uneven rate: 22 frames 0.04 s apart, then 7 of 0.012 s."""
    times = [*(0.04 * place for place in range(22)), *(0.88 + 0.012 * place for place in range(7))]
    return write_clip(tmp_path_factory.mktemp("clip") / "clip.mp4", times=times)


def expected(frame: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """By another way than the code's: brightness (ITU-R 601) of dropped blocks squeezed between two dark greys."""
    grey = frame @ np.array([0.299, 0.587, 0.114])
    dark = np.array([18, 20, 28]) + grey[..., None] / 255 * (np.array([110, 112, 120]) - [18, 20, 28])
    rows, columns = np.indices(grey.shape)  # lines 8 pixels apart
    dark = np.where((rows + columns)[..., None] % 8 == 0, 0.7 * dark + 0.3 * np.array([200, 210, 225]), dark)
    dropped = np.repeat(np.repeat(~keep.reshape(GRID), 32, axis=0), 32, axis=1)
    return np.where(dropped[..., None], dark, frame)


def inside(frame: np.ndarray) -> np.ndarray:
    """(rows, cols, 22, 22, 3): the blocks without their rims, where codecs smear what is beside them."""
    return frame.reshape(3, 32, 4, 32, 3).swapaxes(1, 2)[:, :, 5:27, 5:27]


@pytest.mark.parametrize("tubelet", [1, 2], ids=["frames", "tubelets"])
def test_dropped_blocks_are_dark_and_kept_ones_as_in_the_video_at_every_moment(clip, tmp_path, tubelet):
    masks = {tmp_path / f"{seed}.mp4": some_masks(-(-len(TIMES) // tubelet), seed) for seed in (0, 1)}
    write_overlays(clip, masks, GRID, TIMES, tubelet)
    times, pictures, _ = decode_everything(clip)
    for path, mask in masks.items():
        written = decode_everything(path)
        assert [float(time) for time in written[0]] == pytest.approx([float(time) for time in times], abs=1e-4)
        for time, before, after in zip(times, pictures, written[1], strict=True):
            keep = mask[shown_at([Fraction(moment) for moment in TIMES], float(time)) // tubelet].numpy()
            right, wrong = (inside(expected(before, kind)) for kind in (keep, ~keep))
            error, apart = (np.abs(inside(after) - right).mean((2, 3, 4)), np.abs(right - wrong).mean((2, 3, 4)))
            assert error.max() < 14  # lossy coding, and colours at half the resolution
            assert (error < apart / 3)[apart > 20].all()
            assert (apart > 20).sum() >= 10  # of 12 blocks


def test_the_video_stands_beside_what_is_kept_of_it(clip, tmp_path):
    mask = some_masks(len(TIMES))
    write_overlays(clip, {tmp_path / "both.mp4": mask}, GRID, TIMES, beside=True)
    _, before, _ = decode_everything(clip)
    times, both, _ = decode_everything(tmp_path / "both.mp4")
    assert both[0].shape == (96, 256, 3)
    for time, video, picture in zip(times, before, both, strict=True):
        keep = mask[shown_at([Fraction(moment) for moment in TIMES], float(time))].numpy()
        for half, right in ((picture[:, :128], video), (picture[:, 128:], expected(video, keep))):
            assert np.abs(inside(half.astype(float)) - inside(right)).mean((2, 3, 4)).max() < 14  # as above


def test_a_browser_can_play_it_from_its_first_bytes(clip, tmp_path):
    write_overlays(clip, {tmp_path / "overlay.mp4": some_masks(5)}, GRID, TIMES)
    data = (tmp_path / "overlay.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")
    with av.open(str(tmp_path / "overlay.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, context.width, context.height) == ("h264", "yuv420p", 128, 96)
    source, written = (decode_everything(path)[2] for path in (clip, tmp_path / "overlay.mp4"))
    assert float(written) == pytest.approx(float(source), abs=0.002)


def test_sides_are_even_and_bounded_and_a_turned_video_is_upright(tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", 3, size=(96, 128))
    set_display_matrix(clip, (0, 1, -1, 0))
    write_overlays(clip, {tmp_path / "overlay.mp4": some_masks(1)}, GRID, [0.0], longest_side=65)
    # 128 x 96 upright is 96 wide and 128 high: 65 x 48.75, rounded to even.
    assert decode_everything(tmp_path / "overlay.mp4")[1][0].shape == (64, 48, 3)


@pytest.mark.parametrize("turned", [False, True])
def test_pixels_that_are_not_square_are_stretched_as_players_stretch_them(tmp_path, turned):
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 96, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2)
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((96, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    if turned:
        set_display_matrix(tmp_path / "clip.mp4", (0, 1, -1, 0))
    write_overlays(tmp_path / "clip.mp4", {tmp_path / "overlay.mp4": some_masks(1)}, GRID, [0.0])
    size = (128, 96) if turned else (96, 128)
    assert decode_everything(tmp_path / "overlay.mp4")[1][0].shape[:2] == size
    assert read_frames(tmp_path / "clip.mp4", [0.0], 640).shape[1:3] == size


def test_fast_and_long_videos_get_fewer_frames_and_keep_the_sampled_ones(tmp_path, monkeypatch):
    clip = write_clip(tmp_path / "clip.mp4", 60, fps=60, size=(64, 64))
    sampled = [0.0, 0.35, 59 / 60]
    write_overlays(clip, {tmp_path / "fast.mp4": torch.ones(3, 12, dtype=torch.bool)}, GRID, sampled)
    times, _, _ = decode_everything(tmp_path / "fast.mp4")
    assert len(times) in (31, 32)
    assert min(abs(float(time) - 59 / 60) for time in times) < 1e-4
    monkeypatch.setattr(overlay, "MAX_FRAMES", 10)
    write_overlays(clip, {tmp_path / "long.mp4": torch.ones(3, 12, dtype=torch.bool)}, GRID, sampled)
    times, _, duration = decode_everything(tmp_path / "long.mp4")
    assert len(times) <= 12
    assert float(duration) == pytest.approx(1.0, abs=0.002)


def test_a_stream_without_times_is_counted(tmp_path):
    clip = write_clip(tmp_path / "clip.h264", 10, container_format="h264")
    write_overlays(clip, {tmp_path / "overlay.mp4": some_masks(2)}, GRID, [0.0, 0.2])
    assert len(decode_everything(tmp_path / "overlay.mp4")[1]) == 10
