"""ToMe against the published algorithm written naively, token by token (`naive_merging`)."""

import copy
from typing import Any

import pytest
import torch

from examples.study.token_merging import (
    MergingForConditionalGeneration,
    count_patches,
    match_tokens,
    merge_tokens,
    merging_schedule,
)
from tests.modeling.reference import CLOSE, one_by_one
from tests.modeling.towers import (
    assert_features_close,
    assert_gradients_close,
    encode,
    gradients,
    video_inputs,
    weighted,
)
from tests.naive import NaiveGeometry, naive_budget, naive_connector, weights_from_native
from tests.study.naive_merging import Token, merge, naive_frame, naive_matching, tokens_of_frames
from tests.tiny import Image, Part, Video, build_inputs, patch_grid, tiny_config, tiny_model


def merging_model(**settings: Any) -> MergingForConditionalGeneration:
    """A tiny model in eval mode whose every weight is random, with the weights of `tiny_model`."""
    model = MergingForConditionalGeneration(tiny_config(**{"selector": "cosine", **settings})).float().eval()
    model.load_state_dict(tiny_model(model.config).state_dict())
    return model


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Matching and merging alone.


@pytest.mark.parametrize(("num_tokens", "num_left"), [(10, 7), (11, 6), (11, 11), (8, 4), (2, 1), (225, 192)])
def test_the_tokens_most_alike_merge(num_tokens, num_left):
    keys = random_tokens(3, num_tokens, 6)
    states, sizes = random_tokens(3, num_tokens, 5, seed=1), torch.ones(3, num_tokens)
    places = match_tokens(keys, num_left)
    merged = merge_tokens(states, sizes, places, num_left)
    for frame in range(3):
        matching = naive_matching(keys[frame].tolist(), num_tokens - num_left)
        assert len(matching) == num_tokens - num_left
        expected = merge([Token(row, frozenset([i])) for i, row in enumerate(states[frame])], matching)
        torch.testing.assert_close(merged[frame], torch.stack([token.vector for token in expected]), rtol=0, atol=1e-6)
        for place, token in enumerate(expected):
            assert {i for i, where in enumerate(places[frame].tolist()) if where == place} == token.patches


def test_merging_twice_is_the_mean_of_all():
    """A token of three merged with a token of two is the mean of five: an average of averages would not be."""
    states = random_tokens(1, 5, 3)
    first = torch.tensor([[0, 0, 0, 1, 1]])
    sizes = count_patches(first, 2)
    assert sizes.tolist() == [[3, 2]]
    twice = merge_tokens(merge_tokens(states, torch.ones(1, 5), first, 2), sizes, torch.zeros(1, 2).long(), 1)
    torch.testing.assert_close(twice[0, 0], states[0].mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_patches", "num_left", "num_layers", "expected"),
    [
        (729, 369, 25, None),
        (729, 72, 25, None),
        (225, 108, 6, None),
        (225, 27, 6, [192, 159, 126, 93, 54, 27]),  # the last two halve; 33 of 60 cannot merge
        (81, 18, 6, None),
        (81, 9, 4, [63, 36, 18, 9]),
        (81, 81, 6, [81] * 6),
        (10, 3, 2, [6, 3]),
    ],
)
def test_equally_many_merge_in_each_layer(num_patches, num_left, num_layers, expected):
    counts = merging_schedule(num_patches, num_left, num_layers)
    assert len(counts) == num_layers
    assert counts[-1] == num_left
    if expected is not None:
        assert counts == expected
        return
    merged = [before - after for before, after in zip([num_patches, *counts], counts, strict=False)]
    assert sum(merged) == num_patches - num_left
    assert max(merged) - min(merged) <= 1


def test_layers_that_cannot_merge_so_much_are_an_error():
    with pytest.raises(
        ValueError, match=r"`pruning_ratio` leaves 9 of a frame's 81 patches.*output of layer 1\. Lower"
    ):
        merging_schedule(81, 9, 2)


# In the tower.


def test_a_token_of_s_patches_attends_as_s_equal_ones():
    layer: Any = merging_model().model.vision_tower.layers[1]
    states, sizes = random_tokens(2, 7, 32), torch.tensor([[1, 2, 3, 1, 1, 5, 1], [4, 1, 1, 1, 2, 2, 3]]).float()
    attended, _ = layer.attend(states, sizes.log())
    for frame in range(2):
        copies = states[frame].repeat_interleave(sizes[frame].long(), dim=0)[None]
        among_copies, _ = layer.attend(copies, None)
        first = torch.cat([torch.zeros(1), sizes[frame].cumsum(0)[:-1]]).long()
        torch.testing.assert_close(attended[frame], among_copies[0, first], rtol=0, atol=1e-5)


def case(name: str, num_frames: list[int] | None = None, ratio: float = 0.5, **settings: Any):
    return pytest.param(num_frames or [4, 2, 1], ratio, settings, id=name)


CASES = [
    case("half"),
    case("90", [6, 1], ratio=0.9),
    case("fewer-tokens-than-frames", [12], ratio=0.99),
    case("nothing-is-lost", ratio=0.001),
    case("features-everywhere", [3], feature_layers=[4, 2, 5, 0, 1]),
    case("borders-on-all-sides-7x10", [3], ratio=0.7, image_size=[14, 20]),
    case("window-2x3", [4], ratio=0.6, image_size=[12, 18], pooling_size=[2, 3]),
]


@pytest.mark.parametrize(("num_frames", "ratio", "settings"), CASES)
def test_tower_is_the_naive_one(num_frames, ratio, settings):
    model = merging_model(**settings)
    vision = model.config.vision_config
    inputs = video_inputs(model.config, num_frames)
    actual = encode(model, inputs, ratio)

    geometry = NaiveGeometry(
        vision.num_attention_heads,
        0,
        [layer % 6 for layer in model.config.adapter_config.vision_feature_layer or ()],
        patch_grid(vision),
    )
    weights = weights_from_native(dict(model.named_parameters()))
    pixels, blocks = inputs["pixel_values_videos"], vision.block_grid[0] * vision.block_grid[1]
    table = inputs["video_token_pooling"][:blocks]  # of frame 0; the others' are the same, further on
    features: list[torch.Tensor] = []
    keep_mask: list[list[bool]] = []
    shares: list[list[float]] = []
    for frames in num_frames:
        kept = frames * blocks - naive_budget(ratio, frames, blocks)
        for num_tokens in tokens_of_frames(frames, kept):
            flags = [False] * blocks
            if num_tokens:
                counts = merging_schedule(
                    pixels.shape[1], pixels.shape[1] * num_tokens // blocks, max(geometry.feature_layers) + 1
                )
                groups, places, share = naive_frame(
                    weights, geometry, pixels[len(keep_mask)], table, num_tokens, counts
                )
                heads = model.config.adapter_config.num_attention_heads
                features += [naive_connector(weights, heads, group) for group in groups]
                flags = [block in places for block in range(blocks)]
            keep_mask.append(flags)
            shares.append(share if num_tokens else [0.0] * blocks)
    assert torch.cat(actual.keep_mask).tolist() == keep_mask
    if ratio > 0.01:  # else nothing is merged and the scores are the selector's
        torch.testing.assert_close(torch.cat(actual.token_scores), torch.tensor(shares), rtol=0, atol=1e-6)
    assert actual.temporal_loss is None
    assert_features_close(torch.cat(actual.pooler_output), torch.stack(features))
    assert_gradients_close(
        gradients(weighted(torch.cat(actual.pooler_output)), model), gradients(weighted(torch.stack(features)), model)
    )


@pytest.mark.parametrize("image_size", [[18, 18], [14, 20]], ids=["divisible", "borders"])
def test_a_video_that_loses_nothing_is_encoded_as_without_pruning(image_size):
    model = merging_model(image_size=image_size)
    unpruned = tiny_model(model.config)
    inputs = video_inputs(model.config, [1, 3])
    expected = encode(unpruned, inputs, 0.0).pooler_output
    nothing_lost, first_whole = encode(model, inputs, 0.0).pooler_output, encode(model, inputs, 0.5).pooler_output
    assert all(torch.equal(a, b) for a, b in zip(nothing_lost, expected, strict=True))  # bit for bit
    assert_features_close(first_whole[0], expected[0])  # one frame keeps all its tokens, in a batch that merges
    assert first_whole[1].shape[0] < expected[1].shape[0]


# In the model.

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Image(), Video(1), 2, Video(3), 3], [2, Image(), 4], [6]]


def test_rows_of_a_batch_are_what_they_are_alone():
    model = merging_model()
    batch = build_inputs(ROWS)
    with torch.no_grad():
        together = model(**batch)
        for row, inputs in enumerate(one_by_one(batch, ROWS)):
            alone = model(**inputs)
            columns = together.kept_indices[row] >= 0
            columns &= batch["attention_mask"][row, together.kept_indices[row].clamp_min(0)].bool()
            torch.testing.assert_close(together.logits[row, columns], alone.logits[0], **CLOSE)


def test_a_trained_model_is_saved_and_loaded(tmp_path):
    model = merging_model().train()
    inputs = build_inputs(ROWS, labels=True)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs).loss.backward()
    optimizer.step()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert any("vision_tower.layers.0.self_attn.k_proj" in name for name in changed)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("token_merging*"))
    loaded = MergingForConditionalGeneration.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)
