"""What the tests that every backbone must pass know of each: a tiny model, its stock twin, and inputs.

A new backbone gets them for free: add a `Backbone` to `BACKBONES`. A sample is a list of parts, in their order: a
number of text tokens, a `Clip` or a `Picture`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests import (
    naive_qwen2_5_vl,
    naive_qwen3_vl,
    naive_smolvlm,
    tiny,
    tiny_qwen2_5_vl,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_vl,
    tiny_qwen3_vl_moe,
    tiny_smolvlm,
)
from tests.modeling import reference

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Clip:
    """A video of so many frames of the tower."""

    frames: int


@dataclass(frozen=True)
class Picture:
    """An image."""


Part = int | Clip | Picture
Rows = Sequence[Sequence[Part]]


@dataclass(frozen=True)
class Backbone:
    """
    model: of the vision config's settings, with or without a trained scorer. stock: the native model with a model's
    weights. naive: a sample through a model token by token. batch: samples as rows of one batch, padded on a side, with
    labels of their text. alone: the same samples one by one. pack: the same in a single row. one_block: a model, and a
    batch of videos of so many frames, each frame a single block. tower: where the scorer is. stock_rounding: of logits
    and gradients at ratio 0 against stock. naive_rounding: of both against `naive`. fills_cache_with_packed_rows:
    whether packed rows may be gone on with. stock_mixes: whether stock takes images beside videos.
    """

    name: str
    model: Callable[..., Any]
    stock: Callable[[Any], Any]
    naive: Callable[..., Any]
    batch: Callable[[Rows, str], Inputs]
    alone: Callable[[Rows], list[Inputs]]
    pack: Callable[[Rows], Inputs]
    one_block: Callable[[Sequence[int]], tuple[Any, Inputs]]
    tower: str
    stock_rounding: float
    naive_rounding: float = 1e-5
    fills_cache_with_packed_rows: bool = True
    stock_mixes: bool = True


def parts_of(rows: Rows, home: Any) -> list[list[Any]]:
    """The same with clips and pictures as `Video` and `Image` of the module `home`."""

    def part(some: Part) -> Any:
        if isinstance(some, Clip):
            return home.Video(some.frames)
        return home.Image() if isinstance(some, Picture) else some

    return [[part(some) for some in row] for row in rows]


def molmo2(rule: str = "original") -> Backbone:
    def parts(rows: Rows) -> list[list[tiny.Part]]:
        return parts_of(rows, tiny)

    def batch(rows: Rows, padding_side: str = "left") -> Inputs:
        return tiny.build_inputs(parts(rows), padding_side=padding_side, labels=True)

    def one_block(frames: Sequence[int]) -> tuple[Any, Inputs]:
        config = tiny.tiny_config(image_size=[6, 6])
        return tiny.tiny_model(config), tiny.video_prompt(frames, config, labels=True)

    return Backbone(
        name="molmo2" if rule == "original" else f"molmo2-{rule}",
        model=lambda trained_scorer=True, **vision: tiny.tiny_model(
            tiny.tiny_config(model_overrides={"pruned_position_ids": rule}, **vision), trained_scorer=trained_scorer
        ),
        stock=tiny.stock_twin,
        naive=reference.naive_forward,
        batch=batch,
        alone=lambda rows: reference.one_by_one(batch(rows), parts(rows)),
        pack=lambda rows: reference.pack(batch(rows), parts(rows)),
        one_block=one_block,
        tower="vision_tower",
        # Patches lie block by block, stock's row by row, so sums round otherwise: 6.2e-6 was measured.
        stock_rounding=1e-5,
        stock_mixes=False,
    )


def qwen_vl(name: str, tiny_qwen: Any, naive_qwen: Any) -> Backbone:
    def alone(rows: Rows) -> list[Inputs]:
        def part(some: Part) -> tiny_qwen3_vl.Part:
            if isinstance(some, Clip):
                return tiny_qwen3_vl.Video(some.frames, 2 + some.frames % 2, 3)  # of two resolutions
            return tiny_qwen3_vl.Image() if isinstance(some, Picture) else some

        return tiny_qwen.samples([[part(some) for some in row] for row in rows])

    def batch(rows: Rows, padding_side: str = "left") -> Inputs:
        return tiny_qwen3_vl.batch(alone(rows), padding_side)

    def one_block(frames: Sequence[int]) -> tuple[Any, Inputs]:
        rows: list[list[tiny_qwen3_vl.Part]] = [[3, tiny_qwen3_vl.Video(some, 1, 1), 5] for some in frames]
        return tiny_qwen.tiny_model(), tiny_qwen3_vl.batch(tiny_qwen.samples(rows))

    return Backbone(
        name=name,
        model=lambda trained_scorer=True, **vision: tiny_qwen.tiny_model(
            tiny_qwen.tiny_config(**vision), trained_scorer=trained_scorer
        ),
        stock=tiny_qwen.stock_twin,
        naive=naive_qwen.naive_forward,
        batch=batch,
        alone=alone,
        pack=lambda rows: tiny_qwen3_vl.pack(alone(rows)),
        one_block=one_block,
        tower="visual",
        stock_rounding=1e-6,  # the same kernels: logits are equal to the bit, gradients within 5e-7
        fills_cache_with_packed_rows=False,
    )


def smolvlm(rule: str = "original") -> Backbone:
    def alone(rows: Rows) -> list[Inputs]:
        return tiny_smolvlm.samples(parts_of(rows, tiny_smolvlm))

    def batch(rows: Rows, padding_side: str = "left") -> Inputs:
        return tiny_smolvlm.batch(alone(rows), padding_side)

    def one_block(frames: Sequence[int]) -> tuple[Any, Inputs]:
        rows = [tiny_smolvlm.sample([3, tiny_smolvlm.Video(some), 5], index, 1) for index, some in enumerate(frames)]
        return tiny_smolvlm.tiny_model(tiny_smolvlm.tiny_config(side=8)), tiny_smolvlm.batch(rows)

    return Backbone(
        name="smolvlm" if rule == "original" else f"smolvlm-{rule}",
        model=lambda trained_scorer=True, **vision: tiny_smolvlm.tiny_model(
            tiny_smolvlm.tiny_config(rule, **vision), trained_scorer
        ),
        stock=tiny_smolvlm.stock_twin,
        naive=naive_smolvlm.naive_forward,
        batch=batch,
        alone=alone,
        pack=lambda rows: tiny_smolvlm.pack(alone(rows)),
        one_block=one_block,
        tower="vision_model",
        stock_rounding=1e-5,  # as of Molmo2: 3e-6 of logits up to 4, 5e-7 of their norm; gradients 7e-7 of it
    )


BACKBONES = [
    molmo2(),
    qwen_vl("qwen3_vl", tiny_qwen3_vl, naive_qwen3_vl),
    qwen_vl("qwen2_5_vl", tiny_qwen2_5_vl, naive_qwen2_5_vl),
    smolvlm(),
]
# Whose tower and hooks are another one's: `test_mixtures.py`, and spare cases of the tests of every backbone.
MIXTURES = [qwen_vl("qwen3_vl_moe", tiny_qwen3_vl_moe, naive_qwen3_vl)]
# Whose text model keeps states, with which many of those tests do not deal: `test_hybrids.py`. Gradients of decay rates
# are small: 2.4e-6 of the largest entry was measured, 5e-8 in all; in float64 3e-16. Recurrent layers multiply
# rounding by ten: 2e-5 of logits of size 4, in float64 2e-14.
_STATES: dict[str, Any] = {"stock_rounding": 4e-6, "naive_rounding": 5e-5}
HYBRIDS = [replace(qwen_vl("qwen3_5", tiny_qwen3_5, naive_qwen3_vl), **_STATES)]
HYBRID_MIXTURES = [replace(qwen_vl("qwen3_5_moe", tiny_qwen3_5_moe, naive_qwen3_vl), **_STATES)]
_SPARE = [pytest.param(backbone, marks=pytest.mark.spare) for backbone in MIXTURES]
EVERY = [*BACKBONES, *_SPARE]
LATER = [*_SPARE, *(pytest.param(some, marks=pytest.mark.slow) for some in (*HYBRIDS, *HYBRID_MIXTURES))]
# For tests of positions and caches: Molmo2 may close gaps in positions.
with_compact = pytest.mark.parametrize(
    "backbone",
    [*EVERY, molmo2("compact"), pytest.param(smolvlm("compact"), marks=pytest.mark.slow)],
    ids=lambda backbone: backbone.name,
    indirect=True,
)
# For tests that take seconds each: of backbones whose tower is the same code, one every day.
DAILY = [*BACKBONES[:2], *(pytest.param(backbone, marks=pytest.mark.slow) for backbone in BACKBONES[2:])]
daily = pytest.mark.parametrize("backbone", DAILY, ids=lambda backbone: backbone.name, indirect=True)


@functools.cache
def shared_model(backbone: Backbone) -> Any:
    """Its tiny model, made once in a process."""
    return backbone.model()


def prompt(inputs: Inputs) -> Inputs:
    """Without labels, as for `generate`."""
    return {name: value for name, value in inputs.items() if name != "labels"}


def longer(inputs: Inputs, sequences: torch.Tensor, num_tokens: int = 5, seed: int = 7) -> Inputs:
    """The next turn: what was said so far and some more text."""
    generator = torch.Generator().manual_seed(seed)
    question = torch.randint(1, 500, (len(sequences), num_tokens), generator=generator)
    added = sequences.shape[1] + num_tokens - inputs["input_ids"].shape[1]
    return inputs | {
        "input_ids": torch.cat([sequences, question], dim=-1),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, added), value=1),
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, added)),
    }


def without_vision(inputs: Inputs) -> Inputs:
    """What a cache has not seen of a turn: its text."""
    return {
        name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
