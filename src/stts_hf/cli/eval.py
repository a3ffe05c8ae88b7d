"""`stts-hf eval ROWS.jsonl`: asks the questions of a data set and says how many answers are right, by type."""

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.files import digest_files
from stts_hf.cli.answer_options import (
    add_answer_options,
    check_output,
    open_output,
    print_problems,
    settings_of,
    start_workers_early,
    workers_of,
)
from stts_hf.cli.checkpoint_options import find_checkpoint, load_model, load_processor
from stts_hf.cli.errors import CommandError, need_extras, one_line
from stts_hf.cli.options import check_scaling, choose_device, processing
from stts_hf.cli.progress import import_libraries, note, progress_bar, stage
from stts_hf.wording import percent

HELP = "score a checkpoint on the questions of a JSONL file, by question type"
COLUMNS = ("questions", "right", "accuracy", "no option", "errors", "video tokens", "kept", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "rows",
        type=Path,
        metavar="ROWS.jsonl",
        help="JSONL file of questions with answers, options, videos or images, and types; see docs/evaluation.md",
    )
    add_answer_options(parser, max_new_tokens=16)
    parser.add_argument(
        "--without-options",
        action="store_true",
        help="ask multiple-choice questions without showing the options; the right option's text counts as correct",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="ANSWERS.jsonl",
        help="one line per question, with ANSWERS.summary.json beside it; the same command continues an existing file",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 where some rows could not be read; raises `CommandError` for the user's mistakes."""
    check_scaling(arguments)
    check_rows(arguments.rows)
    check_output(arguments.output, [arguments.rows])
    checkpoint = find_checkpoint(arguments.checkpoint)
    need_extras("Reading rows needs more packages", "train")
    start_workers_early(arguments)
    import_libraries()
    from stts_hf.evaluation.evaluate import COLUMNS, ask_openly, evaluate
    from stts_hf.evaluation.scoring import summarize

    device = choose_device(arguments.device)
    rows = read_rows(arguments.rows)
    if arguments.without_options:
        rows = ask_openly(rows)
    config, processor = load_processor(checkpoint, arguments)
    if arguments.pruning_ratio is None:
        arguments.pruning_ratio = config.vision_config.pruning_ratio
        check_scaling(arguments)
    settings: dict[str, Any] = {"rows": {"file": arguments.rows.name, "digest": digest_files(files_of(arguments.rows))}}
    settings |= settings_of(arguments, checkpoint, config)
    settings |= {"without_options": True} if arguments.without_options else {}
    with open_output(arguments.output, settings, columns=COLUMNS) as (records, write, finish):
        left = [row for row in rows if row["id"] not in records]
        if len(left) < len(rows):
            note(f"{len(rows) - len(left)} of {len(rows)} questions are answered in {arguments.output} already")
        if left:
            with stage(f"Loading {checkpoint} on {device}"):
                model = load_model(checkpoint, config, device, arguments)
            ratio = f"{percent(arguments.pruning_ratio)} of the video tokens dropped"
            note(f"Asking {len(left)} questions with {ratio} ...")
            given = ("pruning_ratio", "batch_size", "decode_timeout", "max_new_tokens", "allow_urls")
            options = {name: getattr(arguments, name) for name in given}
            options |= {"num_workers": workers_of(arguments), "processing": processing(arguments)}
            found = evaluate(model, processor, left, **options)
            with progress_bar(len(left), "question") as bar, contextlib.closing(found):
                for record in found:
                    write(record)
                    bar.update()
        summary = summarize(records[row["id"]] for row in rows)
        finish(summary)
    print_table(summary)
    print_problems(records.values(), "stts-hf eval: error: {} questions could not be asked; they count as wrong")
    return 1 if summary["all"]["errors"] else 0


def files_of(rows: Path) -> list[Path]:
    """The file, and what says which clips its rows are about: data sets with and without snow have the same rows."""
    about = rows.with_name("dataset.json")
    return [rows, about] if about.is_file() else [rows]


def check_rows(rows: Path) -> None:
    """Refuses what can be refused before anything slow happens."""
    if not os.path.isfile(rows):
        what = "is a folder" if os.path.isdir(rows) else "does not exist"
        raise CommandError(f"ROWS.jsonl {rows} {what}; name a file")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; raises `CommandError` where it is damaged, or two rows have one id."""
    from stts_hf.data.loading import load_rows

    try:
        rows = list(load_rows(path))
    except ValueError as error:
        raise CommandError(one_line(error)) from error
    twice = [name for name, times in Counter(row["id"] for row in rows).items() if times > 1]
    if twice:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        raise CommandError(f"{path} has several rows of the id {', '.join(twice[:3])}{more}; give each its own")
    return rows


def print_table(summary: Mapping[str, Any]) -> None:
    """Prints a line for each type and group, and one for all."""
    lines = {"all": summary["all"]}
    for kind in ("group", "type"):
        lines = {f"{kind} {name}": sums for name, sums in summary[f"{kind}s"].items()} | lines
    width = max(map(len, lines))
    print(" " * width + "".join(f"{column:>14}" for column in COLUMNS))
    for name, sums in lines.items():
        cells = (
            sums["questions"],
            sums["right"],
            f"{sums['accuracy']:.1%}",
            sums["no_option"],
            sums["errors"],
            f"{sums['video_tokens']:.1f}",
            f"{sums['video_tokens_kept']:.1f}",
            f"{sums['seconds']:.1f}",
        )
        print(f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
