"""One pass from a call's arguments to what is left of them, the same for `forward` and `generate`.

`plan (host) -> positions -> encode videos (score, bias, drop, encode) -> drop tokens`; merging features into the text
and running the language model come after. What backbones differ in is behind the hooks of `PruningBackbone`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .cache_stts import CachedPrompt, note_after, take_up
from .checks_stts import check_names, check_settings
from .plan_stts import PruningPlan, RowPlan, VideoFeatures
from .sequence_stts import KeptSequence, Tokens, check_shape, find_samples, gather_columns, keep_tokens, token_order


@dataclass
class PrunedInputs:
    """
    What is left of a call's arguments.

    tokens: on the sequence that is left (B, L'), but its mask covers cached columns too, (B, columns + L'), or is
    (B, heads, L', L'). kept_indices: (B, L') in the caller's sequence. video, images: what the hooks returned.
    features: pairs of a placeholder mask (B, L') and the features that go there in order, the videos' first.
    features_per_row: how many of the videos' features go to each row, where that is known on the host. cached_after:
    what a cache will hold, or None where its columns are the caller's tokens and positions.
    """

    tokens: Tokens
    kept_indices: torch.Tensor
    cached_after: CachedPrompt | None = None
    video: VideoFeatures | None = None
    images: BaseModelOutputWithPooling | None = None
    features: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    features_per_row: list[int] | None = None

    def by_row(self, index: int, features: torch.Tensor) -> list[torch.Tensor]:
        """
        `features` (tokens, ...) of the placeholders of pair `index`, one entry per row: beams and samples then repeat
        whole rows. Forces a host-device sync where the numbers are not known.
        """
        if self.video is not None and index == 0 and self.features_per_row is not None:
            return list(features.split(self.features_per_row))
        return list(features.split(self.features[index][0].sum(-1).tolist()))

    @property
    def report(self) -> dict[str, Any]:
        """The fields of a `PruningOutput`."""
        video = {name: getattr(self.video, name, None) for name in ("temporal_loss", "token_scores", "keep_mask")}
        return {"kept_indices": self.kept_indices} | video


if TYPE_CHECKING:

    class NativeModel(PreTrainedModel):
        """The native class that the mixin below precedes."""

else:
    NativeModel = object


class PruningBackbone(NativeModel):
    """
    Mixin for the model without a head: the hooks by which backbones differ, and the pass itself, `prune`.

    parts: what a module is, by its name: "language_model", "vision_tower", "connector" or "scorer"; of two that contain
    each other, the inner one says it. video_inputs, image_inputs: names of the arguments that come with videos and with
    images, the pixels first and the grids last. unread_inputs: names of those that a processor makes and no model
    reads. num_axes: of positions, 0 where a token has one. vision_is_causal: whether vision tokens see only what is
    before them, so that more may follow a cache.
    """

    parts: ClassVar[dict[str, str]]
    video_inputs: tuple[str, ...]
    image_inputs: tuple[str, ...]
    unread_inputs: tuple[str, ...] = ()
    num_axes = 0
    vision_is_causal = False
    config: Any

    @property
    def pixels(self) -> tuple[str, str]:
        """Names of the arguments that hold pixels, of videos and of images."""
        return self.video_inputs[0], self.image_inputs[0]

    def take_vision_inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Takes the arguments of videos and images that are there out of a call's."""
        for name in self.unread_inputs:
            kwargs.pop(name, None)
        vision: dict[str, Any] = {}
        for names in (self.video_inputs, self.image_inputs):
            given = {name: kwargs.pop(name, None) for name in names}
            if given[names[0]] is not None:  # without pixels the others say nothing, as in native models
                vision |= {name: value for name, value in given.items() if value is not None}
        return vision

    def goes_through(self, arguments: Collection[str]) -> bool:
        """Whether `generate` with these arguments goes through `prune`; else native code does all."""
        return self.video_inputs[0] in arguments

    def find_token(self, tokens: Tokens, token_id: int) -> torch.Tensor:
        """Where a token stands, (B, L) bool."""
        if tokens.input_ids is not None:
            return tokens.input_ids == token_id
        embedding = self.get_input_embeddings()(torch.full((), token_id, device=tokens.device))
        assert tokens.inputs_embeds is not None  # `shape` comes first
        return torch.eq(tokens.inputs_embeds, embedding).all(-1)

    def find_placeholders(self, tokens: Tokens, with_videos: bool, with_images: bool) -> tuple[torch.Tensor, ...]:
        """Placeholders of videos and of images, (B, L) bool each."""
        raise NotImplementedError

    def plan_videos(
        self, vision: dict[str, Any], pruning_ratio: float | None = None, with_temporal_loss: bool = False
    ) -> PruningPlan:
        """Checks the video inputs of a call and says what stays of each video."""
        raise NotImplementedError

    def encode_videos(self, pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: Any) -> VideoFeatures:
        raise NotImplementedError

    def encode_images(self, vision: dict[str, Any]) -> BaseModelOutputWithPooling:
        """All images of a call, as the native model encodes them; its `pooler_output` is per image."""
        raise NotImplementedError

    def merge_inputs(self, pruned: "PrunedInputs", by_row: bool = False) -> dict[str, Any]:
        """
        How the native model takes the features: as `mm_encoder_outputs` beside ids or embeddings, with `by_row` one
        entry per row in the order of its placeholders, as `generate` needs it; or in `inputs_embeds`.
        """
        raise NotImplementedError

    def check_generation(self, cache: Cache | None, setting: Callable[[str], Any]) -> None:
        """Raises `ValueError` where `generate` would decode otherwise than `forward` does. setting: of `generate`."""

    def position_tokens(
        self,
        tokens: Tokens,
        cached: CachedPrompt,
        whole_mask: torch.Tensor | None,
        vision: dict[str, Any],
        placeholders: tuple[torch.Tensor, ...] | None,
    ) -> torch.Tensor:
        """
        Positions (B, L) or (axes, B, L) of the whole prompt, before anything is dropped; `tokens` has those that the
        caller gave. whole_mask: (B, seen + L) or None. placeholders: what `find_placeholders` found, where it looked.
        """
        if tokens.position_ids is not None:
            return tokens.position_ids
        return cached.positions_of_new(tokens.shape[1], whole_mask)

    def encode_call(
        self,
        vision: dict[str, Any],
        pruning_ratio: float | None = None,
        with_temporal_loss: bool = False,
        **kwargs: Any,
    ) -> VideoFeatures:
        """What `get_video_features` returns: features of the kept blocks of each video of a call."""
        check_names(kwargs)
        check_settings(pruning_ratio)
        plan = self.plan_videos(vision, pruning_ratio, with_temporal_loss)
        return self.encode_videos(vision[self.video_inputs[0]], plan, **kwargs)

    def prune(
        self,
        tokens: Tokens,
        vision: dict[str, Any],
        cache: Cache | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        with_temporal_loss: bool = False,
        pads_left: bool = False,
    ) -> PrunedInputs:
        """
        Encodes the videos and images of a call and drops the placeholders of dropped blocks.

        vision: the call's `video_inputs` and `image_inputs`. cache: of an earlier call, which this one continues.
        pruned_length: `L'`. Without videos nothing is dropped, but rows get their length. pads_left: whether padding
        moves to the left. Raises `ValueError` where text, videos, images and cache do not fit each other.
        """
        batch_size, length = tokens.shape
        note, order = CachedPrompt.of(cache), token_order(tokens.position_ids, self.num_axes)
        cached = take_up(note, cache, tokens, {} if self.vision_is_causal else vision, pruned_length)
        past_mask, whole_mask, tokens = split_off(tokens, cached, self.num_axes)
        cached = cached.hide(past_mask)
        if order is not None and cached.seen == 0 and packed_rows is not False:
            order = check_shape("position_ids", order, batch_size, length)
            tokens.sample_ids = find_samples(order, tokens.padding_mask)

        plan = None
        if self.video_inputs[0] in vision:
            plan = self.plan_videos(vision, pruning_ratio, with_temporal_loss)
        num_blocks, num_kept, num_dropped = ([], [], []) if plan is None else plan.counts
        drops = any(num_dropped) or pads_left or pruned_length not in (None, length)
        found, rows = None, RowPlan(None)
        if drops or vision:
            found = self.find_placeholders(
                tokens, *(not vision.keys().isdisjoint(names) for names in (self.video_inputs, self.image_inputs))
            )
            if plan is not None or drops:
                rows = RowPlan.read(found[0], tokens.padding_mask, num_blocks, pruned_length is not None, pads_left)
        images: Any = None
        of_images = torch.empty(0)
        if found is not None and self.image_inputs[0] in vision:
            images = self.encode_images(vision)
            of_images = torch.cat(list(images.pooler_output))
            check_image_placeholders(found[1], len(of_images), pruned_length is None)
        # Before the videos' tower runs: what is read back from the device is there at once.
        tokens.position_ids = self.position_tokens(tokens, cached, whole_mask, vision, found)
        video = None if plan is None else self.encode_videos(vision[self.video_inputs[0]], plan)
        sequence, dropped = KeptSequence.whole(batch_size, length, tokens.device), None
        closes_gaps = self.config.pruned_position_ids == "compact"
        if drops and found is not None:
            sequence, dropped = drop_tokens(tokens, found[0], video, num_dropped, rows, pruned_length, closes_gaps)
        left = what_is_left(tokens, sequence, dropped, past_mask, getattr(self.config, "pad_token_id", None) or 0)
        pruned = PrunedInputs(left, sequence.kept_indices, None, video, images)
        # Otherwise a cache's columns are the caller's tokens, and say the positions.
        if drops or note is not None or tokens.position_ids.dim() == 3:
            pruned.cached_after = note_after(cached, tokens, sequence, left, closes_gaps)
        if video is not None and found is not None:
            pruned.features.append((sequence.take(found[0], False), torch.cat(video.pooler_output)))
            if rows.rows is not None:
                pruned.features_per_row = [sum(num_kept[v] for v in videos) for videos in rows.rows]
        if images is not None and found is not None:
            placeholders = sequence.take(found[1], False)
            if rows.drops_padding:
                check_image_placeholders(placeholders, len(of_images), pruned_length is None)
            pruned.features.append((placeholders, of_images))
        return pruned


def split_off(tokens: Tokens, cached: CachedPrompt, num_axes: int) -> tuple[torch.Tensor, torch.Tensor | None, Tokens]:
    """
    Cuts a call's arguments where the cache ends: the mask of the cached columns (B, columns), the caller's whole
    padding mask (B, seen + L) or None, and the new tokens' arguments (B, L). Raises `ValueError` for other lengths.
    """
    batch_size, length = tokens.shape
    seen = KeptSequence(cached.kept_indices, cached.seen)
    past_mask, whole_mask, mask = seen.take_mask(None), tokens.padding_mask, tokens.attention_mask
    if isinstance(mask, dict) or (mask is not None and mask.dim() not in (2, 4)):
        found = "is a dict" if isinstance(mask, dict) else f"has {mask.dim()} dimensions"
        raise ValueError(
            f"`attention_mask` {found}, but must be a padding mask (batch, length) or (batch, heads, length, length)."
        )
    if whole_mask is not None:
        if whole_mask.shape[-1] != cached.seen + length:
            raise ValueError(
                f"`attention_mask` has {whole_mask.shape[-1]} columns, but the sequence has {length} new tokens after "
                f"{cached.seen} cached ones. It must cover both, dropped tokens included, or be None."
            )
        if cached.seen:
            past_mask = seen.take_mask(whole_mask[:, : cached.seen])
        mask = whole_mask[:, cached.seen :]
    types, positions = tokens.mm_token_type_ids, tokens.position_ids
    if types is not None:
        if types.shape[-1] == cached.seen + length:
            types = types[:, cached.seen :]
        types = check_shape("mm_token_type_ids", types, batch_size, length)
    if positions is not None:
        if num_axes and positions.dim() == 3 and len(positions) == 1 + num_axes:
            positions = positions[1:]  # behind what counts the tokens
        axes = int(positions.dim() == 3 and len(positions) == num_axes)
        positions = check_shape("position_ids", positions, batch_size, length, axes, num_axes)
    return past_mask, whole_mask, replace(tokens, attention_mask=mask, mm_token_type_ids=types, position_ids=positions)


def drop_tokens(
    tokens: Tokens,
    of_videos: torch.Tensor,
    video: VideoFeatures | None,
    num_dropped: list[int],
    rows: RowPlan,
    pruned_length: int | None,
    closes_gaps: bool,
) -> tuple[KeptSequence, torch.Tensor | None]:
    """
    What is left of rows without the placeholders of dropped blocks, all of one length, and the tokens (B, L) that
    positions close up on, or None. of_videos: (B, L) placeholders. num_dropped: tokens that each video loses.
    """
    keeps, dropped = torch.ones_like(of_videos), None
    if video is not None and any(num_dropped):
        keep_mask = torch.cat([mask.flatten() for mask in video.keep_mask])
        keeps = keep_tokens(of_videos, keep_mask.to(keeps.device))
    if closes_gaps:
        dropped = ~keeps  # without padding: positions close only the gaps of dropped tokens
    if rows.drops_padding and tokens.padding_mask is not None:
        keeps = keeps & tokens.padding_mask.bool()
    return gather_columns(keeps, rows.new_length(num_dropped, keeps, pruned_length), rows.padded_right), dropped


def what_is_left(
    tokens: Tokens, sequence: KeptSequence, dropped: torch.Tensor | None, past_mask: torch.Tensor, filler_id: int
) -> Tokens:
    """
    The new tokens' arguments on the sequence that is left, (B, L'); its mask covers cached columns too, (B, columns +
    L'), or is (B, heads, L', L'). dropped: (B, L) tokens that positions close up on, or None.
    """

    def take(tensor: torch.Tensor | None, filler: float) -> torch.Tensor | None:
        return None if tensor is None else sequence.take(tensor, filler)

    assert tokens.position_ids is not None  # set by `prune`
    mask = tokens.attention_mask
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        mask = sequence.take_4d_mask(mask)
    else:
        mask = torch.cat([past_mask, sequence.take_mask(tokens.padding_mask)], dim=-1)
    return Tokens(
        input_ids=take(tokens.input_ids, filler_id),
        inputs_embeds=take(tokens.inputs_embeds, 0.0),
        attention_mask=mask,
        position_ids=sequence.take_position_ids(tokens.position_ids, dropped, tokens.sample_ids),
        mm_token_type_ids=take(tokens.mm_token_type_ids, 0),
        sample_ids=take(tokens.sample_ids, 0),
    )


def check_image_placeholders(placeholders: torch.Tensor, num_features: int, may_sync: bool) -> None:
    """Raises `ValueError` where placeholders (B, L) and features differ in number; without a sync, on the device."""
    if placeholders.device.type != "cpu" and not may_sync:
        torch._assert_async(placeholders.sum() == num_features)
    elif int(placeholders.sum()) != num_features:
        raise ValueError(
            f"`pixel_values` make {num_features} image tokens by their grids, but the text has "
            f"{int(placeholders.sum())} image placeholders. Text and images must come from the same call."
        )
