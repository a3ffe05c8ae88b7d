"""Questions about videos: how one is prepared and answered; of many, the next are decoded while the model answers."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature

from stts_hf.data import frames
from stts_hf.data.collator import join_vision
from stts_hf.data.encoding import find_control_token
from stts_hf.data.prefetch import prefetch
from stts_hf.modeling.settings_stts import check_pruning_ratio, check_vision_config
from stts_hf.shortages import in_halves
from stts_hf.wording import did_you_mean


@dataclasses.dataclass(frozen=True, eq=False)  # tensors have no one `==`
class VideoAnswer:
    """The answer about one video, or why there is none; all that follows `error` is empty then. `prepare_video` fills
    in what is known before the model answers, `answer_prepared` the rest.

    Attributes:
        video: as it was passed.
        question: as it was passed.
        answer: what the model wrote, without special tokens and space around it.
        error: what went wrong with the video, None where all went well.
        timestamps: when each of the frames shown is on screen, in seconds since the first frame of the video; where the
            model takes several video frames for one of its `T`, more than `T`.
        damaged_frames: how many frames that should have been shown are damaged; the whole frame before each is shown
            instead, once.
        duration: of the video, in seconds; None where frames came without it.
        grid: rows and columns of blocks in a frame, `n` in all.
        keep_mask: (T, n) bool, which blocks were kept; on the host.
        token_scores: (T, n) float32, what they were ranked by; on the host.
        prompt_tokens: tokens of the prompt, `L`, video tokens that were dropped included.
        tokens_read_before: how many of those that reach the language model a clip held already, from `watch`.
        seconds: what the model took; in a batch, its share of that.
        seconds_waited: how long the model waited for the video to be decoded and preprocessed.
    """

    video: Any
    question: str
    answer: str | None = None
    error: Exception | None = None
    timestamps: tuple[float, ...] = ()
    damaged_frames: int = 0
    duration: float | None = None
    grid: tuple[int, int] = (0, 0)
    keep_mask: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    token_scores: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    prompt_tokens: int = 0
    tokens_read_before: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0

    @property
    def num_frames(self) -> int:
        """Frames of the video that were shown."""
        return len(self.timestamps)

    @property
    def tubelet(self) -> int:
        """How many of the frames the model takes for one of its `T`; the last may lack some."""
        return 1 if self.keep_mask is None else -(-self.num_frames // len(self.keep_mask))

    @property
    def video_tokens(self) -> int:
        """Blocks of the video, `n * T`: its tokens before any was dropped."""
        return 0 if self.keep_mask is None else self.keep_mask.numel()

    @property
    def video_tokens_kept(self) -> int:
        """`K`."""
        return 0 if self.keep_mask is None else int(self.keep_mask.sum())

    @property
    def prompt_tokens_kept(self) -> int:
        """Tokens of the prompt that reach the language model, `L'`."""
        return self.prompt_tokens - self.video_tokens + self.video_tokens_kept


def answer_videos(
    model: Any,
    processor: Any,
    videos: Iterable[Any],
    question: str | Iterable[str],
    *,
    pruning_ratio: float | None = None,
    batch_size: int = 1,
    processing: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **generate_options: Any,
) -> Generator[VideoAnswer, None, None]:
    """Answers a question about each video, one after the other; a thread decodes the next ones meanwhile.

        for answer in answer_videos(model, processor, paths, "What happens?", max_new_tokens=64, on_error="return"):
            print(answer.video, answer.answer or answer.error)

    Answers come in the order of the videos, each as soon as it, and others of its batch, are there.

    Args:
        model: an STTS model of any backbone, or one wrapped by PEFT.
        processor: its processor.
        videos: paths, URLs, the bytes of files, or arrays of frames, as the processor takes them; need not end.
        question: one for all videos, or one for each.
        pruning_ratio: share `k` of video tokens to drop; the checkpoint's by default.
        batch_size: videos that the model answers about at once, padded to the longest. By default one: its prompt of
            thousands of tokens fills a device. 64 frames at 378 pixels take 110 MB, and as many wait as are in a batch.
        processing: options of the processor's call, such as `{"num_frames": 32, "test_time_scaling": True}`.
        on_error: "raise" ends with the error at a video that cannot be read, or that does not fit into memory alone;
            "return" yields a `VideoAnswer` with that `error` in its place and continues.
        generate_options: of `model.generate`, such as `max_new_tokens`; its first sequence is the answer.

    Yields:
        A `VideoAnswer` for each video. Leaving it early (`close()`, or simply dropping it) starts no more videos.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; there are more or fewer questions than
            videos, which shows at the end of the shorter list. What the model itself raises comes through and ends the
            iteration.
    """
    check_vision_config(model.config.vision_config)
    ratio = check_pruning_ratio(model.config.vision_config.pruning_ratio if pruning_ratio is None else pruning_ratio)
    _check_batch(videos, batch_size, on_error, generate_options)
    if isinstance(question, str):
        pairs: Iterator[tuple[Any, str]] = ((video, question) for video in videos)
    else:
        pairs = zip(videos, question, strict=True)

    def prepare(pair: tuple[Any, str]) -> tuple[VideoAnswer, BatchFeature | None]:
        try:
            return prepare_video(processor, *pair, pruning_ratio=ratio, processing=processing)
        except Exception as error:
            return VideoAnswer(*pair, error=error), None

    def complete(batch: Sequence[tuple[VideoAnswer, BatchFeature | None]]) -> Iterator[VideoAnswer]:
        readable = [(answer, inputs) for answer, inputs in batch if inputs is not None]
        call = functools.partial(answer_prepared, model, processor, pruning_ratio=ratio, **generate_options)
        answered: Iterator[VideoAnswer | MemoryError] = iter(in_halves(call, readable))
        for answer, inputs in batch:
            found = answer if inputs is None else next(answered)
            found = dataclasses.replace(answer, error=found) if isinstance(found, MemoryError) else found
            if found.error is not None and on_error == "raise":
                raise found.error
            yield found

    def answers() -> Generator[VideoAnswer, None, None]:
        with contextlib.closing(prefetch(prepare, pairs, ahead=max(2, batch_size))) as prepared:
            batch: list[tuple[VideoAnswer, BatchFeature | None]] = []
            started = time.perf_counter()
            for begun, inputs in prepared:
                batch.append((dataclasses.replace(begun, seconds_waited=time.perf_counter() - started), inputs))
                if len(batch) == batch_size or (inputs is None and on_error == "raise"):
                    yield from complete(batch)
                    batch = []
                started = time.perf_counter()
            yield from complete(batch)

    return answers()


def _check_batch(videos: Any, batch_size: Any, on_error: Any, generate_options: Mapping[str, Any]) -> None:
    if isinstance(videos, str | bytes | os.PathLike):
        raise TypeError(f"videos must be several, got one {type(videos).__name__}; pass a list, even of one video.")
    check_batch_size(batch_size)
    if (asked := generate_options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences is {asked}, but a video gets one answer; leave it out.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")


def check_batch_size(batch_size: Any) -> None:
    """Raises `ValueError` for a number of rows that is none."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")


def prepare_video(
    processor: Any,
    video: Any,
    question: str,
    *,
    pruning_ratio: float,
    processing: Mapping[str, Any] | None = None,
) -> tuple[VideoAnswer, BatchFeature]:
    """Decodes and preprocesses one video and writes its prompt; arguments and errors as in `answer_videos`.

    Returns what is known of the answer, and the arguments of `generate`.
    `pruning_ratio` is what `test_time_scaling` raises the number of frames by, where that is on.
    """
    check_question(processor, question)
    prompt = processor.apply_chat_template(conversation(question), add_generation_prompt=True)
    begun, inputs = read_video(processor, video, prompt, pruning_ratio=pruning_ratio, processing=processing)
    return dataclasses.replace(begun, question=question), inputs


def conversation(question: str, after: Sequence[VideoAnswer] = ()) -> list[dict[str, Any]]:
    """Messages, for a chat template, of a question about a video. after: turns before it, the first one first."""
    questions = [*(turn.question for turn in after), question]
    messages: list[dict[str, Any]] = []
    for place, asked in enumerate(questions):
        text = {"type": "text", "text": asked}
        messages.append({"role": "user", "content": [text] if place else [{"type": "video"}, text]})
        if place < len(after):
            messages.append({"role": "assistant", "content": [{"type": "text", "text": after[place].answer or ""}]})
    return messages


def read_video(
    processor: Any, video: Any, prompt: str, *, pruning_ratio: float, processing: Mapping[str, Any] | None = None
) -> tuple[VideoAnswer, BatchFeature]:
    """As `prepare_video`, for a prompt, or the beginning of one, that is written already."""
    if video is None or (isinstance(video, list | tuple) and not video):
        raise ValueError(f"video is {video!r}. Pass a path, a URL, bytes, an open file or the frames of a video.")
    options = processing_options(processor, processing, pruning_ratio)
    inputs = frames.process(processor, text=[prompt], videos=[video], **options, return_tensors="pt")
    metadata = inputs.pop("video_metadata")[0]
    if metadata.fps is None:  # frames that came without it: the rate that the prompt goes by
        metadata.fps = frames.get_frames(processor.video_processor)["max_fps"]
    ((_, rows, columns),) = frames.block_grids(processor, inputs)
    answer = VideoAnswer(
        video,
        "",
        timestamps=tuple(float(time) for time in metadata.timestamps),
        damaged_frames=getattr(metadata, "num_damaged", 0),
        duration=metadata.duration,
        grid=(rows, columns),
        prompt_tokens=inputs["input_ids"].shape[1],
    )
    return answer, inputs


def processing_options(processor: Any, processing: Mapping[str, Any] | None, pruning_ratio: float) -> dict[str, Any]:
    """
    Options of the processor's call; with test-time scaling, also the ratio that it makes up for. Raises `TypeError`
    for what holds no options, and `ValueError` for one that the processor does not know, and would say nothing of.
    """
    if not isinstance(processing, Mapping | None):
        raise TypeError(f"processing must be a dict of options, such as {{'num_frames': 32}}, got {processing!r:.80}.")
    parts = {f"{part}_kwargs" for part in ("videos", "images", "text")}
    known = frames.OF_VIDEOS | processor.video_processor.valid_kwargs.__annotations__.keys() | parts
    for name in (processing or {}).keys() - known:
        advice = did_you_mean(name, known, "Leave it out.")
        raise ValueError(f"processing has {name!r}, which the processor does not know. {advice}")
    options: dict[str, Any] = {**(processing or {}), "return_metadata": True}
    if options.get("test_time_scaling", getattr(processor.video_processor, "test_time_scaling", False)):
        options.setdefault("pruning_ratio", pruning_ratio)
    return options


def answer_prepared(
    model: Any,
    processor: Any,
    prepared: Sequence[tuple[VideoAnswer, Mapping[str, torch.Tensor]]],
    **generate_options: Any,
) -> list[VideoAnswer]:
    """Completes what `prepare_video` began of some videos, in one call of `generate`, which takes the options."""
    started = time.perf_counter()
    inputs = inputs_for(model, join_prompts(processor, [inputs for _, inputs in prepared]))
    output = model.generate(**inputs, **{**generate_options, "return_dict_in_generate": True})
    written = decode_answers(processor, output.sequences[:, inputs["input_ids"].shape[1] :])
    seconds = (time.perf_counter() - started) / len(prepared)
    return [
        dataclasses.replace(
            begun,
            answer=words,
            keep_mask=output["keep_mask"][place].cpu(),
            token_scores=output["token_scores"][place].float().cpu(),
            seconds=seconds,
        )
        for place, ((begun, _), words) in enumerate(zip(prepared, written, strict=True))
    ]


def decode_answers(processor: Any, new_tokens: Iterable[torch.Tensor]) -> list[str]:
    """The new tokens of each row as words, without special tokens and space around them."""
    return [processor.decode(tokens, skip_special_tokens=True).strip() for tokens in new_tokens]


def join_prompts(
    processor: Any, prompts: Sequence[Mapping[str, torch.Tensor]], padding_side: str = "left"
) -> Mapping[str, torch.Tensor]:
    """What a processor made of several prompts, one by one, as a batch."""
    if len(prompts) == 1:
        return prompts[0]
    of_text = ("input_ids", "attention_mask", "mm_token_type_ids")
    vision = [{name: value for name, value in prompt.items() if name not in of_text} for prompt in prompts]
    fillers = {"input_ids": processor.tokenizer.pad_token_id or 0}
    text = {name: pad([prompt[name][0] for prompt in prompts], fillers.get(name, 0), padding_side) for name in of_text}
    return {**text, **join_vision(vision)}


def pad(rows: Sequence[torch.Tensor], filler: int = 0, padding_side: str = "left") -> torch.Tensor:
    """Rows (tokens,) as (B, most tokens). Tokenizers that pad remember how, which several threads would trip over."""
    return pad_sequence(list(rows), batch_first=True, padding_value=filler, padding_side=padding_side)


def inputs_for(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    A processor's output on the model's device, pixels in its dtype: Qwen2.5-VL's seconds per frame need float32.
    Videos' grids stay on the host, where they are read.
    """
    moved = {**BatchFeature(dict(inputs)).to(model.device)}
    pixels = {name: moved[name].to(model.dtype) for name in moved if name.startswith("pixel_values")}
    return moved | pixels | frames.grids_of(inputs)


def check_question(processor: Any, question: Any) -> None:
    """
    Raises `TypeError` or `ValueError` for a question that is no text, is empty, or holds a token that stands for
    images, videos or turns.
    """
    if not isinstance(question, str):
        raise TypeError(f"question must be a text, got {question!r:.80}, a {type(question).__name__}.")
    if not question.strip():
        raise ValueError(f"question is {question!r}, which asks nothing. Ask something about the video.")
    found = find_control_token(processor, question)
    if found is not None:
        raise ValueError(
            f"question holds {found!r}, a token that stands for images, videos or turns. Take it out of the text."
        )
