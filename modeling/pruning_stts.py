"""One pass from a call's arguments to what is left of them, the same for `forward` and `generate`.

`plan (host) -> encode videos (score, bias, drop, encode) -> drop tokens`; merging features into the text and running
the language model come after. What backbones differ in is behind the hooks of `PruningBackbone`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .scoring_stts import num_kept_blocks, split_videos
from .sequence_stts import (
    CachedPrompt,
    KeptSequence,
    Tokens,
    assign_videos_to_rows,
    check_shape,
    find_samples,
    gather_columns,
    keep_tokens,
    token_order,
)


@dataclass
class VideoFeatures(BaseModelOutputWithPooling):
    """
    pooler_output: per video (K, text hidden size), features of the kept blocks. token_scores: per video (T, n) float32.
    keep_mask: per video (T, n) bool. temporal_loss: scalar or None. last_hidden_state: (P, D), the survivors after
    the last layer that ran. hidden_states: if asked for, the embeddings and each layer's output, (F, N, D) up to the
    pruning layer, then (P, D). deepstack_features: per tap of the tower, per video (K, text hidden size), for text
    models that take them.
    """

    # `ModelOutput` wants a default; these three are always there.
    pooler_output: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    token_scores: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    keep_mask: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    temporal_loss: torch.Tensor | None = None
    deepstack_features: list[tuple[torch.Tensor, ...]] | None = None


@dataclass
class PruningPlan:
    """
    What the tower has to know of a call's videos, on the host before it runs.

    block_patches: (G, S) row of each block's patches among all frames' patches, -1 for padding. grids: `(T, rows,
        cols)` of each video. pruning_ratio: `k`. feature_layers: layers whose outputs a connector takes, not
        negative, where the call chooses them. with_temporal_loss: whether to compute it.
    """

    block_patches: torch.Tensor
    grids: list[tuple[int, int, int]]
    pruning_ratio: float
    feature_layers: list[int] = field(default_factory=list)
    with_temporal_loss: bool = False
    detach_temporal_target: bool = True

    @property
    def num_kept(self) -> list[int]:
        """`K` of each video."""
        return [num_kept_blocks(frames, rows * cols, self.pruning_ratio) for frames, rows, cols in self.grids]

    @property
    def num_blocks(self) -> list[int]:
        """`n * T` of each video: its tokens before dropping."""
        return [frames * rows * cols for frames, rows, cols in self.grids]

    @property
    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """Blocks of each video, those that stay, and those that go."""
        blocks, kept = self.num_blocks, self.num_kept
        return blocks, kept, [n - k for n, k in zip(blocks, kept, strict=True)]

    def per_video(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(G,) as (T, n) of each video."""
        videos = zip(split_videos(blocks, self.grids), self.grids, strict=True)
        return tuple(video.view(frames, rows * cols) for video, (frames, rows, cols) in videos)

    def check_blocks(self, num_patches: int) -> None:
        """Raises `ValueError` where a video's blocks have fewer slots than its frames have patches (`N`)."""
        window_size = self.block_patches.shape[1]
        for _, rows, cols in self.grids:
            if rows * cols * window_size < num_patches:
                raise ValueError(
                    f"`video_grids` has {rows} x {cols} blocks of {window_size} patches, too few for the {num_patches} "
                    "patches of a frame. The video processor's `size`, `patch_size` and `pooling_size` must be those "
                    "of `vision_config`."
                )


@dataclass
class RowPlan:
    """
    Which videos lie in which row, and how many tokens a row has, on the host before the tower runs.

    rows: None where it was not read. num_tokens: tokens of each row that are no padding, or None likewise.
    drops_padding: whether rows lose their padding and get new padding. padded_right: bool, or on the device.
    """

    rows: list[list[int]] | None
    num_tokens: list[int] | None = None
    drops_padding: bool = False
    padded_right: torch.Tensor | bool = False

    @classmethod
    def read(
        cls, of_videos: torch.Tensor, mask: torch.Tensor | None, num_blocks: list[int], gets_length: bool
    ) -> "RowPlan":
        """
        of_videos: (B, L) placeholders. mask: (B, L) or None. num_blocks: of each video. gets_length: whether rows get
        one. Then, and for one row, which may keep its padding, nothing forces a host-device sync, and what would be an
        error becomes an assertion on the device.
        """
        batch_size = of_videos.shape[0]
        padded_right = False if mask is None else ~mask[:, -1].bool().all()
        drops_padding = mask is not None and (gets_length or batch_size > 1)
        hidden = None if mask is None else of_videos & ~mask.bool()
        if of_videos.device.type != "cpu" and (gets_length or batch_size == 1):
            torch._assert_async(of_videos.sum() == sum(num_blocks))
            if hidden is not None:
                torch._assert_async(~hidden.any())
            rows = [list(range(len(num_blocks)))] if batch_size == 1 else None
            return cls(rows, None, drops_padding, padded_right)
        counts = [of_videos.sum(-1)]
        if mask is not None and hidden is not None:
            counts += [mask.bool().sum(-1), hidden.sum(-1)]
        read = torch.stack(counts).tolist()
        rows = assign_videos_to_rows(read[0], num_blocks)
        if mask is None:
            return cls(rows)
        if sum(read[2]):
            raise ValueError(
                f"`attention_mask` hides {sum(read[2])} video placeholder tokens, but may hide only padding. Take the "
                "videos themselves out of the call."
            )
        return cls(rows, read[1] if drops_padding else None, drops_padding, padded_right)

    def new_length(self, num_dropped: list[int], kept_tokens: torch.Tensor, pruned_length: int | None) -> int:
        """
        `L'`: `pruned_length`, or the longest row of kept_tokens (B, L). num_dropped: tokens that each video loses.
        Raises `ValueError` for a row that is longer than `pruned_length`.
        """
        if self.rows is None or (self.drops_padding and self.num_tokens is None):
            assert pruned_length is not None  # otherwise `read` reads
            torch._assert_async((kept_tokens.sum(-1) <= pruned_length).all())
            return pruned_length
        before = self.num_tokens or [kept_tokens.shape[1]] * len(self.rows)
        lengths = [n - sum(num_dropped[v] for v in videos) for n, videos in zip(before, self.rows, strict=True)]
        longest = max(lengths)
        if pruned_length is None:
            return max(longest, 1)
        if longest > pruned_length:
            raise ValueError(
                f"`pruned_length` is {pruned_length}, but row {lengths.index(longest)} has {longest} tokens left "
                "after dropping. Make it longer, shorten the row, or raise `pruning_ratio`."
            )
        return pruned_length


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
    images, the pixels first. unread_inputs: names of those that a processor makes and no model reads. num_axes: of
    positions, 0 where a token has one. vision_is_causal: whether vision tokens see only what is before them, so that
    more may follow a cache.
    """

    parts: ClassVar[dict[str, str]]
    video_inputs: tuple[str, ...]
    image_inputs: tuple[str, ...]
    unread_inputs: tuple[str, ...] = ()
    num_axes = 0
    vision_is_causal = False
    config: Any

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
        """Whether a call with these vision inputs goes through `prune`, which alone remembers positions of axes."""
        return self.video_inputs[0] in arguments or (self.num_axes > 0 and self.image_inputs[0] in arguments)

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

    def merge_inputs(self, pruned: "PrunedInputs") -> dict[str, Any]:
        """
        How the native model takes the features: as `mm_encoder_outputs` beside ids or embeddings, one entry per row in
        the order of its placeholders, since beams and samples repeat whole rows; or in `inputs_embeds`.
        """
        raise NotImplementedError

    def check_generation(self, cache: Cache | None, setting: Callable[[str], Any]) -> None:
        """Raises `ValueError` where `generate` would decode otherwise than `forward` does. setting: of `generate`."""

    def position_tokens(
        self, tokens: Tokens, cached: CachedPrompt, whole_mask: torch.Tensor | None, vision: dict[str, Any]
    ) -> torch.Tensor:
        """
        Positions (B, L) or (axes, B, L) of the whole prompt, before anything is dropped; `tokens` has those that the
        caller gave. whole_mask: (B, seen + L) or None.
        """
        if tokens.position_ids is not None:
            return tokens.position_ids
        return cached.positions_of_new(tokens.shape[1], whole_mask)

    def prune(
        self,
        tokens: Tokens,
        vision: dict[str, Any],
        cache: Cache | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        with_temporal_loss: bool = False,
    ) -> PrunedInputs:
        """
        Encodes the videos and images of a call and drops the placeholders of dropped blocks.

        vision: the call's `video_inputs` and `image_inputs`. cache: of an earlier call, which this one continues.
        pruned_length: `L'`. Without videos nothing is dropped, but rows get their length. Raises `ValueError` where
        text, videos, images and cache do not fit each other.
        """
        batch_size, length = tokens.shape
        positions, note = tokens.position_ids, CachedPrompt.of(cache)
        order = token_order(positions, self.num_axes)
        if positions is not None and order is not None and order is not positions:
            tokens = replace(tokens, position_ids=positions[1:])
        cached = take_up(note, cache, tokens, {} if self.vision_is_causal else vision, pruned_length)
        past_mask, whole_mask, tokens = split_off(tokens, cached, self.num_axes)
        if order is not None and cached.seen == 0 and packed_rows is not False:
            order = check_shape("position_ids", order, batch_size, length)
            tokens.sample_ids = find_samples(order, tokens.padding_mask)
        with_videos, with_images = self.video_inputs[0] in vision, self.image_inputs[0] in vision
        plan = self.plan_videos(vision, pruning_ratio, with_temporal_loss) if with_videos else None
        num_blocks, num_kept, num_dropped = ([], [], []) if plan is None else plan.counts
        drops = any(num_dropped) or pruned_length not in (None, length)
        sequence = KeptSequence.whole(batch_size, length, tokens.device)
        video = dropped = features_per_row = None
        images: Any = None
        features = []
        if drops or with_videos or with_images:
            of_videos, of_images = self.find_placeholders(tokens, with_videos, with_images)
            rows = RowPlan(None)
            if plan is not None or drops:
                rows = RowPlan.read(of_videos, tokens.padding_mask, num_blocks, pruned_length is not None)
            images = self.encode_images(vision) if with_images else None
            if plan is not None:
                video = self.encode_videos(vision[self.video_inputs[0]], plan)
            if drops:
                keeps = torch.ones_like(of_videos)
                if video is not None and any(num_dropped):
                    keep_mask = torch.cat([mask.flatten() for mask in video.keep_mask])
                    keeps = keep_tokens(of_videos, keep_mask.to(of_videos.device))
                if self.config.pruned_position_ids == "compact":
                    dropped = ~keeps  # without padding: positions close only the gaps of dropped tokens
                if rows.drops_padding and tokens.padding_mask is not None:
                    keeps = keeps & tokens.padding_mask.bool()
                new_length = rows.new_length(num_dropped, keeps, pruned_length)
                sequence = gather_columns(keeps, new_length, rows.padded_right)
            if video is not None:
                features.append((sequence.take(of_videos, False), torch.cat(video.pooler_output)))
                if rows.rows is not None:
                    features_per_row = [sum(num_kept[v] for v in videos) for videos in rows.rows]
            if images is not None:
                placeholders, of_all = sequence.take(of_images, False), torch.cat(list(images.pooler_output))
                check_image_placeholders(placeholders, len(of_all))
                features.append((placeholders, of_all))
        tokens.position_ids = self.position_tokens(tokens, cached, whole_mask, vision)
        left = what_is_left(tokens, sequence, dropped, past_mask, getattr(self.config, "pad_token_id", None) or 0)
        # Otherwise a cache's columns are the caller's tokens, and say the positions.
        noted = drops or note is not None or tokens.position_ids.dim() == 3
        return PrunedInputs(
            left,
            sequence.kept_indices,
            note_after(cached, tokens, sequence, left) if noted else None,
            video,
            images,
            features,
            features_per_row,
        )


def take_up(
    note: CachedPrompt | None, cache: Cache | None, tokens: Tokens, vision: dict[str, Any], pruned_length: int | None
) -> CachedPrompt:
    """What a cache with that note holds of the caller's sequence; raises `ValueError` where nothing can follow it."""
    batch_size, _ = tokens.shape
    columns = int(cache.get_seq_length()) if cache is not None else 0
    if note is not None and vision:
        raise ValueError(
            f"`{next(name for name in vision if name.startswith('pixel_values'))}` came with `past_key_values` that "
            "hold a video already. Vision tokens attend to each other in both directions, so the cached ones would not "
            "be the same any more. Leave out what the cache has seen; for anything new, pass the whole conversation "
            "with all its videos and images again, without `past_key_values`."
        )
    if note is None:
        cached = CachedPrompt.untouched(columns, batch_size, tokens.device)
    else:
        cached = note.fitted(columns, batch_size)
    if pruned_length is not None and cached.seen:
        raise ValueError(
            f"`pruned_length` is {pruned_length}, but `past_key_values` holds {cached.seen} tokens already. It is for "
            "calls without a cache, such as training; leave it out."
        )
    return cached


def split_off(tokens: Tokens, cached: CachedPrompt, num_axes: int) -> tuple[torch.Tensor, torch.Tensor | None, Tokens]:
    """
    Cuts a call's arguments where the cache ends: the mask of the cached columns (B, columns), the caller's whole
    padding mask (B, seen + L) or None, and the new tokens' arguments (B, L). Raises `ValueError` for other lengths.
    """
    batch_size, length = tokens.shape
    seen = KeptSequence(cached.kept_indices, cached.seen)
    past_mask, whole_mask, mask = seen.take_mask(None), tokens.padding_mask, tokens.attention_mask
    if mask is not None and mask.dim() not in (2, 4):
        raise ValueError(
            f"`attention_mask` has {mask.dim()} dimensions, but must be a padding mask (batch, length) or "
            "(batch, heads, length, length)."
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
        axes = int(positions.dim() == 3 and len(positions) == num_axes)
        positions = check_shape("position_ids", positions, batch_size, length, axes)
    return past_mask, whole_mask, replace(tokens, attention_mask=mask, mm_token_type_ids=types, position_ids=positions)


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
    if mask is not None and mask.dim() == 4:
        mask = sequence.take_4d_mask(mask)
    else:
        mask = torch.cat([past_mask, sequence.take_mask(mask)], dim=-1)
    return Tokens(
        input_ids=take(tokens.input_ids, filler_id),
        inputs_embeds=take(tokens.inputs_embeds, 0.0),
        attention_mask=mask,
        position_ids=sequence.take_position_ids(tokens.position_ids, dropped, tokens.sample_ids),
        mm_token_type_ids=take(tokens.mm_token_type_ids, 0),
        sample_ids=take(tokens.sample_ids, 0),
    )


def note_after(cached: CachedPrompt, tokens: Tokens, sequence: KeptSequence, left: Tokens) -> CachedPrompt:
    """What a cache holds of the caller's sequence after this call."""
    assert left.position_ids is not None  # `what_is_left` makes them
    token_ids = tokens.input_ids if cached.seen == 0 else None
    if tokens.input_ids is not None and cached.token_ids is not None:
        token_ids = torch.cat([cached.token_ids.to(tokens.device), tokens.input_ids], dim=-1)
    positions = left.position_ids if left.position_ids.dim() == 2 else left.position_ids.amax(0)
    shown = ~sequence.is_filler
    if left.padding_mask is not None:
        shown = left.padding_mask[:, -shown.shape[1] :].bool()
    places = sequence.kept_indices.add(cached.seen).masked_fill(sequence.is_filler, -1)
    return CachedPrompt(
        torch.cat([cached.kept_indices, places], dim=-1),
        cached.seen + sequence.length,
        torch.cat([cached.positions, positions.masked_fill(~shown, -1)], dim=-1),
        token_ids,
    )


def check_image_placeholders(placeholders: torch.Tensor, num_features: int) -> None:
    """Raises `ValueError` where placeholders (B, L) and features differ in number; off the CPU it asserts there."""
    if placeholders.device.type != "cpu":
        torch._assert_async(placeholders.sum() == num_features)
    elif int(placeholders.sum()) != num_features:
        raise ValueError(
            f"`pixel_values` make {num_features} image tokens by their grids, but the text has "
            f"{int(placeholders.sum())} image placeholders. Text and images must come from the same call."
        )
