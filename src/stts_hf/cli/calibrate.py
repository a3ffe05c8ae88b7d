"""`stts-hf calibrate CHECKPOINT INPUT... --keep 0.2`: finds the score threshold that keeps a share of your videos."""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.answer_options import Engine, answer_left, open_output, print_problems, workers_of
from stts_hf.cli.checkpoint_options import load_weights, open_checkpoint
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import DECODING, RUNNING, add_options, check_output, check_writable, processing, share
from stts_hf.cli.predict import add_input_options, check_urls, find_rows
from stts_hf.cli.progress import note, print_lines
from stts_hf.selectors import SELECTORS

if TYPE_CHECKING:
    from stts_hf.inference.calibration import Calibration
    from stts_hf.inference.predictor import Predictor

SCORES = Path("calibration.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or Hub repository; its code is not executed")
    add_input_options(parser)
    parser.add_argument("--keep", type=share, required=True, metavar="K", help="share of video tokens to keep, 0 to 1")
    mean = "mean over videos, each the same (default), or over tokens, where long videos count more"
    parser.add_argument("--mean", choices=("videos", "tokens"), default="videos", help=mean)
    add_options(parser, "min_pruning_ratio", "max_pruning_ratio")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", action="store_true", help="write the threshold into the config.json of CHECKPOINT")
    target.add_argument("--output", type=Path, metavar="FOLDER", help="new folder for a copy with the threshold")
    scores = f"file of the scores, continued if it exists, with a picture beside it (default: {SCORES})"
    parser.add_argument("--scores", type=Path, default=SCORES, metavar="FILE.jsonl", help=scores)
    add_options(parser, *RUNNING, "selector", "allow_urls", *DECODING)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if some videos have an error; raises `CommandError` for a user error."""
    check_arguments(arguments)
    rows = find_rows(arguments, arguments.scores, prompt="?")
    names = [(row.get("media_root"), row["video"] if isinstance(row["video"], str) else row["id"]) for row in rows]
    rows = [*dict(zip(names, rows, strict=True)).values()]  # one of those about a video
    predictor = open_checkpoint(arguments, num_workers=workers_of(arguments), batch_size=1, score_threshold=0.0)
    from dataclasses import replace

    from stts_hf.inference.calibration import Calibration
    from stts_hf.keeping import rule_arguments

    records = score(arguments, predictor, rows)
    scored = [record for record in records if record["error"] is None]
    if not scored:
        raise CommandError(f"no video can be scored: {records[0]['error']}")
    calibration = Calibration(scored, predictor.rule)
    with refused(f"--keep {arguments.keep:g} "):
        threshold = calibration.find_threshold(arguments.keep, arguments.mean)
    print_findings(calibration, threshold, [record["duration"] for record in scored], arguments.scores)
    settings = rule_arguments(replace(predictor.rule, threshold=threshold))
    write(arguments, settings | {"selector": predictor.config.vision_config.selector})
    return print_problems(records, "calibrate")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for what is wrong before anything slow happens."""
    check_urls(arguments)
    check_output(arguments.scores, arguments.inputs, (".jsonl",), "--scores")
    config = Path(arguments.checkpoint, "config.json").expanduser()
    if arguments.write and (not config.is_file() or config.is_symlink()):
        raise CommandError(f"--write needs a folder with a config.json of its own, not {config.parent}; use --output")
    if arguments.output is not None:
        check_writable("--output", arguments.output.parent)
        if os.path.lexists(arguments.output):
            raise CommandError(f"--output {arguments.output} is there already and is not written over; name another")


def score(arguments: argparse.Namespace, predictor: "Predictor", rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns a record of each row, of the file of scores where it holds one of the same video."""
    from stts_hf.checkpoints.files import digest_files
    from stts_hf.inference.calibration import COLUMNS, mark_of, score_rows
    from stts_hf.model_parts import is_scorer_trained

    vision, folder = predictor.config.vision_config, Path(arguments.checkpoint)

    def start(_: object) -> Engine:
        model = load_weights(arguments, predictor)
        if SELECTORS[vision.selector].is_learned and not is_scorer_trained(model):
            raise CommandError(f"CHECKPOINT {folder} has an untrained scorer; train it, or pass --selector cosine")
        return model.device, functools.partial(score_rows, model, predictor.processor, **predictor.options)

    files = [*folder.glob("*.safetensors"), *folder.glob("*processor_config.json")]  # a new threshold changes no score
    weights = digest_files(sorted(files)) if files else [str(folder), getattr(predictor.config, "_commit_hash", None)]
    settings = {"weights": weights, "dtype": arguments.dtype, "processing": processing(arguments)}
    settings |= {"selector": vision.selector, "pruning_layer": vision.pruning_layer}
    with open_output(arguments.scores, settings, columns=COLUMNS, option="--scores") as (records, write, finish):
        marks = {name: record["mark"] for name, record in records.items()}
        done = {row["id"]: row for row in rows if row["id"] in marks and marks[row["id"]] == mark_of(row)}
        answer_left(arguments.scores, rows, done, start, write, f"Scoring by {vision.selector}")
        finish({"videos": len(rows)})
        return [records[row["id"]] for row in rows]


def print_findings(calibration: "Calibration", threshold: float, seconds: Sequence[float | None], scores: Path) -> None:
    """Prints and draws what a threshold keeps of videos, which last so long."""
    import numpy as np

    kept, lasts = calibration.num_kept(threshold), np.array([duration or np.nan for duration in seconds])
    shares, per_second = kept / calibration.sizes, kept / lasts
    error = 1.96 * shares.std(ddof=1) / len(shares) ** 0.5 if len(shares) > 1 else np.nan
    of_tokens = f"{calibration.share(threshold, 'tokens'):.1%} of all tokens"
    print_lines(threshold=f"{threshold:.6g}, by {len(kept)} videos")
    print_lines(kept=f"{shares.mean():.1%} +- {error:.1%} on average over such videos; {of_tokens} here")
    for what, found, form in (("per video", shares, "{:.1%}"), ("per second", per_second, "{:.1f} tokens")):
        numbers = map(form.format, np.nanquantile(found, (0, 1, 0.25, 0.5, 0.75)))
        print_lines(**{what: "{} to {}, quartiles {}, {}, {}".format(*numbers)})
    try:
        need_extras("The picture needs one more", "visualize")
    except CommandError as missing:
        return note(f"No picture: {missing}")
    from stts_hf.checkpoints.atomic_folder import atomic_file
    from stts_hf.visualize.figures import distribution

    levels = np.quantile(np.concatenate(calibration.scores), np.linspace(0, 1, 100))
    curve, path = [calibration.share(level) for level in levels], scores.with_suffix(".png")
    with refused(f"{path} cannot be written: ", OSError), atomic_file(path) as new:
        distribution(shares, per_second, levels, curve, threshold).savefig(new)
    print_lines(picture=str(path))


def write(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Writes the settings into the checkpoint or a copy, or prints how to pass them."""
    import json

    from stts_hf.checkpoints.atomic_folder import atomic_file
    from stts_hf.checkpoints.convert import convert_checkpoint
    from stts_hf.checkpoints.families import own_family
    from stts_hf.checkpoints.files import read_json
    from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS

    if arguments.output is not None:
        with refused("--output ", ValueError, FileExistsError):
            convert_checkpoint(arguments.checkpoint, arguments.output, revision=arguments.revision, **settings)
        print_lines(written=str(arguments.output))
    elif arguments.write:
        path = Path(arguments.checkpoint).expanduser() / "config.json"
        with refused("--write: ", ValueError, OSError):
            own_family(path.parent)
            config = read_json(path)
            config["vision_config"] |= settings
            generation = path.with_name("generation_config.json")
            saved = read_json(generation)
            without = {name: value for name, value in saved.items() if name not in KEEP_ARGUMENTS}
            changed = {path: config} if without == saved else {generation: without, path: config}  # it would outrank
            for file, contents in changed.items():
                with atomic_file(file) as new:
                    new.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        print_lines(written=str(path))
    else:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        print_lines(options=" ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items()))
        print_lines(in_python=f"stts_hf.load({arguments.checkpoint!r}, {given})")
