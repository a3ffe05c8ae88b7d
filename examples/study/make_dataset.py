"""
The synthetic video-QA data set: real MP4 files and pictures, and questions about them whose answers are known.

    folder/dataset.json               format, seed, sizes, and what chance and a reader of the text alone would score
    folder/{split}.jsonl              a row per question
    folder/{split}_conversations.jsonl  a row per clip, with all its questions: what one trains on
    folder/{videos,images}/...        what the rows are about
    folder/motion/{split}.npz         per clip, where things move in the frames that are looked at
    folder/things/{split}.npz         per clip, where each thing is in these frames
"""

import dataclasses
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.data.prompts import choice_messages
from stts_hf.modeling.video_processing_stts import sample_indices

from ..clips.files import write_video
from .backgrounds import PHOTOGRAPHS, read_film, read_photograph
from .distraction import KINDS, Look
from .questions import (
    ANSWERS,
    FPS,
    GROUP_OF,
    LONG_FPS,
    LONG_SECONDS,
    Question,
    compose_image,
    compose_long,
    compose_short,
    conversation,
    with_options,
)
from .scenes import Scene

FORMAT = 3  # to be raised by whatever changes what is drawn or asked
SIZE = 144  # pixels, height and width
SPLITS = {"train": 2000, "validation": 200, "test": 1200}
SHARES = {"short": 0.55, "long": 0.3, "image": 0.15}
QUESTIONS_PER_CLIP = 6
CELLS = 12  # of a frame's side, in motion masks
FRAMES_LOOKED_AT, MAX_FPS = 16, 4.0  # for motion masks

COMPOSERS: dict[str, Callable[..., tuple[Scene, list[Question]]]]
COMPOSERS = {"short": compose_short, "long": compose_long, "image": compose_image}
FULL = Look(strength=1.0, photographs=0.3)


def make_dataset(
    folder: str | os.PathLike, clips: Mapping[str, int] | None = None, seed: int = 0, look: Look = FULL
) -> Iterator[tuple[int, int]]:
    """
    Writes the data set; the folder appears when all of it is there. The same arguments give the same data set, and no
    scene is in two splits.

    Args:
        folder: where to write; must not be there yet.
        clips: number of clips and pictures of each split, at least 1; `SPLITS` by default.
        seed: of all scenes, at least 0.
        look: of all clips: distraction, style, backgrounds, sizes. What happens in a clip and what is asked about it is
            the same with each.

    Yields:
        Clips written and clips in all, after each clip.

    Raises:
        FileExistsError: the folder is there already.
        OSError: something cannot be written; nothing is left then.
        ValueError: photographs or films are wanted, but the packages that have them are not installed.
    """
    if look.photographs:
        for index in range(len(PHOTOGRAPHS[look.style])):
            read_photograph(look.style, index)
    if look.films:
        read_film(look.style)
    folder = Path(folder)
    clips = dict(SPLITS if clips is None else clips)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: name another folder, or delete that one.")
    total, done = sum(clips.values()), 0
    with atomic_folder(folder) as new:
        rows: dict[str, list[dict[str, Any]]] = {}
        for split in clips:
            rows[split], conversations = [], []
            masks: dict[str, dict[str, Any]] = {"motion": {}, "things": {}}
            for clip, kind, scene_seed, scene, questions in compose_split(clips, split, seed, look):
                media = _write_media(new, scene, kind, clip, look.sizes or (SIZE,))
                if kind != "image":
                    times = _times_looked_at(scene)
                    masks["motion"][clip] = scene.motion(times, CELLS)
                    masks["things"][clip] = scene.covers(times, CELLS)
                rows[split] += _rows(clip, media, questions, scene_seed)
                conversations.append({"id": clip, **media, "messages": _conversation(questions, scene_seed)})
                done += 1
                yield done, total
            _write_lines(new / f"{split}.jsonl", rows[split])
            _write_lines(new / f"{split}_conversations.jsonl", conversations)
            for name, found in masks.items():
                (new / name).mkdir(exist_ok=True)
                np.savez_compressed(new / name / f"{split}.npz", **found)
        # What data sets did not have at first is named where it is used: studies of those go on, by their fingerprint.
        shown = dataclasses.asdict(look) | {"kinds": list(look.kinds or KINDS[look.style])}
        about = {
            "format": FORMAT,
            "seed": seed,
            "look": {name: value for name, value in shown.items() if value or name not in ("films", "sizes")},
            "splits": {split: {"clips": clips[split], "questions": len(rows[split])} for split in clips},
            **levels(rows),
        }
        (new / "dataset.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def compose_split(
    clips: Mapping[str, int], split: str, seed: int, look: Look = FULL
) -> Iterator[tuple[str, str, int, Scene, list[Question]]]:
    """
    What the clips and pictures of a split show, in their order: name, kind, seed, scene and all questions of each.
    clips, seed, look: those of the data set, as `dataset.json` has them.
    """
    first = (seed * 97 + list(clips).index(split)) << 24
    looks, is_calm = (look, dataclasses.replace(look, strength=0.0)), np.random.default_rng((seed, 5))
    for index, kind in enumerate(_kinds(clips[split])):
        seen = looks[split == "train" and is_calm.random() < look.calm]
        yield f"{split}-{index:05d}", kind, first + index, *COMPOSERS[kind](first + index, look=seen)


def read_about(folder: str | os.PathLike) -> dict[str, Any]:
    """`dataset.json` of a data set. Raises `ValueError` if there is none, or one of another version."""
    file = Path(folder) / "dataset.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no data set of make-dataset: {file} cannot be read ({error}).") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise ValueError(f"{folder} is of format {found!r}, but this version reads format {FORMAT}: make it anew")
    return about


def _kinds(number: int) -> list[str]:
    """The kinds of a split's clips: they take turns, each time the one that lacks most of its share."""
    kinds: list[str] = []
    for index in range(number):
        kinds.append(max(SHARES, key=lambda kind: SHARES[kind] * (index + 1) - kinds.count(kind)))
    return kinds


def _write_media(folder: Path, scene: Scene, kind: str, clip: str, sizes: Sequence[int]) -> dict[str, list[str]]:
    """Draws the scene into a file; returns the rows' column for it."""
    side = int(np.random.default_rng((scene.seed, 13)).choice(sizes))
    name = f"images/{clip}.png" if kind == "image" else f"videos/{clip}.mp4"
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if kind == "image":
        Image.fromarray(scene.draw([0.0], side)[0]).save(path)
        return {"images": [name]}
    fps = _fps(scene)
    frames = scene.frames((index / fps for index in range(_num_frames(scene))), side, side)
    write_video(path, frames, fps, crf="24")
    return {"videos": [name]}


def _num_frames(scene: Scene) -> int:
    return round(scene.duration * _fps(scene))


def _fps(scene: Scene) -> int:
    return LONG_FPS if scene.duration == LONG_SECONDS else FPS


def _times_looked_at(scene: Scene) -> list[float]:
    """Times of the frames that a processor with the study's settings looks at."""
    fps = _fps(scene)
    indices = sample_indices(_num_frames(scene), float(fps), FRAMES_LOOKED_AT, MAX_FPS)
    return [index / fps for index in indices.tolist()]


def _rows(clip: str, media: dict[str, list[str]], questions: list[Question], seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng((seed, 3))
    rows = []
    for index in sorted(random.permutation(len(questions))[:QUESTIONS_PER_CLIP].tolist()):
        question = questions[index]
        row: dict[str, Any] = {"id": f"{clip}-{index}", "clip": clip, **media}
        row |= {"type": question.kind, "group": GROUP_OF[question.kind], "things": question.things}
        row["question"] = question.text
        options = with_options(question, seed + index) if random.random() < 0.5 else None
        if options:
            row["options"] = options
        rows.append(row | {"answer": question.answer, "possible": len(options or question.answers)})
    return rows


def _conversation(questions: list[Question], seed: int) -> list[dict[str, str]]:
    """Questions about a clip of which none tells another's answer, one in four with options."""
    random = np.random.default_rng((seed, 4))
    messages = []
    for index, question in enumerate(conversation(questions, random)):
        options = with_options(question, seed + 100 + index) if random.random() < 0.25 else None
        messages += choice_messages(question.text, options, question.answer)
    return messages


def levels(rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """
    What can be had without looking, by type, over the last split: `chance` guesses among what the question allows,
    `text_only` says to each type what was right most often in the first split.
    """
    splits = list(rows.values())
    train, test = splits[0], splits[-1]
    commonest: dict[str, Counter] = defaultdict(Counter)
    for row in train:
        commonest[row["type"]][row["answer"]] += 1
    chance, text_only = defaultdict(list), defaultdict(list)
    for row in test:
        allowed = row.get("options") or _named_answers(row)
        chance[row["type"]].append(1 / len(allowed or ANSWERS[row["type"]]))
        counts = commonest[row["type"]]
        guess = max(allowed or counts or [""], key=lambda answer: (counts[answer], answer))
        text_only[row["type"]].append(guess == row["answer"])
    return {
        "chance": {kind: round(float(np.mean(values)), 4) for kind, values in sorted(chance.items())},
        "text_only": {kind: round(float(np.mean(values)), 4) for kind, values in sorted(text_only.items())},
    }


def _named_answers(row: Mapping[str, Any]) -> list[str]:
    """Answers that the question itself names: "the red one or the blue one"."""
    words = row["question"].replace("?", "").split()
    return [words[i + 1] for i in range(len(words) - 2) if words[i] == "the" and words[i + 2] == "one"]


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
