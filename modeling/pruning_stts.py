"""One pass from a call's arguments to what is left of them, the same for `forward` and `generate`.

`read call -> native, or plan -> find placeholders -> positions -> encode (score, bias, drop) -> drop tokens -> merge ->
native forward -> report`. What backbones differ in are the hooks of `PruningBackbone`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.utils import ModelOutput, can_return_tuple

from .budget_stts import KEEP_ARGUMENTS, KeepRule, check_setting
from .cache_stts import UNKNOWN, UNKNOWN_VISION, CacheRecord, last_positions
from .plan_stts import PruningPlan, RowPlan, TowerCache, VideoFeatures
from .scoring_stts import mean_error
from .sequence_stts import KeptSequence, Tokens, check_shape, find_samples, holds_packed_rows, token_order
from .settings_stts import RANKING_ARGUMENTS, check_names, take_given


@dataclass
class Call:
    """
    A call's arguments. vision: those of its videos and images. cache: of an earlier call, which this one continues.
    keep: how many blocks stay, if not as the config says. pruned_length: the length `L'` that every row gets.
    packed_rows: whether rows hold several samples; None where nobody has looked. block_scores: (G,) rank the blocks.
    tower_cache: if empty, lets later calls with the same videos skip layers `0..l`. pads_left: padding moves left.
    """

    tokens: Tokens
    vision: dict[str, Any] = field(default_factory=dict)
    cache: Cache | None = None
    keep: KeepRule | None = None
    pruned_length: int | None = None
    packed_rows: bool | None = None
    with_temporal_loss: bool = False
    block_scores: torch.Tensor | None = None
    tower_cache: TowerCache | None = None
    pads_left: bool = False

    @property
    def changes_length(self) -> bool:
        return self.pads_left or self.pruned_length not in (None, self.tokens.shape[1])


@dataclass
class PrunedInputs:
    """
    What is left of a call's arguments.

    tokens: (B, L'); their mask covers cached columns too, (B, columns + L'). kept_indices: (B, L') in the caller's
    sequence. record: of a cache that this call fills. video, images: what the hooks returned. features: pairs of a
    placeholder mask (B, L') and the features that go there in order, the videos' first. per_row: of each pair, how many
    features go to each row, if known. row_losses: (B,) temporal loss of each row, if known.
    """

    tokens: Tokens
    kept_indices: torch.Tensor
    record: CacheRecord
    video: VideoFeatures | None = None
    images: BaseModelOutputWithPooling | None = None
    features: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    per_row: list[list[int]] = field(default_factory=list)
    row_losses: torch.Tensor | None = None

    def by_row(self, index: int, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Features (tokens, ...) of pair `index`, one entry per row if known, so that beams repeat whole rows."""
        return features.split(self.per_row[index] or len(features))

    @property
    def report(self) -> dict[str, Any]:
        """The fields of outputs that native models do not fill."""
        video = {name: getattr(self.video, name, None) for name in ("temporal_loss", "token_scores", "keep_mask")}
        first = self.features[0][1] if self.features else None
        return {"kept_indices": self.kept_indices, "row_losses": self.row_losses, "image_hidden_states": first} | video


@dataclass
class PruningOutput(ModelOutput):
    """
    Fields that pruning adds to a native output class, which comes after this one.

    Attributes:
        task_loss: cross entropy of the next token, from a model with a head and with labels.
        temporal_loss: unweighted; None without videos, for untrained selectors, and outside training without labels.
        token_scores: per video (T, n), what blocks were ranked by.
        keep_mask: per video (T, n), which blocks were kept.
        kept_indices: (B, L') place of every column of `logits` in the caller's sequence, -1 for filler.
        image_hidden_states: (kept blocks, text hidden size) features of the videos, or of images alone.
    """

    task_loss: torch.Tensor | None = None
    temporal_loss: torch.Tensor | None = None
    token_scores: tuple[torch.Tensor, ...] | None = None
    keep_mask: tuple[torch.Tensor, ...] | None = None
    kept_indices: torch.Tensor | None = None
    image_hidden_states: torch.Tensor | None = None


@dataclass
class PruningModelOutputWithPast(PruningOutput, BaseModelOutputWithPast):
    """
    Of a model without a head. row_losses: (B,) temporal loss over the videos of each row, None if unknown.
    router_logits: of each layer of experts (B * L', experts), if asked for.
    """

    row_losses: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class PruningBackbone(PreTrainedModel):
    """
    Mixin for the model without a head: `forward`, the pass itself, `prune`, and the hooks by which backbones differ.

    native: class of the stock model. parts: "language_model", "vision_tower", "connector" or "scorer" by a module's
    name; inner names win. video_inputs, image_inputs: arguments that come with videos and with images, pixels first,
    grids last. unread_inputs: those that a processor makes and no model reads. num_axes: of positions, 0 for one
    number. vision_is_causal: whether vision tokens see only what is before them, so that more may follow a cache.
    refuses_packed_rows: why a row cannot hold several samples, None where it can.
    """

    native: ClassVar[Any]
    get_image_features: Any  # the native model's
    parts: ClassVar[dict[str, str]]
    video_inputs: tuple[str, ...]
    image_inputs: tuple[str, ...]
    unread_inputs: tuple[str, ...] = ()
    num_axes = 0
    vision_is_causal = False
    refuses_packed_rows: ClassVar[str | None] = None
    config: Any

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        with_temporal_loss: bool = False,
        records_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """
        As the native forward, on the pruned sequence, without the placeholders of dropped blocks; `Call`
        says what our arguments are. `past_key_values` from an earlier call that dropped tokens continues it, in the
        caller's positions; `records_cache=False` leaves its record to the caller.
        """
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, position_ids, mm_token_type_ids)
        vision = self.take_vision_inputs(kwargs)
        call = Call(tokens, vision, past_key_values, None, pruned_length, packed_rows, with_temporal_loss)
        call.block_scores, call.tower_cache = (kwargs.pop(name, None) for name in RANKING_ARGUMENTS)
        self.read_call(call, kwargs)
        pruned = record = None
        if self.is_native(call):
            if tokens.attention_mask is None and call.packed_rows is False and call.cache is None and not self.num_axes:
                # Native code would take gaps in the positions, or those of padding, for packed samples.
                tokens.attention_mask = torch.ones(tokens.shape, dtype=torch.int64, device=tokens.device)
            if records_cache:
                record = self.record_native(call, bool(vision or kwargs.get("mm_encoder_outputs")))
            arguments = tokens.arguments | vision
        else:
            self.check_exclusive(kwargs)
            pruned = self.prune(call)
            record, arguments = pruned.record, self.merge(call, pruned)
        with CacheRecord.set_aside(past_key_values, record):
            outputs = self.native_forward(**(kwargs | arguments), past_key_values=past_key_values, return_dict=True)
        CacheRecord.attach(outputs.past_key_values, record)
        report = {} if pruned is None else pruned.report
        names = PruningModelOutputWithPast.__dataclass_fields__
        return PruningModelOutputWithPast(**{name: report.get(name, outputs.get(name)) for name in names})

    def read_call(self, call: Call, kwargs: dict[str, Any]) -> None:
        """The door: checks a call's arguments, takes from `kwargs` those that are not native, and finds packed rows."""
        check_names(kwargs)
        given = take_given(kwargs, KEEP_ARGUMENTS)
        call.keep = self.config.keep_rule(given) if given else None
        if call.pruned_length is not None:
            check_setting("pruned_length", call.pruned_length)
        CacheRecord.usable(call.cache)
        self.check_new_vision(call.cache, call.vision)
        if call.packed_rows is None and (self.num_axes or self.video_inputs[0] not in call.vision):
            call.packed_rows = holds_packed_rows(call.tokens, call.cache, self.num_axes)
        if call.packed_rows and call.tokens.position_ids is None:
            raise ValueError("Packed rows need `position_ids` that start over at each sample. Pass them too.")

    def is_native(self, call: Call) -> bool:
        """Whether nothing is to be dropped, laid out or continued: then the native model does all."""
        record = CacheRecord.of(call.cache)
        changes = call.packed_rows or call.changes_length or (record is not None and not record.whole)
        return not changes and not self.needs_pruning(call.vision)

    def record_native(self, call: Call, has_vision: bool) -> CacheRecord | None:
        """The record of a cache after a native call, which gets the positions that a record before it says."""
        tokens, record = call.tokens, CacheRecord.of(call.cache)
        if record is None and not has_vision:
            return None
        record, (batch_size, length) = CacheRecord.resume(call.cache, tokens), tokens.shape
        if record.skips_hidden and tokens.position_ids is None and tokens.padding_mask is not None:
            tokens.position_ids = (tokens.padding_mask.long().cumsum(-1) - 1)[:, -length:].clamp_min(0)
        other = UNKNOWN_VISION if has_vision else UNKNOWN
        ids = torch.full((batch_size, length), other, device=tokens.device)
        return record.continued(ids if tokens.input_ids is None else tokens.input_ids)

    def check_exclusive(self, kwargs: dict[str, Any]) -> None:
        """Raises `ValueError` for arguments that describe what is no more once tokens are dropped or laid out anew."""
        if kwargs.get("mm_encoder_outputs"):
            raise ValueError(
                "`mm_encoder_outputs` came with pixels or grids, `pruned_length`, packed rows, or `past_key_values` of "
                "a call that dropped video tokens. Pass the pixels instead of it."
            )
        if "cu_seq_lens_q" in kwargs:
            raise ValueError(
                "`cu_seq_lens_q` describes the sequence before video tokens are dropped. Leave out the flash-attention "
                "arguments; packed samples are told apart by `position_ids` that start over."
            )

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

    # Hooks. Placeholders of videos and of images, (B, L) bool each, by `input_ids`, the names of a call's arguments of
    # vision, and its `mm_token_type_ids` or None:
    find_placeholders: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # Checks the video inputs of a call and says where each video's blocks lie:
    plan_videos: Callable[[dict[str, Any]], PruningPlan]
    encode_videos: Callable[..., VideoFeatures]
    # Checks the image inputs of a call and counts the tokens of each image, on the host:
    count_image_tokens: Callable[[dict[str, Any]], list[int]]
    # Arguments of the native forward for what is left:
    merge: Callable[[Call, PrunedInputs], dict[str, Any]]
    # Arguments of native `generate`: `mm_encoder_outputs`, one entry per row, in the order of its placeholders. Beside
    # what is left, it takes what says a setting of the call.
    merge_rows: Callable[[PrunedInputs, Callable[[str], Any]], dict[str, Any]]

    def native_forward(self, **arguments: Any) -> Any:
        """The native model's own `forward`, which does not read the types of tokens where vision is causal."""
        arguments.pop("mm_token_type_ids", None)
        return self.native.forward(self, **arguments)

    def encode_images(self, vision: dict[str, Any]) -> BaseModelOutputWithPooling:
        """All images of a call, as the native model encodes them: `pooler_output` per image or row."""
        return self.get_image_features(*(vision.get(name) for name in self.image_inputs), return_dict=True)

    def needs_pruning(self, arguments: Collection[str]) -> bool:
        """Whether a call with these arguments goes through `prune`; else native code does all."""
        return self.video_inputs[0] in arguments

    def check_new_vision(self, cache: Cache | None, arguments: Collection[str]) -> None:
        """Raises `ValueError` for pixels among the names of `arguments` where cached vision tokens would see them."""

    def check_generation(self, cache: Cache | None, setting: Callable[[str], Any]) -> None:
        """Raises `ValueError` where `generate` would decode otherwise than `forward` does. setting: of `generate`."""

    def position_tokens(
        self, tokens: Tokens, cached: CacheRecord, vision: dict[str, Any], found: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """
        Positions (B, L) or (axes, B, L) of the whole prompt, before anything is dropped; `tokens` has those that the
        caller gave. found: placeholders of videos and images, (B, L) each.
        """
        return cached.positions_of_new(tokens) if tokens.position_ids is None else tokens.position_ids

    # The pass.

    @can_return_tuple
    def get_video_features(
        self, pixel_values_videos: torch.Tensor, *args: Any, with_temporal_loss: bool = False, **kwargs: Any
    ) -> tuple | VideoFeatures:
        """Features of the kept blocks of each video. args: of `video_inputs`, in their order, or by their names."""
        if len(args) >= len(self.video_inputs):
            raise TypeError(f"`get_video_features` takes {self.video_inputs} by position. Name the others.")
        vision = dict(zip(self.video_inputs, (pixel_values_videos, *args), strict=False))
        vision |= {name: kwargs.pop(name) for name in self.video_inputs if name in kwargs}
        check_names(kwargs)
        keep = self.config.keep_rule(take_given(kwargs, KEEP_ARGUMENTS))
        plan = self.make_plan(vision, keep, with_temporal_loss, **take_given(kwargs, RANKING_ARGUMENTS))
        return self.encode_videos(pixel_values_videos, plan, **kwargs)

    def make_plan(
        self, vision: dict[str, Any], keep: KeepRule | None = None, with_temporal_loss: bool = False, **ranking: Any
    ) -> PruningPlan:
        """`plan_videos`, with what the caller says of scores. A scorer of answers has no temporal loss."""
        plan = replace(self.plan_videos(vision), keep=self.config.keep_rule() if keep is None else keep, **ranking)
        plan.with_temporal_loss = with_temporal_loss and self.config.scorer_target == "change"
        plan.detach_temporal_target = self.config.detach_temporal_target
        plan.check_scores()
        return plan

    def prune(self, call: Call) -> PrunedInputs:
        """
        Encodes the videos and images of a call and drops the placeholders of dropped blocks. Without videos nothing is
        dropped, but rows may get another length. Raises `ValueError` where text, videos, images and cache do not fit.
        """
        vision = call.vision
        cached, past_mask, tokens = self.resume(call)
        plan = None
        if self.video_inputs[0] in vision:
            ranking = {name: getattr(call, name) for name in RANKING_ARGUMENTS}
            plan = self.make_plan(vision, call.keep, call.with_temporal_loss, **ranking)
        of_images = self.count_image_tokens(vision) if self.image_inputs[0] in vision else []
        expected = ([] if plan is None else plan.num_blocks, of_images)
        drops, gets_length = call.changes_length or (plan is not None and plan.drops), call.pruned_length is not None
        found, rows = self.find_placeholders(tokens.ids, vision, tokens.mm_token_type_ids), RowPlan(None)
        if drops or any(expected):
            rows = RowPlan.read(found, tokens.padding_mask, expected, gets_length, call.pads_left)
        images = self.encode_images(vision) if expected[1] else None
        # Before the videos' tower runs, so that a copy to the host does not wait for it.
        tokens.position_ids = self.position_tokens(tokens, cached, vision, found)
        video = None if plan is None else self.encode_videos(vision[self.video_inputs[0]], plan)
        num_kept, num_dropped = ([], []) if plan is None else plan.counts[1:]

        keeps = torch.ones_like(found[0])
        if video is not None and any(num_dropped):
            keep_mask = torch.cat([mask.flatten() for mask in video.keep_mask])
            keeps = keeps.masked_scatter(found[0], keep_mask.to(keeps.device))
        if self.config.pruned_position_ids == "compact":
            tokens.position_ids = tokens.compact(~keeps)
        sequence = KeptSequence.whole(*tokens.shape, tokens.device)
        if drops:
            sequence = rows.gather(keeps, tokens.padding_mask, num_dropped, call.pruned_length)
        left = gather_tokens(tokens, sequence, past_mask)
        record = self.record_pruned(cached, tokens, sequence, left, drops)
        pruned = PrunedInputs(left, sequence.kept_indices, record, video, images)
        if video is not None:
            pruned.features.append((sequence.take(found[0], False), torch.cat(video.pooler_output)))
            pruned.per_row.append([sum(num_kept[v] for v in videos) for videos in rows.rows or ()])
            if video.temporal_errors is not None and rows.rows is not None:
                errors, none = video.temporal_errors, video.temporal_errors[0][:0]
                pruned.row_losses = torch.stack(
                    [mean_error([none, *(errors[v] for v in videos)]) for videos in rows.rows]
                )
        if images is not None:
            features = () if images.pooler_output is None else images.pooler_output  # one tensor, or one of each image
            pruned.features.append((sequence.take(found[1], False), torch.cat(list(features))))
            pruned.per_row.append(rows.image_tokens or [])
        return pruned

    def record_pruned(
        self, cached: CacheRecord, tokens: Tokens, sequence: KeptSequence, left: Tokens, drops: bool
    ) -> CacheRecord:
        """The record of a cache after this call. drops: whether columns are not the new tokens."""
        positions = tokens.position_ids
        assert positions is not None  # `prune` sets it
        assert left.padding_mask is not None  # `gather_tokens` makes it
        # Behind a cache, hidden tokens take no position (`positions_of_new`), where native code counts columns.
        counts_columns = cached.skips_hidden or not cached.seen or tokens.padding_mask is None
        if cached.whole and not drops and positions.dim() == 2 and counts_columns:
            return cached.continued(left.given)
        after = last_positions(tokens, sequence).masked_fill(left.padding_mask[:, cached.columns :] == 0, -1)
        return cached.grown(sequence.kept_indices, after, sequence.length, left.input_ids)

    def resume(self, call: Call) -> tuple[CacheRecord, torch.Tensor, Tokens]:
        """
        What the cache holds, the mask of its columns (B, columns), and the arguments of the tokens behind it (B, L).
        Raises `ValueError` for arguments of other shapes.
        """
        tokens, (batch_size, length) = call.tokens, call.tokens.shape
        cached, order = CacheRecord.resume(call.cache, tokens), token_order(tokens.position_ids, self.num_axes)
        seen = KeptSequence(cached.kept_indices, cached.seen)
        past_mask, mask = seen.take_mask(None), tokens.padding_mask
        if tokens.attention_mask is not None:
            if mask is None or mask.shape[-1] != cached.seen + length:
                found = "of another kind" if mask is None else f"{tuple(mask.shape)}"
                raise ValueError(
                    f"`attention_mask` is {found}, but must be a padding mask ({batch_size}, {cached.seen + length}): "
                    f"{length} new tokens after {cached.seen} cached ones, dropped tokens included; or None."
                )
            past_mask, mask = seen.take_mask(mask[:, : cached.seen]), mask[:, cached.seen :]
        types, positions = tokens.mm_token_type_ids, tokens.position_ids
        if types is not None:
            if types.shape[-1] == cached.seen + length:
                types = types[:, cached.seen :]
            types = check_shape("mm_token_type_ids", types, batch_size, length)
        if positions is not None:
            if self.num_axes and positions.dim() == 3 and len(positions) == 1 + self.num_axes:
                positions = positions[1:]  # behind what counts the tokens
            positions = check_shape("position_ids", positions, batch_size, length, self.num_axes)
        samples = None
        if order is not None and cached.seen == 0 and call.packed_rows is not False:
            samples = find_samples(check_shape("position_ids", order, batch_size, length), mask)
        new = Tokens(tokens.ids, None, mask, positions, types, samples)
        return cached.hide(past_mask), past_mask, new


def gather_tokens(tokens: Tokens, sequence: KeptSequence, past_mask: torch.Tensor) -> Tokens:
    """The new tokens' arguments on what is left, (B, L'); the mask covers cached columns too, (B, columns + L')."""

    def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else sequence.take(tensor, 0)  # any id will do for filler, which is masked

    assert tokens.position_ids is not None  # set by `prune`
    return Tokens(
        input_ids=take(tokens.input_ids),
        attention_mask=torch.cat([past_mask, sequence.take_mask(tokens.padding_mask)], dim=-1),
        position_ids=sequence.take_position_ids(tokens.position_ids),
        mm_token_type_ids=take(tokens.mm_token_type_ids),
        sample_ids=take(tokens.sample_ids),
    )
