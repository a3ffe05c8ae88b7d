"""What `stts-hf run` gives: lines about each video for a person, JSON Lines for a program."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.errors import CommandError, one_line

if TYPE_CHECKING:
    from stts_hf.inference.answering import VideoAnswer


@contextlib.contextmanager
def answers_file(path: Path | None) -> Iterator[Callable[["VideoAnswer"], None]]:
    """
    Creates a file of JSON Lines and gives what writes an answer to it, at once and to the end; without `path` that does
    nothing. A file to which nothing was written is taken away again.

    Raises `CommandError` where the file is there already or cannot be written.
    """
    if path is None:
        yield lambda answer: None
        return
    try:
        # An undecodable byte of a file's name becomes the JSON escape \udcXX.
        file = path.open("x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError as error:
        raise CommandError(answers_exist(path)) from error
    except OSError as error:
        raise CommandError(f"--answers {path} cannot be written: {one_line(error, 120)}") from error
    is_empty = True

    def write(answer: "VideoAnswer") -> None:
        nonlocal is_empty
        is_empty = False
        try:
            file.write(json.dumps(row(answer), ensure_ascii=False) + "\n")
            file.flush()
        except OSError as error:
            raise CommandError(f"--answers {path} cannot be written: {one_line(error, 120)}") from error

    try:
        with file:
            yield write
    finally:
        if is_empty:
            path.unlink(missing_ok=True)


def answers_exist(path: Path) -> str:
    """What to say where `--answers` would write over a file."""
    return f"--answers {path} is there already and is not written over; name another file, or move that one away"


def row(answer: "VideoAnswer") -> dict[str, Any]:
    """One line of the answers file. Every line has all fields; a video that could not be read has null in most."""
    fields: dict[str, Any] = {"video": str(answer.video), "question": answer.question, "answer": answer.answer}
    found = {
        "frames": answer.num_frames,
        "timestamps": [round(seconds, 3) for seconds in answer.timestamps],
        "video_tokens_kept": answer.video_tokens_kept,
        "video_tokens": answer.video_tokens,
        "prompt_tokens_kept": answer.prompt_tokens_kept,
        "prompt_tokens": answer.prompt_tokens,
    }
    failed = answer.error is not None
    fields.update(dict.fromkeys(found) if failed else found)
    return fields | {"error": reason(answer) if failed else None}


def reason(answer: "VideoAnswer") -> str:
    """Why a video could not be read, on one line."""
    error = answer.error
    assert error is not None
    cause = error.__cause__ or error
    # ValueError and OSError are what unreadable files end in; anything else says little without its kind.
    kind = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
    return kind + one_line(cause)


def print_answer(answer: "VideoAnswer", with_question: bool = True) -> None:
    """Prints what was answered about one video, or why nothing was, on stdout."""
    if answer.error is not None:
        print_lines([("error", reason(answer))])
        return
    total, kept = answer.video_tokens, answer.video_tokens_kept
    first, last = answer.timestamps[0], answer.timestamps[-1]
    lines = [
        ("question", answer.question),
        ("answer", answer.answer or "(empty)"),
        (
            "frames",
            f"{answer.num_frames} sampled from {first:.1f} s to {last:.1f} s of a video of {answer.duration:.1f} s",
        ),
        ("video tokens", f"{kept} of {total} kept ({1 - kept / total:.1%} dropped)"),
        ("prompt", f"{answer.prompt_tokens_kept} of {answer.prompt_tokens} tokens reach the language model"),
    ]
    print_lines(lines if with_question else lines[1:])


def print_lines(lines: list[tuple[str, str]]) -> None:
    for label, value in lines:
        print(f"{label + ':':<14}{value}", flush=True)


def print_heading(number: int, total: int, video: str) -> None:
    """Prints which of several videos comes now; bytes of its name that are no text are escaped."""
    name = video.encode("utf-8", "backslashreplace").decode()
    print(f"\n[{number}/{total}] {name}", flush=True)


def print_times(times: Mapping[str, Any]) -> None:
    """Prints the medians of `time_prefills`, each with its ratio to the first."""
    print()
    print(f"{'median, ms':<22}{'vision tower':>20}{'LLM prefill':>20}{'pixels to logits':>20}")
    stock = next(iter(times.values()))
    for name, measured in times.items():
        cells = (
            f"{value:.1f} ({base / value:.2f}x)" if value > 0 else "-"
            for value, base in zip(vars(measured).values(), vars(stock).values(), strict=True)
        )
        print(f"{name:<22}" + "".join(f"{cell:>20}" for cell in cells))


class Tally:
    """How many of several videos were answered so far, and where the time since its making went."""

    def __init__(self) -> None:
        self.answered = self.failed = self.frames = 0
        self.waited = self.waited_first = 0.0
        self._started = time.perf_counter()

    def add(self, answer: "VideoAnswer") -> None:
        if not self.answered + self.failed:
            self.waited_first = answer.seconds_waited
        self.waited += answer.seconds_waited
        self.frames += answer.num_frames
        if answer.error is None:
            self.answered += 1
        else:
            self.failed += 1

    def print(self) -> None:
        """Prints the sum on stdout."""
        seconds = time.perf_counter() - self._started
        print()
        print_lines(
            [
                ("videos", f"{self.answered} answered" + (f", {self.failed} could not be read" if self.failed else "")),
                ("frames", f"{self.frames} in {seconds:.1f} s ({self.frames / seconds:.1f} per second)"),
                (
                    "waiting",
                    f"the model waited {self.waited:.1f} s for decoding, {self.waited_first:.1f} s of that for the "
                    "first video",
                ),
            ]
        )
