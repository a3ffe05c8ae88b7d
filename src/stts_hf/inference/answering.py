"""A question about each of many videos: the next ones are decoded while the model answers this one."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from transformers import BatchFeature

from stts_hf.data import frames
from stts_hf.data.encoding import find_control_token
from stts_hf.data.prefetch import prefetch
from stts_hf.modeling.settings_stts import check_pruning_ratio, check_vision_config


@dataclasses.dataclass(frozen=True)
class VideoAnswer:
    """The answer about one video, or why there is none; all that follows `error` is empty then. `prepare_video` fills
    in what is known before the model answers, `answer_prepared` the rest.

    Attributes:
        video, question: as they were passed.
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
        seconds: what the model took.
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
    keep_mask: torch.Tensor | None = None
    token_scores: torch.Tensor | None = None
    prompt_tokens: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0

    @property
    def num_frames(self) -> int:
        """Frames of the video that were shown."""
        return len(self.timestamps)

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
    processing: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **generate_options: Any,
) -> Generator[VideoAnswer, None, None]:
    """Answers a question about each video, one after the other; a thread decodes the next two meanwhile.

        for answer in answer_videos(model, processor, paths, "What happens?", max_new_tokens=64, on_error="return"):
            print(answer.video, answer.answer or answer.error)

    The batch size is 1: videos differ in length, and one video's prompt of thousands of tokens fills a device. Answers
    come in the order of the videos, each as soon as it is there.

    Args:
        model: an STTS model of any backbone, or one wrapped by PEFT.
        processor: its processor.
        videos: paths, URLs, the bytes of files, or arrays of frames, as the processor takes them; need not end.
        question: one for all videos, or one for each.
        pruning_ratio: share `k` of video tokens to drop; the checkpoint's by default.
        processing: options of the processor's call, such as `{"num_frames": 32, "test_time_scaling": True}`.
        on_error: "raise" ends with the error at a video that cannot be read; "return" yields a `VideoAnswer` with that
            `error` in its place and continues.
        generate_options: of `model.generate`, such as `max_new_tokens`; its first sequence is the answer.

    Returns:
        An iterator of `VideoAnswer`. Leaving it early (`close()`, or simply dropping it) starts no more videos.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; there are more or fewer questions than
            videos, which shows at the end of the shorter list. What the model itself raises comes through and ends the
            iteration.
    """
    if isinstance(videos, str | bytes | os.PathLike):
        raise TypeError(f"videos must be several, got one {type(videos).__name__}; pass a list, even of one video.")
    check_vision_config(model.config.vision_config)
    ratio = check_pruning_ratio(model.config.vision_config.pruning_ratio if pruning_ratio is None else pruning_ratio)
    if (asked := generate_options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences is {asked}, but a video gets one answer; leave it out.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")
    if isinstance(question, str):
        pairs: Iterator[tuple[Any, str]] = ((video, question) for video in videos)
    else:
        pairs = zip(videos, question, strict=True)

    def prepare(pair: tuple[Any, str]) -> tuple[VideoAnswer, BatchFeature | None]:
        try:
            return prepare_video(processor, *pair, pruning_ratio=ratio, processing=processing)
        except Exception as error:
            if on_error == "raise":
                raise
            return VideoAnswer(*pair, error=error), None

    def answers() -> Generator[VideoAnswer, None, None]:
        with contextlib.closing(prefetch(prepare, pairs)) as prepared:
            started = time.perf_counter()
            for answer, inputs in prepared:
                waited = time.perf_counter() - started
                if inputs is not None:
                    answer = answer_prepared(model, processor, answer, inputs, pruning_ratio=ratio, **generate_options)
                yield dataclasses.replace(answer, seconds_waited=waited)
                started = time.perf_counter()

    return answers()


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
    content = [{"type": "video"}, {"type": "text", "text": question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    options = processing_options(processor, processing, pruning_ratio)
    inputs = frames.process(processor, text=[prompt], videos=[video], **options, return_tensors="pt")
    metadata = inputs.pop("video_metadata")[0]
    if metadata.fps is None:  # frames that came without it: the rate that the prompt goes by
        metadata.fps = frames.get_frames(processor.video_processor)["max_fps"]
    ((_, rows, columns),) = frames.block_grids(processor, inputs)
    answer = VideoAnswer(
        video,
        question,
        timestamps=tuple(float(time) for time in metadata.timestamps),
        damaged_frames=getattr(metadata, "num_damaged", 0),
        duration=metadata.duration,
        grid=(rows, columns),
        prompt_tokens=inputs["input_ids"].shape[1],
    )
    return answer, inputs


def processing_options(processor: Any, processing: Mapping[str, Any] | None, pruning_ratio: float) -> dict[str, Any]:
    """Options of the processor's call; with test-time scaling, also the ratio that it makes up for."""
    options: dict[str, Any] = {**(processing or {}), "return_metadata": True}
    if options.get("test_time_scaling", getattr(processor.video_processor, "test_time_scaling", False)):
        options.setdefault("pruning_ratio", pruning_ratio)
    return options


def answer_prepared(
    model: Any, processor: Any, answer: VideoAnswer, inputs: Mapping[str, torch.Tensor], **generate_options: Any
) -> VideoAnswer:
    """Completes what `prepare_video` began, in one call of `generate`, which takes the options."""
    started = time.perf_counter()
    options = {**generate_options, "return_dict_in_generate": True}
    output = model.generate(**inputs_for(model, inputs), **options)
    return dataclasses.replace(
        answer,
        answer=processor.decode(output.sequences[0, answer.prompt_tokens :], skip_special_tokens=True).strip(),
        keep_mask=output["keep_mask"][0].cpu(),
        token_scores=output["token_scores"][0].float().cpu(),
        seconds=time.perf_counter() - started,
    )


def inputs_for(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A processor's output on the model's device, in its dtype; videos' grids stay on the host, where they are read."""
    moved = {**BatchFeature(dict(inputs)).to(model.device, dtype=model.dtype)}
    return moved | frames.grids_of(inputs)


def check_question(processor: Any, question: str) -> None:
    """Raises `ValueError` where a question holds a token that stands for images, videos or turns."""
    found = find_control_token(processor, question)
    if found is not None:
        raise ValueError(
            f"question holds {found!r}, a token that stands for images, videos or turns. Take it out of the text."
        )
