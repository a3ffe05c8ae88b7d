"""From the caller's arguments to what is left of them: encoding, and dropping placeholders in step.

Nothing here runs the language model; `prune_inputs` serves `forward` and `generate` alike.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .checks_stts import (
    check_image_inputs,
    check_image_placeholders,
    check_none_hidden,
    check_shape,
    check_video_inputs,
    read_grids,
)
from .sequence_stts import (
    CachedPrompt,
    KeptSequence,
    assign_videos_to_rows,
    find_samples,
    keep_positions,
    keep_tokens,
    placeholders_of_videos,
)


@dataclass
class PrunedInputs:
    """
    A call's arguments after dropping, all on the sequence that is left (B, L').

    attention_mask covers cached columns too, (B, columns + L'), or is (B, heads, L', L'). features: pairs of a
    placeholder mask (B, L') and the features that go there in order. kept_indices: (B, L') in the caller's sequence.
    features_per_row: how many of the videos' features go to each row, where that is known on the host.
    sample_ids: (B, L') where several samples may share a row. cached_after: what a cache will hold, or None if no token
    was ever dropped. video: output of `get_video_features`.
    """

    input_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor | None
    kept_indices: torch.Tensor
    sample_ids: torch.Tensor | None = None
    cached_after: CachedPrompt | None = None
    video: Any = None
    features: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    features_per_row: list[int] | None = None


def find_token(model, token_id: int, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None):
    """Where (B, L) a token stands, by id or, lacking ids, by its embedding."""
    if input_ids is not None:
        return input_ids == token_id
    embedding = model.get_input_embeddings()(torch.full((), token_id, device=inputs_embeds.device))
    return (inputs_embeds == embedding).all(-1)


def find_placeholders(
    model, input_ids, inputs_embeds, with_videos: bool, with_images: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Placeholders of videos and of images, (B, L) each; Molmo2 has one id for both."""
    config = model.config

    def find(token_id: int) -> torch.Tensor:
        return find_token(model, token_id, input_ids, inputs_embeds)

    placeholders = find(config.image_patch_id)
    if not with_images:
        return placeholders, torch.zeros_like(placeholders)
    if not with_videos:
        return torch.zeros_like(placeholders), placeholders
    frame_starts, image_starts = find(config.frame_start_token_id), find(config.image_start_token_id)
    # Where the processor wraps frames in an image's tokens (`use_frame_special_tokens=False`, as the released models
    # do), a frame's start follows its timestamp, while an image's large view directly follows the end of its small one.
    follows_end = torch.nn.functional.pad(find(config.image_end_token_id)[:, :-1], (1, 0))
    frame_starts = torch.where(frame_starts.any(), frame_starts, image_starts & ~follows_end)
    image_starts = (image_starts & ~frame_starts) | find(config.low_res_image_start_token_id)
    videos = placeholders_of_videos(placeholders, frame_starts, image_starts)
    return videos, placeholders & ~videos


def prune_inputs(
    model,
    input_ids=None,
    inputs_embeds=None,
    pixel_values=None,
    image_token_pooling=None,
    image_grids=None,
    pixel_values_videos=None,
    video_token_pooling=None,
    video_grids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    mm_token_type_ids=None,
    pruning_ratio=None,
    pruned_length=None,
    with_temporal_loss=False,
) -> PrunedInputs:
    """
    Encodes the videos and images of a call and drops the placeholders of dropped blocks; `model` is an `STTSModel`.

    Arguments as in `STTSModel.forward`. Without videos nothing is dropped, but packed samples are told apart, rows get
    `pruned_length`, and `past_key_values` is taken up where it left off. Raises `ValueError` where text, videos and
    images do not fit each other.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
    if model.training and mm_token_type_ids is None:
        raise ValueError("`mm_token_type_ids` is None, but training needs it; pass all that the processor returns.")
    batch_size, length = tokens.shape[:2]
    cached = getattr(past_key_values, "pruned_prompt", None)
    if cached is not None and (pixel_values is not None or pixel_values_videos is not None):
        raise ValueError(
            f"`{'pixel_values' if pixel_values_videos is None else 'pixel_values_videos'}` came with `past_key_values` "
            "that hold a video already. Vision tokens attend to each other in both directions, so the cached ones "
            "would not be the same any more. Leave out what the cache has seen; for anything new, pass the whole "
            "conversation with all its videos and images again, without `past_key_values`."
        )
    columns = past_key_values.get_seq_length() if past_key_values is not None else 0
    ever_dropped = cached is not None
    if cached is None:  # nothing was dropped so far: the cache's columns are the caller's tokens
        places = torch.arange(int(columns), device=tokens.device)
        cached = CachedPrompt(
            places.expand(batch_size, -1), int(columns), torch.full((batch_size, 1), int(columns), device=tokens.device)
        )
    cached.check(int(columns), batch_size)
    if pruned_length is not None and cached.seen:
        raise ValueError(
            f"`pruned_length` is {pruned_length}, but `past_key_values` holds {cached.seen} tokens already. It is for "
            "calls without a cache, such as training; leave it out."
        )
    past_mask, new_mask = split_mask(attention_mask, cached, length)
    if mm_token_type_ids is not None:
        if mm_token_type_ids.shape[-1] == cached.seen + length:
            mm_token_type_ids = mm_token_type_ids[:, cached.seen :]
        check_shape("mm_token_type_ids", mm_token_type_ids, batch_size, length)
    if position_ids is None:
        sample_ids = None
        whole_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        position_ids = cached.positions_of_new(length, whole_mask)
    else:
        position_ids = check_shape("position_ids", position_ids, batch_size, length)
        padding_mask = new_mask if new_mask is not None and new_mask.dim() == 2 else None
        sample_ids = find_samples(position_ids, padding_mask) if cached.seen == 0 else None

    features: list[tuple[torch.Tensor, torch.Tensor]] = []
    video = dropped = features_per_row = None
    sequence = KeptSequence(torch.arange(length, device=tokens.device).expand(batch_size, -1), length)
    if pixel_values_videos is not None or pixel_values is not None or pruned_length not in (None, length):
        with_videos, with_images = pixel_values_videos is not None, pixel_values is not None
        of_videos, of_images = find_placeholders(model, input_ids, inputs_embeds, with_videos, with_images)
        if with_videos:
            video_grids = video_grids if video_grids is None else video_grids.cpu()  # read once, before the ViT runs
            check_video_inputs(pixel_values_videos, video_token_pooling, video_grids, model.config.vision_config)
        plan = RowPlan.read(of_videos, new_mask, video_grids if with_videos else None, pruned_length is not None)
        num_kept: list[int] = []
        if with_images:
            check_image_inputs(pixel_values, image_token_pooling, image_grids)
            images = torch.cat(model.get_image_features(pixel_values, image_token_pooling, image_grids).pooler_output)
        if with_videos:
            video = model.get_video_features(
                pixel_values_videos, video_token_pooling, video_grids, pruning_ratio, with_temporal_loss
            )
            num_kept = [len(kept) for kept in video.pooler_output]
        drops = sum(num_kept) < sum(plan.tokens_per_video)
        if drops or pruned_length not in (None, length):
            ever_dropped = True  # or moved: the columns are the caller's tokens no more
            kept_tokens = torch.ones_like(of_videos)
            if drops:
                kept_tokens = keep_tokens(of_videos, torch.cat([mask.flatten() for mask in video.keep_mask]))
            if model.config.pruned_position_ids == "compact":
                dropped = ~kept_tokens  # before padding goes too, which positions do not close up on
            if plan.drops_padding:
                kept_tokens = kept_tokens & new_mask.bool()
            new_length = plan.new_length(num_kept, kept_tokens, pruned_length)
            sequence = keep_positions(kept_tokens, new_length, plan.padded_right)
        if with_videos:
            features.append((sequence.take(of_videos, False), torch.cat(video.pooler_output)))
            features_per_row = None if plan.rows is None else [sum(num_kept[v] for v in row) for row in plan.rows]
        if with_images:
            placeholders = sequence.take(of_images, False)
            check_image_placeholders(placeholders, len(images))
            features.append((placeholders, images))

    positions = sequence.take_position_ids(position_ids, dropped, sample_ids)
    if new_mask is not None and new_mask.dim() == 4:
        mask = sequence.take_4d_mask(new_mask)
    else:
        mask = torch.cat([past_mask, sequence.take_mask(new_mask)], dim=-1)
    cached_after = None
    if ever_dropped:
        token_ids = input_ids if cached.seen == 0 else None
        if input_ids is not None and cached.token_ids is not None:
            token_ids = torch.cat([cached.token_ids.to(input_ids.device), input_ids], dim=-1)
        last = mask[:, -positions.shape[1] :].bool() if mask.dim() == 2 else ~sequence.is_filler
        cached_after = CachedPrompt(
            torch.cat(
                [cached.kept_indices, sequence.kept_indices.add(cached.seen).masked_fill(sequence.is_filler, -1)],
                dim=-1,
            ),
            cached.seen + length,
            torch.where(last, positions, cached.next_position - 1).amax(-1, keepdim=True) + 1,
            token_ids,
        )
    filler_id = getattr(model.config, "pad_token_id", None) or 0
    return PrunedInputs(
        input_ids=None if input_ids is None else sequence.take(input_ids, filler_id),
        inputs_embeds=None if inputs_embeds is None else sequence.take(inputs_embeds, 0.0),
        attention_mask=mask,
        position_ids=positions,
        mm_token_type_ids=None if mm_token_type_ids is None else sequence.take(mm_token_type_ids, 0),
        kept_indices=sequence.kept_indices,
        sample_ids=None if sample_ids is None else sequence.take(sample_ids, 0),
        cached_after=cached_after,
        video=video,
        features=features,
        features_per_row=features_per_row,
    )


def split_mask(
    attention_mask: torch.Tensor | None, cached: CachedPrompt, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The caller's mask (B, seen + L), (B, L) or None as (B, cached columns) and (B, L); 4D masks are new ones."""
    seen = KeptSequence(cached.kept_indices, cached.seen)
    if attention_mask is None or attention_mask.dim() == 4:
        return seen.take_mask(None), attention_mask
    if attention_mask.shape[-1] == cached.seen + length:
        past = seen.take_mask(attention_mask[:, : cached.seen]) if cached.seen else seen.take_mask(None)
        return past, attention_mask[:, cached.seen :]
    raise ValueError(
        f"`attention_mask` has {attention_mask.shape[-1]} columns, but the sequence has {length} new tokens after "
        f"{cached.seen} cached ones. It must cover both, dropped tokens included, or be None."
    )


@dataclass
class RowPlan:
    """
    Which videos lie in which row, and how many tokens a row has, all on the host and known before the ViT runs.

    rows: None where it was not read. real_tokens: tokens of each row that are no padding, or None likewise.
    drops_padding: whether rows lose their padding and get it anew. padded_right: bool, or on the device.
    """

    rows: list[list[int]] | None
    tokens_per_video: list[int]
    real_tokens: list[int] | None = None
    drops_padding: bool = False
    padded_right: torch.Tensor | bool = False

    @classmethod
    def read(
        cls, of_videos: torch.Tensor, mask: torch.Tensor | None, video_grids: torch.Tensor | None, drop_padding: bool
    ) -> "RowPlan":
        """
        of_videos: (B, L) placeholders. mask: (B, L) or None. drop_padding: whether a length is asked for. Then, and for
        one row, which may keep its padding, nothing has to be read back from a device, and what would be an error
        becomes an assertion there.
        """
        grids = [] if video_grids is None else read_grids(video_grids)
        tokens_per_video = [frames * rows * cols for frames, rows, cols in grids]
        if mask is not None and mask.dim() != 2:
            mask = None
        batch_size = of_videos.shape[0]
        padded_right = mask is not None and ~mask[:, -1].bool().all()
        drops_padding = mask is not None and (drop_padding or batch_size > 1)
        hidden = None if mask is None else of_videos & ~mask.bool()
        if of_videos.device.type != "cpu" and (drop_padding or batch_size == 1):
            torch._assert_async(of_videos.sum() == sum(tokens_per_video))
            if hidden is not None:
                torch._assert_async(~hidden.any())
            rows = [list(range(len(grids)))] if batch_size == 1 else None
            return cls(rows, tokens_per_video, None, drops_padding, padded_right)
        counts = [of_videos.sum(-1)]
        if mask is not None:
            counts += [mask.bool().sum(-1), hidden.sum(-1)]
        read = torch.stack(counts).tolist()
        rows = assign_videos_to_rows(read[0], tokens_per_video)
        if mask is None:
            return cls(rows, tokens_per_video)
        check_none_hidden(sum(read[2]))
        return cls(rows, tokens_per_video, read[1] if drops_padding else None, drops_padding, padded_right)

    def new_length(self, num_kept: list[int], kept_tokens: torch.Tensor, pruned_length: int | None) -> int:
        """`L'`: `pruned_length`, or the longest row of kept_tokens (B, L). Raises `ValueError` for a row too long."""
        unread = self.rows is None or (self.drops_padding and self.real_tokens is None)
        if unread and pruned_length is not None:
            torch._assert_async((kept_tokens.sum(-1) <= pruned_length).all())
            return pruned_length
        dropped = [sum(self.tokens_per_video[v] - num_kept[v] for v in videos) for videos in self.rows]
        real = self.real_tokens or [kept_tokens.shape[1]] * len(dropped)
        lengths = [tokens - gone for tokens, gone in zip(real, dropped, strict=True)]
        longest = max(lengths)
        if pruned_length is None:
            return max(longest, 1)
        if longest > pruned_length:
            raise ValueError(
                f"`pruned_length` is {pruned_length}, but row {lengths.index(longest)} has {longest} tokens left "
                "after dropping. Make it longer, shorten the row, or raise `pruning_ratio`."
            )
        return pruned_length
