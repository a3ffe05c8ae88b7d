"""`stts-hf run VIDEO... "question"`: answers a question about videos, shows what was dropped and what that saved."""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.checkpoints import find_checkpoint, load_model, load_processor
from stts_hf.cli.devices import choose_device
from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.pictures import draw, sheet_paths
from stts_hf.cli.progress import TokenBar, note, stage
from stts_hf.cli.report import (
    Tally,
    answers_exist,
    answers_file,
    print_answer,
    print_heading,
    print_lines,
    print_times,
)

if TYPE_CHECKING:
    from stts_hf.inference.answering import VideoAnswer

HELP = "answer a question about a video, or about each of several, and draw which video tokens were dropped"
SELECTORS = ("scorer", "cosine", "random")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "videos",
        metavar="VIDEO",
        nargs="+",
        help="path of a video file; of several, the next is decoded while the model answers about this one",
    )
    parser.add_argument("question", metavar="QUESTION", help="what to ask about it, or about each of them")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH_OR_REPO",
        help="folder or Hub repository of an STTS checkpoint; its own code runs (trust_remote_code). "
        "Default: stts-tiny of a source checkout, a model for tests",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--pruning-ratio", type=float, metavar="K", help="share of video tokens to drop, 0 to 1")
    parser.add_argument("--selector", choices=SELECTORS, help="what ranks the tokens; default: the checkpoint's")
    parser.add_argument("--num-frames", type=int, metavar="N", help="most frames to look at; default: the checkpoint's")
    parser.add_argument(
        "--test-time-scaling", action="store_true", help="look at 1 / (1 - K) times as many frames for the same tokens"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="a new file for the answers: one JSON object per video"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="where to write the picture (default: contact_sheet.png); with several videos a folder, which is made if "
        "needed, for one picture each (default: no pictures)",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"timed passes per variant, against stock Molmo2; 0: no timing. For one video only (default: {REPEATS})",
    )


def execute(arguments: argparse.Namespace) -> int:
    """
    Runs the command; raises `CommandError` for what the user got wrong. Returns 1 where some of several videos could
    not be read, else 0.
    """
    check_arguments(arguments)
    checkpoint = find_checkpoint(arguments.checkpoint)
    with stage("Loading PyTorch and transformers"):
        import torch  # noqa: F401

    device = choose_device(arguments.device)
    config, processor = load_processor(checkpoint, arguments)
    check_question(processor, arguments.question)
    if len(arguments.videos) == 1:
        return answer_one(arguments, checkpoint, config, processor, device)
    return answer_several(arguments, checkpoint, config, processor, device)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses, before anything slow happens, what can be refused by then."""
    problems = [f"{video} {trouble}" for video in arguments.videos if (trouble := trouble_of(video))]
    if problems:
        raise CommandError(f"VIDEO {', '.join(problems)}; pass the path of a video file")
    if os.path.isfile(arguments.question):
        raise CommandError(f"QUESTION is missing after the videos: the last argument, {arguments.question}, is a file")
    ratio = arguments.pruning_ratio
    if ratio is not None and not 0 <= ratio <= 1:  # NaN fails too
        raise CommandError(f"--pruning-ratio is {ratio}, but must be from 0 (drop nothing) to 1 (drop all)")
    if arguments.test_time_scaling and ratio == 1:
        raise CommandError("--test-time-scaling needs a --pruning-ratio below 1: at 1 no number of frames is enough")
    for name, least in (("num_frames", 1), ("max_new_tokens", 1), ("repeats", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise CommandError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
    if not arguments.question.strip():
        raise CommandError("QUESTION is empty; ask something about the video")
    if arguments.answers is not None:
        check_answers(arguments.answers)
    if len(arguments.videos) == 1:
        check_picture(picture_path(arguments))
        return
    if arguments.repeats:
        raise CommandError("--repeats compares times on one video; leave it out, or pass one VIDEO")
    if arguments.output is not None:
        check_pictures(arguments.output, arguments.videos)


def trouble_of(video: str) -> str | None:
    """What keeps a path from being a video file; None where nothing does."""
    if os.path.isfile(video):
        return None
    if os.path.isdir(video):
        return "is a folder"
    return "is no regular file, and a pipe cannot be searched" if os.path.exists(video) else "does not exist"


def check_question(processor: Any, question: str) -> None:
    from stts_hf.inference import answering

    try:
        answering.check_question(processor, question)
    except ValueError as error:
        raise CommandError(one_line(error)) from error


def check_answers(path: Path) -> None:
    if os.path.lexists(path):
        raise CommandError(answers_exist(path))
    check_folder("--answers", path)


def check_picture(path: Path) -> None:
    if path.suffix.lower() not in PICTURES:
        raise CommandError(f"--output {path} must end in .png, .jpg or .webp")
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise CommandError(f"--output {path} is there already and cannot be written over; name another file")
    check_folder("--output", path)


def check_folder(option: str, path: Path) -> None:
    folder = path.resolve().parent
    if not folder.is_dir():
        raise CommandError(f"{option} {path} lies in a folder that does not exist; create {folder} first")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {path} cannot be written: no permission in {folder}")


def check_pictures(folder: Path, videos: list[str]) -> None:
    if folder.suffix.lower() in PICTURES or (folder.exists() and not folder.is_dir()):
        raise CommandError(f"--output {folder} must name a folder where there are several videos: one picture for each")
    existing = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    if not existing.is_dir():
        raise CommandError(f"--output {folder} cannot be made: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise CommandError(f"--output {folder} cannot be written: no permission in {existing}")
    there = [path.name for path in sheet_paths(folder, videos) if os.path.lexists(path)]
    if there:
        raise CommandError(
            f"--output {folder} holds {', '.join(there)} already, which is not written over; name another folder, or "
            "move the pictures away"
        )


def picture_path(arguments: argparse.Namespace) -> Path:
    return Path("contact_sheet.png") if arguments.output is None else arguments.output


def answer_one(arguments: argparse.Namespace, checkpoint: str, config: Any, processor: Any, device: Any) -> int:
    """Answers about one video, times it against stock Molmo2 and draws it."""
    from stts_hf.inference.answering import VideoAnswer, answer_prepared, inputs_for, prepare_video
    from stts_hf.inference.prefetch import PreparationError

    (video,) = arguments.videos
    ratio = ratio_of(arguments, config)
    with answers_file(arguments.answers) as write:
        # Before the weights, which may take minutes: a file that cannot be read says so now.
        with stage(f"Decoding {video}"):
            try:
                prepared = prepare_video(
                    processor, video, arguments.question, pruning_ratio=ratio, processing=processing(arguments)
                )
            except (ValueError, OSError) as error:
                write(VideoAnswer(video, arguments.question, error=PreparationError(video, error)))
                raise CommandError(one_line(error)) from error
        with stage(f"Loading {checkpoint} on {device}"):
            model = load_model(checkpoint, config, device, arguments)
        with (
            stage(f"Answering with {ratio:.0%} of the video tokens dropped"),
            TokenBar(arguments.max_new_tokens) as bar,
        ):
            answer = answer_prepared(
                model, processor, prepared, pruning_ratio=ratio, streamer=bar, **generation(arguments)
            )
        write(answer)
    repeats = REPEATS if arguments.repeats is None else arguments.repeats
    times = measure(model, inputs_for(model, prepared.inputs), ratio, repeats) if repeats else {}
    path = picture_path(arguments)
    with stage(f"Drawing {path}"):
        draw(answer, path)
    print_answer(answer)
    if times:
        print_times(times)
    print(f"\ncontact sheet: {path}")
    return 0


def answer_several(arguments: argparse.Namespace, checkpoint: str, config: Any, processor: Any, device: Any) -> int:
    """Answers about one video after the other; each answer comes, and is written, as soon as it is there."""
    from stts_hf.inference.answering import answer_videos

    videos, folder, total = arguments.videos, arguments.output, len(arguments.videos)
    sheets = [] if folder is None else sheet_paths(folder, videos)
    with stage(f"Loading {checkpoint} on {device}"):
        model = load_model(checkpoint, config, device, arguments)
    ratio = ratio_of(arguments, config)
    note(f"Answering about {total} videos with {ratio:.0%} of the video tokens dropped ...")
    tally = Tally()
    with answers_file(arguments.answers) as write, TokenBar(arguments.max_new_tokens) as bar:
        answers = answer_videos(
            model,
            processor,
            videos,
            arguments.question,
            pruning_ratio=ratio,
            processing=processing(arguments),
            on_error="return",
            streamer=bar,
            **generation(arguments),
        )
        print_lines([("question", arguments.question)])
        try:
            with contextlib.closing(answers):
                for number, answer in enumerate(answers):
                    write(answer)
                    tally.add(answer)
                    print_heading(number + 1, total, videos[number])
                    print_answer(answer, with_question=False)
                    if folder is not None and answer.error is None:
                        draw_into(folder, answer, sheets[number])
        except KeyboardInterrupt:
            note(f"\n{tally.answered + tally.failed} of {total} videos were done")
            raise
    tally.print()
    if tally.failed:
        print(f"stts-hf run: error: {tally.failed} of {total} videos could not be read", file=sys.stderr)
    return 1 if tally.failed else 0


def draw_into(folder: Path, answer: "VideoAnswer", path: Path) -> None:
    """Draws an answer into a folder, which is made if needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--output {folder} cannot be made: {one_line(error, 120)}") from error
    draw(answer, path)
    print_lines([("picture", str(path))])


def ratio_of(arguments: argparse.Namespace, config: Any) -> float:
    return config.vision_config.pruning_ratio if arguments.pruning_ratio is None else arguments.pruning_ratio


def processing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the processor."""
    options: dict[str, Any] = {} if arguments.num_frames is None else {"num_frames": arguments.num_frames}
    return options | ({"test_time_scaling": True} if arguments.test_time_scaling else {})


def generation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate`: the greedy answer."""
    return {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}


def measure(model: Any, inputs: Any, ratio: float, repeats: int) -> dict[str, Any]:
    """Returns the prompt's times with stock Molmo2, with nothing dropped and with `ratio` dropped."""
    from tqdm import tqdm

    from stts_hf.benchmark.stock import stock_twin
    from stts_hf.cli.timing import time_prefills

    variants = {
        "stock Molmo2": (stock_twin(model), dict(inputs)),
        "STTS, none dropped": (model, {**inputs, "pruning_ratio": 0.0}),
    }
    if ratio > 0:
        variants[f"STTS, {ratio:.0%} dropped"] = (model, {**inputs, "pruning_ratio": ratio})
    passes = len(variants) * (repeats + 1)
    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        tqdm(total=passes, desc="  Timing", unit="pass", leave=False, file=sys.stderr) as bar,
    ):
        return time_prefills(variants, repeats, on_pass=bar.update)
