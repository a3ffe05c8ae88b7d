"""The collator: decodes rows in the data loader's workers, packs and pads them."""

import functools
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import torch
from transformers.utils import logging

from stts_hf.modeling.budget_stts import KeepRule, check_pruning_ratio
from stts_hf.modeling.video_processing_stts import check_count

from .encoding import IGNORED, Encoded, Processor, check_length, count_dropped, empty_video, encode
from .rows import RowError, check_files, read_row

logger = logging.get_logger(__name__)

Row = Mapping[str, Any] | Encoded
_REPLACEMENT_TRIES = 16
# Indices into the patches of all samples, which shift when samples are joined.
_POOLING = {"video_token_pooling": "pixel_values_videos", "image_token_pooling": "pixel_values"}
# A list for the model: FSDP2 and DeepSpeed cast tensors of a batch to bfloat16, which would shift tubelets in time.
_FLOATS = ("second_per_grid_ts",)


@dataclass(eq=False, repr=False)
class STTSDataCollator:
    """
    Makes batches for training. A row is a dict (docs/training_data.md), an `Encoded`, or a list of these that share one
    row of the batch, as of `PackedDataset`. Videos and images are decoded here, so in the data loader's workers.

    Args:
        processor: an STTS model's.
        model_config: the model's config, from which the pruning ratio is taken.
        pruning_ratio: instead of the config's. One of the two is needed with `max_length` or `pad_to`.
        on_error: "raise" stops at a row that cannot be read or decoded, "skip" warns and continues without it.
        replacements: data set that rows are drawn from where, with "skip", a row of the batch is left without a sample.
            Which one depends on the lost row's id alone. Without it such a row is left out; an empty batch is an error.
        max_length: maximum length of a row after pruning, in tokens; nothing is ever cut off.
        pad_to: length of every row after pruning, so that all steps have one shape. Adds `pruned_length` for the model.
            Implies `max_length`.
        return_ids: adds `sample_ids`, ids of the batch's samples, and `skipped_ids`, lists of str, not for the model.
        always_video: adds a black frame without labels to batches without video, so that all processes of a sharded run
            use the same parameters: one row more, or one sample more in the shortest packed row.
        padding_side: "left" or "right", by default the tokenizer's.
        allow_urls: whether videos and images may be fetched from http(s) URLs.

    `batch = collator(rows)` is a dict for `model(**batch)`: `input_ids`, `attention_mask`, `mm_token_type_ids`,
    `labels` (B, L), -100 outside the answers, what the processor gives for videos and images, and, with packed rows,
    `packed_rows` and `position_ids` (B, L) that start over with each sample.

    Raises:
        RowError: a row cannot be read or decoded, or has more tokens after pruning than allowed; it names the row.
        ValueError: an argument is out of range.
    """

    processor: Processor
    _: KW_ONLY
    model_config: InitVar[Any] = None
    pruning_ratio: float | None = None
    on_error: str = "raise"
    replacements: Sequence[Any] | None = None
    max_length: int | None = None
    pad_to: int | None = None
    return_ids: bool = False
    always_video: bool = False
    padding_side: str | None = None
    allow_urls: bool = False

    def __post_init__(self, model_config: Any) -> None:
        check_on_error(self.on_error)
        for name, value in (("max_length", self.max_length), ("pad_to", self.pad_to)):
            if value is not None:
                check_count(name, value)
        if self.pad_to is not None and self.max_length is not None and self.max_length > self.pad_to:
            raise ValueError(f"max_length={self.max_length} is more than pad_to={self.pad_to}. Leave max_length out.")
        self.pruning_ratio = resolve_ratio(model_config, self.pruning_ratio)
        self.max_length = self.max_length or self.pad_to
        if self.max_length is not None and self.pruning_ratio is None:
            raise ValueError("max_length and pad_to count tokens after pruning: pass model_config or pruning_ratio.")
        self.padding_side = self.padding_side or self.processor.tokenizer.padding_side
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {self.padding_side!r}.")

    def __call__(self, rows: Sequence[Row | Sequence[Row]]) -> dict[str, Any]:
        packed = any(not isinstance(row, Mapping | Encoded) for row in rows)
        skipped: list[str] = []
        encoded = [self._encode_row([row] if isinstance(row, Mapping | Encoded) else row, skipped) for row in rows]
        batch = [row for row in encoded if row]
        if not batch:
            raise RowError(
                f"Nothing is left of a batch: all of its rows were skipped: {', '.join(map(repr, skipped))}. Take them "
                "out of the data, or pass `replacements` to draw others in their place."
            )
        samples = [sample for row in batch for sample in row]
        ids = [sample.id for sample in samples]
        if self.always_video and not any(sample.grids for sample in samples):
            self._add_empty_video(batch, packed)
            samples.append(self._empty_video)
        features = self._pad(batch, packed) | join_vision([sample.vision for sample in samples])
        if self.return_ids:
            features |= {"sample_ids": ids, "skipped_ids": skipped}
        return features

    def _encode_row(self, rows: Sequence[Row], skipped: list[str]) -> list[Encoded]:
        """The samples of one row of the batch."""
        samples: list[Encoded] = []
        for row in rows:
            try:
                samples.append(self._encode(row, sum(map(self._pruned_length, samples))))
            except RowError as error:
                if self.on_error == "raise":
                    raise
                logger.warning(f"Skipped: {error}")
                skipped.append(error.row_id or "<no id>")
        if rows and not samples and self.replacements is not None:
            samples = [self._replacement(self.replacements, skipped[-1])]
        return samples

    def _encode(self, row: Row, used: int = 0) -> Encoded:
        """A sample, if it fits behind `used` tokens of its row."""
        if isinstance(row, Encoded):
            sample = row
        else:
            read = read_row(row)
            check_files(read, self.allow_urls)
            sample = encode(self.processor, read)
        if self.max_length is not None:
            check_length(sample.id, self._pruned_length(sample), self.max_length, used)
        return sample

    def _pruned_length(self, sample: Encoded) -> int:
        return len(sample) - count_dropped(sample.grids, self.pruning_ratio or 0)

    def _replacement(self, rows: Sequence[Any], skipped: str) -> Encoded:
        """The first good sample of `rows`, from a row on that depends on the skipped id."""
        start = zlib.crc32(skipped.encode())
        for step in range(_REPLACEMENT_TRIES):
            row = rows[(start + step) % len(rows)]
            for candidate in [row] if isinstance(row, Mapping | Encoded) else row:
                try:
                    return self._encode(candidate)
                except RowError as error:
                    logger.warning(f"Not taken as a replacement: {error}")
        raise RowError(f"Row {skipped!r} was skipped and {_REPLACEMENT_TRIES} rows in its place too. Run prepare_rows.")

    @functools.cached_property
    def _empty_video(self) -> Encoded:
        return empty_video(self.processor)

    def _add_empty_video(self, batch: list[list[Encoded]], packed: bool) -> None:
        lengths = [sum(map(len, samples)) for samples in batch]
        room = self.max_length is None or min(lengths) + len(self._empty_video) <= self.max_length
        if packed and room:
            batch[lengths.index(min(lengths))].append(self._empty_video)
        else:
            batch.append([self._empty_video])

    def _pad(self, batch: list[list[Encoded]], packed: bool) -> dict[str, Any]:
        """Text of the rows, each of them its samples one after another, padded to one length."""
        lengths = [sum(map(len, samples)) for samples in batch]
        width = max(lengths)
        if self.pad_to is not None:
            # So long that every row has `pad_to` tokens once its video tokens are gone.
            width = max(self.pad_to + sum(len(s) - self._pruned_length(s) for s in samples) for samples in batch)
        fillers = {"input_ids": self.processor.tokenizer.pad_token_id or 0, "labels": IGNORED}
        names = ("input_ids", "attention_mask", "mm_token_type_ids", "labels", *(["position_ids"] if packed else []))
        padded: dict[str, Any] = {name: torch.full((len(batch), width), fillers.get(name, 0)) for name in names}
        for row, (samples, length) in enumerate(zip(batch, lengths, strict=True)):
            place = slice(width - length, width) if self.padding_side == "left" else slice(length)
            padded["attention_mask"][row, place] = 1
            for name in ("input_ids", "mm_token_type_ids", "labels"):
                padded[name][row, place] = torch.cat([getattr(sample, name) for sample in samples])
            if packed:
                padded["position_ids"][row, place] = torch.cat([torch.arange(len(sample)) for sample in samples])
        if packed:
            padded["packed_rows"] = True
        if self.pad_to is not None:
            padded["pruned_length"] = self.pad_to
        return padded


def check_on_error(on_error: str) -> None:
    """Raises `ValueError` for anything but "raise" and "skip"."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


def resolve_ratio(model_config: Any, pruning_ratio: float | None) -> float | None:
    """The pruning ratio: as given, else the config's, else None; by a threshold or a budget the lowest there can be."""
    if pruning_ratio is None and model_config is not None:
        vision = model_config.vision_config
        rule = KeepRule.of(vision)
        pruning_ratio = rule.bounds[0] if rule.ratio is None else vision.pruning_ratio
    return None if pruning_ratio is None else check_pruning_ratio(pruning_ratio)


def join_vision(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Videos and images of several samples, what a processor gives for each, joined."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for vision in parts for key in vision):
        holders = [vision for vision in parts if key in vision]
        found = [vision[key] for vision in holders]
        if key in _POOLING:
            patches = [vision[_POOLING[key]].shape[0] * vision[_POOLING[key]].shape[1] for vision in holders]
            starts = itertools.accumulate(patches[:-1], initial=0)
            found = [torch.where(p >= 0, p + start, p) for p, start in zip(found, starts, strict=True)]
        # Tiles of images, (1, tiles, ...), become those of one row, since rows may have other numbers of them.
        tiled = key in ("pixel_values", "pixel_attention_mask") and holders[0]["pixel_values"].dim() == 5
        joined[key] = torch.cat(found, dim=1 if tiled else 0)
        if key in _FLOATS:
            joined[key] = joined[key].tolist()
    return joined
