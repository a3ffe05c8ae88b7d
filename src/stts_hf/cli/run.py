"""`stts-hf run VIDEO "question"`: answers a question about a video and draws the dropped blocks."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stts_hf.cli.checkpoint_options import about_scorer, load_weights, open_checkpoint
from stts_hf.cli.errors import CommandError, refused
from stts_hf.cli.options import FORMATS, MODEL, add_options, check_output, is_url, processing
from stts_hf.cli.progress import print_lines, progress_bar, stage

if TYPE_CHECKING:
    from stts_hf.inference.predictor import Predictor
    from stts_hf.inference.requests import Answer, Prepared

PICTURE = Path("contact_sheet.png")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
FRAME_SIDE = 480  # pixels of a frame in pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    videos = "video file, or an http(s) address with --allow-urls; for several videos see stts-hf predict"
    parser.add_argument("videos", metavar="VIDEO", nargs="+", help=videos)
    parser.add_argument("question", metavar="QUESTION", help="question about the video")
    add_options(parser, *MODEL, "selector", "allow_urls")
    parser.add_argument("--output", type=Path, metavar="PATH", help=f"picture to write (default: {PICTURE})")
    time = "after the answer, time the prompt against the stock model and against no pruning"
    parser.add_argument("--time", action="store_true", help=time)


def execute(arguments: argparse.Namespace) -> int:
    check_arguments(arguments)
    if len(arguments.videos) > 1:
        from stts_hf.cli import predict

        parser = argparse.ArgumentParser()
        predict.add_arguments(parser)
        asked = parser.parse_args([f"--prompt={arguments.question}", "--", *arguments.videos])
        return predict.execute(argparse.Namespace(**vars(asked) | vars(arguments)))
    predictor, prepared = open_video(arguments, arguments.videos[0])
    from stts_hf.keeping import KeepRule, in_words

    path, selector = arguments.output or PICTURE, predictor.model.config.vision_config.selector
    answer = generate(arguments, predictor, prepared, in_words(predictor.rule))
    print_answer(answer)
    with stage(f"Drawing {path}"):
        draw(answer, path, *about_scorer(arguments.checkpoint, [selector]))
    print_lines(picture=str(path))
    if arguments.time:
        from stts_hf.cli.stock_times import print_times, time_prompts

        variants = {"STTS, none dropped": (KeepRule(0.0), selector)}
        if predictor.rule.ratio != 0:
            variants[f"STTS, {in_words(predictor.rule)}"] = (predictor.rule, selector)
        print_times(time_prompts(predictor.model, prepared.inputs, variants), predictor.model.num_parameters())
    return 0


def open_video(arguments: argparse.Namespace, video: str) -> tuple["Predictor", "Prepared"]:
    """Decodes the video, then loads the weights, which may take minutes; raises `CommandError` for what is refused."""
    predictor = open_checkpoint(arguments)
    from dataclasses import replace

    from stts_hf.inference.generate import fill_budget
    from stts_hf.inference.requests import ask_about, prepare
    from stts_hf.video.sources import download, download_limits

    processor = predictor.processor
    with refused("", ValueError, OSError):
        request = replace(ask_about(processor, video, arguments.question), rule=predictor.rule)
        if is_url(video):
            with stage(f"Downloading {video}"):
                request = replace(request, videos=(download(video, *download_limits(processor)),))
        with stage(f"Decoding {video}"):
            prepared = prepare(processor, processing(arguments), request)
    load_weights(arguments, predictor)
    with refused("", ValueError, OSError):
        return predictor, fill_budget(predictor.model, processor, processing(arguments), prepared)


def generate(arguments: argparse.Namespace, predictor: "Predictor", prepared: "Prepared", how: str) -> "Answer":
    """Returns the greedy answer. how: for the progress message."""
    from stts_hf.inference.generate import answer_prepared

    with stage(f"Answering, {how}"), progress_bar(arguments.max_new_tokens, "token") as bar, refused():
        # Gets the prompt (1, L) first, then each token of the answer.
        streamer = SimpleNamespace(put=lambda value: bar.update(value.dim() == 1), end=lambda: None)
        options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, **prepared.arguments([prepared])}
        return answer_prepared(predictor.model, predictor.processor, [prepared], streamer=streamer, **options)[0]


def print_answer(answer: "Answer") -> None:
    print_lines(question=answer.question)
    if answer.damaged_frames:
        print_lines(damaged=f"{answer.damaged_frames} frames; the whole frame before each is shown instead, once")
    total, kept = answer.video_tokens, answer.video_tokens_kept
    first, last = answer.timestamps[0], answer.timestamps[-1]
    print_lines(
        answer=answer.answer or "(empty)",
        frames=f"{answer.num_frames} sampled from {first:.2f} s to {last:.2f} s of a video of {answer.duration:.2f} s",
        video_tokens=f"{kept} of {total} kept ({1 - kept / total:.1%} dropped)",
        prompt=f"{answer.prompt_tokens_kept} of {answer.prompt_tokens} tokens reach the language model",
    )


def draw(answer: "Answer", path: Path, note: str = "") -> None:
    """Decodes the sampled frames once more and writes the contact sheet. Raises `CommandError` if one of them fails."""
    from stts_hf.checkpoints.atomic_folder import atomic_file
    from stts_hf.visualize.contact_sheet import contact_sheet
    from stts_hf.visualize.frames import read_frames

    with refused(f"{path} is not drawn, as its video is read once more: ", ValueError, OSError):
        frames = read_frames(answer.video, answer.timestamps, FRAME_SIDE)
    assert answer.keep_mask is not None  # there is an answer
    where: dict[str, Any] = {"grid": answer.grid, "timestamps": answer.timestamps, "tubelet": answer.tubelet}
    where |= {"title": answer.question, "note": note}
    sheet = contact_sheet(frames, answer.keep_mask, token_scores=answer.token_scores, **where)
    wrong = f"The answer stands, but --output {path} cannot be written; name another file: "
    with refused(wrong, OSError), atomic_file(path) as new:
        sheet.save(new)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for what is wrong before anything slow happens."""
    for video in arguments.videos:
        check_video(video, arguments.allow_urls)
    if os.path.isfile(arguments.question):
        raise CommandError(f"QUESTION is missing after the videos: the last argument, {arguments.question}, is a file")
    if len(arguments.videos) == 1:
        check_output(arguments.output or PICTURE, arguments.videos, PICTURES)
    elif arguments.time or arguments.output is not None:
        raise CommandError("--time and --output take one VIDEO; for several, use stts-hf predict --output")


def check_video(video: str, allow_urls: bool) -> None:
    """
    Raises `CommandError` for a path that is no video of a format that is read, and for a URL without permission to
    download. Opens a file as the reader does, but goes no further, and imports no PyTorch.
    """
    if not os.path.isfile(video):
        if not is_url(video):
            raise CommandError(f"VIDEO {video} is not a file; pass the path of a video file")
        if not allow_urls:
            raise CommandError(f"VIDEO {video} is a URL; allow its download with --allow-urls")
        return
    import av

    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    try:
        with open(video, "rb") as file, av.open(file, container_options=options, metadata_errors="replace"):
            pass
    except av.error.InvalidDataError:
        raise CommandError(f"VIDEO {video} is not a video of a known format; pass a file that a player opens") from None
    except (av.error.FFmpegError, OSError):
        pass  # the reader says what it is
