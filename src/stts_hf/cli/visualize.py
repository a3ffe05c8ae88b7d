"""`stts-hf visualize VIDEO`: shows the blocks that each selector keeps, as pictures, videos and a web page."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.checkpoint_options import about_scorer
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import MODEL, add_options, check_writable, natural
from stts_hf.cli.progress import note, print_lines, stage
from stts_hf.cli.run import FRAME_SIDE, check_video, generate, open_video
from stts_hf.selectors import SELECTORS
from stts_hf.wording import shown_name

if TYPE_CHECKING:
    from stts_hf.benchmark.meters import Cost
    from stts_hf.inference.predictor import Predictor
    from stts_hf.inference.requests import Answer

QUESTION = "What happens in this video?"
PAGE = "report.html"
DPI = 160
WHOLE = "nothing dropped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("video", metavar="VIDEO", help="video file, or an http(s) address with --allow-urls")
    add_options(parser, *MODEL, "allow_urls")
    selectors = "selection methods to compare (default: all; without a trained scorer cosine and random)"
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, help=selectors)
    parser.add_argument("--question", default=QUESTION, help=f'question about the video (default: "{QUESTION}")')
    repeats = "timed prompts per selector; 0 measures nothing"
    add_options(parser, table={"repeats": (natural, 3, "N", repeats)})
    output = "new folder for report.html and its files; it is written completely or not at all"
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help=output)


def execute(arguments: argparse.Namespace) -> int:
    check_video(arguments.video, arguments.allow_urls)
    if os.path.lexists(arguments.output):
        raise CommandError(f"--output {arguments.output} is there already and is not written over; name another folder")
    check_writable("--output", arguments.output.parent)
    need_extras("Figures need one more", "visualize")
    # A stock checkpoint is refused if a learned selector is asked for, and loaded for the others.
    learned = (name for name in arguments.selectors or () if SELECTORS[name].is_learned)
    arguments.selector = next(learned, SELECTORS.of_kind(False)[0])
    predictor, prepared = open_video(arguments, arguments.video)
    from dataclasses import replace

    from stts_hf.checkpoints.atomic_folder import atomic_folder
    from stts_hf.keeping import KeepRule, in_words

    model, begun = predictor.model, prepared.begun
    selectors = choose_selectors(arguments, predictor)
    notes = about_scorer(arguments.checkpoint, selectors)
    if not arguments.selectors and not any(SELECTORS[name].is_learned for name in selectors):
        notes = ["The checkpoint has no trained scorer: only selectors without training are shown."]
        note(notes[0])
    answers = {WHOLE: generate(arguments, predictor, replace(prepared, rule=KeepRule(0.0)), WHOLE)}
    for name in selectors:
        model.config.vision_config.selector = name
        answers[name] = generate(arguments, predictor, prepared, f"{in_words(predictor.rule)} by {name}")
    times: dict[str, Cost] = {}
    if arguments.repeats:
        from stts_hf.cli.stock_times import time_prompts

        variants = {name: (predictor.rule, name) for name in selectors}
        times = time_prompts(model, prepared.inputs, variants, arguments.repeats)
    facts = {
        "video": Path(arguments.video).name,
        "checkpoint": shown_name(arguments.checkpoint),
        "dropped": in_words(predictor.rule).removesuffix(" dropped"),
        "frames": f"{begun.num_frames} of {begun.duration:.2f} s",
        "device": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
    }
    wrong = f"--output {arguments.output} is not written, and nothing of it is left: "
    with refused(wrong, OSError, ValueError), atomic_folder(arguments.output) as folder:
        write_files(folder, answers, times, facts, notes)
    print_findings(answers, times, arguments.output, model.num_parameters())
    return 0


def choose_selectors(arguments: argparse.Namespace, predictor: "Predictor") -> list[str]:
    """Returns the selectors to show, each once. Raises `CommandError` if a learned one is asked for and untrained."""
    from stts_hf.model_parts import is_scorer_trained
    from stts_hf.modeling.selectors_stts import SELECTORS as REGISTERED

    usable = list(SELECTORS) if is_scorer_trained(predictor.model) else SELECTORS.of_kind(False)
    if untrained := [name for name in arguments.selectors or () if name not in usable]:
        without = f"checkpoint {arguments.checkpoint} has no trained scorer"
        raise CommandError(f"--selectors {untrained[0]}: {without}; leave it out, or train it first (stts-hf train)")
    if arguments.selectors or predictor.rule.threshold is None:
        return list(dict.fromkeys(arguments.selectors or usable))
    return [name for name in usable if REGISTERED[name].levels is not None]


def write_files(
    folder: Path,
    answers: Mapping[str, "Answer"],
    times: Mapping[str, "Cost"],
    facts: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Writes all files. Raises `ValueError` if the video cannot be read again, and `OSError`."""
    import torch

    from stts_hf.cli.stock_times import STOCK
    from stts_hf.visualize.contact_sheet import contact_sheet
    from stts_hf.visualize.figures import comparison
    from stts_hf.visualize.frames import read_frames
    from stts_hf.visualize.html_report import write_report
    from stts_hf.visualize.overlay import write_overlays

    first = next(iter(answers.values()))
    pruned = {name: answer for name, answer in answers.items() if name != WHOLE}
    masks = {name: answer.keep_mask for name, answer in pruned.items() if answer.keep_mask is not None}
    scores = {name: answer.token_scores for name, answer in pruned.items() if answer.token_scores is not None}
    where: dict[str, Any] = {"grid": first.grid, "timestamps": first.timestamps, "tubelet": first.tubelet}
    with stage("Drawing contact sheets and figures"):
        frames = read_frames(first.video, first.timestamps, FRAME_SIDE)
        for name, mask in masks.items():
            title = f"{name}: {first.question}"
            note = " ".join(notes) if SELECTORS[name].is_learned else ""
            sheet = contact_sheet(frames, mask, token_scores=scores[name], title=title, note=note, **where)
            sheet.save(folder / f"contact_sheet.{name}.png")
        comparison(frames, masks, **where).savefig(folder / "comparison.png", dpi=DPI)
    with stage("Writing the video with its dropped blocks dimmed"):
        clip = folder / "clip.mp4"  # for the page: whole, and as small as the others
        overlays: dict[Any, Any] = {folder / f"overlay.{name}.mp4": mask for name, mask in masks.items()}
        write_overlays(first.video, overlays | {clip: torch.ones_like(masks[next(iter(masks))])}, **where)
    with stage("Writing the page"):
        given: dict[str, Any] = {"facts": facts, "costs": times, "notes": notes, "clip": clip.read_bytes()}
        write_report(folder / PAGE, frames, answers, baseline=times.get(STOCK), **given)
        clip.unlink()


def print_findings(
    answers: Mapping[str, "Answer"], times: Mapping[str, "Cost"], output: Path, num_parameters: int
) -> None:
    first = next(iter(answers.values()))
    print_lines(question=first.question)
    for name, answer in answers.items():
        kept, total = answer.video_tokens_kept, answer.video_tokens
        print_lines(**{name: f"{kept} of {total} video tokens kept; {answer.answer or '(empty)'}"})
    if times:
        from stts_hf.cli.stock_times import print_times

        print_times(times, num_parameters)
        print()
    print_lines(page=str(output / PAGE))
