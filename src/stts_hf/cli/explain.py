"""`stts-hf explain VIDEO "question"`: why the answer is what it is, and which setting mends it."""

import argparse
from pathlib import Path

from stts_hf.cli.checkpoint_options import load_weights, open_checkpoint
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import MODEL, OPTIONS, add_options, check_output, is_url, processing, seconds
from stts_hf.cli.progress import print_lines, stage
from stts_hf.cli.run import FRAME_SIDE, check_video
from stts_hf.wording import shown_name

PAGE = Path("explanation.html")
REPEATED = ("max_new_tokens", "revision", "dtype", "allow_urls")  # by the commands, beside rule, selector and frames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    video = "video file, or an http(s) address with --allow-urls"
    parser.add_argument("videos", metavar="VIDEO", nargs="*", help=video)
    parser.add_argument("question", metavar="QUESTION", help="question about the video")
    parser.add_argument("--expected", metavar="TEXT", help="right answer (default: the answer with nothing dropped)")
    parser.add_argument("--at", type=seconds, metavar="SECONDS", help="moment of the video that the question is about")
    add_options(parser, *MODEL, "selector", "allow_urls")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="PATH", help=f"page to write (default: {PAGE})")


def execute(arguments: argparse.Namespace) -> int:
    if len(arguments.videos) != 1:
        number = f"got {len(arguments.videos)}" if arguments.videos else "pruning drops tokens of videos alone"
        raise CommandError(f"VIDEO must be one video before the question: {number}")
    (video,) = arguments.videos
    check_video(video, arguments.allow_urls)
    check_output(arguments.output, [video], (".html",))
    need_extras("The page needs one more", "visualize")
    predictor = open_checkpoint(arguments)
    from stts_hf.checkpoints.atomic_folder import atomic_file
    from stts_hf.inference.assistant import VideoAssistant
    from stts_hf.keeping import rule_arguments
    from stts_hf.video.sources import download, download_limits
    from stts_hf.visualize.explanation import commands, sentences, settings_of, write_explanation
    from stts_hf.visualize.frames import read_frames

    model, source = load_weights(arguments, predictor), video
    with refused("", ValueError, OSError):
        if is_url(video):
            with stage(f"Downloading {video}"):
                source = download(video, *download_limits(predictor.processor))
        with stage("Answering with other settings, and with other blocks"):
            options = {"max_new_tokens": arguments.max_new_tokens, **rule_arguments(predictor.rule)}
            options |= {"expected": arguments.expected, "at": arguments.at, "processing": processing(arguments)}
            found = VideoAssistant(model, predictor.processor).explain(source, arguments.question, **options)
        with stage(f"Drawing {arguments.output}"):
            frames = read_frames(source, found.asked.answer.timestamps, FRAME_SIDE)
    print_lines(question=arguments.question)
    for name, finding in settings_of(found).items():
        print(f"{name + ':':<32}{finding.answer.answer or '(empty)'} ({finding.probability:.0%})")
    print("", *sentences(found), sep="\n")
    repeated = {name: getattr(arguments, name) for name in REPEATED}
    given = processing(arguments) | {name: value for name, value in repeated.items() if value != OPTIONS[name][1]}
    for command in commands(found, video, arguments.checkpoint, given):
        print(f"  {command}")
    names = name, checkpoint = Path(video).name, shown_name(arguments.checkpoint)
    facts = {"video": name, "checkpoint": checkpoint, "cost": f"{found.cost:.1f} answers with nothing dropped"}
    with refused(f"--output {arguments.output} cannot be written: ", OSError), atomic_file(arguments.output) as new:
        write_explanation(new, frames, found, commands(found, *names, given), facts)
    print_lines(page=str(arguments.output))
    return 0
