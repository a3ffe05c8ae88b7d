"""`stts-hf visualize VIDEO`: what each selector keeps of a video, as pictures, videos and a page for the browser."""

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import CommandError, need_extras, one_line
from stts_hf.cli.options import add_model_options, check_writable, natural
from stts_hf.cli.progress import note, print_lines, stage
from stts_hf.cli.run import FRAME_SIDE, check_videos, generate, open_video
from stts_hf.selectors import LEARNED, SELECTORS, UNTRAINED
from stts_hf.shortages import is_disk_full
from stts_hf.wording import percent

if TYPE_CHECKING:
    from stts_hf.inference.requests import Answer

HELP = "compare what selection methods keep of a video: contact sheets, dimmed videos, a web page"
QUESTION = "What happens in this video?"
STOCK = "stock model"
PAGE = "report.html"
DPI = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("video", metavar="VIDEO", help="video file, or an http(s) address with --allow-urls")
    add_model_options(parser, max_new_tokens=64, selector=False)
    parser.add_argument(
        "--selectors",
        nargs="+",
        choices=SELECTORS,
        help="selection methods to compare (default: all; without a trained scorer cosine and random)",
    )
    parser.add_argument("--question", default=QUESTION, help=f'question about the video (default: "{QUESTION}")')
    parser.add_argument(
        "--repeats",
        type=natural,
        default=3,
        metavar="N",
        help="timed prompts per selector; 0 measures nothing (default: 3)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="new folder for report.html and its files; it is written completely or not at all",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command; raises `CommandError` for what the user got wrong, and for a full disk."""
    check_arguments(arguments)
    # A stock checkpoint is refused where a scorer is asked for, and loaded for those that need none where not.
    arguments.selector = next((name for name in arguments.selectors or () if name in LEARNED), UNTRAINED[0])
    predictor, prepared = open_video(arguments, arguments.video)
    from stts_hf.checkpoints.atomic_folder import atomic_folder

    model, checkpoint, begun = predictor.model, arguments.checkpoint, prepared.begun
    selectors, notes = usable_selectors(arguments.selectors, model, checkpoint)
    answers = {}
    for name in selectors:
        model.config.vision_config.selector = name
        answers[name] = generate(arguments, predictor, prepared, name)
    times = measure(selectors, model, prepared.inputs, arguments) if arguments.repeats else {}
    facts = {
        "video": Path(arguments.video).name,
        "checkpoint": checkpoint,
        "dropped": percent(arguments.pruning_ratio),
        "frames": f"{begun.num_frames} of {begun.duration:.2f} s",
        "device": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
    }
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the unfinished folder goes with it
    try:
        with atomic_folder(arguments.output) as folder:
            write_files(folder, answers, times, facts, notes)
    except (OSError, ValueError) as error:
        why = "no space is left on the disk" if is_disk_full(error) else one_line(error, 200)
        raise CommandError(f"--output {arguments.output} is not written, and nothing of it is left: {why}") from error
    finally:
        signal.signal(signal.SIGTERM, before)
    print_findings(answers, times, arguments.output)
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before anything slow happens."""
    check_videos([arguments.video], arguments)
    if os.path.lexists(arguments.output):
        raise CommandError(f"--output {arguments.output} is there already and is not written over; name another folder")
    check_writable("--output", arguments.output.parent)
    need_extras("Figures need one more", "visualize")


def usable_selectors(asked: Sequence[str] | None, model: Any, checkpoint: str) -> tuple[list[str], list[str]]:
    """
    The selectors to show, each once, and what to say of those that are not. Raises `CommandError` where a scorer is
    asked for that was never trained.
    """
    from stts_hf.model_parts import is_scorer_trained

    is_trained = is_scorer_trained(model)
    without = f"checkpoint {checkpoint} has no trained scorer"
    if asked is not None:
        learned = [name for name in asked if name in LEARNED]
        if learned and not is_trained:
            raise CommandError(f"--selectors {learned[0]}: {without}; leave it out, or train it first (stts-hf train)")
        return list(dict.fromkeys(asked)), []
    if is_trained:
        return list(SELECTORS), []
    note(f"The {without}: showing {' and '.join(UNTRAINED)} only")
    return UNTRAINED, [f"The {without}, so there are only selectors that need no training."]


def measure(
    selectors: Sequence[str], model: Any, inputs: Mapping[str, Any], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the prompt's times in milliseconds, of the stock model and of each selector, as `time_prompts` does."""
    from stts_hf.benchmark.models import stock_twin
    from stts_hf.cli.stock_times import time_prompts
    from stts_hf.inference.generate import inputs_for

    given = inputs_for(model, inputs)
    pruned = given | {"pruning_ratio": arguments.pruning_ratio}
    variants = {STOCK: (stock_twin(model), given)} | dict.fromkeys(selectors, (model, pruned))

    def choose(name: str) -> None:
        if name != STOCK:
            model.config.vision_config.selector = name

    return time_prompts(variants, arguments.repeats, choose)


def write_files(
    folder: Path,
    answers: Mapping[str, "Answer"],
    times: Mapping[str, list[float]],
    facts: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Draws and writes everything. Raises `ValueError` where the video cannot be read again, and `OSError`."""
    import torch

    from stts_hf.cli.stock_times import COLUMNS
    from stts_hf.visualize.contact_sheet import contact_sheet
    from stts_hf.visualize.figures import comparison
    from stts_hf.visualize.frames import read_frames
    from stts_hf.visualize.html_report import Column, write_report
    from stts_hf.visualize.overlay import write_overlays

    first = next(iter(answers.values()))
    masks = {name: answer.keep_mask for name, answer in answers.items() if answer.keep_mask is not None}
    scores = {name: answer.token_scores for name, answer in answers.items() if answer.token_scores is not None}
    where: dict[str, Any] = {"grid": first.grid, "timestamps": first.timestamps, "tubelet": first.tubelet}
    with stage("Drawing contact sheets and figures"):
        frames = read_frames(first.video, first.timestamps, FRAME_SIDE)
        for name, mask in masks.items():
            title = f"{name}: {first.question}"
            sheet = contact_sheet(frames, mask, token_scores=scores[name], title=title, **where)
            sheet.save(folder / f"contact_sheet.{name}.png")
        comparison(frames, masks, **where).savefig(folder / "comparison.png", dpi=DPI)
    with stage("Writing the video with its dropped blocks dimmed"):
        clip = folder / "clip.mp4"  # for the page: whole, and as small as the others
        overlays: dict[Any, Any] = {folder / f"overlay.{name}.mp4": mask for name, mask in masks.items()}
        write_overlays(first.video, overlays | {clip: torch.ones_like(masks[next(iter(masks))])}, **where)
    with stage("Writing the page"):
        milliseconds = {name: dict(zip(COLUMNS, found, strict=True)) for name, found in times.items()}
        write_report(
            folder / PAGE,
            frames,
            {name: Column(answer, milliseconds.get(name, {})) for name, answer in answers.items()},
            facts=facts,
            baseline=milliseconds.get(STOCK),
            notes=notes,
            clip=clip.read_bytes(),
        )
        clip.unlink()


def print_findings(answers: Mapping[str, "Answer"], times: Mapping[str, list[float]], output: Path) -> None:
    """Prints what was found, and where it was written."""
    first = next(iter(answers.values()))
    print_lines(question=first.question)
    for name, answer in answers.items():
        kept, total = answer.video_tokens_kept, answer.video_tokens
        print_lines(**{name: f"{kept} of {total} video tokens kept; {answer.answer or '(empty)'}"})
    if times:
        from stts_hf.cli.stock_times import print_times

        print_times(times)
        print()
    print_lines(page=str(output / PAGE))
