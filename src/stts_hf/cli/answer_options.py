"""The output file and the messages of `stts-hf predict` and `stts-hf eval`."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import refused
from stts_hf.cli.options import processing
from stts_hf.cli.progress import note, progress_bar

if TYPE_CHECKING:
    from stts_hf.inference.predictor import Predictor

MOST_WORKERS = 4  # by default
Row = Mapping[str, Any]
Write = Callable[[Row], None]
Engine = tuple[object, Callable[[Iterable[Row]], Generator[dict[str, Any], None, None]]]  # where it runs; answers rows


def workers_of(arguments: argparse.Namespace) -> int:
    return min(MOST_WORKERS, os.cpu_count() or 1) if arguments.workers is None else arguments.workers


def settings_of(arguments: argparse.Namespace, predictor: "Predictor") -> dict[str, Any]:
    """Settings of the model that change its answers; batches and devices change them by rounding only."""
    from stts_hf.checkpoints.files import fingerprint
    from stts_hf.keeping import rule_arguments

    folder = Path(arguments.checkpoint)
    local = folder.is_dir() and arguments.output
    commit = getattr(predictor.config, "_commit_hash", None)  # of the Hub
    return {
        "checkpoint": {"digest": fingerprint(folder)} if local else {"name": str(folder), "commit": commit},
        **rule_arguments(predictor.rule),
        "selector": predictor.config.vision_config.selector,
        "processing": processing(arguments),
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": arguments.dtype,
    }


@contextlib.contextmanager
def open_output(
    path: Path | None,
    settings: Mapping[str, Any],
    *,
    columns: Mapping[str, Any],
    retry_errors: bool = True,
    option: str = "--output",
) -> Iterator[tuple[dict[str, Any], Write, Write]]:
    """Gives the answers of the file, or of memory, and functions that add one and that end it; `CommandError`."""
    if path is None:
        records: dict[str, Any] = {}
        yield records, lambda record: records.update({record["id"]: record}), lambda summary: None
        return
    from stts_hf.inference.answers_file import AnswersError, open_answers

    with (
        refused(f"{option} ", AnswersError),
        open_answers(path, settings, columns=columns, retry_errors=retry_errors) as file,
    ):
        try:
            yield file.answered, file.write, file.finish
        except KeyboardInterrupt:
            note(f"\n{len(file.answered)} answers are in {path}; the same command goes on from there")
            raise


def answer_left(
    path: Path | None,
    rows: Sequence[Row],
    records: Mapping[str, Any],
    start: Callable[[contextlib.ExitStack], Engine],
    write: Write,
    words: str,
) -> tuple[int, float]:
    """
    Writes a record of each row that has none; messages say `path` and `words`. Returns their number, and seconds.
    start: of the engine; what it opens on the stack is closed at the end.
    """
    left = [row for row in rows if row["id"] not in records]
    if len(left) < len(rows):
        note(f"{len(rows) - len(left)} of {len(rows)} rows are answered in {path} already")
    if not left:
        return 0, 0.0
    with contextlib.ExitStack() as stack:
        place, answer = start(stack)
        note(f"{words}: {len(left)} rows on {place} ...")
        started = time.perf_counter()
        bar = stack.enter_context(progress_bar(len(rows), "row", done=len(rows) - len(left)))
        for record in stack.enter_context(contextlib.closing(answer(left))):
            write(record)
            bar.update()
        return len(left), time.perf_counter() - started


def print_problems(records: Iterable[Row], command: str, most: int = 5) -> int:
    """Prints the rows that have errors on stderr. Returns the exit status: 1 if there are any."""
    errors = [f"{record['id']}: {record['error']}" for record in records if record["error"] is not None]
    for line in errors[:most]:
        note(line)
    if errors:
        note(f"stts-hf {command}: error: {len(errors)} rows could not be answered")
    return int(bool(errors))
