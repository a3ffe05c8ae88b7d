"""What the engine is asked and what it returns: a request, its decoded inputs, and the answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import BatchFeature
from transformers.image_utils import load_image

from stts_hf.data.encoding import Processor, check_texts, find_control_token
from stts_hf.keeping import KeepRule, rule_arguments, share_budget
from stts_hf.video import processors as frames
from stts_hf.video.sources import open_picture
from stts_hf.wording import did_you_mean

from .inputs import StoredVideo


@dataclass(frozen=True, eq=False)  # `==` of tensors is no bool
class Answer:
    """
    The answer to a request about a video, or its error; all fields after `error` are empty then.

    Attributes:
        video: as it was passed.
        question: as it was passed.
        answer: the generated text, without special tokens and surrounding whitespace.
        error: why there is no answer, else None.
        timestamps: when each of the frames shown is on screen, in seconds since the first frame of the video; where the
            model merges several video frames into one of its `T`, more than `T`.
        damaged_frames: number of sampled frames that are damaged; the intact frame before each is shown instead, once.
        duration: of the video, in seconds; None for frames that came without it.
        grid: rows and columns of blocks in a frame, `n` in all.
        keep_mask: (T, n) bool, which blocks were kept; on the host.
        token_scores: (T, n) float32, the scores that blocks were ranked by; on the host.
        prompt_tokens: tokens of the prompt before pruning, `L`.
        new_tokens: tokens of the answer, including the end token.
        tokens_read_before: prompt tokens after pruning that a `Clip` had cached already.
        seconds: time in the model; in a batch, divided by its rows.
        others: the same facts about further videos of the prompt.
    """

    video: Any = None
    question: str = ""
    answer: str | None = None
    error: Exception | None = None
    timestamps: tuple[float, ...] = ()
    damaged_frames: int = 0
    duration: float | None = None
    grid: tuple[int, int] = (0, 0)
    keep_mask: torch.Tensor | None = field(default=None, repr=False)
    token_scores: torch.Tensor | None = field(default=None, repr=False)
    prompt_tokens: int = 0
    new_tokens: int = 0
    tokens_read_before: int = 0
    seconds: float = 0.0
    others: tuple["Answer", ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The generated text; empty if there is an error."""
        return self.answer or ""

    def __str__(self) -> str:
        return self.text

    @property
    def num_frames(self) -> int:
        """Number of sampled frames of the video."""
        return len(self.timestamps)

    @property
    def tubelet(self) -> int:
        """How many frames the model merges into one of its `T`; the last may have fewer."""
        return 1 if self.keep_mask is None else -(-self.num_frames // len(self.keep_mask))

    @property
    def video_tokens(self) -> int:
        """Tokens of all videos before pruning, `n * T` of each."""
        return sum(one.keep_mask.numel() for one in (self, *self.others) if one.keep_mask is not None)

    @property
    def video_tokens_kept(self) -> int:
        """`K`, of all videos."""
        return sum(self.kept_by_video)

    @property
    def kept_by_video(self) -> tuple[int, ...]:
        """`K` of each video of the prompt."""
        return tuple(int(one.keep_mask.sum()) for one in (self, *self.others) if one.keep_mask is not None)

    @property
    def prompt_tokens_kept(self) -> int:
        """Tokens of the prompt after pruning, `L'`."""
        return self.prompt_tokens - self.video_tokens + self.video_tokens_kept


@dataclass(frozen=True)
class Request:
    """
    One conversation, rendered by the chat template up to where the answer begins.

    head: up to the end of the last video or image, "" without any. tail: the rest, "" in a request for a head alone.
    videos, images: in the order of their placeholders: paths, URLs or bytes, images also PIL images; a video may be a
    list of images. question: as the answer is to repeat it. error: why it cannot be asked. rule: how many blocks stay,
    by default what the call says.
    """

    head: str
    tail: str
    videos: tuple[Any, ...] = ()
    images: tuple[Any, ...] = ()
    question: str = ""
    error: Exception | None = None
    rule: KeepRule | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for requests with the same head. Media other than texts are the same if they are the same object."""
        media = (source if isinstance(source, str) else id(source) for source in (*self.videos, *self.images))
        return (self.head, self.rule, len(self.videos), *media) if self.head else (self.tail, id(self))

    def failed(self, error: Exception) -> Answer:
        """Its answer if there is none."""
        return Answer(self.videos[0] if self.videos else None, self.question, error=error)


@dataclass(eq=False)
class Prepared:
    """
    A request, decoded and tokenized.

    begun: the answer, with what is known before the model runs. inputs: one row, as the processor returns them, empty
    with `begun.error`. rule: how many blocks of each video stay. scales: whether frames follow it (test-time scaling).
    """

    request: Request
    begun: Answer
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rule: KeepRule | None = None
    scales: bool = False

    @staticmethod
    def arguments(several: Sequence["Prepared"]) -> dict[str, Any]:
        """Of a model's call about several that have the same rule: how many blocks stay."""
        rule, budgets = several[0].rule, [one.rule.budget for one in several if one.rule is not None]
        if rule is not None and rule.budget is not None:
            rule = dataclasses.replace(
                rule, budget=[most for some in budgets if isinstance(some, list) for most in some]
            )
        return {} if rule is None else rule_arguments(rule)


def make_request(
    processor: Processor,
    messages: Sequence[Mapping[str, Any]],
    videos: Sequence[Any] = (),
    images: Sequence[Any] = (),
    question: str = "",
) -> Request:
    """Renders a conversation of parts, with its videos and images. Raises `ValueError` for a control token."""
    check_texts(processor, messages)
    # As training renders answers: behind an empty thought, where a template knows thoughts.
    thinks = "enable_thinking" in str(processor.chat_template)
    options = {"enable_thinking": False} if thinks else {}
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    ends = [text.rfind(token) + len(token) for token in (processor.video_token, processor.image_token) if token in text]
    end = max(ends, default=0)
    # The head includes the token that closes a video: the video's own last tokens may be dropped, and the position of
    # the text behind them would be unknown.
    closing = getattr(processor, "vision_end_token", "<|vision_end|>")
    end += len(closing) if end and text.startswith(closing, end) else 0
    return Request(text[:end], text[end:], tuple(videos), tuple(images), question)


def ask_about(processor: Processor, video: Any, question: str, after: Sequence[Answer] = ()) -> Request:
    """The request for a question about a video, after earlier turns. Raises as `check_question`."""
    check_question(processor, question)
    messages: list[dict[str, Any]] = []
    for turn in after:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.text}]})
    messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
    messages[0]["content"].insert(0, {"type": "video"})
    return make_request(processor, messages, [video], question=question)


def check_question(processor: Processor, question: Any) -> None:
    """Raises `TypeError` or `ValueError` for a question that is not text, is empty, or holds a control token."""
    if not isinstance(question, str):
        raise TypeError(f"question must be a text, got {question!r:.80}, a {type(question).__name__}.")
    if not question.strip():
        raise ValueError(f"question is {question!r}, which asks nothing. Ask something about the video.")
    found = find_control_token(processor, question)
    if found is not None:
        raise ValueError(f"question holds {found!r}, a control token of the model. Take it out of the text.")


def processing_options(processor: Processor, processing: Any, rule: KeepRule | None) -> dict[str, Any]:
    """Options of the processor's call. Raises for what would be ignored, or does not fit the rule of the call."""
    if not isinstance(processing, Mapping | None):
        raise TypeError(f"processing must be a dict of options, such as {{'num_frames': 32}}, got {processing!r:.80}.")
    parts = {f"{part}_kwargs" for part in ("videos", "images", "text")}
    known = frames.OF_VIDEOS | processor.video_processor.valid_kwargs.__annotations__.keys() | parts
    known -= {"return_tensors", "return_metadata"}  # which `prepare` needs as they are
    for name in (processing or {}).keys() - known:
        advice = did_you_mean(name, known, "Leave it out.")
        raise ValueError(f"processing has {name!r}, which is no option of a question's video. {advice}")
    options: dict[str, Any] = {**(processing or {}), "return_metadata": True}
    for name in parts & options.keys():
        if not isinstance(options[name], Mapping | None):
            raise TypeError(f"processing[{name!r}] must be a dict of options, got {options[name]!r:.80}.")
    if options.get("test_time_scaling", getattr(processor.video_processor, "test_time_scaling", False)):
        if rule is None or rule.ratio == 1 or (rule.ratio is None and None in (rule.threshold, rule.budget)):
            needs = "a pruning_ratio below 1, or a score_threshold and the video_token_budget that frames are to fill"
            raise ValueError(f"test_time_scaling=True needs {needs}.")
        options = {"pruning_ratio": rule.ratio or 0.0, **options}
    return options


def prepare(processor: Processor, processing: Mapping[str, Any] | None, request: Request, **more: Any) -> Prepared:
    """Decodes and tokenizes a request; raises its error, the decoder's, and as `processing_options`. more: of those."""
    if request.error is not None:
        raise request.error
    options = processing_options(processor, processing, request.rule) | more
    for video in request.videos:
        if video is None or (isinstance(video, list | tuple) and not video):
            raise ValueError(f"video is {video!r}. Pass a path, a URL, bytes, an open file or the frames of a video.")

    inputs: BatchFeature = frames.process(
        processor,
        text=[request.head + request.tail],
        videos=[video.load() if isinstance(video, StoredVideo) else video for video in request.videos] or None,
        images=[load_image(open_picture(image, processor)) for image in request.images] or None,
        return_tensors="pt",
        **(options if request.videos else {}),
    )
    shown = inputs.pop("video_metadata", None) or []
    grids = frames.block_grids(processor, inputs)
    seen = []
    for video, metadata, (_, rows, columns) in zip(request.videos, shown, grids, strict=True):
        if metadata.fps is None:  # frames without a rate: the one that the prompt's times assume
            metadata.fps = frames.get_frames(processor.video_processor)["max_fps"]
        facts: dict[str, Any] = {"duration": metadata.duration, "grid": (rows, columns)}
        facts["timestamps"] = tuple(float(time) for time in metadata.timestamps)
        facts["damaged_frames"] = getattr(metadata, "num_damaged", 0)
        seen.append(Answer(video, request.question, **facts))
    first, *others = seen or [Answer(question=request.question)]
    begun = dataclasses.replace(first, prompt_tokens=inputs["input_ids"].shape[1], others=tuple(others))
    rule = request.rule
    if rule is not None and isinstance(rule.budget, int):
        rule = dataclasses.replace(rule, budget=share_budget(rule.budget, grids))
    return Prepared(request, begun, inputs, rule, scales="pruning_ratio" in options)
