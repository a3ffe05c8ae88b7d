"""The model `stts` of lmms-eval: `lmms_eval --model stts --model_args pretrained=my-stts,pruning_ratio=0.5`."""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.utils import logging

from stts_hf.checkpoints.files import usable
from stts_hf.inference.assistant import load
from stts_hf.inference.engine import answer_requests
from stts_hf.inference.requests import Answer, Request, make_request
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.modeling.settings_stts import take_given
from stts_hf.video.sources import is_url

logger = logging.get_logger(__name__)

_WINDOW = 32  # batches whose prompts are made at once: their images are in memory
_FRAMES = (".png", ".jpg", ".jpeg", ".webp")
_MAX_NEW_TOKENS = 1024  # of tasks that do not say
_FOR_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


class STTS(lmms):
    """
    An STTS checkpoint of any backbone, or a stock one of such a model with `selector=cosine` or `random`.

    Args:
        pretrained: folder or Hub repository; code that lies in it does not run.
        pruning_ratio, score_threshold, min_pruning_ratio, max_pruning_ratio, video_token_budget: how many video tokens
            stay, by default the checkpoint's.
        selector: "scorer", "cosine" or "random", by default the checkpoint's.
        num_frames, max_fps: frames to look at, by default the checkpoint's.
        test_time_scaling: look at `1 / (1 - pruning_ratio)` times as many frames.
        batch_size: most questions at once.
        device, dtype, revision: by default the process's GPU or else the CPU, "auto" and "main".
        attn_implementation: as in transformers, also as JSON: `{"text_config": "flex_attention"}`.
        allow_urls: whether tasks may name http(s) URLs.

    Raises:
        ValueError: an argument is unknown or does not fit.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        selector: str | None = None,
        num_frames: int | None = None,
        max_fps: float | None = None,
        test_time_scaling: bool = False,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        attn_implementation: str | None = None,
        allow_urls: bool = False,
        **unknown: Any,
    ):
        super().__init__()
        keep = take_given(unknown, KEEP_ARGUMENTS)
        if unknown:
            raise ValueError(f"model_args has {', '.join(sorted(unknown))}, which the model stts does not know.")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
        if attn_implementation is not None:
            with usable(f"attn_implementation is {attn_implementation}", "name a kernel, or one for each part as JSON"):
                is_json = attn_implementation.startswith("{")
                keep["attn_implementation"] = json.loads(attn_implementation) if is_json else attn_implementation
        self.batch_size = int(batch_size)
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        device = str(self.accelerator.device) if self._world_size > 1 else device
        assistant = load(pretrained, selector=selector, device=device, dtype=dtype, revision=revision, **keep)
        self.model, self.processor, self.device = assistant.model, assistant.processor, assistant.model.device
        given = {"num_frames": num_frames, "max_fps": max_fps, "test_time_scaling": test_time_scaling or None}
        self.processing = {name: value for name, value in given.items() if value is not None}
        self.allow_urls = allow_urls

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """
        Answers requests, those with the same generation settings in batches. One that cannot be asked, also because its
        video cannot be read, is logged as an error and answered with nothing: an exception would cost lmms-eval the
        answers to all others. How many these were, and how many were asked without a video or image, is logged by task
        at the end and stands in the results file.
        """
        results: dict[int, GenerationResult] = {}
        unreadable: list[str] = []
        # Questions of each task that could not be asked, and that were asked without a video or image.
        self._failed, self._text_only = Counter[str](), Counter[str]()
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[2], sort_keys=True, default=str), []).append(place)
        started = time.perf_counter()
        with tqdm(total=len(requests), desc="Model Responding", disable=self.rank != 0) as bar:
            for places in alike.values():
                options, until = generation_options(requests[places[0]].args[2])
                options |= {"processing": self.processing, "batch_size": self.batch_size}
                for start in range(0, len(places), _WINDOW * self.batch_size):
                    window = places[start : start + _WINDOW * self.batch_size]
                    prompts = [self._prompt(requests[place]) for place in window]
                    answers = answer_requests(self.model, self.processor, prompts, **options)
                    for number, answer in answers:
                        asked = requests[window[number]]
                        if answer.error is not None:
                            unreadable.append(f"{_name(asked)} cannot be asked: {answer.error!r}")
                            self._failed[asked.task_name] += 1
                            logger.error(unreadable[-1])
                        results[window[number]] = result_of(answer, until)
                        bar.update()
        if unreadable and len(unreadable) == len(requests) and self.world_size == 1:  # other processes' would be lost
            raise ValueError(f"None of {len(requests)} questions could be asked. {unreadable[0]}")
        counts = [result.token_counts.output_tokens or 0 for result in results.values() if result.token_counts]
        seconds = time.perf_counter() - started
        found = {"unreadable": self._failed.total(), "text_only": self._text_only.total()}
        log_metrics(seconds, sum(counts), sum(counts) / seconds, {"rank": self.rank, **found})
        totals = Counter(request.task_name for request in requests)
        for task, number in self._failed.items():
            logger.error(f"{task}: {number} of {totals[task]} questions could not be asked, so they have no answer.")
        for task, number in self._text_only.items():
            logger.warning(f"{task}: {number} of {totals[task]} questions were asked without any video or image.")
        return [results[place] for place in range(len(requests))]

    def _prompt(self, request: Instance) -> Request:
        """What a task's messages ask; with an error where they ask what the model does not take, or cannot be made."""
        _, doc_to_messages, _, doc_id, task, split = request.args
        messages: list[dict[str, Any]] = []
        media: dict[str, list[Any]] = {"video": [], "image": []}
        try:
            conversation = ChatMessages(messages=doc_to_messages(self.task_dict[task][split][doc_id]))
            for message in conversation.messages:
                parts = [part.model_dump(include={"type", "text"}) for part in message.content]
                messages.append({"role": message.role, "content": parts})
                for part in message.content:
                    if part.type != "text":
                        source = self._source(part)
                        media[part.type].append(source)
            asked = make_request(self.processor, messages, media["video"], media["image"])
        except (Exception, SystemExit) as error:  # also of the task's own code, which may exit for a missing video
            return Request("", "", error=error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if not any(media.values()):  # as some tasks ask where a file is missing
            self._text_only[request.task_name] += 1
        return asked

    def _source(self, part: Any) -> Any:
        """What the processor reads a video or image from."""
        source = part.url
        if part.type not in ("video", "image"):
            raise ValueError(f"the task shows {part.type}, but the model takes videos, images and text.")
        if part.type == "video" and (isinstance(source, Mapping) or (part.start_time, part.end_time) != (None, None)):
            raise ValueError("the task shows a part of a video, and only whole ones can be read. Cut it out first.")
        if is_url(source) and not self.allow_urls:
            raise ValueError(f"{source!r} is a URL, and nothing is fetched unasked. Add allow_urls=True to model_args.")
        if part.type == "video" and isinstance(source, str) and os.path.isdir(source):
            return sorted(str(path) for path in Path(source).iterdir() if path.suffix.lower() in _FRAMES)
        return source

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Refused: a task of several rounds asks about its own answers."""
        raise NotImplementedError(f"{_name(requests[0])} asks in several rounds, which the model stts does not take.")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refused: none of the video benchmarks needs it."""
        raise NotImplementedError(f"{_name(requests[0])} compares likelihoods, but the model stts writes answers only.")


def generation_options(asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """
    A task's `generation_kwargs` as options of `model.generate`, greedy unless they ask for sampling, and the texts that
    an answer ends before. What `generate` has no option for is left out with a warning.
    """
    until = asked.get("until") or []
    given = {name: value for name, value in asked.items() if name != "until" and value is not None}
    unknown = sorted(name for name in given if not hasattr(GenerationConfig(), name))
    if unknown:
        logger.warning_once(f"generation_kwargs has {', '.join(unknown)}, which `generate` lacks: left out.")
    options = {name: value for name, value in given.items() if name not in unknown}
    options.setdefault("max_new_tokens", _MAX_NEW_TOKENS)
    temperature = options.get("temperature")
    options["do_sample"] = options.get("do_sample", bool(temperature)) and temperature != 0
    if not options["do_sample"]:
        options = {name: value for name, value in options.items() if name not in _FOR_SAMPLING}
    return options, [until] if isinstance(until, str) else list(until)


def result_of(answer: Answer, until: Sequence[str]) -> GenerationResult:
    """What lmms-eval takes for an answer, which ends before any of the texts `until`."""
    if answer.error is not None:
        return GenerationResult(text="")
    ends = [answer.text.find(stop) for stop in until if stop and stop in answer.text]
    counts = TokenCounts(input_tokens=answer.prompt_tokens, output_tokens=answer.new_tokens)
    return GenerationResult(text=answer.text[: min(ends, default=None)], token_counts=counts)


def _name(request: Instance) -> str:
    return f"Question {request.doc_id} of the task {request.task_name}"
