"""Contact sheets of videos that were answered: where they go, and drawing them."""

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stts_hf.cli.errors import CommandError, one_line

if TYPE_CHECKING:
    from stts_hf.inference.answering import VideoAnswer

FRAME_WIDTH = 480
ENDING = ".contact_sheet.png"
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def check_picture(path: Path) -> None:
    """Raises `CommandError` where the picture of a single video cannot be written; an older one is replaced."""
    if path.suffix.lower() not in PICTURES:
        raise CommandError(f"--output {path} must end in .png, .jpg or .webp")
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise CommandError(f"--output {path} is there already and cannot be written over; name another file")
    check_folder("--output", path)


def check_pictures(folder: Path, videos: Sequence[str]) -> None:
    """Raises `CommandError` where a folder cannot be made, or holds one of the videos' pictures already."""
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


def check_folder(option: str, path: Path) -> None:
    """Raises `CommandError` where the folder of a file that is to be written is missing or cannot be written to."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise CommandError(f"{option} {path} lies in a folder that does not exist; create {folder} first")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {path} cannot be written: no permission in {folder}")


def sheet_paths(folder: Path, videos: Sequence[str]) -> list[Path]:
    """
    One picture's path per video: its name without the ending, and a number where that name is taken. No two differ in
    case only, which some file systems do not tell apart.
    """
    stems = [Path(video).stem for video in videos]
    own_names = {stem.casefold() for stem in stems}
    taken: set[str] = set()
    paths = []
    for stem in stems:
        name, number = stem, 1
        while name.casefold() in taken or (number > 1 and name.casefold() in own_names):
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        paths.append(folder / (name + ENDING))
    return paths


def draw(answer: "VideoAnswer", path: Path) -> None:
    """
    Decodes the sampled frames once more, small and not squashed, and writes the contact sheet, into a folder that is
    made if needed. Raises `CommandError` where the file cannot be written.
    """
    from stts_hf.modeling.video_reading_stts import VideoFile
    from stts_hf.visualize.contact_sheet import contact_sheet

    # The first decoding has warned of damaged files already. The filter is for this module's calls and stays in place:
    # `catch_warnings` would also hide warnings of the thread that decodes the next videos meanwhile.
    warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(__name__))
    with VideoFile(answer.video) as file:
        shown = file.at(answer.timestamps)
        height, width = file.read(shown[:1])[0].shape[2:]
        scale = min(1.0, FRAME_WIDTH / max(height, width))
        frames, _ = file.read(shown, (max(1, round(height * scale)), max(1, round(width * scale))))
    assert answer.keep_mask is not None  # there is an answer
    sheet = contact_sheet(
        frames.permute(0, 2, 3, 1).numpy(),
        answer.keep_mask,
        answer.grid,
        answer.timestamps,
        answer.token_scores,
        title=answer.question,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except OSError as error:
        raise CommandError(f"--output {path} cannot be written: {one_line(error, 120)}") from error
