"""What the commands that answer many questions share: their options, their file of answers, what they say of errors."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.files import fingerprint
from stts_hf.cli.answer_report import check_file
from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import add_model_options, count, natural, positive, processing
from stts_hf.cli.progress import note
from stts_hf.data.isolated import start_early

MOST_WORKERS = 4  # by default
Write = Callable[[Mapping[str, Any]], None]


def add_answer_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Adds what answers, of which frames, how long and how many at once. max_new_tokens: the default."""
    add_model_options(parser, max_new_tokens)
    parser.add_argument(
        "--max-fps", type=positive, metavar="R", help="maximum frames per second (default: checkpoint's)"
    )
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="questions per batch (default: 8)")
    parser.add_argument(
        "--workers",
        type=natural,
        metavar="N",
        help="processes that decode ahead; 0: one thread (default: one per core, at most 4)",
    )
    parser.add_argument(
        "--decode-timeout",
        type=positive,
        default=600,
        metavar="S",
        help="seconds allowed for reading the videos and images of one row (default: 600)",
    )


def workers_of(arguments: argparse.Namespace) -> int:
    """How many processes decode."""
    if arguments.workers is not None:
        return arguments.workers
    return min(MOST_WORKERS, os.cpu_count() or 1)


def start_workers_early(arguments: argparse.Namespace) -> None:
    """Lets the processes that decode import PyTorch while this one does."""
    if workers_of(arguments):
        start_early("stts_hf.inference.requests")


def check_output(output: Path | None, inputs: Iterable[Path], endings: tuple[str, ...] = (".jsonl",)) -> None:
    """Raises `CommandError` where no file of answers can be made, before anything slow happens."""
    if output is None:
        return
    if output.suffix not in endings:
        raise CommandError(f"--output {output} must be a file that ends in {' or '.join(endings)}")
    check_file("--output", output)
    if output.exists() and any(os.path.exists(path) and os.path.samefile(path, output) for path in inputs):
        raise CommandError(f"--output would write to {output}, which is an input; name another")


def settings_of(arguments: argparse.Namespace, checkpoint: str, config: Any) -> dict[str, Any]:
    """What of a model changes its answers; batches and devices change them by rounding only."""
    folder = Path(checkpoint)
    local = folder.is_dir() and arguments.output
    commit = getattr(config, "_commit_hash", None)  # of the Hub
    return {
        "checkpoint": {"digest": fingerprint(folder)} if local else {"name": checkpoint, "commit": commit},
        "pruning_ratio": arguments.pruning_ratio,
        "selector": config.vision_config.selector,
        "processing": processing(arguments),
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": arguments.dtype,
    }


@contextlib.contextmanager
def open_output(
    path: Path | None, settings: Mapping[str, Any], *, columns: Mapping[str, Any], retry_errors: bool = True
) -> Iterator[tuple[dict[str, Any], Write, Write]]:
    """
    The answers that are there, what adds one, and what ends the file; without a path in memory alone. Raises
    `CommandError` where the file is refused or cannot be written.
    """
    if path is None:
        records: dict[str, Any] = {}
        yield records, lambda record: records.update({record["id"]: record}), lambda summary: None
        return
    from stts_hf.inference.answers_file import AnswersError, open_answers

    try:
        with open_answers(path, settings, columns=columns, retry_errors=retry_errors) as file:
            try:
                yield file.answered, file.write, file.finish
            except KeyboardInterrupt:
                note(f"\n{len(file.answered)} answers are in {path}; the same command goes on from there")
                raise
    except AnswersError as error:
        raise CommandError(f"--output {one_line(error)}") from error


def print_problems(records: Iterable[Mapping[str, Any]], summary: str, most: int = 5) -> None:
    """Says on stderr which rows have errors. summary: takes their number."""
    errors = [f"{record['id']}: {record['error']}" for record in records if record["error"] is not None]
    for line in errors[:most]:
        note(line)
    if errors:
        note(summary.format(len(errors)))
