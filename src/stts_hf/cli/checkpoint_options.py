"""Opens the checkpoint that a command's options name."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import CommandError, refused
from stts_hf.cli.options import OPTIONS, PROCESSING, processing
from stts_hf.cli.progress import import_libraries, note, stage

if TYPE_CHECKING:
    from stts_hf.inference.predictor import Predictor

OF_PREDICTOR = OPTIONS.keys() - {*PROCESSING, "workers"}
TINY = Path("hub_configs") / "stts-tiny"
SMALL = 50_000_000  # parameters


def find_checkpoint(checkpoint: str | None, revision: str | None = None) -> str:
    """Returns the given checkpoint, or the tiny one if the command runs from a source checkout."""
    if checkpoint is not None:
        from stts_hf.checkpoints.loading import check_checkpoint

        if not os.path.exists(os.path.expanduser(checkpoint)):
            note(f"There is no folder {checkpoint} here")
        with refused("--"):
            return check_checkpoint(checkpoint, revision)
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / TINY / "config.json").is_file():
            folder = root / TINY
            note("No --checkpoint: using stts-tiny, which knows a few shapes, colours and letters, and nothing else")
            return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    raise CommandError(f"--checkpoint is needed: a folder or Hub name. (Only a source checkout has {TINY}.)")


def about_scorer(checkpoint: str, selectors: Iterable[str]) -> list[str]:
    """A sentence beside pictures where the scorer has only seen synthetic clips."""
    if Path(checkpoint).name != TINY.name or "scorer" not in selectors:
        return []
    return [
        "The scorer of stts-tiny has only seen synthetic clips: on other videos it may keep the wrong blocks. "
        "The selector cosine needs no training."
    ]


def open_checkpoint(arguments: argparse.Namespace, **options: Any) -> "Predictor":
    """Returns the checkpoint, weights unread; sets its path in `arguments`. options: of `Predictor`, first."""
    arguments.checkpoint = find_checkpoint(arguments.checkpoint, arguments.revision)
    if options.get("num_workers"):
        from stts_hf.data.isolated import start_early

        start_early("stts_hf.inference.requests")  # decoding processes import PyTorch while this one does
    import_libraries()
    from stts_hf.inference.predictor import Predictor
    from stts_hf.inference.requests import processing_options

    with refused("--"):
        predictor = Predictor(**{**predictor_options(arguments), **options})
        processing_options(predictor.processor, processing(arguments), predictor.rule)
    return predictor


def predictor_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Predictor` that a command's arguments set."""
    given = {name: value for name, value in vars(arguments).items() if name in OF_PREDICTOR}
    return {**given, "processing": processing(arguments)}


def load_weights(arguments: argparse.Namespace, predictor: "Predictor") -> Any:
    with refused("--"), stage(f"Loading {arguments.checkpoint}"):
        model = predictor.model
    use_one_thread(model)
    return model


def use_one_thread(model: Any) -> None:
    """One thread for a small model on a CPU, where threads wait longer than they compute if anything else runs."""
    import torch

    is_set = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if model.device.type == "cpu" and model.num_parameters() < SMALL and torch.get_num_threads() > 1 and not is_set:
        torch.set_num_threads(1)
        note("The model is small: one CPU thread computes; OMP_NUM_THREADS sets another number")
