"""The page is parsed as a browser parses it: what it holds, that it loads nothing, and escapes what it says."""

import base64
import dataclasses
import html.parser
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stts_hf.inference.requests import Answer
from stts_hf.visualize.html_report import MOST_OF_CLIP, write_report

VOID = {"meta", "input", "br", "img", "link", "hr"}
ATTACK = '</script><script>alert("1")</script><img src=x onerror=alert(1)> & {{ 7 * 7 }}'


class Page(html.parser.HTMLParser):
    """Elements with their attributes, text by the element it stands in, and elements that were never closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self):
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


def answers(frames: int = 5, tubelet: int = 1, rows: int = 2, columns: int = 3, question: str = "What moves?"):
    generator = torch.Generator().manual_seed(0)
    size = (-(-frames // tubelet), rows * columns)

    def answer(keep: float) -> Answer:
        return Answer(
            "clip.mp4",
            question,
            answer="A ring.",
            timestamps=tuple(0.5 * place for place in range(frames)),
            duration=0.5 * frames,
            grid=(rows, columns),
            keep_mask=torch.rand(size, generator=generator) < keep,
            token_scores=torch.rand(size, generator=generator),
            prompt_tokens=20 + size[0] * size[1],
        )

    return {"scorer": answer(0.3), "cosine": answer(0.6)}


def noise(frames: int, height: int = 60, width: int = 80) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def cost(*rounds: float) -> Any:
    """What grows with the first round, so that shares that are saved differ."""
    flops = {"tower": int(rounds[0] * 1e9), "total": int(3 * rounds[0] * 1e9)}
    return SimpleNamespace(cache_bytes=int(rounds[0] * 1024), flops=flops, rounds={"total": [*rounds]})


def write(path: Path, found, frames: np.ndarray, **options: Any) -> Page:
    costs = {name: cost(100.0 / place) for place, name in enumerate(found, 1)}
    given: dict[str, Any] = {"facts": {"video": "clip.mp4"}, "costs": costs, "baseline": cost(200.0)}
    write_report(path, frames, found, **(given | options))
    return Page(path)


@pytest.mark.parametrize("tubelet", [1, 2], ids=["frames", "tubelets"])
def test_it_holds_masks_scores_times_and_frames(tmp_path, tubelet):
    found = answers(tubelet=tubelet)
    data = write(tmp_path / "report.html", found, noise(5)).data
    assert data["times"] == [0, 0.5, 1, 1.5, 2]
    assert (data["tubelet"], data["rows"], data["columns"], data["duration"]) == (tubelet, 2, 3, 2.5)
    for entry, (name, answer) in zip(data["selectors"], found.items(), strict=True):
        assert entry["name"] == name
        assert [*base64.b64decode(entry["mask"])] == answer.keep_mask.int().flatten().tolist()
        later = answer.token_scores[1:]
        want = 255 * (answer.token_scores - later.min()) / (later.max() - later.min())
        np.testing.assert_allclose([*base64.b64decode(entry["scores"])], want.clip(0, 255).flatten(), atol=0.51)
    with Image.open(io.BytesIO(base64.b64decode(data["frames"][4]))) as image:
        assert (image.format, image.size) == ("JPEG", (80, 60))


def test_counts_and_times_stand_in_its_tables(tmp_path):
    found = answers()
    page = write(tmp_path / "report.html", found, noise(5))
    cells = [text.strip() for text in page.texts["td"] + page.texts["small"]]
    kept = [int(answer.keep_mask.sum()) for answer in found.values()]
    for text in (*map(str, kept), *(str(20 + number) for number in kept), "50", "200.0", "100.0", "50.0"):
        assert text in cells
    assert [text for text in cells if text.endswith("x)")] == ["(2.00x)", "(4.00x)"]
    for answer in found.values():
        for number in answer.keep_mask.sum(-1).tolist():
            assert str(number) in cells


def test_cache_and_flops_stand_beside_the_share_that_is_saved(tmp_path):
    page = write(tmp_path / "report.html", answers(), noise(5))
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", page.source.partition('<h2 id="times">')[0], re.S)
    cells = [re.findall(r"[\d,.+-]+%?", re.sub("<[^>]*>", " ", row.partition("</th>")[2]))[-6:] for row in rows[:3]]
    assert cells[0][-3:] == ["200", "200", "600"]  # KiB, GFLOP of the tower, and of all
    assert cells[1] == ["100", "-50%", "100", "-50%", "300", "-50%"]
    assert cells[2] == ["50", "-75%", "50.0", "-75%", "150", "-75%"]
    without = write(tmp_path / "untimed.html", answers(), noise(5), costs=None, baseline=None)
    assert "GFLOP" not in without.source


def test_times_have_their_spread_and_a_ratio_where_all_rounds_agree(tmp_path):
    costs = {"scorer": cost(90.0, 100.0, 190.0), "cosine": cost(150.0, 210.0, 100.0)}
    page = write(tmp_path / "report.html", answers(), noise(5), costs=costs, baseline=cost(200.0, 200.0, 200.0))
    cells = [text.strip() for text in page.texts["td"] + page.texts["small"]]
    assert {"100.0 (90.0-190.0)", "(2.00x)", "150.0 (100.0-210.0)", "(rounds disagree)"} <= {*cells}


def test_it_loads_nothing(tmp_path):
    page = write(tmp_path / "report.html", answers(), noise(5), clip=b"some video")
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action", "data", "poster"} & attributes.keys()
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", page.source)
    (policy,) = (item["content"] for item in page.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert page.open == []


def test_what_users_wrote_is_escaped(tmp_path):
    found = {name: dataclasses.replace(answer, answer=ATTACK) for name, answer in answers(question=ATTACK).items()}
    page = write(tmp_path / "report.html", found, noise(5), facts={"video": ATTACK}, notes=[ATTACK])
    assert len(page.all("script")) == 2
    assert not page.all("img")
    assert page.texts["dd"] == [ATTACK]
    assert ATTACK in "".join(page.texts["p"])


def test_everything_has_a_name_for_those_who_do_not_see_it(tmp_path):
    page = write(tmp_path / "report.html", answers(), noise(5))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("svg") + [item for item in page.all("input") if item["type"] == "range"]:
        assert attributes["aria-label"]
    for _, attributes in page.elements:
        if name := attributes.get("aria-labelledby"):
            assert name in ids
        if attributes.get("role") == "region":
            assert attributes.keys() & {"aria-label", "aria-labelledby"}
    assert page.all("html")[0]["lang"] == "en"
    assert [item["content"] for item in page.all("meta") if item.get("name") == "viewport"]


def test_64_frames_of_noise_stay_below_10_megabytes(tmp_path):
    found = answers(64, rows=9, columns=9)
    page = write(tmp_path / "report.html", found, noise(64, 360, 480), clip=b"0" * MOST_OF_CLIP)
    assert (tmp_path / "report.html").stat().st_size < 10e6
    assert base64.b64decode(page.data["clip"]) == b"0" * MOST_OF_CLIP
    assert write(tmp_path / "large.html", answers(), noise(5), clip=b"0" * (MOST_OF_CLIP + 1)).data["clip"] == ""


def test_answers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`keep_mask` has shape \(5, 6\), but 4 frames"):
        write(tmp_path / "report.html", answers(), noise(4))
    failed = {"scorer": Answer("clip.mp4", "What?", error=ValueError("it is no video"))}
    with pytest.raises(ValueError, match="'scorer' without an answer: it is no video"):
        write(tmp_path / "report.html", failed, noise(4))
