"""`stts-hf run VIDEO "question"`: answers a question about a video, shows what was dropped and what that saved."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli import answer_report as report
from stts_hf.cli import predict
from stts_hf.cli.checkpoint_options import find_checkpoint, load_model, load_processor
from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import add_model_options, check_scaling, choose_device, processing
from stts_hf.cli.progress import TokenBar, import_libraries, progress_bar, stage
from stts_hf.wording import percent

if TYPE_CHECKING:
    from stts_hf.inference.requests import Answer, Prepared

HELP = "answer a question about a video and draw the dropped tokens"
PICTURE = Path("contact_sheet.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "videos",
        metavar="VIDEO",
        nargs="+",
        help="video file, or an http(s) address with --allow-urls; for several videos see stts-hf predict",
    )
    parser.add_argument("question", metavar="QUESTION", help="question about the video")
    add_model_options(parser, max_new_tokens=64)
    parser.add_argument("--output", type=Path, metavar="PATH", help=f"picture to write (default: {PICTURE})")
    parser.add_argument(
        "--time",
        action="store_true",
        help="after the answer, time the prompt against the stock model and against no pruning",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status; raises `CommandError` for what the user got wrong."""
    check_arguments(arguments)
    if len(arguments.videos) > 1:
        return predict.execute(as_prediction(arguments))
    opened, path = open_video(arguments, arguments.videos[0]), arguments.output or PICTURE
    answer = generate(arguments, opened)
    report.print_lines(question=answer.question)
    report.print_answer(answer)
    with stage(f"Drawing {path}"):
        report.draw(answer, path)
    report.print_lines(picture=str(path))
    if arguments.time:
        from stts_hf.cli.stock_times import compare_with_stock, print_times, time_prompts
        from stts_hf.inference.generate import inputs_for

        inputs = inputs_for(opened.model, opened.prepared.inputs)
        print_times(time_prompts(compare_with_stock(opened.model, inputs, arguments.pruning_ratio)))
    return 0


@dataclasses.dataclass
class Opened:
    """A decoded request about a video, and the model to answer it."""

    checkpoint: str
    model: Any
    processor: Any
    prepared: "Prepared"


def open_video(arguments: argparse.Namespace, video: str) -> Opened:
    """
    Decodes the video, which an address is downloaded for once, and then loads the weights, which may take minutes.
    Raises `CommandError` for a checkpoint, device, video or question that is refused. Sets the default pruning ratio.
    """
    checkpoint = find_checkpoint(arguments.checkpoint)
    import_libraries()
    from stts_hf.inference.requests import ask_about, prepare, processing_options
    from stts_hf.video.sources import download, download_limits, is_url

    device = choose_device(arguments.device)
    config, processor = load_processor(checkpoint, arguments)
    if arguments.pruning_ratio is None:
        arguments.pruning_ratio = config.vision_config.pruning_ratio
        check_scaling(arguments)
    try:
        request = ask_about(processor, video, arguments.question)
        if is_url(video):
            with stage(f"Downloading {video}"):
                request = dataclasses.replace(request, videos=(download(video, *download_limits(processor)),))
        with stage(f"Decoding {video}"):
            options = processing_options(processor, processing(arguments), arguments.pruning_ratio)
            prepared = prepare(processor, options, request)
    except (ValueError, OSError) as error:
        raise CommandError(one_line(error)) from error
    with stage(f"Loading {checkpoint} on {device}"):
        model = load_model(checkpoint, config, device, arguments)
    return Opened(checkpoint, model, processor, prepared)


def generate(arguments: argparse.Namespace, opened: Opened, selector: str = "") -> "Answer":
    """The greedy answer. selector: named in the progress message."""
    from stts_hf.inference.generate import answer_prepared

    options = {name: getattr(arguments, name) for name in ("pruning_ratio", "max_new_tokens")}
    by = f" by {selector}" if selector else ""
    with (
        stage(f"Answering with {percent(arguments.pruning_ratio)} of the video tokens dropped{by}"),
        progress_bar(arguments.max_new_tokens, "token") as bar,
    ):
        options |= {"do_sample": False, "streamer": TokenBar(bar)}
        return answer_prepared(opened.model, opened.processor, [opened.prepared], **options)[0]


def as_prediction(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments of `stts-hf predict` that ask the same about several videos."""
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    defaults = vars(parser.parse_args([f"--prompt={arguments.question}", "--", *arguments.videos]))
    return argparse.Namespace(**defaults | vars(arguments))


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before anything slow happens."""
    check_videos(arguments.videos, arguments)
    if os.path.isfile(arguments.question):
        raise CommandError(f"QUESTION is missing after the videos: the last argument, {arguments.question}, is a file")
    if len(arguments.videos) == 1:
        report.check_picture(arguments.output or PICTURE)
    elif arguments.time or arguments.output is not None:
        raise CommandError("--time and --output are about one VIDEO; answers about several: stts-hf predict --output")


def check_videos(videos: Sequence[str], arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for a path that is no video file, an empty question, or scaling at a ratio of 1."""
    if problems := [f"{video} {trouble}" for video in videos if (trouble := trouble_of(video, arguments.allow_urls))]:
        raise CommandError(f"VIDEO {', '.join(problems)}; pass the path of a video file")
    if not arguments.question.strip():
        raise CommandError("the question is empty; ask something about the video")
    check_scaling(arguments)


def trouble_of(video: str, allow_urls: bool) -> str | None:
    """What keeps a path from being a video file; None where nothing does."""
    if os.path.isfile(video):
        return None
    from stts_hf.video.sources import is_url

    if is_url(video):
        return None if allow_urls else "is an address, which is downloaded only with --allow-urls"
    if os.path.isdir(video):
        return "is a folder"
    return "is no regular file, and a pipe cannot be searched" if os.path.exists(video) else "does not exist"
