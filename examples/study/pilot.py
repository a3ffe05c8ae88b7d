"""One scorer fitted to answers on a frozen checkpoint, and its answers beside those of cosine: minutes, not a study.

python -m examples.study.pilot fit hub_configs/stts-tiny outputs/pilot outputs/distracted outputs/calm
python -m examples.study.pilot ask outputs/pilot/best outputs/distracted --output outputs/marks.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.encoding import encode
from stts_hf.data.loading import load_rows
from stts_hf.data.rows import read_row
from stts_hf.evaluation.evaluate import evaluate
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.training.build import renew_scorer

from .data import load_processor, read_questions, write_json
from .fitting import train
from .questions import GROUP_OF

BATCH = 16


def clips_of(file: Path, processor: Any, most: int | None = None) -> Any:
    """The conversations about videos of a split, decoded once, with the data set before their ids."""
    rows = [read_row(row) for row in load_rows(file) if row.get("videos")]
    for sample in (samples := [encode(processor, row) for row in rows[:most]]):
        sample.id = f"{file.parent.name}-{sample.id}"
    return samples


def fit(base: Path, output: Path, datasets: list[Path], epochs: float, seed: int = 0) -> None:
    """
    Fits a new scorer; keeps the weights with the least answer loss on validation clips in `output/best`. seed: of the
    scorer and of the order of the rows; the masks are those of all seeds, and copied into `output` are not measured.
    """
    processor = load_processor(base)
    model: Any = STTSForConditionalGeneration.from_pretrained(
        base, selector="scorer", scorer_target="answers", score_bias=False
    )
    renew_scorer(model, seed)
    rows: Any = ConcatDataset([clips_of(folder / "train_conversations.jsonl", processor) for folder in datasets])
    validation: Any = ConcatDataset(
        [clips_of(folder / "validation_conversations.jsonl", processor, 48) for folder in datasets]
    )
    train(
        model,
        rows,
        STTSDataCollator(processor, model_config=model.config, return_ids=True),
        folder=output,
        choose_on=validation,
        max_steps=round(epochs * max(len(rows) // BATCH, 1)),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        scorer_only=True,
        freeze=["language_model", "vision_tower", "connector"],
        learning_rates={"scorer": 1e-3},
        warmup_steps=20,
        weight_decay=0.05,
        state_cache_gb=4.0,
        seed=0,
        data_seed=seed,
    )
    with atomic_folder(output / "best", overwrite=True) as new:
        model.save_pretrained(new)
        processor.save_pretrained(new)


def ask(checkpoint: Path, dataset: Path, clips: int, ratios: list[float], output: Path, selectors: list[str]) -> None:
    """Asks about test clips by each selector, and writes a mark for each question; prints shares right."""
    rows = [row for row in read_questions(dataset, without_options=True) if row.get("videos")]
    some = set(list(dict.fromkeys(row["clip"] for row in rows))[:clips])
    rows = [row for row in rows if row["clip"] in some and GROUP_OF[row["type"]] != "chance"]
    rows = [row | {"media_root": str(dataset)} for row in rows]
    processor = load_processor(checkpoint)
    marks: dict[str, Any] = {"clips": [row["clip"] for row in rows]}
    for selector in selectors:
        model: Any = STTSForConditionalGeneration.from_pretrained(checkpoint, selector=selector).eval()
        for ratio in ratios:
            answers = evaluate(model, processor, rows, pruning_ratio=ratio, batch_size=32)
            found = {answer["id"]: answer["right"] for answer in answers}
            right = "".join(str(int(found[row["id"]])) for row in rows)
            marks[f"{selector} {ratio:g}"] = right
            share = right.count("1") / len(right)
            print(f"{dataset.name}, {selector}, {ratio:.0%} dropped: {share:.1%} right", flush=True)
            write_json(output, marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fit")
    command.add_argument("base", type=Path)
    command.add_argument("output", type=Path)
    command.add_argument("datasets", type=Path, nargs="+")
    command.add_argument("--epochs", type=float, default=12)
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(execute=fit)
    command = commands.add_parser("ask")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("dataset", type=Path)
    command.add_argument("--selectors", nargs="+", default=["scorer", "cosine"])
    command.add_argument("--clips", type=int, default=120)
    command.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9])
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(execute=ask)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    given.pop("execute")(**{name: value for name, value in given.items() if name != "command"})


if __name__ == "__main__":
    main()
