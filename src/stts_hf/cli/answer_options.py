"""The options, the output file and the messages of `stts-hf predict` and `stts-hf eval`."""

import argparse
import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.files import fingerprint
from stts_hf.cli.errors import refused
from stts_hf.cli.options import add_model_options, count, natural, positive, processing
from stts_hf.cli.progress import note, progress_bar
from stts_hf.wording import percent

MOST_WORKERS = 4  # by default
Row = Mapping[str, Any]
Write = Callable[[Row], None]


def add_answer_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Adds the options of model, frames, answers and decoding. max_new_tokens: the default."""
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
    """Returns the number of decoding processes."""
    if arguments.workers is not None:
        return arguments.workers
    return min(MOST_WORKERS, os.cpu_count() or 1)


def settings_of(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Settings of the model that change its answers; batches and devices change them by rounding only."""
    folder = Path(arguments.checkpoint)
    local = folder.is_dir() and arguments.output
    commit = getattr(config, "_commit_hash", None)  # of the Hub
    return {
        "checkpoint": {"digest": fingerprint(folder)} if local else {"name": str(folder), "commit": commit},
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
    Gives the answers that the file holds, a function that adds one, and one that ends the file; without a path all
    stay in memory. Raises `CommandError` if the file is refused or cannot be written.
    """
    if path is None:
        records: dict[str, Any] = {}
        yield records, lambda record: records.update({record["id"]: record}), lambda summary: None
        return
    from stts_hf.inference.answers_file import AnswersError, open_answers

    with (
        refused("--output ", AnswersError),
        open_answers(path, settings, columns=columns, retry_errors=retry_errors) as file,
    ):
        try:
            yield file.answered, file.write, file.finish
        except KeyboardInterrupt:
            note(f"\n{len(file.answered)} answers are in {path}; the same command goes on from there")
            raise


def without_answer(rows: Sequence[Row], records: Mapping[str, Any], output: Path | None) -> list[Row]:
    """Returns the rows that have no record yet."""
    left = [row for row in rows if row["id"] not in records]
    if len(left) < len(rows):
        note(f"{len(rows) - len(left)} of {len(rows)} rows are answered in {output} already")
    return left


def watched(records: Generator[Row, None, None], left: int, total: int) -> Iterator[Row]:
    """Yields the records of the last `left` of `total` rows, under a progress bar."""
    with progress_bar(total, "row", done=total - left) as bar, contextlib.closing(records):
        for record in records:
            yield record
            bar.update()


def note_start(arguments: argparse.Namespace, left: int, place: object) -> None:
    """Prints how many rows are answered, and how. place: where the models run."""
    note(f"Answering {left} rows on {place} with {percent(arguments.pruning_ratio)} of the video tokens dropped ...")


def print_problems(records: Iterable[Row], command: str, most: int = 5) -> int:
    """Prints the rows that have errors on stderr. Returns the exit status: 1 if there are any."""
    errors = [f"{record['id']}: {record['error']}" for record in records if record["error"] is not None]
    for line in errors[:most]:
        note(line)
    if errors:
        note(f"stts-hf {command}: error: {len(errors)} rows could not be answered")
    return int(bool(errors))
