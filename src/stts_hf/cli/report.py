"""What `stts-hf run` gives: lines and pictures for a person, JSON Lines for a program; and where it may write them."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.options import check_writable
from stts_hf.data.lines import write_line

if TYPE_CHECKING:
    from stts_hf.inference.answering import VideoAnswer

FRAME_SIDE = 480
ENDING = ".contact_sheet.png"
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def check_answers(path: Path) -> None:
    """Raises `CommandError` where an answers file cannot be made; an empty one holds nothing to lose."""
    is_empty_file = path.is_file() and not path.stat().st_size
    if os.path.lexists(path) and not is_empty_file:
        raise CommandError(
            f"--answers {path} is there already and is not written over; name another file, or move that one away"
        )
    check_folder("--answers", path)


def check_picture(path: Path) -> None:
    """Raises `CommandError` where the picture of a single video cannot be written; an older one is replaced."""
    if path.suffix.lower() not in PICTURES:
        raise CommandError(f"--output {path} must end in .png, .jpg or .webp")
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise CommandError(f"--output {path} is there already and cannot be written over; name another file")
    check_folder("--output", path)


def check_pictures(folder: Path, videos: Sequence[str]) -> None:
    """Raises `CommandError` where a folder cannot be made, or holds one of the videos' pictures already."""
    if folder.suffix.lower() in PICTURES or folder.is_file():
        raise CommandError(f"--output {folder} must name a folder where there are several videos: one picture for each")
    check_writable("--output", folder)
    there = [path.name for path in sheet_paths(folder, videos) if os.path.lexists(path)]
    if there:
        raise CommandError(
            f"--output {folder} holds {', '.join(there)} already, which is not written over; name another folder, or "
            "move the pictures away"
        )


def check_folder(option: str, path: Path) -> None:
    """Raises `CommandError` where the folder of a file that is to be written is missing or cannot be written to."""
    folder = path.resolve().parent
    if not folder.exists():
        raise CommandError(f"{option} {path} lies in a folder that does not exist; create {folder} first")
    check_writable(option, folder)


@contextlib.contextmanager
def answers_file(path: Path | None) -> Iterator[Callable[["VideoAnswer"], None]]:
    """
    Creates a file of JSON Lines and gives what writes an answer to it, at once and whole or not at all; without `path`
    that does nothing. A file to which nothing was written is removed. Raises `CommandError` where it cannot be written.
    """
    if path is None:
        yield lambda answer: None
        return
    try:
        file = io.FileIO(path, "a")
    except OSError as error:
        raise CommandError(f"--answers {path} cannot be written: {one_line(error, 120)}") from error

    def write(answer: "VideoAnswer") -> None:
        try:
            write_line(file, row(answer))
        except OSError as error:
            raise CommandError(f"--answers {path} cannot be written: {one_line(error, 120)}") from error

    with file:
        try:
            yield write
        finally:
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def row(answer: "VideoAnswer") -> dict[str, Any]:
    """One line of the answers file. Every line has all fields; a video that could not be read has null in most."""
    found = {
        "frames": answer.num_frames,
        "damaged_frames": answer.damaged_frames,
        "timestamps": [round(seconds, 3) for seconds in answer.timestamps],
        "video_tokens_kept": answer.video_tokens_kept,
        "video_tokens": answer.video_tokens,
        "prompt_tokens_kept": answer.prompt_tokens_kept,
        "prompt_tokens": answer.prompt_tokens,
    }
    return {
        "video": str(answer.video),
        "question": answer.question,
        "answer": answer.answer,
        **(dict.fromkeys(found) if answer.error else found),
        "error": reason(answer.error) if answer.error else None,
    }


def reason(error: Exception) -> str:
    """Why a video could not be read, on one line."""
    # ValueError and OSError are what unreadable files end in; anything else says little without its kind.
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return kind + one_line(error)


def print_answer(answer: "VideoAnswer") -> None:
    """Prints what was answered about one video, or why nothing was, on stdout."""
    if answer.error is not None:
        print_lines(error=reason(answer.error))
        return
    if answer.damaged_frames:
        print_lines(damaged=f"{answer.damaged_frames} frames; the whole frame before each is shown instead, once")
    total, kept = answer.video_tokens, answer.video_tokens_kept
    first, last = answer.timestamps[0], answer.timestamps[-1]
    print_lines(
        answer=answer.answer or "(empty)",
        frames=f"{answer.num_frames} sampled from {first:.1f} s to {last:.1f} s of a video of {answer.duration:.1f} s",
        video_tokens=f"{kept} of {total} kept ({1 - kept / total:.1%} dropped)",
        prompt=f"{answer.prompt_tokens_kept} of {answer.prompt_tokens} tokens reach the language model",
    )


def print_lines(**lines: str) -> None:
    for label, value in lines.items():
        print(f"{label.replace('_', ' ') + ':':<14}{value}", flush=True)


def print_heading(number: int, total: int, video: str) -> None:
    """Prints which of several videos comes now; bytes of its name that are no text are escaped."""
    name = video.encode("utf-8", "backslashreplace").decode()
    print(f"\n[{number}/{total}] {name}", flush=True)


def print_summary(waits: Sequence[float], frames: int, failed: int, seconds: float) -> None:
    """Prints the sum over several videos; waits: seconds that the model waited for each of them."""
    print()
    print_lines(
        videos=f"{len(waits) - failed} answered" + (f", {failed} could not be read" if failed else ""),
        frames=f"{frames} in {seconds:.1f} s ({frames / seconds:.1f} per second)",
        waiting=f"the model waited {sum(waits):.1f} s for decoding, {waits[0]:.1f} s of that for the first video",
    )


def sheet_paths(folder: Path, videos: Sequence[str]) -> list[Path]:
    """
    One picture's path per video: its name without the ending, and a number where that name is taken. No two differ in
    case only, which some file systems do not tell apart.
    """
    taken: set[str] = set()
    paths = []
    for video in videos:
        stem = name = Path(video).stem
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        paths.append(folder / (name + ENDING))
    return paths


def draw(answer: "VideoAnswer", path: Path) -> None:
    """
    Decodes the sampled frames once more, small and not squashed, and writes the contact sheet, into a folder that is
    made if needed. Raises `CommandError` where the video cannot be read again or the file cannot be written.
    """
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
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except OSError as error:
        raise CommandError(f"--output {path} cannot be written: {one_line(error, 120)}") from error
