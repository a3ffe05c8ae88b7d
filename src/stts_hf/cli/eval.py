"""`stts-hf eval ROWS.jsonl`: scores a checkpoint on the questions of a data set, by type."""

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stts_hf.cli.answer_options import Engine, answer_left, open_output, print_problems, settings_of, workers_of
from stts_hf.cli.checkpoint_options import load_weights, open_checkpoint
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import DECODING, MODEL, add_options, check_output

COLUMNS = ("questions", "right", "accuracy", "no option", "errors", "video tokens", "kept", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rows = "JSONL file of questions with answers, options, videos or images, and types; see docs/evaluation.md"
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help=rows)
    add_options(parser, *MODEL, "selector", "allow_urls", "batch_size", *DECODING, max_new_tokens=16)
    openly = "ask multiple-choice questions without showing the options; the right option's text counts as correct"
    parser.add_argument("--without-options", action="store_true", help=openly)
    output = "one line per question, with ANSWERS.summary.json beside it; the same command continues an existing file"
    parser.add_argument("--output", type=Path, metavar="ANSWERS.jsonl", help=output)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if some rows could not be read; raises `CommandError` for a user error."""
    if not arguments.rows.is_file():
        what = "is a folder" if arguments.rows.is_dir() else "does not exist"
        raise CommandError(f"ROWS.jsonl {arguments.rows} {what}; name a file")
    if arguments.output is not None:
        check_output(arguments.output, [arguments.rows], (".jsonl",))
    need_extras("Reading rows needs more packages", "train")
    predictor = open_checkpoint(arguments, num_workers=workers_of(arguments))
    from stts_hf.checkpoints.files import digest_files
    from stts_hf.data.loading import load_rows
    from stts_hf.evaluation.evaluate import COLUMNS, ask_openly, evaluate
    from stts_hf.evaluation.scoring import summarize
    from stts_hf.inference.inputs import check_ids
    from stts_hf.keeping import in_words

    with refused():
        rows: list[dict[str, Any]] = [row | {"id": str(row["id"])} for row in load_rows(arguments.rows)]
    with refused(f"{arguments.rows}: "):
        check_ids(rows)
    if arguments.without_options:
        rows = ask_openly(rows)
    settings: dict[str, Any] = {"rows": {"file": arguments.rows.name, "digest": digest_files([arguments.rows])}}
    settings |= settings_of(arguments, predictor)
    settings |= {"without_options": True} if arguments.without_options else {}

    def start(_: object) -> Engine:
        model = load_weights(arguments, predictor)
        return model.device, functools.partial(evaluate, model, predictor.processor, **predictor.options)

    with open_output(arguments.output, settings, columns=COLUMNS) as (records, write, finish):
        answer_left(arguments.output, rows, records, start, write, f"Answering, {in_words(predictor.rule)}")
        answers = [records[row["id"]] for row in rows]  # the file may hold more
        summary = summarize(answers)
        finish(summary)
    print_table(summary)
    return print_problems(answers, "eval")


def print_table(summary: Mapping[str, Any]) -> None:
    lines = {"all": summary["all"]}
    for kind in ("group", "type"):
        lines = {f"{kind} {name}": sums for name, sums in summary[f"{kind}s"].items()} | lines
    width = max(map(len, lines))
    print(" " * width + "".join(f"{column:>14}" for column in COLUMNS))
    for name, sums in lines.items():
        counts = sums["questions"], sums["right"], f"{sums['accuracy']:.1%}", sums["no_option"], sums["errors"]
        others = (f"{sums[column]:.1f}" for column in ("video_tokens", "video_tokens_kept", "seconds"))
        print(f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in (*counts, *others)))
