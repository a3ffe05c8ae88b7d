"""A checkpoint that answers questions about videos, for those who do not want to learn chat templates."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from stts_hf.checkpoints.loading import check_checkpoint, choose_device, load_config_and_processor, load_model
from stts_hf.data.encoding import Processor
from stts_hf.keeping import in_words, set_rule
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.modeling.settings_stts import take_given

from .clip import AnswerStream, Clip
from .engine import answer_videos
from .explain import Explanation, explain
from .generate import generate_options
from .inputs import ENDINGS
from .reading import Reading
from .requests import Answer


def load(
    checkpoint: str | os.PathLike[str],
    *,
    pruning_ratio: float | None = None,
    score_threshold: float | None = None,
    selector: str | None = None,
    device: str | torch.device | None = None,
    dtype: Any = None,
    revision: str | None = None,
    **options: Any,
) -> "VideoAssistant":
    """
    Loads a checkpoint for questions about videos:

        assistant = stts_hf.load("allenai/Molmo2-4B", selector="cosine", pruning_ratio=0.5)
        print(assistant.answer("clip.mp4", "What happens?").answer)

    Args:
        checkpoint: folder or Hub repository of an STTS checkpoint of any backbone, or of a stock Molmo2, Qwen3-VL or
            Qwen2.5-VL, with a selector that needs no training. Code in the checkpoint is not executed.
        pruning_ratio: fraction `k` of video tokens to drop; the checkpoint's by default.
        score_threshold: keep the blocks that score at least this, in place of a ratio (docs/budget.md).
        selector: "scorer", "cosine" or "random"; the checkpoint's by default.
        device: "cpu", "cuda", "cuda:1", ..., or a `torch.device`; by default a GPU if there is one.
        dtype: "float32", "bfloat16", ... or a `torch.dtype`; that of the weights by default.
        revision: branch, tag or commit of a Hub repository.
        options: `min_pruning_ratio`, `max_pruning_ratio` and `video_token_budget`, as in `VideoAssistant`; others of
            `from_pretrained`, such as `attn_implementation`, or `device_map` in place of `device`.

    Raises:
        TypeError, ValueError: there is no such checkpoint or device, it is of another kind of model, or an argument is
            of the wrong kind or out of range.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint must be a folder or the name of a Hub repository, got {checkpoint!r:.80}.")
    found = check_checkpoint(os.fspath(checkpoint), revision)
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, but must be 'auto', 'float32', 'bfloat16' or another of PyTorch's.")
    placed = options.get("device_map") is not None
    if placed and device is not None:
        raise ValueError(f"device is {device!r} and device_map is {options['device_map']!r}. Pass one of them.")
    target = None if placed else choose_device("auto" if device is None else str(device))
    config, processor = load_config_and_processor(found, revision=revision, selector=selector)
    keep = take_given(options, KEEP_ARGUMENTS)
    set_rule(config.vision_config, {"pruning_ratio": pruning_ratio, "score_threshold": score_threshold, **keep})
    model = load_model(found, config, target, revision=revision, dtype=dtype or "auto", **options)
    return VideoAssistant(model, processor)


def check_one_video(video: Any) -> None:
    """Raises `TypeError` for a list of videos, which is no list of pictures."""
    paths = [str(one) for one in video if isinstance(one, str | os.PathLike)] if isinstance(video, list | tuple) else ()
    if any(path.lower().endswith(ENDINGS) and not path.lower().endswith(".gif") for path in paths):
        raise TypeError(f"video is a list of {len(video)} videos. Ask about several with `answer_batch`.")


class VideoAssistant:
    """
    A model that answers questions about videos. `load` returns one; it can also be made of a model and a processor.
    Several threads may use it at once.

    A video is a path, a URL, the bytes of a file, an open file or decoded frames. An `Answer` holds the text and what
    the model saw (`keep_mask`, `token_scores`, `timestamps`, token counts). Arguments of all methods:

    - `pruning_ratio`: fraction `k` of video tokens to drop; the model's by default.
    - `score_threshold`: keep the blocks that score at least this, in place of a ratio; `min_pruning_ratio` and
      `max_pruning_ratio` are bounds. `video_token_budget`: maximum video tokens of a question (docs/budget.md).
    - `processing`: which frames, such as `{"num_frames": 32}`, `{"fps": 1}` or `{"test_time_scaling": True}`.
    - `options`: of `model.generate`; by default greedy decoding of at most 256 tokens.

    They raise `TypeError` or `ValueError` for a question that is not text, is empty or holds a control token, a video
    that cannot be read, and an option that is unknown or out of range.

    Attributes:
        model, processor: an STTS model of any backbone, or one wrapped by PEFT, and its processor.
    """

    def __init__(self, model: Any, processor: Processor):
        self.model, self.processor = model, processor

    def __repr__(self) -> str:
        config, name = self.model.config, Path(self.model.config.name_or_path).name
        dropped = f"{in_words(config.keep_rule())} by {config.vision_config.selector}"
        return f"VideoAssistant({name or type(self.model).__name__} on {self.model.device}, {dropped})"

    def __getattr__(self, name: str) -> Any:
        also = f": {name} is a method of a clip, assistant.watch(video).{name}(...)" if hasattr(Clip, name) else ""
        raise AttributeError(f"'VideoAssistant' object has no attribute {name!r}{also}", name=name, obj=self)

    @property
    def pruning_ratio(self) -> float | None:
        """Default fraction `k` of video tokens to drop; None with a threshold or a budget, which it replaces."""
        return self.model.config.keep_rule().ratio

    @pruning_ratio.setter
    def pruning_ratio(self, value: float) -> None:
        set_rule(self.model.config.vision_config, {"pruning_ratio": value})

    def answer(
        self,
        video: Any,
        question: str,
        *,
        pruning_ratio: float | None = None,
        processing: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Answer:
        """Answers one question about a video. To ask several, `watch` it."""
        check_one_video(video)
        return self.answer_batch([video], [question], pruning_ratio=pruning_ratio, processing=processing, **options)[0]

    def answer_batch(
        self,
        videos: Iterable[Any],
        questions: str | Iterable[str],
        *,
        batch_size: int = 8,
        pruning_ratio: float | None = None,
        processing: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[Answer]:
        """
        Answers a question about each of several videos, in their order; `batch_size` of them at once, while the next
        ones are decoded. `answer_videos` takes videos that do not end.

        Args:
            questions: one for each video, or one for all.
            on_error: "raise", or "return" an `Answer` with an `error` for a video that cannot be read.
        """
        if not isinstance(videos, str | bytes | os.PathLike):  # which `answer_videos` refuses
            videos = list(videos)
            questions = [questions] * len(videos) if isinstance(questions, str) else list(questions)
            if len(questions) != len(videos):
                numbers = f"questions are {len(questions)} and videos {len(videos)}"
                raise ValueError(f"{numbers}. Pass one question for each, or one for all.")
        given: dict[str, Any] = {"pruning_ratio": pruning_ratio, "processing": processing, "batch_size": batch_size}
        given |= generate_options(options)
        return list(answer_videos(self.model, self.processor, videos, questions, on_error=on_error, **given))

    def stream(self, video: Any, question: str, **options: Any) -> AnswerStream:
        """As `answer`, piece by piece: an iterator of text, whose `answer` is there at its end."""
        return AnswerStream(self.processor, self.answer, video, question, **options)

    def watch(
        self,
        video: Any,
        *,
        pruning_ratio: float | None = None,
        processing: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Clip:
        """Reads a video for as many questions as wanted, which take the options of `generate`."""
        check_one_video(video)
        return Clip(self.model, self.processor, video, processing=processing, pruning_ratio=pruning_ratio, **options)

    def explain(
        self, video: Any, question: str, *, expected: str | None = None, at: float | None = None, **options: Any
    ) -> Explanation:
        """
        Why the answer to a question is what it is: what it is with nothing dropped and by other selectors, which blocks
        turn it, and which setting mends it (docs/explain.md). Costs at most ten answers with nothing dropped.

        Args:
            expected: the right answer; by default the one with nothing dropped.
            at: a moment that matters, in seconds.
            options: `max_new_tokens` (64), `processing`, and what says how many blocks stay.

        Raises:
            TypeError: `expected` is not a text; and as `answer`.
            ValueError: nothing is dropped of the video; `at` is behind its end; and as `answer`.
        """
        check_one_video(video)
        return explain(Reading(self.model, self.processor, video, question, expected=expected, **options), at)
