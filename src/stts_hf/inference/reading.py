"""A clip and a question, read under many keep masks, and what that costs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stts_hf.data.encoding import Processor
from stts_hf.keeping import KeepRule, rule_arguments, take_rule
from stts_hf.model_parts import LANGUAGE_MODEL, VISION_TOWER, parts_of
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.modeling.video_processing_stts import check_count

from .generate import ReadHeads, fill_budget, inputs_for, read_heads, tokenize
from .requests import Answer, ask_about, prepare


@dataclass(frozen=True)
class Finding:
    """
    What one setting answers. rule, selector: the setting. answer: with text and masks. probability: of its text.
    expected: probability of the answer that is looked for.
    """

    rule: KeepRule
    selector: str
    answer: Answer
    probability: float
    expected: float

    def gives(self, text: str) -> bool:
        return same(self.answer.text, text)


def same(one: str, other: str) -> bool:
    """Whether two answers have the same words, but for case and a full stop."""
    return one.lower().rstrip(". ").split() == other.lower().rstrip(". ").split()


def tokens_of(model: Any, processor: Processor, text: str) -> torch.Tensor:
    """Tokens (tokens,) of an answer, with the one that ends it."""
    (ids,), ends = tokenize(processor, text)["input_ids"], model.generation_config.eos_token_id
    return torch.tensor([*ids.tolist(), *([ends] if isinstance(ends, int) else ends or [])[:1]])


class Reading:
    """
    A clip and a question, read under many keep masks. wanted: the answer that is looked for, by default the first one.
    target: its tokens. spent: FLOPs of matrix products with the weights, in answers with nothing dropped. rest: share
    of the tower's layers after `l`.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        video: Any,
        question: str,
        *,
        expected: str | None = None,
        processing: Mapping[str, Any] | None = None,
        max_new_tokens: int = 64,
        **keep: Any,
    ) -> None:
        self.model, self.processor, self.rule = model, processor, take_rule(model.config, keep)
        if keep:
            raise TypeError(f"`explain` takes no {', '.join(sorted(keep))}. Leave it out.")
        if not isinstance(expected, str | None):
            raise TypeError(f"expected must be a text, got {expected!r:.80}.")
        check_count("max_new_tokens", max_new_tokens)
        self.processing = processing
        self.request = replace(ask_about(processor, video, question), rule=self.rule)
        self.generation = {"max_new_tokens": max_new_tokens, "do_sample": False, "tokenizer": processor.tokenizer}
        self.tail = tokenize(processor, self.request.tail)
        self.target = torch.tensor([])
        self.wanted, self.spent, self.unit, self.weights = expected or "", 0.0, 1.0, Counter[str]()
        self.rest = 1 - (model.config.vision_config.pruning_layer + 1) / model.config.vision_config.num_hidden_layers
        for (name, part), weight in zip(parts_of(model).items(), model.parameters(), strict=True):
            self.weights[part] += 0 if "embed" in name or "lm_head" in name else weight.numel()
        self.sample()

    def sample(self, **options: Any) -> Answer:
        """Decodes the clip, with more options; returns what is known before the model runs."""
        given = {**(self.processing or {}), **options} if options else self.processing
        prepared = prepare(self.processor, given, replace(self.request, tail=""))
        self.prepared = fill_budget(self.model, self.processor, given, prepared)
        self.inputs = inputs_for(self.model, self.prepared.inputs)
        self.tower_cache, self.dense = TowerCache(), 1 - self.rest  # of the tower's layers, which run once
        return self.prepared.begun

    def charge(self, keep_mask: torch.Tensor, tokens: int) -> None:
        """Adds a pass that kept these blocks (T, n). tokens: that the language model read."""
        layers, self.dense = self.dense + self.rest * float(keep_mask.float().mean()), 0.0
        patches = layers * len(next(iter(self.tower_cache.states.values())))
        self.spent += (self.weights[VISION_TOWER] * patches + self.weights[LANGUAGE_MODEL] * tokens) / self.unit

    def answered(self, answer: torch.Tensor) -> torch.Tensor:
        """Ids (1, L) of the question and of an answer's tokens (tokens,)."""
        return torch.cat([self.tail["input_ids"][0], answer.cpu()])[None].to(self.model.device)

    @torch.no_grad()
    def rate(self, heads: ReadHeads, answer: torch.Tensor) -> float:
        """The probability of an answer's tokens (tokens,)."""
        tail, cache = self.answered(answer), heads.take(torch.tensor([0]), keep=True)
        mask = torch.cat([heads.tokens["attention_mask"], torch.ones_like(tail)], dim=-1)
        given = {"past_key_values": cache, "attention_mask": mask, "logits_to_keep": len(answer) + 1}
        return likelihood(self.model(input_ids=tail, **given).logits, answer)[1]

    @torch.no_grad()
    def holds(self, **keep: Any) -> tuple[bool, float]:
        """Whether the target is the greedy answer, and its probability. keep: how many blocks stay, or which."""
        tail = self.answered(self.target)
        more = {"input_ids": tail, "attention_mask": torch.ones_like(tail), "mm_token_type_ids": torch.zeros_like(tail)}
        texts = {name: torch.cat([self.inputs[name], of], -1) for name, of in more.items() if name in self.inputs}
        keep |= {"tower_cache": self.tower_cache, "use_cache": False, "logits_to_keep": len(self.target) + 1}
        output = self.model(**self.inputs | texts, **keep)
        (keep_mask,) = output.keep_mask
        self.charge(keep_mask, texts["input_ids"].shape[1] - int((~keep_mask).sum()))
        return likelihood(output.logits, self.target)

    def ask(self, rule: KeepRule, model: Any = None) -> Finding:
        """What a setting answers. The first one sets the unit of costs, and the target."""
        model, row = model or self.model, torch.tensor([0])
        call = {"tower_cache": self.tower_cache, **rule_arguments(rule)}
        heads = read_heads(model, self.processor, [self.prepared], **call)
        (new,) = heads.answer(model, heads.take(row, True), row, self.tail, **self.generation)
        (seen,) = heads.begun
        assert seen.keep_mask is not None  # there is a video
        self.charge(seen.keep_mask, heads.columns + 3 * self.answered(new).shape[1])  # it is rated twice
        text = self.processor.decode(new.tolist(), skip_special_tokens=True).strip()
        if not len(self.target):
            self.unit, self.spent, self.wanted = self.spent, 1.0, self.wanted or text
            self.target = new if same(text, self.wanted) else tokens_of(self.model, self.processor, self.wanted)
        rated = [self.rate(heads, answer) for answer in (new, self.target)]
        return Finding(rule, model.config.vision_config.selector, replace(seen, answer=text), *rated)


def likelihood(logits: torch.Tensor, answer: torch.Tensor) -> tuple[bool, float]:
    """If an answer's tokens (tokens,) are greedy by logits (1, tokens + 1, vocabulary), and their probability."""
    likely, chosen = logits[0, :-1].float().log_softmax(-1), answer.to(logits.device)
    return bool((likely.argmax(-1) == chosen).all()), float(likely.gather(1, chosen[:, None]).sum().exp())
