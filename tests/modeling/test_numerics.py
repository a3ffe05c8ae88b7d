"""Half precision, extremes and repetition, for every backbone: as exact as stock is, finite, and the same again."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from tests.backbones import BACKBONES, HYBRIDS, Backbone, Clip, Inputs, Picture, Rows, prompt
from tests.conftest import REPOSITORY
from tests.modeling.reference import gradients
from tests.version_marks import since_transformers_5_23

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]
DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


STATES = [pytest.param(backbone, marks=pytest.mark.slow) for backbone in HYBRIDS]


@pytest.fixture(scope="module", params=[*BACKBONES, *STATES], ids=lambda backbone: backbone.name)
def backbone(request) -> Backbone:
    """Without mixtures of experts, where rounding sends a token to another expert, in stock as in ours."""
    return request.param


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def rounded(model, dtype: torch.dtype):
    """The model with weights of `dtype`, and the same weights as float32. RoPE's frequencies stay float32."""
    half, exact = copy.deepcopy(model), copy.deepcopy(model)
    for parameter, wide in zip(half.parameters(), exact.parameters(), strict=True):
        parameter.data = parameter.data.to(dtype)
        wide.data = parameter.data.float()
    return half, exact


@torch.no_grad()
def error(model, inputs: Inputs, dtype: torch.dtype, **options) -> float:
    """Mean distance of logits in half precision from those of the same weights and pixels in float32."""
    half, exact = rounded(model, dtype)
    low = cast(inputs, dtype)
    found, expected = half(**low, **options), exact(**cast(low, torch.float32), **options)
    assert found.logits.dtype == dtype
    real = inputs["attention_mask"].bool() if not options else expected.kept_indices >= 0
    return float((found.logits.float() - expected.logits)[real].abs().mean())


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_half_precision_loses_no_more_than_stock_does(backbone, dtype, rows):
    """
    Blocks are drawn at random, so that rounding cannot choose others. Fewer tokens and packed layers change the sums,
    not how exact they are: 0.90 to 1.12 of stock's error was measured. Stock that refuses images beside videos gets the
    videos alone.
    """
    model, inputs = backbone.model(selector="random"), prompt(backbone.batch(rows, "right"))
    of_stock = rows if backbone.stock_mixes else [[part for part in row if part != Picture()] for row in rows]
    allowed = 1.3 * error(backbone.stock(model), prompt(backbone.batch(of_stock, "right")), dtype)
    for ratio in (0.0, 0.5, 0.9):
        assert error(model, inputs, dtype, pruning_ratio=ratio) < allowed


def errors_of_training(model, inputs: Inputs, dtype: torch.dtype, **options) -> tuple[float, float]:
    """How far the loss is from float32's, and all gradients together, as a part of the norm of float32's."""
    half, exact = rounded(model, dtype)
    low = cast(inputs, dtype)
    found, expected = half(**low, **options), exact(**cast(low, torch.float32), **options)
    if options:
        assert all(map(torch.equal, found.keep_mask, expected.keep_mask))
    moved, wanted = gradients(half, found.loss), gradients(exact, expected.loss)
    assert moved.keys() == wanted.keys()
    distance = torch.cat([(moved[name].float() - wanted[name]).flatten() for name in wanted]).norm()
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    return float((found.loss - expected.loss).detach().abs()), float(distance / norm)


@pytest.mark.parametrize(("selector", "ratios"), [("random", (0.0, 0.5, 0.9)), ("scorer", (0.0, 0.3))])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_losses_and_gradients_in_half_precision_lose_no_more_than_stocks_do(backbone, selector, ratios, dtype):
    """
    The scorer's own loss and gradients count too; at these ratios rounding does not change what it keeps.

    Gradients of one small batch scatter: 0.85 to 1.69 of stock's error was measured. Errors of a loss's labels cancel
    out by chance, in stock almost wholly; so a loss is held to the mean error of stock's logits: at most 0.41 of it
    was measured.
    """
    model, inputs = backbone.model(selector=selector), backbone.batch(ROWS, "right")
    stock = backbone.stock(model)
    of_logits, of_gradients = error(stock, inputs, dtype), errors_of_training(stock, inputs, dtype)[1]
    for ratio in ratios:
        loss, moved = errors_of_training(model, inputs, dtype, pruning_ratio=ratio)
        assert loss < of_logits
        assert moved < 2 * of_gradients


@pytest.mark.parametrize(("selector", "units"), [("scorer", 6), ("cosine", 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@torch.no_grad()
def test_scores_in_half_precision_are_float32s_and_keep_the_same_blocks(backbone, selector, units, dtype):
    """
    Units of `dtype`'s eps. The scorer rounds after each of its layers, and its last one sums 64 products: at most 3.4
    eps were measured. Cosines are computed in float32, of states whose errors cancel out: at most 0.4 eps.

    A block may be kept in one and not in the other where its score lies so near the cut that the errors reach over it.
    """
    tolerance = units * torch.finfo(dtype).eps
    half, exact = rounded(backbone.model(selector=selector), dtype)
    low = cast(backbone.batch(ROWS, "left"), dtype)
    found, expected = half(**low, pruning_ratio=0.5), exact(**cast(low, torch.float32), pruning_ratio=0.5)
    decided = []
    for ours, theirs, kept, wanted in zip(
        found.token_scores, expected.token_scores, found.keep_mask, expected.keep_mask, strict=True
    ):
        torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=0)
        later, kept, wanted = theirs[1:], kept[1:], wanted[1:]  # frame 0 always stays
        cut = (later[wanted].min() + later[~wanted].max()) / 2 if wanted.any() else later.max()
        clear = (later - cut).abs() > 2 * tolerance
        assert torch.equal(kept[clear], wanted[clear])
        decided.append(clear.flatten())
    assert torch.cat(decided).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@torch.no_grad()
def test_a_model_cast_in_place_ranks_as_one_that_was_loaded_so(backbone, dtype):
    """Loading leaves RoPE's frequencies in float32. `model.to` rounds the text's, which rank nothing."""
    model, low = backbone.model(), cast(prompt(backbone.batch(ROWS, "left")), dtype)
    loaded, in_place = rounded(model, dtype)[0], copy.deepcopy(model).to(dtype)
    found, expected = (each(**low, pruning_ratio=0.5) for each in (in_place, loaded))
    assert all(map(torch.equal, found.token_scores, expected.token_scores))
    assert all(map(torch.equal, found.keep_mask, expected.keep_mask))


class Dictation(LogitsProcessor):
    """Keeps the logits of each step of `generate`, which then says the words given."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        word = self.words[:, len(self.steps), None]
        self.steps.append(scores.float())
        return torch.full_like(scores, -torch.inf).scatter(1, word, 0.0)


@torch.no_grad()
def error_of_steps(model, inputs: Inputs, dtype: torch.dtype, cache: dict[str, Any], **options) -> float:
    """Mean distance of the logits of prefill and cached steps from float32's of the whole sequence, without cache."""
    half, exact = rounded(model, dtype)
    low, words = cast(inputs, dtype), torch.arange(11, 16)[None]
    dictation = Dictation(words)
    half.generate(**low, max_new_tokens=5, do_sample=False, logits_processor=[dictation], **cache, **options)
    whole = cast(low, torch.float32) | {
        "input_ids": torch.cat([low["input_ids"], words[:, :-1]], -1),
        "attention_mask": torch.nn.functional.pad(low["attention_mask"], (0, 4), value=1),
        "mm_token_type_ids": torch.nn.functional.pad(low["mm_token_type_ids"], (0, 4)),
    }
    expected = exact(**whole, **options).logits[:, -5:]
    return float((torch.stack(dictation.steps, 1) - expected).abs().mean())


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("cache", [{}, pytest.param(STATIC, marks=since_transformers_5_23)], ids=["growing", "static"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_cached_steps_in_half_precision_lose_no_more_than_stock_does(backbone, dtype, cache):
    """Of one short row, errors scatter more than above: 0.97 to 1.32 of stock's was measured."""
    model, inputs = backbone.model(selector="random"), prompt(backbone.batch(ROWS[1:], "left"))
    allowed = 1.5 * error_of_steps(backbone.stock(model), inputs, dtype, cache)
    for ratio in (0.0, 0.5, 0.9):
        assert error_of_steps(model, inputs, dtype, cache, pruning_ratio=ratio) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_packed_rows_in_half_precision_lose_no_more_than_rows_of_their_own(backbone, dtype):
    """0.99 to 1.04 of the error was measured."""
    model, inputs = backbone.model(selector="random"), prompt(backbone.pack(ROWS))
    if model.model.refuses_packed_rows:
        pytest.skip(f"{backbone.name} refuses packed rows")
    rows = prompt(backbone.batch(ROWS, "right"))
    for ratio in (0.0, 0.5, 0.9):
        allowed = 1.2 * error(model, rows, dtype, pruning_ratio=ratio)
        assert error(model, inputs, dtype, pruning_ratio=ratio) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bias", [-300.0, 300.0, 0.0], ids=["scores of 0", "scores of 1", "both"])
def test_extreme_scores_stay_finite(backbone, bias, dtype):
    model = rounded(backbone.model().train(), dtype)[0]
    layer = model.get_submodule(f"model.{backbone.tower}.scorer.score_layer")
    with torch.no_grad():
        layer.bias.fill_(bias)
        layer.weight.mul_(0.0 if bias else 1e4)
    outputs = model(**cast(backbone.batch(ROWS, "left"), dtype), pruning_ratio=0.5)
    scores = torch.cat([one.flatten() for one in outputs.token_scores])
    extremes = torch.tensor([0.0, 1.0] if not bias else [float(bias > 0)])
    nearest = (scores.float()[:, None] - extremes).abs()
    assert nearest.min(1).values.max() < 1e-6
    assert nearest.min(0).values.max() < 1e-6
    assert all(int((~mask).sum()) == mask.numel() // 2 for mask in outputs.keep_mask)
    assert outputs.logits.isfinite().all()
    assert outputs.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=["fp32", "bf16", "fp16"])
def test_frames_of_one_colour_stay_finite(backbone, dtype):
    model, inputs = rounded(backbone.model().train(), dtype)[0], backbone.batch(ROWS, "left")
    inputs["pixel_values_videos"] = torch.zeros_like(inputs["pixel_values_videos"])
    outputs = model(**cast(inputs, dtype), pruning_ratio=0.5)
    assert outputs.temporal_loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9, 1.0])
def test_frames_of_one_block_stay_finite(backbone, ratio, dtype):
    """Each row of a frame then has its minimum as its maximum; one of the videos is a single block."""
    model, inputs = backbone.one_block([4, 1, 3])
    model = rounded(model.train(), dtype)[0]
    outputs = model(**cast(inputs, dtype), pruning_ratio=ratio)
    assert [mask.shape for mask in outputs.keep_mask] == [(4, 1), (1, 1), (3, 1)]
    dropped = {0.0: [0, 0, 0], 0.5: [2, 0, 1], 0.9: [3, 0, 2], 1.0: [4, 1, 3]}[ratio]
    assert [int((~mask).sum()) for mask in outputs.keep_mask] == dropped
    assert outputs.logits.isfinite().all()
    assert outputs.task_loss.isfinite()
    assert outputs.temporal_loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


def trained_and_sampled(backbone: Backbone) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of a new model of the same weights, and what is sampled from a seed."""
    model, inputs = backbone.model().train(), backbone.batch(ROWS, "left")
    outputs = model(**inputs, pruning_ratio=0.5)
    found = {"logits": outputs.logits.detach(), "loss": outputs.loss.detach()} | gradients(model, outputs.loss)
    torch.manual_seed(3)
    sampled = model.eval().generate(**prompt(inputs), do_sample=True, max_new_tokens=8, pruning_ratio=0.5)
    return found | {"sampled": sampled}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_same_again_to_the_bit(backbone):
    assert_same_bits(trained_and_sampled(backbone), trained_and_sampled(backbone))


IN_ANOTHER_PROCESS = """
import sys, torch
from tests.backbones import BACKBONES
from tests.modeling.test_numerics import trained_and_sampled
torch.set_num_threads(int(sys.argv[2]))
torch.save({backbone.name: trained_and_sampled(backbone) for backbone in BACKBONES}, sys.argv[1])
"""


@pytest.mark.slow
def test_the_same_in_another_process_to_the_bit(tmp_path):
    """With as many threads, and another order of hashes."""
    file = tmp_path / "found.pt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    arguments = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(file), str(torch.get_num_threads())]
    result = subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = torch.load(file, weights_only=True)
    assert set(found) == {backbone.name for backbone in BACKBONES}
    for backbone in BACKBONES:
        assert_same_bits(found[backbone.name], trained_and_sampled(backbone))
