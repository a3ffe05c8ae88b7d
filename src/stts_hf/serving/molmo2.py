"""STTS on Molmo2 in vLLM: its language model with the mask of vision tokens, who see each other in both directions."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoProcessor, AutoVideoProcessor
from vllm.config import VllmConfig
from vllm.model_executor.models.molmo2 import (
    Molmo2ForConditionalGeneration,
    Molmo2TextModel,
    _get_weights_with_merged_embedding,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.inputs import ProcessorInputs

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.serving.attention import VisionAttention, VisionStep
from stts_hf.serving.model import ServingModel
from stts_hf.serving.processing import DummyInputs, MultiModalProcessor, ProcessingInfo
from stts_hf.video.processors import molmo2_block_grid

AutoProcessor.register(STTSConfig, STTSProcessor, exist_ok=True)
AutoVideoProcessor.register(STTSConfig, STTSVideoProcessor, exist_ok=True)

_FRAME_TEXT = 10  # tokens: each frame's time and its ends


class Molmo2Info(ProcessingInfo):
    placeholders: ClassVar = {"image": "<|image|>", "video": "<|video|>"}
    block_tokens: ClassVar = dict.fromkeys(placeholders, "image_patch_id")
    tensors: ClassVar = {"grids": "{}_grids", "pooling": "{}_token_pooling"}

    def num_positions(self, modality: str, ids: torch.Tensor, grid: torch.Tensor) -> int:
        return len(ids)

    def largest_video(self, num_tokens: int) -> tuple[int, int, int]:
        video: Any = self.get_hf_processor().video_processor
        rows, columns = molmo2_block_grid(video)
        per_frame = rows * columns * (1 - self.pruning_ratio) + _FRAME_TEXT
        num_frames = max(1, min(video.num_frames, int((num_tokens - rows * columns) / per_frame)))
        return num_frames, video.size["height"], video.size["width"]


class Molmo2Processor(MultiModalProcessor):
    """As for all, with what Molmo2's vision tokens see and its first token."""

    info: Molmo2Info

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return prompt if prompt[:1] == [first] else [first, *prompt]

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> Mapping[str, list[str]]:
        """What vLLM reuses tokens by: all items and the text between them, since tokens of a video see the others."""
        hashes = super()._get_mm_hashes(inputs)
        vocabulary = self.info.get_tokenizer().get_vocab()
        wanted = {vocabulary[placeholder] for placeholder in self.info.placeholders.values()}
        places = [place for place, token in enumerate(inputs.prompt) if token in wanted]
        between = inputs.prompt[min(places, default=0) : max(places, default=-1) + 1]
        together = repr((sorted(hashes.items()), between))
        return {
            modality: [hashlib.sha256(f"{one} in {together}".encode()).hexdigest() for one in of_modality]
            for modality, of_modality in hashes.items()
        }


@MULTIMODAL_REGISTRY.register_processor(Molmo2Processor, info=Molmo2Info, dummy_inputs=DummyInputs)
class Molmo2ForServing(ServingModel):
    """Molmo2 with video token pruning, as vLLM runs models."""

    info = Molmo2Info
    whole = STTSForConditionalGeneration
    language_part = Molmo2TextModel
    vision_weights = "model.vision_backbone."
    hf_to_vllm_mapper = Molmo2ForConditionalGeneration.hf_to_vllm_mapper
    packed_modules_mapping = Molmo2ForConditionalGeneration.packed_modules_mapping

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str:
        return cls.info.placeholders[modality]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.step = VisionStep()
        for layer in self.model.layers:
            attention = layer.self_attn.attn
            attention.impl = VisionAttention(attention.impl, self.step)

    def encode(self, modality: str, item: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = item["pixels"], item["pooling"], item["grids"]
        if modality == "video":
            output: Any = self.vision.get_video_features(*inputs)
            return output.pooler_output[0], output.keep_mask[0].flatten()
        (features,) = self.vision.get_image_features(*inputs).pooler_output
        return features, torch.ones(len(features), dtype=torch.bool, device=features.device)

    def place(self, modality: str, item: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.arange(len(item["ids"]), device=item["ids"].device).expand(3, -1)

    def merge(
        self, embeds: torch.Tensor, is_block: torch.Tensor, features: torch.Tensor, types: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features are added to the placeholders' embeddings, as Molmo2 does; notes: which are vision tokens."""
        embeds[is_block] += features
        return embeds, types[:, None]

    def run(
        self, positions: torch.Tensor, inputs_embeds: torch.Tensor | None, notes: torch.Tensor | None, **inputs: Any
    ) -> torch.Tensor:
        self.step.is_vision = None if notes is None else notes[:, 0].bool()
        positions = positions[0] if positions.dim() == 2 else positions
        hidden_states = self.model(positions=positions, inputs_embeds=inputs_embeds, **inputs)
        self.step.is_vision = None
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(_get_weights_with_merged_embedding(weights))
