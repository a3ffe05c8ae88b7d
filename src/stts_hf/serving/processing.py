"""From a request's videos and images to prompt tokens and tensors, through STTS's own processor.

A video stays encoded until the processor reads it: it decodes only the frames that it shows, as in transformers.
"""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, AutoVideoProcessor, BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

AutoProcessor.register(STTSConfig, STTSProcessor, exist_ok=True)
AutoVideoProcessor.register(STTSConfig, STTSVideoProcessor, exist_ok=True)

PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>"}
VIDEO_LOADER = "stts"
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
PARTS = ("pixels", "pooling", "ids", "types")  # of an item, with a number of rows of its own
# Others could make tensors that the model has no weights for, which would stop the server.
REQUEST_OPTIONS = {"num_frames", "max_fps", "fps", "test_time_scaling", "pruning_ratio"}


@VIDEO_LOADER_REGISTRY.register(VIDEO_LOADER)
class EncodedVideoLoader(VideoLoader):
    """What vLLM loads from a URL: the file as it is, (bytes,) uint8."""

    @classmethod
    def load_bytes(cls, data: bytes, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return encoded_video(data)


def encoded_video(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    """A video file's bytes as vLLM hands videos on: an array with metadata."""
    return np.frombuffer(data, dtype=np.uint8), {}


class VideoParser(MultiModalDataParser):
    """vLLM's parser, which takes the bytes or the path of a video file too."""

    def _parse_video_data(self, data: Any) -> ModalityDataItems[Any, Any] | None:
        if isinstance(data, bytes | str | os.PathLike):
            data = [data]
        if isinstance(data, list):
            data = [self._read(item) for item in data]
        return super()._parse_video_data(data)

    @staticmethod
    def _read(item: Any) -> Any:
        if isinstance(item, str | os.PathLike):
            with open(item, "rb") as file:
                item = file.read()
        return encoded_video(item) if isinstance(item, bytes) else item


class ProcessingInfo(BaseProcessingInfo):
    """What vLLM asks of a model before it has inputs."""

    def get_data_parser(self) -> MultiModalDataParser:
        return VideoParser(video_needs_metadata=True)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(PLACEHOLDERS)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)  # as many as fit: a request may ask for more frames

    @property
    def pruning_ratio(self) -> float:
        return self.get_hf_config().vision_config.pruning_ratio


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    """Inputs as large as they may be, from which vLLM sees how much memory it needs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "".join(PLACEHOLDERS[modality] * count for modality, count in mm_counts.items())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        processor: Any = self.info.get_hf_processor()
        video, image = processor.video_processor, processor.image_processor
        rows, columns = video.block_grid
        # Kept tokens, and some for each frame's time and its ends; a prompt that is too long would be refused.
        per_frame = rows * columns * (1 - self.info.pruning_ratio) + 10
        num_frames = max(1, min(video.num_frames, int((seq_len - rows * columns) / per_frame)))
        frames = np.zeros((num_frames, video.size["height"], video.size["width"], 3), np.uint8)
        side = image.max_crops * image.size["width"]
        return {
            "video": [(frames, {"fps": 2.0})] * mm_counts.get("video", 0),
            "image": self._get_dummy_images(width=side, height=side, num_images=mm_counts.get("image", 0)),
        }


class MultiModalProcessor(BaseMultiModalProcessor[ProcessingInfo]):
    """Runs STTS's processor on one video or image at a time, and writes kept placeholders into the prompt."""

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return prompt if prompt[:1] == [first] else [first, *prompt]

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> Mapping[str, list[str]]:
        """
        What vLLM reuses computed tokens by. The tokens of one video depend on all others in the prompt, which they
        see, and on what is between: of several, each hash says them all.
        """
        hashes = super()._get_mm_hashes(inputs)
        if sum(map(len, hashes.values())) < 2:
            return hashes
        vocabulary = self.info.get_tokenizer().get_vocab()
        wanted = {vocabulary[placeholder] for placeholder in PLACEHOLDERS.values()}
        places = [place for place, token in enumerate(inputs.prompt) if token in wanted]
        between = inputs.prompt[places[0] : places[-1] + 1] if places else []
        together = repr((sorted(hashes.items()), between))
        return {
            modality: [hashlib.sha256(f"{one} in {together}".encode()).hexdigest() for one in of_modality]
            for modality, of_modality in hashes.items()
        }

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, Any]) -> BatchFeature:
        """Per modality, the tensors of its items one behind the other, and how many rows of each are whose."""
        found: dict[str, list[torch.Tensor]] = {}
        for modality, items in mm_items.items():
            for index in range(len(items)):
                for name, tensor in self._process(modality, items.get(index), hf_kwargs).items():
                    found.setdefault(name, []).append(tensor)
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
        inputs = processor(text=PLACEHOLDERS[modality], **{f"{modality}s": [item]}, return_tensors="pt", **options)
        grid = inputs[f"{modality}_grids"]
        ids, types = inputs["input_ids"][0, 1:], inputs["mm_token_type_ids"][0, 1:]  # without the processor's BOS
        pixels = inputs[PIXELS[modality]].to(self.info.ctx.model_config.dtype)
        num_dropped = 0
        if modality == "video":
            num_frames, rows, columns = grid[0].tolist()
            kept = num_kept_blocks(num_frames, rows * columns, self.info.pruning_ratio)
            num_dropped = num_frames * rows * columns - kept
        named = {"pixels": pixels, "pooling": inputs[f"{modality}_token_pooling"], "ids": ids, "types": types}
        named |= {f"num_{name}": torch.tensor([len(named[name])]) for name in PARTS}
        named |= {"grids": grid, "num_dropped": torch.tensor([num_dropped])}
        return {f"{modality}_{name}": tensor for name, tensor in named.items()}

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = {}
        for modality in PLACEHOLDERS:
            for name in ("grids", "num_dropped"):
                fields[f"{modality}_{name}"] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
            for name in PARTS:
                sizes = hf_inputs.get(f"{modality}_num_{name}", torch.empty(0))
                fields[f"{modality}_{name}"] = MultiModalFieldConfig.flat_from_sizes(modality, sizes)
                fields[f"{modality}_num_{name}"] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        """
        Each placeholder as the tokens of its item less as many blocks as will be dropped. Which ones they are the
        tower says later; the model then lays out the tokens anew, as many as here.
        """
        patch = self.info.get_hf_config().image_patch_id
        vocabulary = self.info.get_tokenizer().get_vocab()

        def replacement(modality: str, index: int) -> PromptUpdateDetails:
            item = out_mm_kwargs[modality][index]
            ids, num_dropped = item[f"{modality}_ids"].data, int(item[f"{modality}_num_dropped"].data)
            kept = torch.ones_like(ids, dtype=torch.bool)
            patches = (ids == patch).nonzero()[:, 0]
            kept[patches[len(patches) - num_dropped :]] = False
            return PromptUpdateDetails.from_seq(ids[kept].tolist())

        return [
            PromptReplacement(
                modality=modality,
                target=[vocabulary[placeholder]],
                replacement=functools.partial(replacement, modality),
            )
            for modality, placeholder in PLACEHOLDERS.items()
            if modality in mm_items
        ]
