"""What a row may look like, and what is said of one that does not."""

import json
import os
import subprocess

import pytest
from PIL import Image

from stts_hf.data.rows import ANSWER as ANSWER_COLUMN
from stts_hf.data.rows import RowError, check_files, read_row
from stts_hf.video.sources import load_picture, open_picture
from tests.stts_hf.training.samples import assistant, image_row, prepare_each, text_row, user, video_row

ANSWER = assistant("Yes.")


def kinds(sample):
    return [[part["type"] for part in message["content"]] for message in sample.messages]


def texts(message):
    return [part["text"] for part in message["content"] if part["type"] == "text"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Why?", "video"), ANSWER], "videos": ["a.mp4"]},
        {"messages": [{"role": "user", "content": "<video>\nWhy?"}, ANSWER], "videos": ["a.mp4"]},
        {"messages": [{"role": "user", "content": "Why?"}, ANSWER], "videos": ["a.mp4"]},
        {"messages": [{"role": "user", "content": "Why?"}, ANSWER], "video": "a.mp4"},
        {"messages": [{"role": "user", "content": "Why?"}, ANSWER], "videos": [{"bytes": None, "path": "a.mp4"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "Why?"}]},
                ANSWER,
            ]
        },
        {
            # as a table gives it: every part has every key
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video", "video": "a.mp4", "text": None, "image": None},
                        {"type": "text", "video": None, "text": "Why?", "image": None},
                    ],
                },
                ANSWER,
            ],
            "images": None,
        },
        {"question": "Why?", "answer": "Yes.", "videos": ["a.mp4"]},
        {
            "messages": [
                {"role": "user", "content": {"type": "text", "text": "Why?"}},
                {"role": "assistant", "content": {"type": "text", "text": "Yes."}},
            ],
            "videos": ["a.mp4"],
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<video>\nWhy?"}]}, ANSWER],
            "video": "a.mp4",
        },
    ],
    ids=[
        "parts",
        "placeholder",
        "no_placeholder",
        "one_video",
        "dict",
        "path_in_part",
        "filled_with_none",
        "question",
        "content_is_a_part",
        "placeholder_in_part",
    ],
)
def test_forms_of_one_conversation(row):
    sample = read_row(row | {"media_root": "/data"})
    assert sample.videos == ["/data/a.mp4"]
    assert kinds(sample) == [["video", "text"], ["text"]]
    assert texts(sample.messages[0]) == ["Why?"]
    assert texts(sample.messages[1]) == ["Yes."]


def test_a_style_is_said_once_where_a_text_is_split():
    text = {"type": "text", "text": "One <video> two", "style": "demo"}
    sample = read_row({"messages": [{"role": "user", "content": text}, ANSWER], "video": "a.mp4"})
    first, _, last = sample.messages[0]["content"]
    assert (first, last) == (text | {"text": "One "}, {"type": "text", "text": " two"})


LITERAL = "Why is it <video> and not <image>?"


@pytest.mark.parametrize(
    "row",
    [
        {"question": LITERAL, "answer": LITERAL},
        {"question": LITERAL, "options": [LITERAL, "<image>"], "answer": 0},
        {"question": LITERAL, ANSWER_COLUMN: json.dumps({"question": "", "answer": LITERAL})},
        {"messages": [user("Why?", "video")], ANSWER_COLUMN: json.dumps({"question": "", "answer": LITERAL})},
    ],
    ids=["question", "options", "own_answer", "own_answer_to_messages"],
)
def test_placeholders_are_words_outside_of_messages(row):
    sample = read_row(row | {"videos": ["a.mp4"]})
    assert kinds(sample) == [["video", "text"], ["text"]]
    said = [text for message in sample.messages for text in texts(message)]
    assert [LITERAL in text for text in said] == ["question" in row, "options" not in row]


def test_columns_fill_parts_in_order_and_parts_may_bring_their_own():
    content = [{"type": "image"}, {"type": "image", "image": "own.png"}, {"type": "image"}]
    row = {"messages": [{"role": "user", "content": content}, ANSWER], "images": ["first.png", b"second"]}
    assert read_row(row).images == ["first.png", "own.png", b"second"]


def test_sources_of_all_kinds():
    picture = Image.new("RGB", (2, 2))
    row = image_row("r", "/x/absolute.png", "b", "c", "d", "e", "f")
    row["images"] = ["/x/absolute.png", "https://a/b.png", b"bytes", {"bytes": b"data", "path": "p"}, picture, "up.png"]
    expected = ["/x/absolute.png", "https://a/b.png", b"bytes", b"data", picture, "/root/up.png"]
    assert read_row(row | {"media_root": "/root"}).images == expected


def test_a_row_is_not_changed_by_reading_it():
    row = video_row("r", "a.mp4")
    before = repr(row)
    read_row(row)
    assert repr(row) == before


def test_subtitles_come_first(media):
    row = video_row("r", "two.mp4") | {"subtitles": "speech.srt", "media_root": str(media)}
    assert read_row(row).messages[0] == {"role": "subtitle", "content": "0.0 - 1.2 Hello there"}


def no_answer(row):
    return row | {"messages": row["messages"][:1]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "r", "text": "x"}, r"columns messages and question.*\['id', 'text'\]"),
        (video_row("r", "a.mp4") | {"question": "Why?"}, "messages and question"),
        ({"id": "r", "messages": [{"role": "user"}, ANSWER]}, r"messages\[0\] must have role and content"),
        ({"id": "r", "messages": [{"role": "tool", "content": "x"}, ANSWER]}, r"messages\[0\] has role 'tool'"),
        ({"id": "r", "messages": [user("x"), assistant(" ")]}, r"messages\[1\]: the answer is empty"),
        (
            {"id": "r", "messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]},
            "a part must have the type .* .audio.",
        ),
        (no_answer(video_row("r", "a.mp4")), "no assistant message"),
        (video_row("r", "a.mp4") | {"videos": []}, "videos has 0 entries, but the messages have 1"),
        (video_row("r", "a.mp4") | {"videos": ["a", "b"]}, "videos has 2 entries, but the messages have 1"),
        (video_row("r", 3), r"videos\[0\] must be a path, .* got 3"),
        (
            text_row("r") | {"messages": [{"role": "user", "content": 3}, ANSWER]},
            r"messages\[0\]: content must .* got 3",
        ),
        ({"id": "r", "question": "Q", "options": ["a", "b"]}, "answer is empty"),
        (video_row("r", "a.mp4") | {"subtitles": "gone.srt"}, "no subtitle file"),
        ("text", "must be a dict"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value.split()[0][:20],
)
def test_bad_rows_are_named(row, said):
    name = "r" if isinstance(row, dict) else "row 7"
    with pytest.raises(RowError, match=f"Row '{name}': .*{said}"):
        read_row(row, 7)


def test_a_file_may_be_spelled_out_in_its_address():
    assert read_row(image_row("r", "data:image/png;base64,aGVsbG8=")).images == [b"hello"]


@pytest.mark.parametrize(("error", "pruning_ratio"), [(ImportError, None), (MemoryError, 0.5)])
def test_what_is_not_the_rows_fault_skips_none(pruning_ratio, error, processor, monkeypatch):
    def fail(*_):
        raise error("jinja2 is missing")

    monkeypatch.setattr("stts_hf.data.encoding.render", fail)
    with pytest.raises(error, match="jinja2 is missing"):
        prepare_each([text_row("a")], processor, pruning_ratio=pruning_ratio, on_error="skip")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/etc", "is a folder"),
        ("pipe.mp4", "is a pipe or device"),
        ("empty.mp4", "is empty"),
        *((path, "does not exist") for path in ("a\0b.mp4", "x" * 5000, "rtsp://a/b", "concat:a.mp4|b.mp4")),
        ("HTTPS://a/b.mp4", "is a URL, and nothing is fetched unasked"),
    ],
)
def test_what_is_no_file_is_refused_before_anything_opens_it(tmp_path, path, said):
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(RowError, match=rf"Row 'r': videos: .*{said}"):
        check_files(read_row(video_row("r", path) | {"media_root": str(tmp_path)}))


def test_no_other_program_draws_a_picture(tmp_path, monkeypatch):
    """PIL has Ghostscript draw EPS, whose text is a program."""
    path = tmp_path / "drawing.png"
    Image.new("RGB", (4, 4)).save(path, "eps")
    monkeypatch.setattr(subprocess, "Popen", None)
    for source in path, path.read_bytes():
        with pytest.raises(ValueError, match=r"is an EPS file.* Convert it to PNG"):
            open_picture(source)
    with pytest.raises(ValueError, match=r"is an EPS file.* Convert it to PNG"):
        load_picture(str(path))
