"""A sample as the model's inputs: prompt, labels and tensors, and its length after pruning without decoding."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2
import torch
from transformers.image_utils import load_image

from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.modeling.sequence_stts import align_labels as align_labels
from stts_hf.modeling.video_reading_stts import STTSVideoMetadata
from stts_hf.video import processors as frames
from stts_hf.video.sources import open_picture

from .rows import RowError, Sample, row_errors

IGNORED = -100  # the label of what is not learned
BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode reserves these for marks within a program


class Processor(Protocol):
    """What the processors of all backbones have."""

    tokenizer: Any
    image_processor: Any
    video_processor: Any
    chat_template: Any
    image_token: str
    video_token: str
    image_token_ids: Any

    @property
    def model_input_names(self) -> list[str]: ...
    def decode(self, *args: Any, **kwargs: Any) -> str: ...
    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any: ...
    def replace_video_token(self, video_inputs: dict[str, Any], video_idx: int, **kwargs: Any) -> str: ...
    def get_text_with_replacements(self, text: Any, *args: Any, **kwargs: Any) -> Any: ...
    def _get_num_multimodal_tokens(self, **sizes: Any) -> dict[str, Any]: ...
    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any: ...


@dataclass
class Encoded:
    """
    A sample as tensors.

    input_ids, mm_token_type_ids, labels: (L,). vision: what the processor gives for its videos and images, with the
    shapes of DESIGN.md. grids: `(T, rows, columns)` in blocks of each video.
    """

    id: str
    input_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    labels: torch.Tensor
    vision: dict[str, torch.Tensor] = field(default_factory=dict)
    grids: list[frames.Grid] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_ids)


def count_dropped(grids: Sequence[frames.Grid], pruning_ratio: float) -> int:
    """Number of dropped tokens of videos with these `(T, rows, columns)`."""
    blocks = [(t, rows * columns) for t, rows, columns in grids]
    return sum(t * n - num_kept_blocks(t, n, pruning_ratio) for t, n in blocks)


def check_length(name: str, length: int, limit: int, used: int = 0, *, argument: str = "max_length") -> None:
    """Raises `RowError` where `length` tokens do not fit behind `used` tokens of other samples into `limit`."""
    if used + length > limit:
        before = f" and the samples before it in its row {used}" if used else ""
        raise RowError(
            f"Row {name!r} has {length} tokens after pruning{before}, but {argument} is {limit}. Raise {argument} or "
            "pruning_ratio, or lower num_frames, which some video processors call max_frames.",
            name,
        )


def encode(processor: Processor, sample: Sample) -> Encoded:
    """Decodes and tokenizes a sample. Raises `RowError` for what cannot be decoded, rendered or learned."""
    with row_errors(sample.id):
        if sample.room:
            raise ValueError("its answer is yet to be written. Pass the rows through `answer_rows` first.")
        text, spans = prompt_of(processor, sample)
        inputs = frames.process(
            processor,
            text=[text],
            videos=sample.videos or None,
            images=[load_image(open_picture(image, processor)) for image in sample.images] or None,
            return_tensors="pt",
            padding=False,
            truncation=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        spelled = inputs["text_replacement_offsets"][0]

        def move(place: int) -> int:
            """Where a place in the prompt lies once its placeholders are spelled out."""
            return place + sum(len(r["replacement"]) - len(r["text"]) for r in spelled if r["span"][1] <= place)

        moved = [(move(start), move(end)) for start, end in spans]
        labels = make_labels(inputs["input_ids"][0], inputs["offset_mapping"][0], moved)
        if (labels == IGNORED).all():
            raise ValueError("messages: all labels are masked, so nothing is learned. Leave the row out.")
    return _encoded(processor, sample.id, inputs, labels)


def _encoded(processor: Processor, name: str, inputs: Any, labels: torch.Tensor) -> Encoded:
    of_text = {*processor.tokenizer.model_input_names, "mm_token_type_ids"}
    parts = (processor.video_processor, processor.image_processor, processor)  # the whole one may add some of its own
    keys = dict.fromkeys(key for part in parts for key in part.model_input_names)
    vision = {key: inputs[key] for key in keys if key in inputs and key not in of_text}
    grids = frames.block_grids(processor, inputs)
    return Encoded(name, inputs["input_ids"][0], inputs["mm_token_type_ids"][0], labels, vision, grids)


def prompt_of(processor: Processor, sample: Sample) -> tuple[str, list[tuple[int, int]]]:
    """`render` of the sample. Raises `ValueError`, also for control tokens in a text."""
    check_texts(processor, sample.messages)
    check_videos(processor, sample)
    return render(processor, place_subtitles(processor, sample.messages))


def check_videos(processor: Processor, sample: Sample) -> None:
    """Raises `ValueError` for more videos than a text of the model may have."""
    most = getattr(processor, "max_videos", None)
    if most is not None and len(sample.videos) > most:
        raise ValueError(
            f"videos: a text of this model holds at most {most} video{'s'[: most > 1]}, this one has "
            f"{len(sample.videos)}. Make a row of each."
        )


def place_subtitles(processor: Processor, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Subtitles as a message where the template has a place for them, else as text behind the videos and images."""
    if messages[0]["role"] != "subtitle" or "subtitle" in (processor.chat_template or ""):
        return messages
    subtitles, first, *others = messages
    media = [part for part in first["content"] if part["type"] != "text"]
    texts = [part for part in first["content"] if part["type"] == "text"]
    words = {"type": "text", "text": f"{subtitles['content']}\n"}
    return [{**first, "content": [*media, words, *texts]}, *others]


def render(processor: Processor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """
    The conversation in the chat template's words, behind the bos token where the processor puts one first, and which
    characters `[start, end)` are learned: each answer and the eos token behind it, which is added where the template
    leaves the last answer open.

    A second rendering has marks around the answers, since a template may move videos and strip texts.

    Raises:
        ValueError: the template refuses the conversation, or changes answers so that they cannot be found.
    """
    eos = processor.tokenizer.eos_token
    text = _apply(processor, messages)
    renderings = (_apply(processor, _mark_answers(messages, strip)) for strip in (False, True))
    marked = next((one for one in renderings if one.replace(BEGIN, "").replace(END, "") == text), "")
    pieces = re.split(f"[{BEGIN}{END}]", marked)  # every other one is an answer
    if len(pieces) != 1 + 2 * sum(message["role"] == "assistant" for message in messages):
        raise ValueError("chat_template changes the words of answers. Use a template that keeps them.")
    if messages[-1]["role"] == "assistant" and not pieces[-1].rstrip().endswith(eos):
        pieces[-1] += eos
    bos = (processor.tokenizer.bos_token or eos) if getattr(processor, "adds_bos", False) else ""
    if not text.startswith(bos):
        pieces[0] = bos + pieces[0]
    spans, start = [], len(pieces[0])
    for answer, after in zip(pieces[1::2], pieces[2::2], strict=True):
        if not after.lstrip().startswith(eos):
            raise ValueError(
                f"chat_template: no eos_token {eos!r} ends the answer {answer[:40]!r}. Set the tokenizer's eos_token "
                "to the token that ends a turn."
            )
        spans.append((start, start + len(answer) + after.index(eos) + len(eos)))
        start += len(answer) + len(after)
    return "".join(pieces), spans


def _mark_answers(messages: list[dict[str, Any]], strip: bool) -> list[dict[str, Any]]:
    """The messages with `BEGIN` and `END` around each answer. strip: for templates that strip answers."""
    marked = []
    for message in messages:
        if message["role"] == "assistant":
            parts = [part | {"text": part["text"].strip() if strip else part["text"]} for part in message["content"]]
            parts[0] = parts[0] | {"text": BEGIN + parts[0]["text"]}
            parts[-1] = parts[-1] | {"text": parts[-1]["text"] + END}
            message = message | {"content": parts}
        marked.append(message)
    return marked


def _apply(processor: Processor, messages: list[dict[str, Any]]) -> str:
    try:
        return processor.apply_chat_template(messages, tokenize=False)
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"chat_template refuses messages of the roles {roles}: {error}") from error


def check_texts(processor: Processor, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ValueError` where a text of messages holds a token that stands for images, videos or turns."""
    for number, message in enumerate(messages):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
        found = find_control_token(processor, *texts)
        if found is not None:
            raise ValueError(f"messages[{number}] holds {found!r}, a control token of the model. Take it out.")


def find_control_token(processor: Processor, *texts: str) -> str | None:
    """A token in the texts that stands for images, videos or turns, or None."""
    tokenizer = processor.tokenizer
    # Tokens that begin a turn are not among `all_special_tokens`.
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = {processor.image_token, processor.video_token, *special}
    tokens |= set(tokenizer.convert_ids_to_tokens(processor.image_token_ids))
    tokens |= {getattr(processor, name, None) for name in ("vision_start_token", "vision_end_token")}
    return next((token for token in sorted(filter(None, tokens)) if any(token in text for text in texts)), None)


def count_tokens(
    processor: Processor,
    text: str,
    videos: Sequence[tuple[torch.Tensor, STTSVideoMetadata]],
    image_sizes: Sequence[tuple[int, int]],
    pruning_ratio: float,
) -> int:
    """Tokens of a rendered prompt after pruning. videos: of `frames.probe`. image_sizes: height and width of each."""
    grids, shown = [grid for grid, _ in videos], [metadata for _, metadata in videos]
    inputs = {frames.grid_name(processor): torch.stack(grids), "video_metadata": shown} if videos else {}
    words = [processor.replace_video_token(inputs, index) for index in range(len(videos))]
    images = [processor.image_token] * len(image_sizes)
    [text], _ = processor.get_text_with_replacements([text], images, words)
    count: Any = processor._get_num_multimodal_tokens  # noqa: SLF001  # there is no other name for it
    counts = count(image_sizes=image_sizes)["num_image_tokens"] if image_sizes else []
    length = len(processor.tokenizer(text)["input_ids"]) + sum(counts) - len(counts)
    return length - count_dropped(frames.block_grids(processor, inputs), pruning_ratio)


def make_labels(input_ids: torch.Tensor, offsets: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """
    `input_ids` (L,) where a token ends within a span of characters, -100 elsewhere: it may begin before it, with a
    template's space. offsets: (L, 2) of tokens.
    """
    learned = torch.zeros_like(input_ids, dtype=torch.bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        learned |= (ends > start) & (ends <= end) & (ends > starts)
    learned[0] = False  # nothing predicts a sample's first token
    return input_ids.where(learned, IGNORED)


def empty_video(processor: Processor) -> Encoded:
    """A black video of one frame, without labels. Its temporal loss is 0, since it has no second frame."""
    size = getattr(processor.video_processor, "patch_size", 1)
    inputs = frames.process(
        processor,
        text=[processor.video_token],
        videos=[torch.zeros(1, 3, 8 * size, 8 * size, dtype=torch.uint8)],
        video_metadata=[{"total_num_frames": 1, "fps": 1.0}],
        return_tensors="pt",
    )
    labels = torch.full_like(inputs["input_ids"][0], IGNORED)
    return _encoded(processor, "<empty video>", inputs, labels)
