"""`stts-hf predict INPUT...`: answers prompts about many videos into a file; a stopped run can be continued."""

import argparse
import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.answer_options import Engine, Row, answer_left, open_output, print_problems, settings_of, workers_of
from stts_hf.cli.checkpoint_options import load_weights, open_checkpoint, predictor_options
from stts_hf.cli.errors import CommandError, need_extras, one_line, refused
from stts_hf.cli.options import DECODING, MODEL, Option, add_options, check_output, count, is_url, natural, positive
from stts_hf.cli.progress import print_lines, stage

if TYPE_CHECKING:
    from stts_hf.inference.predictor import Predictor

PARQUET = ".parquet"
NUMBERS = ("video_tokens_kept", "video_tokens", "prompt_tokens", "new_tokens", "frames", "damaged_frames", "seconds")
# Columns of a record with their types; a record with an error may hold None.
COLUMNS: dict[str, Any] = {"id": object, "video": object, "prompt": object, "answer": str, "error": str | None}
COLUMNS |= dict.fromkeys(NUMBERS, int) | {"seconds": float}

RAY: dict[str, Option] = {
    "address": (
        str,
        None,
        "HOST:PORT",
        "address of the Ray cluster; auto: the cluster running on this machine; local: a new one for this run "
        "(default: RAY_ADDRESS, else local)",
    ),
    "models": (count, None, "N", "number of models on Ray (default: as many as fit)"),
    "cpus": (positive, None, "N", "CPUs per model on Ray (default: 1; with a GPU up to 4)"),
    "gpus": (float, None, "N", "GPUs per model on Ray, 0 to 1 (default: 1 if there are any)"),
    "retries": (natural, None, "N", "retries of rows whose process on Ray died (default: 2)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="prompt for videos without one")
    output = ".jsonl or .parquet file, one row per input; an existing file is continued (default: standard output)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.add_argument("--retry-errors", action="store_true", help="ask rows with an error in --output again")
    add_options(parser, *MODEL, "selector", "allow_urls", "batch_size", *DECODING)
    engines = "local (default): one model in this process; ray: one model per GPU or CPU of a machine or cluster"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=engines)
    add_options(parser, table=RAY)


def add_input_options(parser: argparse.ArgumentParser) -> None:
    inputs = "videos, folders of videos, patterns in quotes ('videos/**/*.mp4'), JSONL or Parquet files of rows "
    inputs += "{id, video, prompt}, or data sets of the Hub"
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help=inputs)
    parser.add_argument("--split", help="split of a data set (default: train)")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a data set of the Hub")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if some rows have an error; raises `CommandError` for a user error or a full disk."""
    check_arguments(arguments)
    output = arguments.output
    lines = output.with_suffix(".jsonl") if is_parquet(output) else output  # a Parquet file is made of it
    rows = find_rows(arguments, output, arguments.prompt)
    local = arguments.engine == "local"
    here: dict[str, Any] = {"num_workers": workers_of(arguments)} if local else {"device": "cpu"}
    predictor = open_checkpoint(arguments, **here)
    from stts_hf.inference.requests import check_question
    from stts_hf.keeping import in_words, own_rule

    if arguments.prompt is not None:
        with refused("--prompt: "):
            check_question(predictor.processor, arguments.prompt)
    settings = {"inputs": list(map(os.path.normpath, arguments.inputs)), "prompt": arguments.prompt}
    settings |= {"split": arguments.split, "subset": arguments.subset} | settings_of(arguments, predictor)
    own = {row["id"]: rule for row in rows if (rule := own_rule(row))}
    settings |= {"rules": own} if own else {}
    with open_output(lines, settings, columns=COLUMNS, retry_errors=arguments.retry_errors) as (records, write, finish):
        check_same(rows, records, output)

        def write_and_print(record: Row) -> None:
            write(record)
            if output is None:
                print_record(len(records), len(rows), record)

        start = functools.partial(start_engine, arguments, predictor)
        how = f"Answering, {in_words(predictor.rule)}"
        done, seconds = answer_left(output, rows, records, start, write_and_print, how)
        answers = [records[row["id"]] for row in rows]  # the file may hold more, of inputs that are gone
        summary = summarize(answers)
        finish(summary)
        if is_parquet(output):
            write_parquet(answers, output)
    print_summary(summary, done, seconds)
    return print_problems(answers, "predict")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for what is wrong before anything slow happens."""
    given = [name for name in RAY if getattr(arguments, name) is not None]
    check_urls(arguments)
    if arguments.engine == "local" and given:
        raise CommandError(f"--{given[0]} needs --engine ray")
    if arguments.engine == "ray":
        need_extras("--engine ray needs more packages", "ray", module="ray")
    output = arguments.output
    for path in {output, output.with_suffix(".jsonl")} if output else ():
        check_output(path, arguments.inputs, (".jsonl", PARQUET))
    if is_parquet(output):
        need_extras("Writing Parquet needs more packages", "train")
    if arguments.retry_errors and output is None:
        raise CommandError("--retry-errors needs --output, the file with the errors")


def check_urls(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for a URL among the inputs without permission to download."""
    if not arguments.allow_urls and (urls := list(filter(is_url, arguments.inputs))):
        raise CommandError(f"INPUT {urls[0]} is a URL; allow its download with --allow-urls")


def start_engine(arguments: argparse.Namespace, predictor: "Predictor", stack: contextlib.ExitStack) -> Engine:
    """Returns one model in this process, or several on Ray, which `stack` leaves. Raises `CommandError`."""
    if arguments.engine == "local":
        return load_weights(arguments, predictor).device, predictor.predict
    from stts_hf.inference.on_ray import RayFailed, choose_slots, connect, predict_on_ray

    options = predictor_options(arguments)
    if arguments.workers is not None:
        options["num_workers"] = arguments.workers
    with refused("--"), stage("Connecting to Ray"):
        machines = stack.enter_context(connect(arguments.address))
        slots = choose_slots(machines, arguments.device, arguments.models, arguments.cpus, arguments.gpus)
    place = f"Ray ({slots.models} models, each with {slots.gpus:g} GPUs and {slots.cpus:g} CPUs)"
    retries = {} if arguments.retries is None else {"retries": arguments.retries}
    stack.enter_context(refused("--engine ray: ", RayFailed))
    return place, functools.partial(predict_on_ray, options=options, slots=slots, **retries)


def is_parquet(output: Path | None) -> bool:
    return output is not None and output.suffix.lower() == PARQUET


def find_rows(arguments: argparse.Namespace, output: Path | None, prompt: str | None) -> list[dict[str, Any]]:
    """Returns the rows of all inputs but the output. Raises `CommandError` if one cannot be found or read."""
    from stts_hf.inference.answers_file import summary_path
    from stts_hf.inference.inputs import read_inputs

    leave_out = [] if output is None else [output, output.with_suffix(".jsonl"), summary_path(output)]
    with refused():
        try:
            options = {"split": arguments.split, "subset": arguments.subset, "leave_out": leave_out}
            return read_inputs(arguments.inputs, prompt=prompt, **options)
        except ImportError:
            need_extras("Reading rows needs more packages", "train")
            raise


def check_same(rows: Sequence[Row], records: Mapping[str, Row], output: Path) -> None:
    """Raises `CommandError` if the output's answer to a row is about another prompt or video."""
    from stts_hf.inference.predictor import video_name

    for row in rows:
        there = records.get(row["id"])
        for name, now in (("prompt", row["prompt"]), ("video", video_name(row))):
            if there is not None and there[name] != now:
                raise CommandError(
                    f"--output {output} holds answers of another job: the {name} of row {row['id']} is {now!r:.80}, "
                    f"and was {there[name]!r:.80}. Name another file, or move that one away."
                )


def summarize(records: Sequence[Row]) -> dict[str, Any]:
    answered = [record for record in records if record["error"] is None]
    sums = {name: sum(record[name] for record in answered) for name in NUMBERS if name != "prompt_tokens"}
    return {"rows": len(records), "answered": len(answered), "errors": len(records) - len(answered), **sums}


def write_parquet(records: Sequence[Row], path: Path) -> None:
    """Writes the records in this order, completely or not at all. Raises `CommandError` if that fails."""
    import pyarrow
    import pyarrow.parquet

    from stts_hf.checkpoints.atomic_folder import atomic_file

    kinds = dict.fromkeys(NUMBERS, pyarrow.int64()) | {"seconds": pyarrow.float64()}
    columns = {name: [record[name] for record in records] for name in records[0]}
    texts = {name: list(map(printable, values)) for name, values in columns.items() if name not in kinds}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    table = pyarrow.Table.from_pydict(columns | texts, schema=schema)
    wrong = f"--output {path} cannot be written, but {path.with_suffix('.jsonl')} has all answers; run this again: "
    with refused(wrong, OSError), atomic_file(path) as new:
        pyarrow.parquet.write_table(table, new)


def printable(value: Any) -> str | None:
    """Returns the value as text; undecodable bytes of file names become \\udcXX, as in JSON."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


def print_record(number: int, total: int, record: Row) -> None:
    print(f"\n[{number}/{total}] {printable(record['id'])}", flush=True)
    if record["error"] is not None:
        print_lines(error=one_line(ValueError(record["error"])))
        return
    damaged = f", {record['damaged_frames']} damaged" if record["damaged_frames"] else ""
    print_lines(
        prompt=record["prompt"],
        answer=record["answer"] or "(empty)",
        frames=f"{record['frames']}{damaged}",
        video_tokens=f"{record['video_tokens_kept']} of {record['video_tokens']} kept",
    )


def print_summary(summary: Row, done: int, seconds: float) -> None:
    """Prints the sums. done, seconds: of this run's rows."""
    total, kept = summary["video_tokens"], summary["video_tokens_kept"]
    print_lines(
        rows=f"{summary['rows']}: {summary['answered']} answered, {summary['errors']} with an error",
        frames=f"{summary['frames']}, {summary['damaged_frames']} of them damaged",
        video_tokens=f"{kept} of {total} kept" + (f" ({1 - kept / total:.1%} dropped)" if total else ""),
    )
    if done:
        print_lines(this_run=f"{done} rows in {seconds:.1f} s ({done / seconds:.3g} per second)")
