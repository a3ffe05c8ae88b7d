"""Rows made ready before training: their lengths are those of the samples the collator makes, and so are they."""

import copy
import io
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from stts_hf import RowError, STTSDataCollator, load_rows, prepare_rows
from stts_hf.data.encoding import count_dropped, encode
from stts_hf.data.rows import read_row
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import set_frames
from stts_hf.video.sources import download_limits
from tests.clips import write_clip
from tests.stts_hf.training.samples import image_row, lengths, prepare_each, text_row, user, video_row


@pytest.fixture(scope="module")
def rows(media):
    write_clip(media / "uneven.mkv", times=[0, 0.11, 0.42, 1.73, 1.79, 3.2, 3.25, 5.0])
    write_clip(media / "long.mp4", 12, fps=0.5)  # more than 16 frames' worth at 4 per second
    png = io.BytesIO()
    Image.new("L", (50, 220)).save(png, "png")
    both = video_row("both", media / "three.mp4")
    both["messages"][2:] = [user("And here?", "image"), both["messages"][1]]
    return [
        text_row("text"),
        video_row("two", media / "two.mp4"),
        video_row("uneven", media / "uneven.mkv"),
        video_row("long", media / "long.mp4"),
        video_row("bytes", (media / "five.mkv").read_bytes()) | {"subtitles": [{"start": 0, "end": 1, "text": "Hm"}]},
        image_row("wide", media / "wide.png"),
        image_row("turned", media / "turned.jpg", media / "wide.png"),
        image_row("memory", "x") | {"images": [png.getvalue()]},
        image_row("picture", "x") | {"images": [Image.new("RGB", (90, 20))]},
        both | {"images": [str(media / "wide.png")]},
        {"id": "choice", "question": "Q?", "options": ["a", "b"], "answer": 0, "videos": [str(media / "two.mp4")]},
    ]


@pytest.mark.parametrize("pruning_ratio", [0.3, 1.0])
def test_lengths_are_those_of_the_encoded_samples(any_processor, rows, pruning_ratio):
    chosen = rows if pruning_ratio == 0.3 else rows[:5]
    encoded = [encode(any_processor, read_row(row)) for row in chosen]
    expected = [len(one) - count_dropped(one.grids, pruning_ratio) for one in encoded]
    assert lengths(chosen, any_processor, pruning_ratio) == expected
    assert max(one.grids[0][0] for one in encoded if one.grids) > 5


def test_nothing_is_decoded(processor, rows, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("decoded")

    monkeypatch.setattr(VideoFile, "read", refuse)
    monkeypatch.setattr(Image.Image, "convert", refuse)
    lengths(rows, processor, 0.5)


def test_settings_of_the_video_processor_count(any_processor, rows):
    changed = copy.copy(any_processor)
    changed.video_processor = copy.copy(any_processor.video_processor)
    set_frames(changed.video_processor, num_frames=4)
    [length] = lengths(rows[3:4], changed, 0.5)
    encoded = encode(changed, read_row(rows[3]))
    assert encoded.grids[0][0] == 4 // getattr(changed.video_processor, "temporal_patch_size", 1)
    assert length == len(encoded) - count_dropped(encoded.grids, 0.5)


def test_rows_that_cannot_be_read_or_are_too_long(processor, rows, media):
    bad = [rows[0], video_row("damaged", media / "damaged.mp4"), rows[3], rows[1], {"id": "none"}]
    options: Any = {"pruning_ratio": 0.5, "max_length": 150}
    assert list(map(len, prepare_each(bad, processor, on_error="skip", **options))) == [1, 0, 0, 1, 0]
    with pytest.raises(RowError, match="Row 'damaged': Cannot read"):
        prepare_each(bad, processor, **options)
    with pytest.raises(RowError, match=r"Row 'long' has .* tokens after pruning, but max_length is 150"):
        prepare_each(rows[3:4], processor, **options)


@pytest.fixture
def table(media):
    """A row of files, one whose video is bytes, one whose video does not open, and one of text."""
    return load_rows(
        datasets.Dataset.from_list(
            [
                video_row("file", media / "two.mp4"),
                video_row("damaged", media / "damaged.mp4"),
                text_row("text") | {"videos": None},
            ]
        )
    )


def test_prepared_rows_make_the_batches_of_the_rows_themselves(processor, table):
    prepared = prepare_rows(table, processor, pruning_ratio=0.5, on_error="skip", progress=False)
    assert prepared["id"] == ["file", "text"]
    good = table.select([0, 2])
    encoded = [encode(processor, read_row(row)) for row in good]
    assert prepared["length"] == [len(one) - count_dropped(one.grids, 0.5) for one in encoded]
    collator = STTSDataCollator(processor)
    found, expected = (collator([rows[0], rows[1]]) for rows in (prepared, good))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_bad_rows_are_named_at_once(processor, table):
    with pytest.raises(RowError, match=r"2 of 3 rows cannot be trained on:(?s:.*)Row 'file' has .* tokens") as error:
        prepare_rows(table, processor, pruning_ratio=0.5, max_length=30, progress=False)
    assert "Row 'damaged': " in str(error.value)


def test_nothing_is_fetched_unasked(processor):
    """Neither a video nor an image, neither to count its tokens nor to open it, and not by the collator."""
    url = "HTTP://example.com/a.mp4"
    rows: Any = [video_row("far", url), image_row("near", url)]
    for ratio in (None, 0.5):
        for row in rows:
            with pytest.raises(RowError, match=rf"Row '{row['id']}': \w+: '{url}' is a URL.*allow_urls"):
                prepare_each([row], processor, pruning_ratio=ratio)
    for row in rows:
        with pytest.raises(RowError, match="nothing is fetched unasked"):
            STTSDataCollator(processor)([row])


def test_urls_are_fetched_where_they_are_allowed(processor, monkeypatch):
    limits = download_limits(processor)
    fetched: list[Any] = []

    def fetch(*arguments: Any) -> io.BytesIO:
        fetched.append(arguments)
        file = io.BytesIO()
        Image.new("RGB", (40, 30)).save(file, "png")
        file.seek(0)
        return file

    monkeypatch.setattr("stts_hf.video.sources.download", fetch)
    row = image_row("near", "https://example.com/a.png")
    collated = STTSDataCollator(processor, allow_urls=True)([row])
    assert lengths([row], processor, 0.5, allow_urls=True) == [collated["input_ids"].shape[1]]
    assert fetched == [("https://example.com/a.png", *limits)] * 2
