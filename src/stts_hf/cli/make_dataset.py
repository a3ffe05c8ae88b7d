"""`stts-hf make-dataset`: synthetic clips and questions about them."""

import argparse
from pathlib import Path

from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import check_writable, count
from stts_hf.cli.progress import note

HELP = "make synthetic clips and questions about them, to train and measure on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; must not be there yet")
    for split in ("train", "validation", "test"):
        parser.add_argument(f"--{split}", type=count, metavar="N", help=f"clips and pictures of the {split} split")
    parser.add_argument("--seed", type=int, default=0, help="of all scenes (default: 0)")
    parser.add_argument("--without-snow", action="store_true", help="the same clips without regions of snow")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command; raises `CommandError` for what the user got wrong, and for a full disk."""
    from stts_hf.evaluation.make_dataset import SPLITS, make_dataset

    check_writable("FOLDER", arguments.folder.parent)
    clips = {split: getattr(arguments, split) or number for split, number in SPLITS.items()}
    try:
        for done, total in make_dataset(arguments.folder, clips, arguments.seed, not arguments.without_snow):
            if done % 100 == 0 or done == total:
                note(f"{done} of {total} clips")
    except (ValueError, FileExistsError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"{arguments.folder} cannot be written, and nothing of it is left: {one_line(error)}"
        ) from error
    print(arguments.folder)
    return 0
