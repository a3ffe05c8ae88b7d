"""Rows made ready before training: their lengths are those of the samples the collator makes, and so are they."""

import io
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from stts_hf import RowError, STTSDataCollator, check_rows, load_rows, measure_lengths, prepare_rows
from stts_hf.data.encoding import encode
from stts_hf.data.rows import read_row
from stts_hf.modeling.video_reading_stts import VideoFile
from tests.clips import write_clip
from tests.stts_hf.training.samples import image_row, text_row, user, video_row


@pytest.fixture(scope="module")
def rows(media):
    write_clip(media / "uneven.mkv", times=[0, 0.11, 0.42, 1.73, 1.79, 3.2, 3.25, 5.0])
    write_clip(media / "long.mp4", 40, fps=1)  # more than 64 frames' worth at 2 per second
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


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.3, 0.7, 1.0])
def test_lengths_are_those_of_the_encoded_samples(processor, rows, pruning_ratio):
    chosen = rows if pruning_ratio == 0.3 else rows[:5]
    encoded = [encode(processor, read_row(row)) for row in chosen]
    expected = [len(one) - one.dropped(pruning_ratio) for one in encoded]
    assert measure_lengths(chosen, processor, pruning_ratio, progress=False) == expected
    assert max(one.grids[0][0] for one in encoded if one.grids) == 40


def test_nothing_is_decoded(processor, rows, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("decoded")

    monkeypatch.setattr(VideoFile, "read", refuse)
    monkeypatch.setattr(Image.Image, "convert", refuse)
    measure_lengths(rows, processor, 0.5, progress=False)


def test_settings_of_the_video_processor_count(processor, rows):
    before = processor.video_processor.num_frames
    processor.video_processor.num_frames = 4
    try:
        [length] = measure_lengths(rows[3:4], processor, 0.5, progress=False)
        encoded = encode(processor, read_row(rows[3]))
        assert encoded.grids[0][0] == 4
        assert length == len(encoded) - encoded.dropped(0.5)
    finally:
        processor.video_processor.num_frames = before


def test_rows_that_cannot_be_read_or_are_too_long(processor, rows, media):
    bad = [rows[0], video_row("damaged", media / "damaged.mp4"), rows[3], rows[1], {"id": "none"}]
    options: Any = {"progress": False, "max_length": 300}
    lengths = measure_lengths(bad, processor, 0.5, on_error="skip", **options)
    assert [length is None for length in lengths] == [False, True, True, False, True]
    with pytest.raises(RowError, match="Row 'damaged': Cannot read"):
        measure_lengths(bad, processor, 0.5, **options)
    with pytest.raises(RowError, match=r"Row 'long' has .* tokens after pruning, but max_length is 300"):
        measure_lengths(rows, processor, 0.5, **options)


def test_a_ratio_is_needed_for_videos_alone(processor, rows):
    assert measure_lengths(rows[:1], processor, progress=False) == [len(encode(processor, read_row(rows[0])))]
    with pytest.raises(RowError, match="Row 'two': pruning_ratio is not known"):
        measure_lengths(rows[1:2], processor, progress=False)


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
    assert prepared["length"] == measure_lengths(table.select([0, 2]), processor, 0.5, progress=False)
    collator = STTSDataCollator(processor)
    found, expected = (collator([rows[0], rows[1]]) for rows in (prepared, table.select([0, 2])))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_videos_that_lie_in_the_row_as_bytes_are_found_again(processor, media):
    features = {"id": datasets.Value("string"), "question": datasets.Value("string")}
    features |= {"answer": datasets.Value("string"), "video": datasets.Value("binary")}
    row = {"id": "bytes", "question": "What?", "answer": "A ball.", "video": (media / "two.mp4").read_bytes()}
    rows = load_rows(datasets.Dataset.from_list([row], features=datasets.Features(features)))
    prepared = prepare_rows(rows, processor, progress=False)
    assert read_row(prepared[0]).prompt is not None
    collator = STTSDataCollator(processor)
    assert torch.equal(collator([prepared[0]])["pixel_values_videos"], collator([rows[0]])["pixel_values_videos"])


def test_all_bad_rows_are_named_at_once(processor, table):
    with pytest.raises(RowError, match=r"2 of 3 rows cannot be trained on:(?s:.*)Row 'file' has .* tokens") as error:
        prepare_rows(table, processor, pruning_ratio=0.5, max_length=60, progress=False)
    assert "Row 'damaged': " in str(error.value)


@pytest.mark.parametrize("url", ["https://example.com/a.mp4", "HTTP://example.com/a.mp4"])
def test_nothing_is_fetched_unasked(processor, url, monkeypatch):
    """Neither a video nor an image, by none of the functions that look at rows, and not by the collator."""
    rows: Any = [video_row("far", url), image_row("near", url)]
    for function in (check_rows, lambda rows, processor: measure_lengths(rows, processor, 0.5)):
        for row in rows:
            with pytest.raises(RowError, match=rf"Row '{row['id']}': \w+: '{url}' is a URL.*allow_urls"):
                function([row], processor)
    for row in rows:
        with pytest.raises(RowError, match="nothing is fetched unasked"):
            STTSDataCollator(processor)([row])


def test_urls_are_fetched_where_they_are_allowed(processor, monkeypatch):
    limits = (processor.video_processor.max_download_bytes, processor.video_processor.max_download_seconds)
    fetched: list[Any] = []

    def fetch(*arguments: Any) -> io.BytesIO:
        fetched.append(arguments)
        file = io.BytesIO()
        Image.new("RGB", (40, 30)).save(file, "png")
        file.seek(0)
        return file

    monkeypatch.setattr("stts_hf.data.encoding.download", fetch)
    row = image_row("near", "https://example.com/a.png")
    collated = STTSDataCollator(processor, allow_urls=True)([row])
    assert measure_lengths([row], processor, allow_urls=True, progress=False) == [collated["input_ids"].shape[1]]
    assert fetched == [("https://example.com/a.png", *limits)] * 2
