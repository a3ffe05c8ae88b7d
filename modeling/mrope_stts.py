"""What backbones share whose tokens have a position in time, height and width, and whose vision tokens are causal.

Their towers take patches of all videos in one flat sequence, block by block, beside grids `(T, rows, cols)`. A call
with videos or images goes `prune -> native forward`, which takes the features as `mm_encoder_outputs`. Native models
keep in `rope_deltas` how far the last call's positions were ahead of its columns. Here nothing is kept: positions come
from the prompt, the caller or the record of a cache, so calls may alternate, and run in several threads.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import is_flash_attention_requested

from .cache_stts import CacheRecord
from .plan_stts import PruningPlan, VideoFeatures, check_finite, check_grids, check_tensors
from .pruning_stts import Call, PrunedInputs, PruningBackbone
from .sequence_stts import IMAGE, VIDEO, Tokens


class MropeBackbone(PruningBackbone):
    """
    Mixin for the model without a head. `visual` is its tower, which is called with pixels and a `PruningPlan`.

    tower, text_class: classes of `visual` and of `language_model`. run_per_frame: whether each frame of a video has a
    run of placeholders in the text, or all have one together.
    """

    tower: ClassVar[Any]
    text_class: ClassVar[Any]
    parts: ClassVar[dict[str, str]] = {
        "language_model": "language_model",
        "visual": "vision_tower",
        "visual.scorer": "scorer",
        "visual.merger": "connector",
    }
    run_per_frame = True
    video_inputs: tuple[str, ...] = ("pixel_values_videos", "video_grid_thw")
    image_inputs = ("pixel_values", "image_grid_thw")
    num_axes = 3
    vision_is_causal = True
    visual: Any
    get_rope_index: Any
    # Native code caches the last call's RoPE delta here. We ignore writes and return None, so calls share no state.
    rope_deltas: Any = property(lambda self: None, lambda self, value: None)

    def __init__(self, config: Any):
        super(self.native, self).__init__(config)  # the native `__init__` would build the stock tower
        self.visual = self.tower(config.vision_config)
        self.language_model = self.text_class(config.text_config)
        self.post_init()

    def take_vision_inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As in `PruningBackbone`, grids on the host, which native code would read beside `mm_encoder_outputs`."""
        names = self.video_inputs[1:] + self.image_inputs[1:]
        if any(kwargs.get(name) is not None for name in names):
            self.check_exclusive(kwargs)
        vision = super().take_vision_inputs(kwargs)
        return vision | {name: vision[name].cpu() for name in names if isinstance(vision.get(name), torch.Tensor)}

    def needs_pruning(self, arguments: Collection[str]) -> bool:
        """Images too: native code would not remember the positions of what it leaves in a cache."""
        return any(name in arguments for name in self.pixels)

    def find_placeholders(
        self, input_ids: torch.Tensor, vision: Collection[str], types: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Placeholders of videos and of images, (B, L) each."""
        with_videos, with_images = (any(n in vision for n in names) for names in (self.video_inputs, self.image_inputs))
        videos, images = input_ids == self.config.video_token_id, input_ids == self.config.image_token_id
        return videos & with_videos, images & with_images

    def read_grids(self, vision: dict[str, Any], names: tuple[str, ...]) -> list[tuple[int, int, int]]:
        """
        The grid `(T, rows, cols)` of each video or image in blocks, on the host; raises `ValueError` or `TypeError`
        where pixels (patches, values) and grids (V, 3) in patches do not fit each other or the config.
        """
        of_pixels, of_grids = names[0], names[-1]
        pixel_values, grid_thw = check_tensors(vision, of_pixels, of_grids)
        grids, side = check_grids(of_grids, grid_thw), self.visual.spatial_merge_size
        if any(rows % side or cols % side for _, rows, cols in grids):
            raise ValueError(
                f"`{of_grids}` is {grids}, but rows and columns must be multiples of `spatial_merge_size` = {side}, "
                "which must be the processor's `merge_size`."
            )
        expected = (sum(map(math.prod, grids)), self.visual.patch_embed.proj.weight[0].numel())
        if tuple(pixel_values.shape) != expected:
            raise ValueError(
                f"`{of_pixels}` has shape {tuple(pixel_values.shape)}, but `{of_grids}` and the vision config make it "
                f"{expected}: patches, and values of a patch."
            )
        return [(frames, rows // side, cols // side) for frames, rows, cols in grids]

    def plan_videos(self, vision: dict[str, Any]) -> PruningPlan:
        """Where the blocks of all videos lie in `pixel_values_videos`; raises as `read_grids`."""
        grids, pixels = self.read_grids(vision, self.video_inputs), vision[self.video_inputs[0]]
        check_finite(pixels)
        patches = torch.arange(len(pixels), device=pixels.device)
        return PruningPlan(patches.view(-1, self.visual.spatial_merge_unit), grids)

    def encode_videos(self, pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: Any) -> VideoFeatures:
        """Scores the blocks of all frames, drops what the plan says and merges the rest into tokens."""
        return self.visual(pixel_values.to(self.visual.dtype), pruning=plan, **kwargs)

    def count_image_tokens(self, vision: dict[str, Any]) -> list[int]:
        return [math.prod(grid) for grid in self.read_grids(vision, self.image_inputs)]

    def encode_images(self, vision: dict[str, Any]) -> BaseModelOutputWithPooling:
        """All images of a call, as the native model does."""
        pixels, grids = (vision[name] for name in self.image_inputs)
        return self.get_image_features(pixels, grids.to(pixels.device), return_dict=True)

    def merge(self, call: Call, pruned: PrunedInputs) -> dict[str, Any]:
        """Features go to the native forward, which scatters them."""
        arguments = pruned.tokens.arguments | self.merge_rows(pruned)
        if not call.packed_rows:
            return arguments
        positions = self.packed_position_ids(pruned.tokens, call.cache)
        return arguments | {"position_ids": positions, "attention_mask": None, "use_cache": False}

    def merge_rows(self, pruned: PrunedInputs, setting: Callable[[str], Any] | None = None) -> dict[str, Any]:
        """`mm_encoder_outputs`: features, and those of the taps of a tower with deepstack."""
        encoded: list[tuple[str, Any]] = [("video", pruned.video), ("image", pruned.images)]
        outputs = {}
        for index, (name, of) in enumerate((name, of) for name, of in encoded if of is not None):
            features, taps = pruned.by_row(index, pruned.features[index][1]), None
            if "visual.deepstack_merger_list" in self.parts:  # then native code takes a list, if of no taps
                taps = [pruned.by_row(index, torch.cat(list(tap))) for tap in of.deepstack_features]
            outputs[name] = VideoFeatures(pooler_output=features, deepstack_features=taps)
        return {"mm_encoder_outputs": outputs} if outputs else {}

    def position_tokens(
        self, tokens: Tokens, cached: CacheRecord, vision: dict[str, Any], found: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """
        Native positions (3, B, L) of the whole prompt, counted anew in each sample of a row. Positions of the caller
        that have three axes are taken as they are; others (B, L) say where samples, and over a cache what follows it,
        begin. Without images and videos, (B, L). Raises `ValueError` where placeholders do not fit the grids or
        `mm_token_type_ids`, and for positions (B, L) that do not count tokens.
        """
        given = tokens.position_ids
        if not vision or (given is not None and given.dim() == 3):
            return super().position_tokens(tokens, cached, vision, found)
        # Native code reads them one by one, so they come to the host together.
        types = VIDEO * found[0].long() + IMAGE * found[1].long()
        optional = [(tokens.padding_mask, 1), (tokens.sample_ids, 0), (given, 0)]
        columns = [torch.full_like(types, other) if some is None else some.long() for some, other in optional]
        given_types = types if tokens.mm_token_type_ids is None else tokens.mm_token_type_ids.long()
        types, given_types, shown, samples, counts = torch.stack([types, given_types, *columns]).cpu().unbind()
        if not torch.equal(types, given_types):
            raise ValueError(
                f"`mm_token_type_ids` must be {VIDEO} for placeholders of videos in this call, {IMAGE} for those of "
                f"images and 0 elsewhere, but {int((types != given_types).sum())} tokens differ. Pass all that the "
                "processor returns."
            )
        rows, masks = samples_as_rows(samples, shown.bool())
        runs = [types[row, mask].unique_consecutive(return_counts=True) for row, mask in zip(rows, masks, strict=True)]
        for kind, names in ((VIDEO, self.video_inputs), (IMAGE, self.image_inputs)):
            in_text = torch.cat([lengths[kinds == kind] for kinds, lengths in runs])
            grids = vision.get(names[-1], types.new_zeros(0, 3))
            per_grid = grids[:, 0] if self.run_per_frame and kind == VIDEO else torch.ones_like(grids[:, 0])
            by_grids = (grids.prod(-1) // self.visual.spatial_merge_unit // per_grid).repeat_interleave(per_grid)
            if not torch.equal(in_text, by_grids):
                raise ValueError(
                    f"`{names[-1]}` needs runs of {by_grids.tolist()} placeholder tokens, but the text has runs of "
                    f"{in_text.tolist()}. Text and {names[-1].partition('_')[0]}s must come from the same call of this "
                    "model's processor."
                )
        others = {name: value for name, value in vision.items() if not name.startswith("pixel_values")}
        native, _ = self.get_rope_index(types[rows], types[rows], attention_mask=masks.long(), **others)
        positions = native.new_zeros(self.num_axes, *types.shape)
        for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            counted, start = counts[row, mask], 0
            if given is not None:
                if bool((counted.diff() != 1).any()):
                    raise ValueError(
                        "`position_ids` (batch, length) with images or videos must count the tokens of each sample, "
                        f"but those of row {row} do not grow by 1. Pass (3, batch, length), or leave them out."
                    )
                start = int(counted[0]) if cached.seen else 0
            positions[:, row, mask] = native[:, index, mask] + start
        positions = positions.to(tokens.device)
        return positions if given is not None and cached.seen else positions + cached.next_position

    def packed_position_ids(self, left: Tokens, past_key_values: Cache | None) -> torch.Tensor:
        """
        What tells the native model samples of a row apart, beside neither mask nor cache: positions (4, B, L'), of
        which the first counts from 0 in each sample, and is 0 in filler, which so parts from everything.
        """
        flash = is_flash_attention_requested(self.config.text_config)
        padding_mask, samples, positions = left.padding_mask, left.sample_ids, left.position_ids
        if samples is None or padding_mask is None or past_key_values is not None or (flash and left.shape[0] > 1):
            raise ValueError(
                "Packed rows need `position_ids` that start over at each sample, at most a padding `attention_mask`, "
                "no `past_key_values`, and with flash attention a batch of one row. Leave out `past_key_values`, or "
                "use 'sdpa'."
            )
        assert positions is not None  # `prune` makes them
        numbers = torch.where(padding_mask.bool(), samples, -1)
        place = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
        starts = (numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0) | (numbers < 0)
        order = place - torch.where(starts, place, 0).cummax(-1).values
        return torch.cat([order[None], positions.expand(self.num_axes, -1, -1)])


def samples_as_rows(sample_ids: torch.Tensor, shown: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """
    Samples of rows (B, L) apart, on the host: the row of each, and where its tokens are, (samples, L) bool. Tokens that
    are not `shown` (B, L) are of none.
    """
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    for row, (numbers, seen) in enumerate(zip(sample_ids, shown, strict=True)):
        of_samples = [seen & (numbers == number) for number in numbers[seen].unique()]
        rows, masks = rows + [row] * len(of_samples), masks + of_samples
    return rows, torch.stack(masks)
