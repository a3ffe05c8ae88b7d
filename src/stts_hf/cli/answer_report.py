"""What `stts-hf run` gives a person, lines and a picture; and where it may write them."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import check_writable

if TYPE_CHECKING:
    from stts_hf.inference.requests import Answer

FRAME_SIDE = 480
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def check_picture(path: Path) -> None:
    """Raises `CommandError` where the picture of a single video cannot be written; an older one is replaced."""
    if path.suffix.lower() not in PICTURES:
        raise CommandError(f"--output {path} must end in .png, .jpg or .webp")
    check_file("--output", path)


def check_file(option: str, path: Path) -> None:
    """Raises `CommandError` where a file cannot be written, or something else than a file is there."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) or not os.access(path, os.W_OK):
            raise CommandError(f"{option} {path} is there already and cannot be written over; name another file")
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, a loop of links
        raise CommandError(f"{option} {path} cannot be used: {error.strerror}; name another file") from error
    folder = Path(os.path.realpath(path)).parent
    if not folder.exists():
        raise CommandError(f"{option} {path} lies in a folder that does not exist; create {folder} first")
    check_writable(option, folder)


def print_answer(answer: "Answer") -> None:
    """Prints what was answered about a video, on stdout."""
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


def print_lines(**lines: str) -> None:
    for label, value in lines.items():
        print(f"{label.replace('_', ' ') + ':':<14}{value}", flush=True)


def draw(answer: "Answer", path: Path) -> None:
    """
    Decodes the sampled frames once more, small and not squashed, and writes the contact sheet. Raises `CommandError`
    where the video cannot be read again or the file cannot be written.
    """
    from stts_hf.checkpoints.atomic_folder import atomic_file
    from stts_hf.visualize.contact_sheet import contact_sheet
    from stts_hf.visualize.frames import read_frames

    try:
        frames = read_frames(answer.video, answer.timestamps, FRAME_SIDE)
    except (ValueError, OSError) as error:
        raise CommandError(f"{path} is not drawn, as its video is read once more: {one_line(error, 200)}") from error
    assert answer.keep_mask is not None  # there is an answer
    sheet = contact_sheet(
        frames,
        answer.keep_mask,
        answer.grid,
        answer.timestamps,
        answer.token_scores,
        title=answer.question,
        tubelet=answer.tubelet,
    )
    try:
        with atomic_file(path) as new:
            sheet.save(new)
    except OSError as error:
        raise CommandError(
            f"--output {path} cannot be written: {one_line(error, 120)}. The answer above stands: mend that, or name "
            "another file"
        ) from error
