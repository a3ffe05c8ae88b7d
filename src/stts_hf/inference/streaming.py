"""An answer piece by piece, while a thread lets the model write it."""

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from transformers import TextIteratorStreamer

from .answering import Answer


class AnswerStream:
    """
    Iterates over pieces of an answer's text, of a character or more, as the model writes them.

    The model begins when the first piece is asked for, in a thread; what it raises comes there too. Leaving early
    (`close()`, or simply dropping the stream) ends it at the next token.

    Attributes:
        answer: the whole `Answer`, once the last piece was taken; before that None, and of a stream that was left.
    """

    def __init__(
        self,
        processor: Any,
        ask: Callable[..., Answer],
        *arguments: Any,
        turns: list[Answer] | None = None,
        **options: Any,
    ):
        """ask: called in the thread as `ask(*arguments, streamer=..., **options)`. turns: gets the answer too."""
        if "streamer" in options:
            raise TypeError("streamer is what a stream passes itself. Leave it out, or call `ask` or `answer`.")
        self._taken: list[Answer] = []
        streamer = _Pieces(processor.tokenizer, skip_special_tokens=True)
        # They do not know this object, so that they are closed when it is dropped.
        answer = functools.partial(ask, *arguments, streamer=streamer, **options)
        self._pieces = _write(streamer, answer, [self._taken, *([] if turns is None else [turns])])

    @property
    def answer(self) -> Answer | None:
        return self._taken[0] if self._taken else None

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer where it is; returns when the model has stopped."""
        self._pieces.close()


class _Left(Exception):
    """Nobody reads the answer any more."""


class _Pieces(TextIteratorStreamer):
    """
    Queues an answer's text, token by token: transformers' own waits for spaces, which not every language has. Ends
    `generate` where nobody reads it any more.
    """

    left = False
    problem: BaseException | None = None

    def put(self, value: torch.Tensor) -> None:
        if self.left:
            raise _Left
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.token_cache.extend(value.flatten().tolist())
        text = str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
            self.on_finalized_text(text[self.print_len :])
            self.print_len = len(text)


def _write(
    streamer: _Pieces, answer: Callable[[], Answer], taken: Sequence[list[Answer]]
) -> Generator[str, None, None]:
    """The pieces. The answer is there long before a slow reader has them all, and `taken` gets it only then."""
    found: list[Answer] = []

    def work() -> None:
        try:
            found.append(answer())
        except _Left:
            pass
        except BaseException as error:  # handed to the thread that reads
            streamer.problem = error
        finally:
            streamer.on_finalized_text("", stream_end=True)

    thread = threading.Thread(target=work, name="answer")
    thread.start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        streamer.left = True
        thread.join()
    if streamer.problem is not None:
        raise streamer.problem
    for answers in taken:
        answers.extend(found)
