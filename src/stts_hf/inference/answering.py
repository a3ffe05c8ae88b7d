"""A question about each of many videos: the next ones are decoded while the model answers this one."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from transformers import BatchFeature

from stts_hf.data.encoding import find_control_token
from stts_hf.data.prefetch import prefetch
from stts_hf.modeling.configuration_stts import check_vision_config
from stts_hf.modeling.settings_stts import check_pruning_ratio


@dataclasses.dataclass(frozen=True)
class PreparedVideo:
    """A video and a question as the model takes them: `inputs` for `generate`, `metadata` of the frames shown."""

    video: Any
    question: str
    inputs: Any
    metadata: Any


@dataclasses.dataclass(frozen=True)
class VideoAnswer:
    """The answer about one video, or why there is none; all that follows `error` is empty then.

    Attributes:
        video, question: as they were passed.
        answer: what the model wrote, without special tokens and space around it.
        error: what went wrong with the video, None where all went well.
        timestamps: when each of the `T` frames shown is on screen, in seconds since the first frame of the video.
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
        """`T`."""
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
        model: an `STTSForConditionalGeneration`, or one wrapped by PEFT.
        processor: its `STTSProcessor`.
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

    def prepare(pair: tuple[Any, str]) -> PreparedVideo | VideoAnswer:
        try:
            return prepare_video(processor, *pair, pruning_ratio=ratio, processing=processing)
        except Exception as error:
            if on_error == "raise":
                raise
            return VideoAnswer(*pair, error=error)

    def answers() -> Generator[VideoAnswer, None, None]:
        with contextlib.closing(prefetch(prepare, pairs)) as prepared:
            started = time.perf_counter()
            for found in prepared:
                waited = time.perf_counter() - started
                if isinstance(found, PreparedVideo):
                    found = answer_prepared(model, processor, found, pruning_ratio=ratio, **generate_options)
                yield dataclasses.replace(found, seconds_waited=waited)
                started = time.perf_counter()

    return answers()


def prepare_video(
    processor: Any,
    video: Any,
    question: str,
    *,
    pruning_ratio: float,
    processing: Mapping[str, Any] | None = None,
) -> PreparedVideo:
    """Decodes and preprocesses one video and writes its prompt; arguments and errors as in `answer_videos`.

    `pruning_ratio` is what `test_time_scaling` raises the number of frames by, where that is on.
    """
    check_question(processor, question)
    content = [{"type": "video"}, {"type": "text", "text": question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    options: dict[str, Any] = {**(processing or {}), "return_metadata": True, "return_tensors": "pt"}
    if options.get("test_time_scaling", processor.video_processor.test_time_scaling):
        options.setdefault("pruning_ratio", pruning_ratio)
    inputs = processor(text=[prompt], videos=[video], **options)
    metadata = inputs.pop("video_metadata")[0]
    if metadata.fps is None:  # frames that came without it: the rate that the prompt goes by
        metadata.fps = processor.video_processor.max_fps
    return PreparedVideo(video, question, inputs, metadata)


def answer_prepared(
    model: Any, processor: Any, prepared: PreparedVideo, *, pruning_ratio: float | None = None, **generate_options: Any
) -> VideoAnswer:
    """Answers the question about a prepared video in one call of `generate`; arguments as in `answer_videos`."""
    started = time.perf_counter()
    inputs = inputs_for(model, prepared.inputs)
    options = {**generate_options, "pruning_ratio": pruning_ratio, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options)
    prompt_tokens = inputs["input_ids"].shape[1]
    text = processor.decode(output.sequences[0, prompt_tokens:], skip_special_tokens=True).strip()
    rows, columns = inputs["video_grids"][0, 1:].tolist()
    return VideoAnswer(
        prepared.video,
        prepared.question,
        answer=text,
        timestamps=tuple(float(time) for time in prepared.metadata.timestamps),
        damaged_frames=getattr(prepared.metadata, "num_damaged", 0),
        duration=prepared.metadata.duration,
        grid=(rows, columns),
        keep_mask=output["keep_mask"][0].cpu(),
        token_scores=output["token_scores"][0].float().cpu(),
        prompt_tokens=prompt_tokens,
        seconds=time.perf_counter() - started,
    )


def inputs_for(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A processor's output on the model's device, in its dtype; `video_grids` stay on the host, where they are read."""
    grids = inputs["video_grids"]
    return {**BatchFeature(dict(inputs)).to(model.device, dtype=model.dtype), "video_grids": grids}


def check_question(processor: Any, question: str) -> None:
    """Raises `ValueError` where a question holds a token that stands for images, videos or turns."""
    found = find_control_token(processor, question)
    if found is not None:
        raise ValueError(
            f"question holds {found!r}, a token that stands for images, videos or turns. Take it out of the text."
        )
