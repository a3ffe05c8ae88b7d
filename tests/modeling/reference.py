"""A batch taken apart into its rows, and what a row's logits must be, written token by token.

`naive_forward` shares only the tower's features and stock Molmo2's text model with the code under test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.naive import NaiveRule, NaiveThreshold
from tests.tiny import FRAME_START, IMAGE_START, LOW_RES_IMAGE_START, PATCH, Image, Part, Video

PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "labels", "position_ids")
VISION_INPUTS = (
    "pixel_values",
    "image_token_pooling",
    "image_grids",
    "image_num_crops",
    "pixel_values_videos",
    "video_token_pooling",
    "video_grids",
)

Inputs = dict[str, Any]

# float32 rounding of logits of size about 5, at most 3e-6 where it was measured; a missing or misplaced token changes
# them by more than 0.1.
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}


class Float64(TorchFunctionMode):
    """Computes in float64 whatever asks for float32, native code too; new tensors and parameters are float64."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda it: torch.float64 if it is torch.float32 else it, (args, kwargs or {}))
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **kwargs)


def as_float64(inputs: Inputs) -> Inputs:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def one_by_one(inputs: Inputs, rows: Sequence[Sequence[Part]]) -> list[Inputs]:
    """The rows of a batch that `build_inputs(rows)` made, each as a batch of its own without padding."""
    return [_row(inputs, list(rows), index) for index in range(len(rows))]


def pack(inputs: Inputs, rows: Sequence[Sequence[Part]]) -> Inputs:
    """The rows of a batch, joined in a single row; videos and images keep their order."""
    alone = one_by_one(inputs, rows)
    per_token = [name for name in PER_TOKEN if name in inputs and name not in ("attention_mask", "position_ids")]
    packed = {name: torch.cat([row[name] for row in alone], dim=-1) for name in per_token}
    packed["position_ids"] = torch.cat([torch.arange(row["input_ids"].shape[1]) for row in alone])[None]
    return packed | {name: inputs[name] for name in VISION_INPUTS if name in inputs}


def _row(inputs: Inputs, rows: list[Sequence[Part]], index: int) -> Inputs:
    real = inputs["attention_mask"][index].bool()
    row = {name: inputs[name][index : index + 1, real] for name in PER_TOKEN if name in inputs}
    before = [part for parts in rows[:index] for part in parts]
    videos, earlier_videos = _of(Video, rows[index]), _of(Video, before)
    if videos:
        frames = slice(sum(v.frames for v in earlier_videos), sum(v.frames for v in earlier_videos + videos))
        grids = inputs["video_grids"]
        blocks = int(grids[0, 1] * grids[0, 2])
        patches = inputs["pixel_values_videos"].shape[1]
        table = inputs["video_token_pooling"][frames.start * blocks : frames.stop * blocks]
        row["pixel_values_videos"] = inputs["pixel_values_videos"][frames]
        row["video_token_pooling"] = torch.where(table < 0, table, table - frames.start * patches)
        row["video_grids"] = grids[len(earlier_videos) : len(earlier_videos) + len(videos)]
    images, earlier_images = _of(Image, rows[index]), _of(Image, before)
    if images:
        first, last = len(earlier_images), len(earlier_images) + len(images)
        crops, grids = inputs["image_num_crops"], inputs["image_grids"]
        tokens = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
        first_crop, last_crop = int(crops[:first].sum()), int(crops[:last].sum())
        table = inputs["image_token_pooling"][int(tokens[:first].sum()) : int(tokens[:last].sum())]
        patches = inputs["pixel_values"].shape[1]
        row["pixel_values"] = inputs["pixel_values"][first_crop:last_crop]
        row["image_token_pooling"] = torch.where(table < 0, table, table - first_crop * patches)
        row["image_grids"], row["image_num_crops"] = grids[first:last], crops[first:last]
    return row


def _of(kind: type, parts: Sequence[Part]) -> list:
    return [part for part in parts if isinstance(part, kind)]


@dataclass
class NaiveOutput:
    """kept: places of the tokens that are left; logits: (L', vocabulary); labels: (L',) of those tokens."""

    kept: list[int]
    logits: torch.Tensor
    labels: list[int] = field(default_factory=list)

    @property
    def task_losses(self) -> torch.Tensor:
        """Cross entropy of each label from the token before it; the first has none."""
        labels = torch.tensor(self.labels[1:])
        losses = torch.nn.functional.cross_entropy(self.logits[:-1], labels, reduction="none", ignore_index=-100)
        return losses[labels != -100]


def call_of(rule: NaiveRule | None) -> dict[str, Any]:
    """The arguments of a call with this rule."""
    if not isinstance(rule, NaiveThreshold):
        return {"pruning_ratio": rule}
    bounds = {"min_pruning_ratio": rule.lowest, "max_pruning_ratio": rule.highest}
    return {"score_threshold": rule.score, "video_token_budget": rule.budget, **bounds}


def naive_forward(
    model, row: Inputs, pruning_rule: NaiveRule | None = None, shift: int = 0, rule: str | None = None
) -> NaiveOutput:
    """
    Logits of one unpadded row: embeddings, positions and mask built token by token for stock Molmo2's text model.

    `shift` moves every token after the first dropped one, for tests that must notice it; `rule` replaces the config's.
    """
    rule = rule or model.config.pruned_position_ids
    features, keep = [], []
    if "pixel_values_videos" in row:
        video = model.model.get_video_features(
            row["pixel_values_videos"], row["video_token_pooling"], row["video_grids"], **call_of(pruning_rule)
        )
        features = list(torch.cat(video.pooler_output))
        keep = torch.cat([mask.flatten() for mask in video.keep_mask]).tolist()
    image_features = []
    if "pixel_values" in row:
        images = model.model.get_image_features(
            row["pixel_values"], row["image_token_pooling"], row["image_grids"]
        ).pooler_output
        image_features = list(torch.cat(images))

    embeddings, positions, is_vision = [], [], []
    kept: list[int] = []
    table = model.model.language_model.embed_tokens.weight
    in_frame = False
    for place, token in enumerate(row["input_ids"][0].tolist()):
        if token in (FRAME_START, IMAGE_START, LOW_RES_IMAGE_START):
            in_frame = token == FRAME_START
        embedding = table[token]
        if token == PATCH and in_frame:
            if not keep.pop(0):
                continue
            embedding = embedding + features.pop(0)
        elif token == PATCH:
            embedding = embedding + image_features.pop(0)
        given = int(row["position_ids"][0, place]) if "position_ids" in row else place
        dropped = place - len(kept) if rule == "compact" else 0
        positions.append(given - dropped + (shift if len(kept) < place else 0))
        embeddings.append(embedding)
        is_vision.append(bool(row["mm_token_type_ids"][0, place]) if "mm_token_type_ids" in row else False)
        kept.append(place)
    assert not features
    assert not keep
    assert not image_features

    vision, causal = torch.tensor(is_vision), torch.ones(len(kept), len(kept), dtype=torch.bool).tril()
    mask = (causal | (vision[:, None] & vision))[None, None]
    hidden_states = model.model.language_model(
        inputs_embeds=torch.stack(embeddings)[None],
        attention_mask=mask,
        position_ids=torch.tensor([positions]),
        use_cache=False,
    ).last_hidden_state
    labels = row["labels"][0, kept].tolist() if "labels" in row else []
    return NaiveOutput(kept, model.lm_head(hidden_states)[0], labels)


def logits_of_row(outputs, inputs: Inputs, index: int) -> torch.Tensor:
    """Logits of a row of a batch without those of padding and filler, (L', vocabulary)."""
    kept = outputs.kept_indices[index]
    mask = inputs.get("attention_mask")
    real = kept >= 0
    if mask is not None:
        real &= mask[index].bool()[kept.clamp_min(0)]
    return outputs.logits[index, real]


def kept_of_row(outputs, inputs: Inputs, index: int) -> list[int]:
    """Places of a row's kept tokens, counted from its first real token."""
    kept = outputs.kept_indices[index]
    mask = inputs["attention_mask"][index].bool()
    return [int(mask[:place].sum()) for place in kept.tolist() if place >= 0 and mask[place]]


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every parameter that the loss reaches."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_gradients_equal(ours: dict, expected: dict, tolerance: float = 1e-5) -> None:
    """The same parameters have gradients, each within `tolerance` of the largest entry of the expected one.

    Entries below 0.01 count as 0.01: the gradient of a key bias is zero but for rounding.
    """
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-2)
        error = float((ours[name] - gradient).abs().max()) / scale
        assert error < tolerance, f"{name}: {error}"


def returned_by(owner: Any, name: str, monkeypatch) -> list[Any]:
    """A list that fills with what the method `name` of `owner` returns from now on."""
    returned: list[Any] = []
    real = getattr(owner, name)

    def method(*args, **kwargs):
        returned.append(real(*args, **kwargs))
        return returned[-1]

    monkeypatch.setattr(owner, name, method)
    return returned
