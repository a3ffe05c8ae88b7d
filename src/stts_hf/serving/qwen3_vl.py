"""STTS on Qwen3-VL in vLLM: its language model, whose first layers take the deepstack features of kept blocks too."""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import Qwen3LLMModel
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration
from stts_hf.serving.model import ServingModel
from stts_hf.serving.processing import DummyInputs, MultiModalProcessor, ProcessingInfo

_TUBELETS = 8  # of the video by which vLLM sees how much memory it needs
_TUBELET_TEXT = 16  # tokens: its time and its ends


class Qwen3VLInfo(ProcessingInfo):
    placeholders: ClassVar = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    block_tokens: ClassVar = {"image": "image_token_id", "video": "video_token_id"}
    tensors: ClassVar = {"grids": "{}_grid_thw"}

    def num_positions(self, modality: str, ids: torch.Tensor, grid: torch.Tensor) -> int:
        """A tubelet, or image, takes up as many as its longer side has blocks; each token between takes up one."""
        tubelets, rows, columns = grid.tolist()
        num_text = int((~self.find_blocks(self.get_hf_config(), modality, ids)).sum())
        return num_text + tubelets * max(rows, columns) // self.get_hf_config().vision_config.spatial_merge_size

    def largest_video(self, num_tokens: int) -> tuple[int, int, int]:
        video: Any = self.get_hf_processor().video_processor
        tubelets = max(1, min(_TUBELETS, num_tokens // (2 * _TUBELET_TEXT)))
        fit = (num_tokens - tubelets * _TUBELET_TEXT) / (tubelets * (1 - self.pruning_ratio) + self.pruning_ratio)
        frames, side = tubelets * video.temporal_patch_size, video.patch_size * video.merge_size
        blocks = min(fit, video.size["longest_edge"] / (frames * side**2))
        side *= max(1, math.isqrt(int(blocks)))
        return frames, side, side


@MULTIMODAL_REGISTRY.register_processor(MultiModalProcessor, info=Qwen3VLInfo, dummy_inputs=DummyInputs)
class Qwen3VLForServing(ServingModel):
    """Qwen3-VL with video token pruning, as vLLM runs models."""

    info = Qwen3VLInfo
    whole = STTSQwen3VLForConditionalGeneration
    language_part = Qwen3LLMModel
    vision_weights = "model.visual."
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."})
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str:
        return f"<|vision_start|>{cls.info.placeholders[modality]}<|vision_end|>"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.num_taps = len(self.config.vision_config.deepstack_visual_indexes)
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def encode(self, modality: str, item: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (K, (1 + taps) * hidden size): the merger's, then deepstack's."""
        if modality == "video":
            output: Any = self.vision.get_video_features(item["pixels"], item["grids"])
            keep_mask = output.keep_mask[0].flatten()
        else:
            output = self.vision.get_image_features(item["pixels"], item["grids"].to(item["pixels"].device))
            keep_mask = torch.ones(len(output.pooler_output[0]), dtype=torch.bool, device=item["ids"].device)
        taps = [torch.cat(list(tap)) for tap in output.deepstack_features or ()]
        return torch.cat([output.pooler_output[0], *taps], dim=-1), keep_mask

    def place(self, modality: str, item: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, types = item["ids"].cpu()[None], item["types"].cpu()[None]
        positions, _ = self.vision.get_rope_index(ids, types, **{f"{modality}_grid_thw": item["grids"]})
        return positions[:, 0].to(item["ids"].device)

    def merge(
        self, embeds: torch.Tensor, is_block: torch.Tensor, features: torch.Tensor, types: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features take the place of the placeholders' embeddings; notes: deepstack's, side by side."""
        merged = nn.functional.pad(embeds, (0, self.num_taps * embeds.shape[-1]))
        merged[is_block] = features
        return merged.tensor_split([embeds.shape[-1]], dim=-1)  # type: ignore[return-value]  # two

    def run(
        self, positions: torch.Tensor, inputs_embeds: torch.Tensor | None, notes: torch.Tensor | None, **inputs: Any
    ) -> torch.Tensor:
        taps = None
        if inputs_embeds is not None:  # deepstack's tensors are there in every such step: a compiled model goes by that
            if notes is None:
                notes = inputs_embeds.new_zeros(len(inputs_embeds), self.num_taps * inputs_embeds.shape[-1])
            of_taps = notes.unflatten(-1, (self.num_taps, -1)).unbind(1) if self.num_taps else ()
            taps = IntermediateTensors({f"deepstack_input_embeds_{tap}": of for tap, of in enumerate(of_taps)})
        return self.model(positions=positions, inputs_embeds=inputs_embeds, deepstack_input_embeds=taps, **inputs)
