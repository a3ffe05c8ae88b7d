"""`RasterTower` and `CausalBackbone` under a backbone of hooks alone: equal to stock SmolVLM, and to masking.

At ratio 0, patches lie block by block where stock's lie row by row, so sums round otherwise: 2.6e-6 was measured.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import tiny_raster
from tests.backbones import prompt
from tests.naive import naive_bias, naive_keep_mask, naive_scores
from tests.tiny_raster import (
    GRID,
    PLACEHOLDER,
    SIDE,
    Image,
    Inputs,
    Part,
    Video,
    as_pictures,
    batch,
    pack,
    sample,
    samples,
    tiny_model,
)

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
MIXED: list[Part] = [3, Video(3), 2, Image(), 2, Video(2), 4]
ROWS: list[list[Part]] = [[3, Video(4), 5], MIXED, [2, Image(), 3, Image(), 2], [9]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["original", "compact"])
def model(request):
    return tiny_model(request.param)


def naive_video(model: Any, pixels: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One video, masked: features of all blocks (T * n, text width), of which those of kept ones count, (T, n)."""
    tower, config, side = model.model.vision_model, model.config.vision_config, GRID * SIDE
    table = torch.arange(side * side).view(GRID, SIDE, GRID, SIDE).transpose(1, 2).reshape(-1, SIDE * SIDE)
    table = torch.cat([frame * side * side + table for frame in range(len(pixels))])
    x = F.conv2d(pixels, tower.embeddings.patch_embedding.weight, tower.embeddings.patch_embedding.bias, stride=4)
    x = x.flatten(2).transpose(1, 2) + tower.embeddings.position_embedding.weight  # (T, N, D)
    allowed, bias = torch.ones(x.shape[:2], dtype=torch.bool), torch.zeros(x.shape[:2])
    heads = config.num_attention_heads
    for index, layer in enumerate(tower.encoder.layers):
        normed = layer.layer_norm1(x)
        attention = layer.self_attn
        query, key, value = (
            projection(normed).unflatten(-1, (heads, -1))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = torch.einsum("tqhd,tkhd->thqk", query, key) / math.sqrt(query.shape[-1])
        logits = logits + (bias[:, None, None] if index == config.pruning_layer + 1 else 0)
        if index > config.pruning_layer + 1:
            logits = logits.masked_fill(~allowed[:, None, None], -math.inf)
        attended = torch.einsum("thqk,tkhd->tqhd", logits.softmax(-1).nan_to_num(), value)
        x = x + attention.out_proj(attended.flatten(2))
        hidden = layer.mlp.fc1(layer.layer_norm2(x))
        x = x + layer.mlp.fc2(F.gelu(hidden, approximate="tanh"))
        if index == config.pruning_layer:
            weights = {f"vision_tower.scorer.{name}": weight for name, weight in tower.scorer.named_parameters()}
            scores = naive_scores(weights, heads, x, table)
            keep_mask = naive_keep_mask(scores, ratio)
            bias = naive_bias(scores, table, (side, side), config.score_rescaling)
            allowed = torch.zeros(x.shape[:2], dtype=torch.bool).flatten()
            allowed[table[keep_mask.flatten()].flatten()] = True
            allowed = allowed.view(x.shape[:2])
    blocks = tower.post_layernorm(x).flatten(0, 1)[table]  # (T * n, w^2, D)
    return blocks.flatten(1) @ model.model.connector.modality_projection.proj.weight.T, keep_mask


def naive_logits(model: Any, inputs: Inputs, ratio: float) -> tuple[torch.Tensor, list[int]]:
    """Logits (L', vocabulary) of one sample and the places of the tokens that are left, token by token."""
    features, keeps = [], []
    grids = inputs.get("video_grids", torch.zeros(0, 3, dtype=torch.long))
    for pixels in inputs.get("pixel_values_videos", torch.zeros(0)).split(grids[:, 0].tolist()):
        of_video, keep_mask = naive_video(model, pixels, ratio)
        features.append(of_video)
        keeps += keep_mask.flatten().tolist()
    of_videos: Iterator[Any] = iter(torch.cat(features) if features else [])
    of_images: Iterator[Any] = iter(())
    if "pixel_values" in inputs:
        of_images = iter(torch.cat(model.model.get_image_features(inputs["pixel_values"]).pooler_output))
    kept, embeds, left = [], [], iter(keeps)
    types = inputs["mm_token_type_ids"][0].tolist()
    for place, token in enumerate(inputs["input_ids"][0].tolist()):
        embedding = model.get_input_embeddings().weight[token]
        if token == PLACEHOLDER and types[place] == 2:
            embedding = next(of_videos)
            if not next(left):
                continue
        elif token == PLACEHOLDER:
            embedding = next(of_images)
        kept.append(place)
        embeds.append(embedding)
    compact = model.config.pruned_position_ids == "compact"
    hidden = model.model.text_model(
        inputs_embeds=torch.stack(embeds)[None],
        position_ids=torch.tensor([list(range(len(kept))) if compact else kept]),
        attention_mask=torch.ones(1, len(kept), dtype=torch.long),
    ).last_hidden_state
    return model.lm_head(hidden)[0], kept


@pytest.mark.parametrize("parts", [ROWS[0], MIXED], ids=["video", "mixed"])
def test_at_ratio_0_it_is_stock(model, parts):
    inputs, stock = sample(parts), tiny_raster.stock_twin(model)
    expected, actual = stock(**as_pictures(inputs)), model(**inputs, pruning_ratio=0.0)
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(actual.task_loss, expected.loss, **CLOSE)
    theirs = stock.generate(**{n: v for n, v in as_pictures(inputs).items() if n != "labels"}, **GREEDY)
    assert torch.equal(model.generate(**prompt(inputs), **GREEDY, pruning_ratio=0.0), theirs)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("parts", [[3, Video(5), 4], MIXED], ids=["video", "mixed"])
def test_it_is_the_naive_one(model, parts, ratio):
    inputs = sample(parts)
    outputs = model(**inputs, pruning_ratio=ratio)
    logits, kept = naive_logits(model, inputs, ratio)
    assert outputs.kept_indices[0].tolist() == kept
    torch.testing.assert_close(outputs.logits[0], logits, **CLOSE)


def test_gradients_are_the_naive_ones(model):
    inputs = sample([3, Video(4), 5])
    weights = torch.randn(512, generator=torch.Generator().manual_seed(1))
    found = []
    for logits in (model(**inputs, pruning_ratio=0.5).logits[0], naive_logits(model, inputs, 0.5)[0]):
        model.zero_grad()
        (logits @ weights).sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert any(".scorer." in name for name in found[0])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        scale = float(found[1][name].abs().max())  # up to 60; rounding of 9e-6 was measured
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=2e-5 * max(scale, 1.0), msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_samples_alone(model, side):
    alone = samples(ROWS)
    outputs = model(**batch(alone, side), pruning_ratio=0.5)
    for index, inputs in enumerate(alone):
        expected = model(**inputs, pruning_ratio=0.5).logits[0]
        # Padding in front moves the positions, of which attention only sees differences.
        shown = outputs.kept_indices[index] >= 0
        shown &= batch(alone, side)["attention_mask"][index].bool()[outputs.kept_indices[index].clamp_min(0)]
        torch.testing.assert_close(outputs.logits[index, shown], expected, **CLOSE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_are_samples_alone(attention):
    model, alone = tiny_model(), samples(ROWS)
    model.set_attn_implementation({"text_config": attention})
    logits = model(**pack(alone), pruning_ratio=0.5).logits[0]
    expected = torch.cat([model(**inputs, pruning_ratio=0.5).logits[0] for inputs in alone])
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    "extra", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}, {"use_cache": False}]
)
def test_generate_is_a_loop_without_cache(model, extra):
    inputs = prompt(sample(MIXED))
    answer = model.generate(**inputs, **GREEDY | extra, pruning_ratio=0.5)
    if "num_beams" in extra:  # beams of a batch are those of its rows
        alone = [prompt(row) for row in samples(ROWS[:2])]
        together = model.generate(**batch(alone), **GREEDY | extra, pruning_ratio=0.5)
        for row, one in zip(together, alone, strict=True):
            assert torch.equal(row[-6:], model.generate(**one, **GREEDY | extra, pruning_ratio=0.5)[0, -6:])
        return
    ids = inputs["input_ids"]
    for _ in range(6):
        grown = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        grown["mm_token_type_ids"] = F.pad(
            inputs["mm_token_type_ids"], (0, ids.shape[1] - inputs["input_ids"].shape[1])
        )
        logits = model(**grown, pruning_ratio=0.5).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
    assert torch.equal(answer, ids)


def test_a_second_video_follows_a_cache():
    model = tiny_model()
    whole = prompt(sample([3, Video(3), 5, Video(2), 4]))
    first = 3 + 3 * (GRID**2 + 2) + 5
    per_token = ("input_ids", "mm_token_type_ids")
    before = {name: whole[name][:, :first] for name in (*per_token, "attention_mask")}
    after = {name: whole[name][:, first:] for name in per_token} | {"attention_mask": whole["attention_mask"]}
    frames, grids = whole["pixel_values_videos"], whole["video_grids"]
    with torch.no_grad():
        cache = model(**before, pixel_values_videos=frames[:3], video_grids=grids[:1], use_cache=True).past_key_values
        cached = model(**after, pixel_values_videos=frames[3:], video_grids=grids[1:], past_key_values=cache)
        expected = model(**whole)
    torch.testing.assert_close(cached.logits[0], expected.logits[0, -cached.logits.shape[1] :], **CLOSE)


def test_inputs_that_do_not_fit_are_refused():
    model, inputs = tiny_model(), sample(MIXED)
    wrong: list[tuple[Inputs, str]] = [
        ({"mm_token_type_ids": None}, "`mm_token_type_ids` is None"),
        ({"video_grids": inputs["video_grids"] + torch.tensor([0, 1, 0])}, "`video_grids` is"),
        ({"pixel_values_videos": inputs["pixel_values_videos"][1:]}, "`pixel_values_videos` has shape"),
        ({"mm_token_type_ids": inputs["mm_token_type_ids"].clamp_max(1)}, "video placeholder tokens for 0"),
    ]
    for change, message in wrong:
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=message):
                call(**prompt(inputs) | change)
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot part"):
        model(**pack(samples(ROWS)))


def test_text_and_images_alone_are_native(model):
    stock = tiny_raster.stock_twin(model)
    rows: list[list[Part]] = [[9], [2, Image(), 5]]
    for parts in rows:
        inputs = sample(parts)
        with torch.no_grad():
            assert torch.equal(
                model(**inputs).logits, stock(**as_pictures(inputs) if len(parts) > 1 else inputs).logits
            )
