"""`stts-hf demo`: a web page that answers questions about videos and shows the kept blocks."""

import argparse
import signal
import socket
from pathlib import Path

from stts_hf.cli.checkpoint_options import TINY, about_scorer, load_weights, open_checkpoint
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import MODEL, Option, add_options, count, positive, processing
from stts_hf.cli.progress import note

ABOUT_TINY = "stts-tiny knows a few shapes, colours and letters in made-up clips, and nothing else."
# Of `Limits`.
LIMITS: dict[str, Option] = {
    "max_upload_mb": (count, 200, "MB", "maximum size of an uploaded file"),
    "max_seconds": (positive, 600, "S", "maximum duration of a video"),
    "max_clips": (count, 4, "N", "maximum number of encoded videos in memory, over all visitors"),
    "max_answers": (count, 2, "N", "maximum number of concurrent answers; further questions wait"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *MODEL, "selector")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only); 0.0.0.0: all"
    )
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    add_options(parser, table=LIMITS)


def execute(arguments: argparse.Namespace) -> None:
    """Serves the page until it is interrupted; raises `CommandError` for a user error."""
    need_extras("The page needs more packages", "demo", module="gradio")
    host, port = arguments.host, arguments.port
    with refused(f"--host {host} and --port {port} cannot be listened on: ", OSError, OverflowError):
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:  # before the model is loaded
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    predictor = open_checkpoint(arguments)
    if predictor.rule.budget is not None and predictor.rule.threshold is None:
        raise CommandError("--video-token-budget has no slider on the page: pass --score-threshold with it")
    from stts_hf.demo import serving
    from stts_hf.demo.held_clips import Limits
    from stts_hf.inference.assistant import VideoAssistant
    from stts_hf.keeping import rule_arguments, set_rule

    limits = Limits(**{name.removeprefix("max_"): getattr(arguments, name) for name in (*LIMITS, "max_new_tokens")})
    assistant = VideoAssistant(load_weights(arguments, predictor), predictor.processor)
    set_rule(assistant.model.config.vision_config, rule_arguments(predictor.rule))
    name = Path(arguments.checkpoint).name
    about = f"{name} on {assistant.model.device}"
    if name == TINY.name:
        about = " ".join([f"{about}. {ABOUT_TINY}", *about_scorer(arguments.checkpoint, ["scorer"])])
    link = "" if Path(arguments.checkpoint).expanduser().exists() else f"https://huggingface.co/{arguments.checkpoint}"
    page = serving.build(assistant, limits=limits, processing=processing(arguments), about=about, link=link)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that temporary files are deleted
    note(f"The page is at http://{host}:{port} until Ctrl+C")
    serving.serve(page, server_name=host, server_port=port, quiet=True)
    serving.end_process()
