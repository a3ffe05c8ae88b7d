"""
Whether `explain` names the right thing: clips with masks of what each question is about, whose pruned answer is wrong
and whose unpruned answer is right, where a block of the thing was dropped. A line per clip, and a summary.

python -m examples.study make-dataset outputs/asked --seed 33 --train 1 --validation 1 --test 300
python -m examples.study.explaining hub_configs/stts-tiny outputs/asked --pruning-ratio 0.8 --clips 40
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stts_hf.evaluation.scoring import is_right
from stts_hf.inference.assistant import VideoAssistant, load
from stts_hf.inference.explain import Explanation
from stts_hf.inference.requests import Answer

from .data import load_masks, read_questions
from .motion import share_of_blocks
from .questions import GROUP_OF

FEW = 8  # blocks


def shows_things(row: dict[str, Any], answer: Answer, covers: np.ndarray) -> np.ndarray:
    """Blocks (T, n) that show a thing of the question. covers: (things, T, rows, columns) in percent."""
    assert answer.keep_mask is not None  # there is a video
    shown = np.zeros(tuple(answer.keep_mask.shape), dtype=bool)
    for thing in row["things"]:
        share = share_of_blocks(covers[thing], (len(shown), *answer.grid))
        assert share is not None  # the model sees the frames that the data set counts
        shown |= share > 0
    return shown


def lost_answers(assistant: VideoAssistant, dataset: Path, ratio: float) -> Iterator[dict[str, Any]]:
    """
    Open questions, at most one for each clip, that are right with nothing dropped and wrong at the ratio, where a block
    that shows the thing was dropped; with `shown` (T, n), `video`, and the `seconds` of the first.
    """
    seen: set[str] = set()
    covers = load_masks(dataset, "things")
    for row in read_questions(dataset, without_options=True):
        if not row.get("videos") or row["clip"] in seen or GROUP_OF[row["type"]] == "chance":
            continue
        video = str(dataset / row["videos"][0])
        found = [assistant.answer(video, row["question"], pruning_ratio=k, max_new_tokens=8) for k in (0.0, ratio)]
        shown, mask = shows_things(row, found[1], covers[row["clip"]]), found[1].keep_mask
        assert mask is not None  # there is a video
        if [is_right(answer.text, row) for answer in found] == [True, False] and (shown & ~mask.numpy()).any():
            seen.add(row["clip"])
            yield row | {"video": video, "seconds": found[0].seconds, "shown": shown}


def names_the_thing(explanation: Explanation, shown: np.ndarray) -> tuple[bool, bool]:
    """
    Whether a thing of the question is seen at the moment that is named and one of the first `FEW` blocks that are named
    shows a part of it; and whether the first of them does. shown: (T, n).
    """
    blocks = explanation.blocks[:FEW]
    if not blocks:
        return False, False
    return bool(shown[blocks[0][0]].any()) and any(bool(shown[block]) for block in blocks), bool(shown[blocks[0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--pruning-ratio", type=float, default=0.8)
    parser.add_argument("--clips", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    assistant = load(given.checkpoint)
    named, costs, sizes, times = [], [], [], []
    for row in lost_answers(assistant, given.dataset, given.pruning_ratio):
        started = time.perf_counter()
        options: dict[str, Any] = {"pruning_ratio": given.pruning_ratio, "max_new_tokens": 8}
        found = assistant.explain(row["video"], row["question"], expected=row["answer"], **options)
        times.append((time.perf_counter() - started) / row["seconds"])
        named.append(names_the_thing(found, row["shown"]))
        costs.append(found.cost)
        sizes.append(len(found.blocks))
        words = f"{row['id']} {row['type']}: {found.cause}, {len(found.blocks)} blocks, cost {found.cost:.1f}"
        print(f"{words}, {'named' if named[-1][0] else 'missed'}{', first' * named[-1][1]}", flush=True)
        if len(named) == given.clips:
            break
    right, first = np.sum(named, axis=0)
    print(
        f"{right} of {len(named)} named, {first} by the first block; "
        f"blocks: median {np.median(sizes):g}, most {max(sizes)}"
    )
    print(f"cost: median {np.median(costs):.1f}, most {max(costs):.1f}; in time: median {np.median(times):.1f}")


if __name__ == "__main__":
    main()
