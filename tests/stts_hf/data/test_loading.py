"""Data sets from files through `datasets`, and the look at all rows before training."""

import json
import pickle
import re
from typing import Any

import datasets
import pytest
from PIL import Image

from stts_hf import RowError, load_rows, prepare_rows
from stts_hf.data.rows import read_row
from tests.stts_hf.training.samples import assistant, image_row, prepare_each, text_row, user, video_row

MIXED = [
    video_row("first", "two.mp4"),
    {"messages": [{"role": "user", "content": "<video>Why?"}, assistant("Yes.")], "videos": ["two.mp4"]},
    {"question": "Q?", "options": ["a", "b"], "answer": 1, "video": "two.mp4", "subtitles": "speech.srt"},
    {"question": "Q?", "options": ["a", "b"], "answer": "b", "subtitles": [{"start": 0, "end": 1, "text": "x"}]},
    {"id": 17, "messages": [user("Q?", "image"), assistant("A")], "images": ["wide.png"]},
]


def write_jsonl(path, rows):
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.fixture
def mixed(media):
    yield write_jsonl(media / "mixed.jsonl", MIXED)
    (media / "mixed.jsonl").unlink()


def test_jsonl_of_mixed_rows_comes_back_as_written(mixed, media):
    rows = load_rows(mixed)
    assert isinstance(rows, datasets.Dataset)
    # every second line is blank
    assert rows["id"] == ["first", "mixed.jsonl:3", "mixed.jsonl:5", "mixed.jsonl:7", "17"]
    for row, written in zip(rows, MIXED, strict=True):
        kept = {key: value for key, value in row.items() if value is not None and key not in ("id", "media_root")}
        assert kept == {key: value for key, value in written.items() if key != "id"}
        assert read_row(row).videos == ([str(media / "two.mp4")] if "Q?" not in str(row) or row["video"] else [])


def test_json_list_and_several_files(tmp_path, media, mixed):
    (tmp_path / "list.JSON").write_text(
        json.dumps([text_row("a"), {k: v for k, v in text_row("").items() if k != "id"}])
    )
    rows = load_rows([tmp_path / "list.JSON", mixed], media_root=media)
    assert rows["id"][:3] == ["a", "list.JSON:2", "first"]
    assert set(rows["media_root"]) == {str(media)}


@pytest.mark.parametrize("kind", ["path", "bytes", "Video", "List(Video)"])
def test_parquet_gives_files_undecoded(tmp_path, media, kind):
    path, data = str(media / "two.mp4"), (media / "two.mp4").read_bytes()
    column = {
        "path": [path],
        "bytes": data,
        "Video": {"bytes": data, "path": None},
        "List(Video)": [{"bytes": data, "path": None}],
    }[kind]
    table = datasets.Dataset.from_list([{"id": "r", "messages": [user("Q?"), assistant("A")], "videos": column}])
    feature = {"Video": datasets.Video(), "List(Video)": datasets.List(datasets.Video())}.get(kind)
    if feature is not None:
        table = table.cast(datasets.Features({**table.features, "videos": feature}))
    table.to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(tmp_path / "rows.parquet")
    assert read_row(rows[0]).videos == [path if kind == "path" else data]
    assert "decode=True" not in str(rows.features)
    assert read_row(pickle.loads(pickle.dumps(rows))[0]).messages == read_row(rows[0]).messages


def test_images_of_a_decoding_column(tmp_path):
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("string")})
    features["images"] = datasets.List(datasets.Image())
    picture = Image.new("RGB", (4, 4))
    table = datasets.Dataset.from_list([{"question": "Q?", "answer": "A", "images": [picture]}], features=features)
    table.save_to_disk(tmp_path / "saved")
    for source, name in ((table, "row:1"), (tmp_path / "saved", "saved:1")):
        rows = load_rows(source)
        assert rows["id"] == [name]
        assert isinstance(read_row(rows[0]).images[0], bytes)
    assert isinstance(table[0]["images"][0], Image.Image)  # the caller's own is as it was


def test_a_repository_of_data_files(tmp_path, media):
    """A local folder goes the way of a Hub repository: `datasets.load_dataset(name, split=...)`."""
    repository = tmp_path / "data-set"
    repository.mkdir()
    for split, name in (("train", "a"), ("validation", "b")):
        datasets.Dataset.from_list([video_row(name, "two.mp4")]).to_parquet(
            repository / f"{split}-00000-of-00001.parquet"
        )
    rows = load_rows(str(repository), split="validation", media_root=media, cache_dir=str(tmp_path / "cache"))
    assert rows["id"] == ["b"]
    assert read_row(rows[0]).videos == [str(media / "two.mp4")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", None, "no data file"),
        ("rows.jsonl", '{"id": 1}\n{"id": ', r"rows.jsonl:2 is not JSON"),
        ("rows.jsonl", "[1]\n", r"rows.jsonl:1 must be an object"),
        ("rows.jsonl", "\n", "holds no rows"),
        ("rows.jsonl", '{"id": ' + "[" * 100_000, "rows.jsonl:1 is not JSON"),
        ("rows.json", "[" * 100_000, "rows.json is not JSON"),
        ("rows.jsonl", b'{"id": 1}\n\n{"id": "\xe9"}', "rows.jsonl:3 is not UTF-8"),
        ("rows.jsonl", '{"id": "a\\ud800"}', r"rows.jsonl:1: id 'a\\ud800' holds a lone surrogate"),
        ("rows.csv", "a,b", "neither JSONL nor Parquet"),
        ("rows.json", '{\n "data": []\n}', r"rows.json:1 is not JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        load_rows(tmp_path / name)


def test_texts_that_look_like_json_stay_texts(tmp_path):
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", [{"question": "2024", "answer": "12"}, {"answer": 12}]))
    assert [(row["question"], row["answer"]) for row in rows] == [("2024", "12"), (None, 12)]


def test_sources_of_different_forms_are_joined(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "Q?", "options": ["a", "b"], "answer": 1, "videos": ["a.mp4"]}])
    write_jsonl(tmp_path / "b.jsonl", [{"question": "Q?", "answer": "text", "videos": ["b.mp4"]}])
    table = datasets.Dataset.from_list([{"id": 7, "messages": [user("Q?"), assistant("A")], "videos": ["c.mp4"]}])
    table.to_parquet(tmp_path / "c.parquet")
    rows = load_rows([tmp_path / name for name in ("c.parquet", "a.jsonl", "b.jsonl")])
    samples = [read_row(row) for row in rows]
    assert [sample.id for sample in samples] == ["7", "a.jsonl:1", "b.jsonl:1"]
    assert [sample.messages[-1]["content"][0]["text"] for sample in samples] == ["A", "B", "text"]
    assert [sample.videos for sample in samples] == [[str(tmp_path / name)] for name in ("c.mp4", "a.mp4", "b.mp4")]


def test_columns_with_files_are_not_joined_with_paths(tmp_path, media):
    write_jsonl(tmp_path / "a.jsonl", [image_row("a", media / "wide.png")])
    features = datasets.Features({"images": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict({"images": [[Image.new("RGB", (4, 4))]]}, features=features)
    with pytest.raises(ValueError, match=r"column 'images' of source 2 is List\(Image.*Json.*cannot be joined"):
        load_rows([tmp_path / "a.jsonl", table])


def test_a_dataset_dict_gives_its_split():
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_list([video_row(name, "a.mp4")]) for name in ("train", "test")}
    )
    assert load_rows(both)["id"] == ["train"]
    assert load_rows([both, both["train"]], split="test")["id"] == ["test", "train"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([text_row("a")], "got dict"),
        (None, "got NoneType"),
        (datasets.Dataset.from_list([text_row("a")]).to_iterable_dataset(), "got IterableDataset"),
    ],
    ids=["rows", "none", "iterable"],
)
def test_what_is_no_source_is_refused(source, said):
    with pytest.raises(TypeError, match=f"source must be a path.*{said}"):
        load_rows(source)


def test_all_bad_rows_are_found_without_reading_media(processor, media, tmp_path, monkeypatch):
    monkeypatch.setattr(type(processor.video_processor), "preprocess", None)
    rows = [
        video_row("good", media / "two.mp4"),
        video_row("gone", media / "gone.mp4"),
        video_row("unread", media / "damaged.mp4"),  # only its name is looked at
        text_row("no columns") | {"messages": None},
        text_row("turns") | {"messages": [user("a"), user("b"), assistant("c")]},
        image_row("picture", media / "wide.png"),
    ]
    table = load_rows(write_jsonl(tmp_path / "rows.jsonl", rows))
    options: Any = {"headers": False, "progress": False}
    with pytest.raises(RowError) as caught:
        prepare_rows(table, processor, **options)
    for said in ("3 of 6 rows", "Row 'gone': videos: the file", "Row 'no columns': one of", "Row 'turns': .*alternate"):
        assert re.search(said, str(caught.value))
    assert prepare_rows(table, processor, on_error="skip", **options)["id"] == ["good", "unread", "picture"]
    with pytest.raises(ValueError, match="on_error must be"):
        prepare_rows(table, processor, on_error="ignore")


def test_files_are_opened_where_they_shall_be(processor, media, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture" * 9)
    rows = [
        video_row("good", media / "two.mp4"),
        video_row("broken", media / "damaged.mp4"),
        video_row("bytes", b"not a video" * 50),
        video_row("remote", "https://example.com/a.mp4"),
        image_row("wide", media / "wide.png"),
        image_row("picture", tmp_path / "broken.png"),
        video_row("second", media / "five.mkv"),
        text_row("text"),
    ]
    options: Any = {"on_error": "skip", "allow_urls": True}
    assert list(map(len, prepare_each(rows, processor, headers=False, **options))) == [1] * 8
    assert list(map(len, prepare_each(rows, processor, **options))) == [1, 0, 0, 1, 1, 0, 1, 1]
    with pytest.raises(RowError, match=r"Row 'broken': Cannot read video file '.*damaged.mp4'"):
        prepare_each(rows[1:2], processor)


SECRET = "0\n00:00:00,000 --> 00:00:01,000\nsecret\n"


@pytest.fixture
def from_hub(tmp_path, media, monkeypatch):
    """
    Loads a row as the Hub's data set user/name would give it, with a file of its own in the cache, and `secret.mp4`,
    `secret.srt` and a link to one of them elsewhere.
    """
    cache = tmp_path / "hub" / "datasets--user--name"
    (tmp_path / "home").mkdir()
    for name, folder in (("secret.mp4", tmp_path / "home"), ("own.mp4", cache / "blobs")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((media / "two.mp4").read_bytes())
    (tmp_path / "home" / "secret.srt").write_text(SECRET)
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / "own.mp4").symlink_to("../blobs/own.mp4")
    (cache / "snapshots" / "link.mp4").symlink_to(tmp_path / "home" / "secret.mp4")
    monkeypatch.setattr("stts_hf.data.loading.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    monkeypatch.chdir(tmp_path / "home")

    def load(root: Any = None, **columns: Any) -> Any:
        table = datasets.Dataset.from_list([{"question": "Q?", "answer": "A", **columns}])
        monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: table)
        return load_rows("user/name", media_root=root)[0]

    return load


@pytest.mark.parametrize(
    "row",
    [
        {"video": "{home}/secret.mp4"},
        {"video": "file://{home}/secret.mp4"},
        {"video": "secret.mp4"},
        {"video": "{cache}/snapshots/../../../home/secret.mp4"},
        {"video": "{cache}/snapshots/link.mp4"},
        {"videos": [{"bytes": None, "path": "{home}/secret.mp4"}]},
        {"images": ["{home}/secret.png"]},
        {"video": "{home}/secret.mp4", "stts_within": '["/"]'},
        {"subtitles": "../home/secret.srt"},
        {"video": "{cache}/snapshots/own.mp4\0.mp4"},
    ],
    ids=str,
)
def test_a_row_from_the_hub_leads_to_no_file_of_the_users(from_hub, tmp_path, row):
    text = json.dumps(row).replace("{home}", f"{tmp_path}/home")
    text = text.replace("{cache}", f"{tmp_path}/hub/datasets--user--name")
    with pytest.raises(RowError, match="is no file of the data set, and a row from the Hub may name no other"):
        read_row(from_hub(**json.loads(text)))


def test_a_row_from_the_hub_has_its_own_files(from_hub, tmp_path):
    own = str(tmp_path / "hub" / "datasets--user--name" / "snapshots" / "own.mp4")
    assert read_row(from_hub(video=own, subtitles=SECRET)).videos == [own]
    assert read_row(from_hub(video={"bytes": b"held", "path": "/etc/hostname"})).videos == [b"held"]


def test_a_row_from_the_hub_has_the_files_of_the_media_root_that_is_passed(from_hub, media):
    assert read_row(from_hub(video="two.mp4", root=media)).videos == [str(media / "two.mp4")]
    with pytest.raises(RowError, match="is no file of the data set"):
        read_row(from_hub(video="../escaped.mp4", root=media))


def test_a_row_of_a_file_here_may_name_any_file(tmp_path, media):
    table = load_rows(write_jsonl(tmp_path / "a.jsonl", [video_row("a", media / "two.mp4")]))
    assert read_row(table[0]).videos == [str(media / "two.mp4")]
