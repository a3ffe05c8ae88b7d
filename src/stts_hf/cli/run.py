"""`stts-hf run VIDEO... "question"`: answers a question about videos, shows what was dropped and what that saved."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stts_hf.cli import report
from stts_hf.cli.checkpoints import find_checkpoint, load_model, load_processor
from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import (
    add_device_options,
    add_model_options,
    add_selector_option,
    add_url_option,
    check_scaling,
    choose_device,
    count,
    processing,
)
from stts_hf.cli.progress import TokenBar, import_libraries, note, progress_bar, stage

HELP = "answer a question about a video, or about each of several, and draw which video tokens were dropped"
PICTURE = Path("contact_sheet.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "videos",
        metavar="VIDEO",
        nargs="+",
        help="path of a video file, or with --allow-urls its address; of several, the next is decoded while the model "
        "answers about this one",
    )
    parser.add_argument("question", metavar="QUESTION", help="what to ask about it, or about each of them")
    add_model_options(parser)
    add_selector_option(parser)
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="longest answer (default: 64)")
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
    add_device_options(parser)
    add_url_option(parser)
    parser.add_argument(
        "--time",
        action="store_true",
        help="compare the times of one video's prompt with the stock model and with nothing dropped, after the answer",
    )


def execute(arguments: argparse.Namespace) -> int:
    """
    Runs the command; raises `CommandError` for what the user got wrong. Returns 1 where some of several videos could
    not be read, else 0.
    """
    check_arguments(arguments)
    checkpoint = find_checkpoint(arguments.checkpoint)
    import_libraries()
    from stts_hf.inference.answering import check_question

    device = choose_device(arguments.device)
    config, processor = load_processor(checkpoint, arguments)
    try:
        check_question(processor, arguments.question)
    except ValueError as error:
        raise CommandError(one_line(error)) from error
    if arguments.pruning_ratio is None:
        arguments.pruning_ratio = config.vision_config.pruning_ratio

    def load() -> Any:
        with stage(f"Loading {checkpoint} on {device}"):
            return load_model(checkpoint, config, device, arguments)

    answer = answer_one if len(arguments.videos) == 1 else answer_several
    return answer(arguments, processor, load)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before anything slow happens."""
    problems = [
        f"{video} {trouble}" for video in arguments.videos if (trouble := trouble_of(video, arguments.allow_urls))
    ]
    if problems:
        raise CommandError(f"VIDEO {', '.join(problems)}; pass the path of a video file")
    if os.path.isfile(arguments.question):
        raise CommandError(f"QUESTION is missing after the videos: the last argument, {arguments.question}, is a file")
    if not arguments.question.strip():
        raise CommandError("QUESTION is empty; ask something about the video")
    check_scaling(arguments)
    if arguments.answers is not None:
        report.check_answers(arguments.answers)
    if len(arguments.videos) == 1:
        report.check_picture(arguments.output or PICTURE)
    elif arguments.time:
        raise CommandError("--time compares times on one video; leave it out, or pass one VIDEO")
    elif arguments.output is not None:
        report.check_pictures(arguments.output, arguments.videos)


def trouble_of(video: str, allow_urls: bool) -> str | None:
    """What keeps a path from being a video file; None where nothing does."""
    if os.path.isfile(video):
        return None
    if video.lower().startswith(("http://", "https://")):
        return None if allow_urls else "is an address, which is downloaded only with --allow-urls"
    if os.path.isdir(video):
        return "is a folder"
    return "is no regular file, and a pipe cannot be searched" if os.path.exists(video) else "does not exist"


def answer_one(arguments: argparse.Namespace, processor: Any, load: Callable[[], Any]) -> int:
    """Answers about one video, draws it, and times it against the stock model where that is asked for."""
    from stts_hf.inference.answering import VideoAnswer, answer_prepared, inputs_for, prepare_video

    (video,), question, ratio = arguments.videos, arguments.question, arguments.pruning_ratio
    path = arguments.output or PICTURE
    with report.answers_file(arguments.answers) as write:
        # Before the weights, which may take minutes: a file that cannot be read says so now.
        with stage(f"Decoding {video}"):
            try:
                begun, inputs = prepare_video(
                    processor, video, question, pruning_ratio=ratio, processing=processing(arguments)
                )
            except (ValueError, OSError) as error:
                write(VideoAnswer(video, question, error=error))
                raise CommandError(one_line(error)) from error
        model = load()
        with (
            stage(f"Answering with {ratio:.0%} of the video tokens dropped"),
            progress_bar(arguments.max_new_tokens, "token") as bar,
        ):
            options = {"streamer": TokenBar(bar), **generation(arguments)}
            (answer,) = answer_prepared(model, processor, [(begun, inputs)], **options)
        report.print_lines(question=question)
        report.print_answer(answer)
        write(answer)
    with stage(f"Drawing {path}"):
        report.draw(answer, path)
    report.print_lines(picture=str(path))
    if arguments.time:
        from stts_hf.cli.timing import compare_with_stock, print_times, time_prompts

        variants = compare_with_stock(model, inputs_for(model, inputs), ratio)
        print_times(time_prompts(variants))
    return 0


def answer_several(arguments: argparse.Namespace, processor: Any, load: Callable[[], Any]) -> int:
    """Answers about one video after the other; each answer comes, and is written, as soon as it is there."""
    from stts_hf.inference.answering import answer_videos

    videos, total = arguments.videos, len(arguments.videos)
    sheets = report.sheet_paths(arguments.output, videos) if arguments.output else [None] * total
    model = load()
    note(f"Answering about {total} videos with {arguments.pruning_ratio:.0%} of the video tokens dropped ...")
    report.print_lines(question=arguments.question)
    started, waits, frames, failed = time.perf_counter(), list[float](), 0, 0
    with report.answers_file(arguments.answers) as write, progress_bar(arguments.max_new_tokens, "token") as bar:
        answers = answer_videos(
            model,
            processor,
            videos,
            arguments.question,
            processing=processing(arguments),
            on_error="return",
            streamer=TokenBar(bar),
            **generation(arguments),
        )
        try:
            with contextlib.closing(answers):
                for answer, sheet in zip(answers, sheets, strict=True):
                    write(answer)
                    waits.append(answer.seconds_waited)
                    frames += answer.num_frames
                    failed += answer.error is not None
                    report.print_heading(len(waits), total, answer.video)
                    report.print_answer(answer)
                    if sheet is not None and answer.error is None:
                        try:
                            report.draw(answer, sheet)
                            report.print_lines(picture=str(sheet))
                        except CommandError as error:  # the other videos still have their answers
                            note(str(error))
                            failed += 1
        except KeyboardInterrupt:
            note(f"\n{len(waits)} of {total} videos were done")
            raise
    report.print_summary(waits, frames, failed, time.perf_counter() - started)
    if failed:
        note(f"stts-hf run: error: {failed} of {total} videos could not be read")
    return 1 if failed else 0


def generation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate`: the greedy answer."""
    return {
        "pruning_ratio": arguments.pruning_ratio,
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": False,
    }
