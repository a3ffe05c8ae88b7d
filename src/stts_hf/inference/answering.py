"""Questions about videos: how one is prepared and answered; of many, the next are decoded while the model answers."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature

from stts_hf.data.collator import join_vision
from stts_hf.data.encoding import find_control_token
from stts_hf.video import processors as frames
from stts_hf.wording import did_you_mean


@dataclasses.dataclass(frozen=True, eq=False)  # tensors have no one `==`
class Answer:
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
        new_tokens: tokens of the answer, with the one that ends it.
        tokens_read_before: how many of those that reach the language model a clip held already, from `watch`.
        seconds: what the model took; in a batch, its share of that.
        seconds_waited: how long the model waited for the video to be decoded and preprocessed.
        others: what was seen of further videos in the same prompt.
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
    new_tokens: int = 0
    tokens_read_before: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0
    others: tuple["Answer", ...] = dataclasses.field(default=(), repr=False)

    @property
    def text(self) -> str:
        """What the model wrote; empty where there is an error."""
        return self.answer or ""

    def __str__(self) -> str:
        return self.text

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
        """Blocks of all videos, `n * T` of each: their tokens before any was dropped."""
        return sum(one.keep_mask.numel() for one in (self, *self.others) if one.keep_mask is not None)

    @property
    def video_tokens_kept(self) -> int:
        """`K`, of all videos."""
        return sum(int(one.keep_mask.sum()) for one in (self, *self.others) if one.keep_mask is not None)

    @property
    def prompt_tokens_kept(self) -> int:
        """Tokens of the prompt that reach the language model, `L'`."""
        return self.prompt_tokens - self.video_tokens + self.video_tokens_kept


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
) -> tuple[Answer, BatchFeature]:
    """Decodes and preprocesses one video and writes its prompt; arguments and errors as in `answer_videos`.

    Returns what is known of the answer, and the arguments of `generate`.
    `pruning_ratio` is what `test_time_scaling` raises the number of frames by, where that is on.
    """
    check_question(processor, question)
    prompt = processor.apply_chat_template(conversation(question), add_generation_prompt=True)
    begun, inputs = read_video(processor, video, prompt, pruning_ratio=pruning_ratio, processing=processing)
    return dataclasses.replace(begun, question=question), inputs


def conversation(question: str, after: Sequence[Answer] = ()) -> list[dict[str, Any]]:
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
) -> tuple[Answer, BatchFeature]:
    """As `prepare_video`, for a prompt, or the beginning of one, that is written already."""
    return read_media(processor, prompt, [video], options=processing_options(processor, processing, pruning_ratio))


def read_media(
    processor: Any, prompt: str, videos: Sequence[Any], images: Sequence[Any] = (), *, options: Mapping[str, Any]
) -> tuple[Answer, BatchFeature]:
    """What is known of the answer to a prompt, and its inputs. options: of `processing_options`, for videos."""
    for video in videos:
        if video is None or (isinstance(video, list | tuple) and not video):
            raise ValueError(f"video is {video!r}. Pass a path, a URL, bytes, an open file or the frames of a video.")
    media = {"videos": videos or None, "images": images or None}
    inputs = frames.process(processor, text=[prompt], **media, return_tensors="pt", **(options if videos else {}))
    shown = inputs.pop("video_metadata", None) or []
    seen = []
    for video, metadata, (_, rows, columns) in zip(videos, shown, frames.block_grids(processor, inputs), strict=True):
        if metadata.fps is None:  # frames that came without it: the rate that the prompt goes by
            metadata.fps = frames.get_frames(processor.video_processor)["max_fps"]
        seen.append(
            Answer(
                video,
                "",
                timestamps=tuple(float(time) for time in metadata.timestamps),
                damaged_frames=getattr(metadata, "num_damaged", 0),
                duration=metadata.duration,
                grid=(rows, columns),
            )
        )
    first, *others = seen or [Answer(None, "")]
    return dataclasses.replace(first, prompt_tokens=inputs["input_ids"].shape[1], others=tuple(others)), inputs


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
    prepared: Sequence[tuple[Answer, Mapping[str, torch.Tensor]]],
    **generate_options: Any,
) -> list[Answer]:
    """Completes what `prepare_video` began of some videos, in one call of `generate`, which takes the options."""
    started = time.perf_counter()
    inputs = inputs_for(model, join_prompts(processor, [inputs for _, inputs in prepared]))
    output = model.generate(**inputs, **{**generate_options, "return_dict_in_generate": True})
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    begun = with_masks([answer for answer, _ in prepared], output.get("keep_mask"), output.get("token_scores"))
    return complete(model, processor, begun, new, inputs["attention_mask"].sum(-1).tolist(), started)


def with_masks(begun: Sequence[Answer], keep_masks: Any, token_scores: Any) -> list[Answer]:
    """The same with what was kept of their videos. keep_masks, token_scores: (T, n) of each video, None without."""
    masks, scores = iter(keep_masks or ()), iter(token_scores or ())

    def fill(answer: Answer) -> Answer:
        if not answer.timestamps:  # it has no video
            return answer
        found: dict[str, Any] = {"keep_mask": next(masks).cpu(), "token_scores": next(scores).float().cpu()}
        return dataclasses.replace(answer, **found, others=tuple(map(fill, answer.others)))

    return list(map(fill, begun))


def complete(
    model: Any, processor: Any, begun: Sequence[Answer], new: Any, lengths: Sequence[int], started: float
) -> list[Answer]:
    """The answers whose new tokens these are. lengths: of the prompts. started: when, by `time.perf_counter`."""
    seconds = (time.perf_counter() - started) / len(begun)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [
        dataclasses.replace(
            answer,
            answer=words,
            new_tokens=next((count for count, token in enumerate(row.tolist(), 1) if token in ends), len(row)),
            prompt_tokens=length,
            seconds=seconds,
        )
        for answer, words, row, length in zip(begun, decode_answers(processor, new), new, lengths, strict=True)
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
