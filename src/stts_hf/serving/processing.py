"""From a request's videos and images to prompt tokens and tensors, through a checkpoint's own processor.

A video stays encoded until it is its turn: only the frames that are shown are decoded, as in transformers.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.video.processors import block_grids, process

VIDEO_LOADER = "stts"
MODALITIES = ("image", "video")
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
ON_HOST = ("grids", "num_dropped", "num_positions")  # of an item, a row each
# Others could make tensors that the model has no weights for, which would stop the server.
REQUEST_OPTIONS = {"num_frames", "max_fps", "fps", "test_time_scaling", "pruning_ratio"}
# How many positions a token of a video may take up with those dropped around it. A frame's time and ends stay, so that
# Molmo2's 81 blocks, all dropped, come to 15. The model's table of rotary embeddings is that long.
MOST_POSITIONS = 16


@VIDEO_LOADER_REGISTRY.register(VIDEO_LOADER)
class EncodedVideoLoader(VideoLoader):
    """What vLLM loads from a URL: the file as it is, (bytes,) uint8."""

    @classmethod
    def load_bytes(cls, data: bytes, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return encoded_video(data)


def encoded_video(item: Any) -> Any:
    """The bytes or the path of a video file as vLLM hands videos on: an array with metadata; others as they are."""
    if isinstance(item, str | os.PathLike):
        item = Path(item).read_bytes()
    return (np.frombuffer(item, dtype=np.uint8), {}) if isinstance(item, bytes) else item


class VideoParser(MultiModalDataParser):
    """vLLM's parser, which takes the bytes or the path of a video file too."""

    def _parse_video_data(self, data: Any) -> ModalityDataItems[Any, Any] | None:
        read = [encoded_video(item) for item in data] if isinstance(data, list) else encoded_video(data)
        return super()._parse_video_data(read)


class ProcessingInfo(BaseProcessingInfo):
    """
    What vLLM asks of a model before it has inputs, and what backbones differ in.

    placeholders: per modality, what stands for an item in a prompt; one token. block_tokens: what the config calls the
    token that stands for a block among an item's tokens. tensors: what the model wants of an item beside its pixels and
    tokens, under the processor's names, in which {} is the modality; "grids" is one of them.
    """

    placeholders: ClassVar[Mapping[str, str]]
    block_tokens: ClassVar[Mapping[str, str]]
    tensors: ClassVar[Mapping[str, str]]

    def num_positions(self, modality: str, ids: torch.Tensor, grid: torch.Tensor) -> int:
        """How many positions an item takes up, none of it dropped. ids: (L,) its tokens. grid: (3,) its entry."""
        raise NotImplementedError

    def largest_video(self, num_tokens: int) -> tuple[int, int, int]:
        """Frames, height and width of a video that makes about so many tokens, and no more."""
        raise NotImplementedError

    @classmethod
    def find_blocks(cls, config: Any, modality: str, ids: torch.Tensor) -> torch.Tensor:
        """Which of an item's tokens (L,) stand for blocks, (L,) bool."""
        return ids == getattr(config, cls.block_tokens[modality])

    @classmethod
    def parts(cls) -> tuple[str, ...]:
        """Tensors of an item that have a number of rows of their own."""
        return ("pixels", "ids", "types", *(name for name in cls.tensors if name not in ON_HOST))

    def get_data_parser(self) -> MultiModalDataParser:
        return VideoParser(video_needs_metadata=True)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(MODALITIES)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)  # as many as fit: a request may ask for more frames

    @property
    def pruning_ratio(self) -> float:
        return self.get_hf_config().vision_config.pruning_ratio


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    """The largest video, from which vLLM sees how much memory it needs, or an image of its frames' size."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "".join(self.info.placeholders[modality] * count for modality, count in mm_counts.items())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        frames = np.zeros((*self.info.largest_video(seq_len), 3), np.uint8)
        items: dict[str, Any] = {"video": (frames, {"fps": 2.0}), "image": Image.fromarray(frames[0])}
        return {modality: [items[modality]] * count for modality, count in mm_counts.items()}


class MultiModalProcessor(BaseMultiModalProcessor[ProcessingInfo]):
    """Runs the checkpoint's processor on one video or image at a time, and writes kept placeholders into the prompt."""

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, Any]) -> BatchFeature:
        """Per modality, the tensors of its items one behind the other, and how many rows of each are whose."""
        found: dict[str, list[torch.Tensor]] = {}
        for modality, items in mm_items.items():
            for index in range(len(items)):
                for name, tensor in self._process(modality, items.get(index), hf_kwargs).items():
                    found.setdefault(f"{modality}_{name}", []).append(tensor)
        return BatchFeature({name: torch.cat(tensors) for name, tensors in found.items()})

    def _process(self, modality: str, item: Any, request: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """One item's tensors, by their names in `_get_mm_fields_config`. Raises `ValueError` for what is no item."""
        given = {*request, *(name for scope in request.values() if isinstance(scope, Mapping) for name in scope)}
        unknown = given - REQUEST_OPTIONS - {"videos_kwargs", "images_kwargs", "text_kwargs", "truncation"}
        if unknown:
            raise ValueError(
                f"`mm_processor_kwargs` of a request has {', '.join(sorted(unknown))}, but may have only "
                f"{', '.join(sorted(REQUEST_OPTIONS))}. Start the server with it: --mm-processor-kwargs."
            )
        options = self.info.ctx.get_merged_mm_kwargs(request)
        if modality == "video":
            item, metadata = item
            if item.ndim == 1:  # encoded
                item = item.tobytes()
            else:
                options["do_sample_frames"] = metadata.get("do_sample_frames", True)
                options["video_metadata"] = [{n: value for n, value in metadata.items() if n != "do_sample_frames"}]
        processor: Any = self.info.get_hf_processor()
        text = [self.info.placeholders[modality]]
        inputs = process(processor, text=text, **{f"{modality}s": [item]}, return_tensors="pt", **options)
        bos = int(getattr(processor, "adds_bos", False))
        ids, types = (inputs[name][0, bos:] for name in ("input_ids", "mm_token_type_ids"))
        named = {"pixels": inputs[PIXELS[modality]].to(self.info.ctx.model_config.dtype), "ids": ids, "types": types}
        named |= {name: inputs[of.format(modality)] for name, of in self.info.tensors.items()}
        num_dropped = 0
        for frames, rows, columns in block_grids(processor, inputs):
            kept = num_kept_blocks(frames, rows * columns, self.info.pruning_ratio)
            num_dropped = frames * rows * columns - kept
        num_positions = self.info.num_positions(modality, ids, named["grids"][0])
        if num_positions > MOST_POSITIONS * (len(ids) - num_dropped):
            raise ValueError(
                f"A video has {num_positions} positions for {len(ids) - num_dropped} kept tokens, but may have at most "
                f"{MOST_POSITIONS} for each. Serve it with a pruning_ratio below {self.info.pruning_ratio}."
            )
        named |= {f"num_{name}": torch.tensor([len(named[name])]) for name in self.info.parts()}
        return named | {"num_dropped": torch.tensor([num_dropped]), "num_positions": torch.tensor([num_positions])}

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = {}
        for modality in MODALITIES:
            for name in ON_HOST:
                fields[f"{modality}_{name}"] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
            for name in self.info.parts():
                sizes = hf_inputs.get(f"{modality}_num_{name}", torch.empty(0))
                fields[f"{modality}_{name}"] = MultiModalFieldConfig.flat_from_sizes(modality, sizes)
                fields[f"{modality}_num_{name}"] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        """Each placeholder as its item's tokens less the blocks that will drop; the tower says which later."""
        vocabulary = self.info.get_tokenizer().get_vocab()

        def replacement(modality: str, index: int) -> PromptUpdateDetails:
            item = out_mm_kwargs[modality][index]
            ids, num_dropped = item[f"{modality}_ids"].data, int(item[f"{modality}_num_dropped"].data)
            kept = torch.ones_like(ids, dtype=torch.bool)
            blocks = self.info.find_blocks(self.info.get_hf_config(), modality, ids).nonzero()[:, 0]
            kept[blocks[len(blocks) - num_dropped :]] = False
            return PromptUpdateDetails.from_seq(ids[kept].tolist())

        return [
            PromptReplacement(
                modality=modality,
                target=[vocabulary[placeholder]],
                replacement=functools.partial(replacement, modality),
            )
            for modality, placeholder in self.info.placeholders.items()
            if modality in mm_items
        ]
