"""Several samples in one row, told apart by positions that start over, are what they are in rows of their own."""

import pytest
import torch

from tests.modeling.reference import CLOSE, assert_gradients_equal, gradients, naive_forward, one_by_one, pack
from tests.tiny import Part, Video, build_inputs, tiny_config, tiny_model

SAMPLES: list[list[Part]] = [[3, Video(4), 5], [2, Video(3), 3, Video(2), 6], [4], [1, Video(2), 7]]


@pytest.fixture(params=["original", "compact"])
def model(request):
    model = tiny_model(tiny_config())
    model.config.pruned_position_ids = request.param
    return model


@pytest.fixture
def batch():
    inputs = build_inputs(SAMPLES)
    real = inputs["attention_mask"].bool()
    return inputs | {"labels": inputs["input_ids"].where(real & (inputs["input_ids"] < 512), -100)}


def samples_of(outputs, batch) -> list[torch.Tensor]:
    """Logits of each sample of a packed row."""
    ends = batch["attention_mask"].sum(-1).cumsum(0)
    sample = torch.searchsorted(ends, outputs.kept_indices[0], right=True)
    return [outputs.logits[0, sample == index] for index in range(len(ends))]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("pruning_ratio", [0.0, 0.3, 0.7, 1.0])
def test_logits_equal_separate_rows(model, batch, pruning_ratio, use_cache):
    with torch.no_grad():
        outputs = model(**pack(batch, SAMPLES), pruning_ratio=pruning_ratio, use_cache=use_cache)
        for logits, row in zip(samples_of(outputs, batch), one_by_one(batch, SAMPLES), strict=True):
            expected = naive_forward(model, row, pruning_ratio, rule=model.config.pruned_position_ids)
            torch.testing.assert_close(logits, expected.logits, **CLOSE)


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5])
def test_loss_and_gradients_over_all_labels_equal_separate_rows(model, batch, pruning_ratio):
    """No label is left out, not even a sample's first token, which must not be predicted from the sample before."""
    packed = pack(batch, SAMPLES)
    assert (packed["labels"] >= 0)[packed["position_ids"] == 0].all()
    outputs = model(**packed, pruning_ratio=pruning_ratio)
    rule = model.config.pruned_position_ids
    alone = [naive_forward(model, row, pruning_ratio, rule=rule) for row in one_by_one(batch, SAMPLES)]
    expected = torch.cat([row.task_losses for row in alone]).mean()
    torch.testing.assert_close(outputs.task_loss, expected, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model, outputs.task_loss), gradients(model, expected))


def test_a_row_of_samples_beside_a_padded_row(model, batch):
    rows = SAMPLES[:2]
    lone: list[list[Part]] = [[3, Video(4), 5]]
    first = pack(build_inputs(rows, labels=True), rows)
    second = build_inputs(lone, seed=1, labels=True)
    padding = first["input_ids"].shape[1] - second["input_ids"].shape[1]
    assert padding > 0

    def pad(tensor, value):
        return torch.nn.functional.pad(tensor, (0, padding), value=value)

    inputs = {
        "input_ids": torch.cat([first["input_ids"], pad(second["input_ids"], 0)]),
        "mm_token_type_ids": torch.cat([first["mm_token_type_ids"], pad(second["mm_token_type_ids"], 0)]),
        "attention_mask": torch.cat([torch.ones_like(first["input_ids"]), pad(second["attention_mask"], 0)]),
        "position_ids": torch.cat([first["position_ids"], pad(torch.arange(second["input_ids"].shape[1])[None], 0)]),
        "pixel_values_videos": torch.cat([first["pixel_values_videos"], second["pixel_values_videos"]]),
        "video_token_pooling": torch.cat(
            [first["video_token_pooling"], second["video_token_pooling"] + first["pixel_values_videos"][..., 0].numel()]
        ),
        "video_grids": torch.cat([first["video_grids"], second["video_grids"]]),
    }
    with torch.no_grad():
        outputs = model(**inputs)
        packed = model(**{name: value for name, value in first.items() if name != "labels"})
        expected = naive_forward(model, second, rule=model.config.pruned_position_ids)
    kept = outputs.kept_indices
    torch.testing.assert_close(outputs.logits[0, kept[0] >= 0], packed.logits[0], **CLOSE)
    torch.testing.assert_close(outputs.logits[1, kept[1] >= 0], expected.logits, **CLOSE)


@pytest.mark.parametrize(
    ("sample", "changed"), [(sample, "text") for sample in range(4)] + [(sample, "video") for sample in (0, 1, 3)]
)
def test_no_sample_sees_another(model, batch, sample, changed):
    """Changing one sample changes its own logits and no others, neither behind it (causal) nor before (block)."""
    packed = pack(batch, SAMPLES)
    packed.pop("labels")
    videos = [sum(isinstance(part, Video) for part in row) for row in SAMPLES]
    altered = {name: value.clone() for name, value in packed.items()}
    if changed == "text":
        start = int(batch["attention_mask"].sum(-1)[:sample].sum())
        altered["input_ids"][0, start] = (packed["input_ids"][0, start] + 1) % 500
    else:
        frames = packed["video_grids"][:, 0].tolist()
        before = sum(frames[: sum(videos[:sample])])
        altered["pixel_values_videos"][before : before + frames[sum(videos[:sample])]] *= -1.0
    with torch.no_grad():
        old, new = (samples_of(model(**inputs), batch) for inputs in (packed, altered))
    for index, (logits, changed_logits) in enumerate(zip(old, new, strict=True)):
        difference = (changed_logits - logits).abs().max()
        assert difference > 0.05 if index == sample else difference < CLOSE["atol"]


def test_one_block_for_the_whole_row_fails_the_comparison(model, batch):
    """What stock Molmo2's single vision block would do to packed samples is noticed: the check above can fail."""
    packed = pack(batch, SAMPLES)
    del packed["labels"]
    with torch.no_grad():
        outputs = model(**packed)
        del packed["position_ids"]
        one_sample = model(**packed)
    assert (outputs.logits - one_sample.logits).abs().amax(-1)[0].median() > 0.05
