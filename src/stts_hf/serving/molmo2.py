"""STTS on Molmo2 as a vLLM model: our vision tower and connector, vLLM's Molmo2 language model.

The prompt already lacks as many placeholders as will be dropped, the tower says which, and a video's embeddings are
laid out anew with what only then is known: which of them are vision tokens, and how many dropped ones precede each.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.molmo2 import (
    Molmo2ForConditionalGeneration,
    Molmo2TextModel,
    _get_weights_with_merged_embedding,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration, STTSModel
from stts_hf.serving.attention import VisionAttention, VisionStep
from stts_hf.serving.processing import PARTS, PLACEHOLDERS, DummyInputs, MultiModalProcessor, ProcessingInfo
from stts_hf.serving.settings import keeps_gaps

VISION_WEIGHTS = "model.vision_backbone."  # how their names begin in a checkpoint's files
NOTES = 3  # columns behind an embedding: is it a vision token, and the dropped ones before it, in two digits
_BASE = 256  # of these digits: bfloat16 holds every whole number up to here


@MULTIMODAL_REGISTRY.register_processor(MultiModalProcessor, info=ProcessingInfo, dummy_inputs=DummyInputs)
class STTSForServing(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """Molmo2 with video token pruning, as vLLM runs models; settings are those of the checkpoint."""

    hf_to_vllm_mapper = Molmo2ForConditionalGeneration.hf_to_vllm_mapper
    packed_modules_mapping = Molmo2ForConditionalGeneration.packed_modules_mapping

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str:
        return PLACEHOLDERS[modality]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: STTSConfig = vllm_config.model_config.hf_config
        self.config, self.keeps_gaps = config, keeps_gaps(config)
        with self._mark_tower_model(vllm_config, {"image", "video"}):  # type: ignore[operator]  # vLLM has no types
            self.vision = vision_part(config)
        with self._mark_language_model(vllm_config):  # type: ignore[operator]
            self.model = Molmo2TextModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        text = config.text_config
        self.lm_head = ParallelLMHead(
            text.vocab_size,
            text.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.step = VisionStep()
        self.gaps: torch.Tensor | None = None  # (tokens,) of the step: dropped tokens before each in its video
        for layer in self.model.layers:
            attention = layer.self_attn.attn
            attention.impl = VisionAttention(attention.impl, self.step)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """
        Positions (3, L) of a prompt, and how far the answer's are ahead of their places. Those inside a video follow
        its first token; `forward` adds the gaps that only the tower knows.
        """
        positions = torch.arange(len(input_tokens))
        for feature in mm_features:
            end = feature.mm_position.offset + feature.mm_position.length
            positions[end:] += num_dropped(feature)
        return positions.expand(3, -1).clone(), sum(map(num_dropped, mm_features))

    def embed_multimodal(self, **inputs: torch.Tensor) -> list[torch.Tensor]:
        """
        Per video or image of one modality (tokens, hidden size + NOTES), all tokens that stand for it in the prompt.
        One after the other: their tensors before the tower are many times larger than what is left.
        """
        embedded = []
        for modality in PLACEHOLDERS:
            if f"{modality}_ids" not in inputs:
                continue
            encode = self.encode_video if modality == "video" else self.encode_image
            for item in split_items(inputs, modality):
                embedded.append(self.lay_out(item["ids"], item["types"], *encode(item)))
        return embedded

    def encode_video(self, item: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (K, hidden size) of a video's kept blocks, and which of its blocks they are, (T * n,) bool."""
        output: Any = self.vision.get_video_features(item["pixels"], item["pooling"], item["grids"])
        return output.pooler_output[0], output.keep_mask[0].flatten()

    def encode_image(self, item: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n, hidden size) of an image's blocks; all are kept."""
        output: Any = self.vision.get_image_features(item["pixels"], item["pooling"], item["grids"])
        features = output.pooler_output[0]
        return features, torch.ones(len(features), dtype=torch.bool, device=features.device)

    def lay_out(
        self, ids: torch.Tensor, types: torch.Tensor, features: torch.Tensor, keep_mask: torch.Tensor
    ) -> torch.Tensor:
        """
        Embeddings of an item's tokens with features added onto their placeholders, as Molmo2 adds them, and notes.
        ids, types: (L,) before anything is dropped. features: (K, hidden size). keep_mask: (placeholders,) bool.
        """
        is_patch = ids == self.config.image_patch_id
        kept = ~is_patch
        kept[is_patch] = keep_mask
        embeds = self.model.embed_input_ids(ids[kept])
        embeds[is_patch[kept]] += features.to(embeds)
        gaps = (~kept).cumsum(0)[kept] * self.keeps_gaps
        notes = torch.stack([types[kept], gaps // _BASE, gaps % _BASE], dim=-1)
        return torch.cat([embeds, notes.to(embeds)], dim=-1)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings (tokens, hidden size) of a step; takes the notes of its videos and images for `forward`."""
        self.step.is_vision = self.gaps = None
        embed = self._embed_text_input_ids
        embeds = embed(input_ids, self.model.embed_input_ids, is_multimodal=is_multimodal)  # type: ignore[operator]
        if not multimodal_embeddings or is_multimodal is None:
            return embeds
        found = torch.cat(list(multimodal_embeddings)).to(embeds)
        places = is_multimodal.to(embeds.device)
        embeds[places] = found[:, :-NOTES]
        is_vision, high, low = found[:, -NOTES:].long().unbind(-1)
        self.step.is_vision = torch.zeros_like(places).masked_scatter(places, is_vision.bool())
        self.gaps = torch.zeros_like(input_ids, dtype=torch.long).masked_scatter(places, high * _BASE + low)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden size) of a step. positions: (tokens,), or (3, tokens) with equal rows."""
        if positions.dim() == 2:
            positions = positions[0]
        if self.gaps is not None and self.keeps_gaps:
            positions = positions + nn.functional.pad(self.gaps, (0, len(positions) - len(self.gaps)))
        hidden_states = self.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)
        self.step.is_vision = self.gaps = None  # a step without `embed_input_ids` has no vision tokens
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of the parameters that got theirs; raises `ValueError` where the tower lacks some."""
        of_vision: dict[str, torch.Tensor] = {}

        def of_text() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name.startswith(VISION_WEIGHTS):
                    of_vision[name] = weight
                else:
                    yield name, weight

        loader = AutoWeightsLoader(self)
        loaded = loader.load_weights(_get_weights_with_merged_embedding(of_text()), mapper=self.hf_to_vllm_mapper)
        self.vision.load_state_dict(vision_part(self.config, of_vision).state_dict())
        return loaded | {f"vision.{name}" for name, _ in self.vision.named_parameters()}


class VisionOnly(STTSForConditionalGeneration):
    """Our model, whose language model may stay without weights."""

    _keys_to_ignore_on_load_missing = {"language_model", "lm_head"}  # noqa: RUF012  # as transformers declares it


def vision_part(config: STTSConfig, weights: dict[str, torch.Tensor] | None = None) -> STTSModel:
    """
    Our model without a language model, in PyTorch's default precision and device; weights: by the names in files.
    Raises `ValueError` where some are missing.
    """
    small = copy.deepcopy(config)
    text = small.text_config  # of a model that goes again: a loader knows the names of whole models only
    text.num_hidden_layers = text.vocab_size = text.additional_vocab_size = text.intermediate_size = 1
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    missing: list[str] = []
    if weights is None:
        whole = VisionOnly(small)
    else:
        found: Any = VisionOnly.from_pretrained(
            None, config=small, state_dict=weights, output_loading_info=True, dtype=torch.get_default_dtype()
        )
        whole, info = found
        missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} weights of the vision tower and connector, such as {missing[0]}. "
            "Serve one that `save_pretrained` or `stts-hf convert` wrote."
        )
    model = whole.eval().requires_grad_(False).model
    del model.language_model
    return model


def split_items(inputs: dict[str, torch.Tensor], modality: str) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each video or image, which vLLM hands over one behind the other."""
    grids = inputs[f"{modality}_grids"]
    sizes = {name: inputs[f"{modality}_num_{name}"].flatten().tolist() for name in PARTS}
    parts = {name: inputs[f"{modality}_{name}"].split(sizes[name]) for name in PARTS}
    for index in range(len(grids)):
        yield {name: parts[name][index] for name in PARTS} | {"grids": grids[index : index + 1]}


def num_dropped(feature: MultiModalFeatureSpec) -> int:
    """How many of an item's tokens the prompt lacks."""
    assert feature.data is not None  # vLLM keeps what is on the host for models with positions of their own
    return int(feature.data[f"{feature.modality}_num_dropped"].data)
