"""What `stts-hf run` gives: lines about each video for a person, JSON Lines for a program."""

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import CommandError, one_line

if TYPE_CHECKING:
    from stts_hf.inference.answering import VideoAnswer


def check_answers(path: Path) -> None:
    """Raises `CommandError` where an answers file would replace anything; an empty file holds nothing to lose."""
    is_empty_file = path.is_file() and not path.stat().st_size
    if os.path.lexists(path) and not is_empty_file:
        raise CommandError(
            f"--answers {path} is there already and is not written over; name another file, or move that one away"
        )


@contextlib.contextmanager
def answers_file(path: Path | None) -> Iterator[Callable[["VideoAnswer"], None]]:
    """
    Creates a file of JSON Lines and gives what writes an answer to it, at once and whole or not at all; without `path`
    that does nothing. A file to which nothing was written is removed.

    Raises `CommandError` where the file is there already or cannot be written.
    """
    if path is None:
        yield lambda answer: None
        return
    check_answers(path)
    try:
        file = io.FileIO(path, "a")
    except OSError as error:
        raise CommandError(f"--answers {path} cannot be written: {one_line(error, 120)}") from error

    def write(answer: "VideoAnswer") -> None:
        whole_lines = file.tell()
        # An undecodable byte of a file's name becomes the JSON escape \udcXX.
        line = (json.dumps(row(answer), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            if file.write(line) < len(line):  # the disk had room for a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            file.truncate(whole_lines)
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
    failed = answer.error is not None
    return {
        "video": str(answer.video),
        "question": answer.question,
        "answer": answer.answer,
        **(dict.fromkeys(found) if failed else found),
        "error": reason(answer) if failed else None,
    }


def reason(answer: "VideoAnswer") -> str:
    """Why a video could not be read, on one line."""
    assert answer.error is not None
    # ValueError and OSError are what unreadable files end in; anything else says little without its kind.
    kind = "" if isinstance(answer.error, ValueError | OSError) else f"{type(answer.error).__name__}: "
    return kind + one_line(answer.error)


def print_answer(answer: "VideoAnswer", with_question: bool = True) -> None:
    """Prints what was answered about one video, or why nothing was, on stdout."""
    if answer.error is not None:
        print_lines(error=reason(answer))
        return
    if with_question:
        print_lines(question=answer.question)
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
