"""What STTS models share in vLLM: our vision tower and connector in front of vLLM's language model.

The prompt already lacks as many placeholders as will be dropped, the tower says which, and an item's embeddings are
laid out anew with notes of what only then is known, such as the position that each of its tokens had.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.multimodal.inputs import MultiModalFeatureSpec

from stts_hf.serving.digits import NUM_DIGITS, from_digits, to_digits
from stts_hf.serving.processing import MODALITIES, MOST_POSITIONS, ProcessingInfo


class ServingModel(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """
    A model with video token pruning, as vLLM runs models; settings are those of the checkpoint. What a subclass says:

    info: of its processor. whole: our model in transformers. language_part: vLLM's language model without a head.
    vision_weights: how the names of the vision part's weights begin in a checkpoint's files.
    """

    info: ClassVar[type[ProcessingInfo]]
    whole: ClassVar[Any]
    language_part: ClassVar[Any]
    vision_weights: ClassVar[str]
    hf_to_vllm_mapper: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        with self._mark_tower_model(vllm_config, set(MODALITIES)):  # type: ignore[operator]  # vLLM has no types
            self.vision = vision_part(self.whole, config)
        with self._mark_language_model(vllm_config):  # type: ignore[operator]
            self.model = self.language_part(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        text = config.text_config
        self.lm_head = ParallelLMHead(
            text.vocab_size,
            text.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.notes: torch.Tensor | None = None  # (tokens, digits of positions, and what the subclass adds) of a step
        ratio = config.vision_config.pruning_ratio
        per_token = min(1 / (1 - ratio), MOST_POSITIONS) if ratio < 1 else MOST_POSITIONS
        for layer in self.model.layers:
            make_room(layer.self_attn.rotary_emb, math.ceil(per_token * vllm_config.model_config.max_model_len))

    def encode(self, modality: str, item: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (K, width) of the blocks that are kept, and which of an item's blocks they are, (blocks,) bool."""
        raise NotImplementedError

    def place(self, modality: str, item: dict[str, torch.Tensor]) -> torch.Tensor:
        """Positions (3, L) of an item's tokens before anything is dropped, from where it begins."""
        raise NotImplementedError

    def merge(
        self, embeds: torch.Tensor, is_block: torch.Tensor, features: torch.Tensor, types: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Embeddings (L', hidden size) of an item's tokens with features (K, width) where is_block (L',), and the notes
        (L', N) of the subclass. types: (L',) the processor's.
        """
        raise NotImplementedError

    def run(
        self, positions: torch.Tensor, inputs_embeds: torch.Tensor | None, notes: torch.Tensor | None, **inputs: Any
    ) -> torch.Tensor:
        """The language model, with final positions (3, tokens) or (tokens,), and the notes (tokens, N) of `merge`."""
        raise NotImplementedError

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions (3, L) of a prompt, and how far the answer's are ahead; `forward` adds what the tower knows."""
        positions, end, ahead = torch.arange(len(input_tokens)), 0, 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            start, length = feature.mm_position.offset, feature.mm_position.length
            positions[end:start] += ahead
            positions[start : start + length] = start + ahead
            assert feature.data is not None  # vLLM keeps what is on the host for models with positions of their own
            ahead += int(feature.data[f"{feature.modality}_num_positions"].data) - length
            end = start + length
        positions[end:] += ahead
        return positions.expand(3, -1).clone(), ahead

    def embed_multimodal(self, **inputs: torch.Tensor) -> list[torch.Tensor]:
        """
        Per video or image of one modality (tokens, hidden size + notes), all tokens that stand for it in the prompt.
        One after the other: their tensors before the tower are many times larger than what is left.
        """
        embedded = []
        for modality in MODALITIES:
            if f"{modality}_ids" in inputs:
                parts = {}
                for name in self.info.parts():
                    sizes = inputs[f"{modality}_num_{name}"].flatten().tolist()
                    parts[name] = inputs[f"{modality}_{name}"].split(sizes)
                for index, grid in enumerate(inputs[f"{modality}_grids"]):
                    item = {name: tensors[index] for name, tensors in parts.items()} | {"grids": grid[None]}
                    embedded.append(self.embed_item(modality, item))
        return embedded

    def embed_item(self, modality: str, item: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embeddings (L', hidden size) of an item's tokens, features where is_block (L',), and notes (L', N)."""
        features, keep_mask = self.encode(modality, item)
        is_block = self.info.find_blocks(self.config, modality, item["ids"])
        kept = ~is_block
        kept[is_block] = keep_mask
        embeds = self.model.embed_input_ids(item["ids"][kept])
        embeds, notes = self.merge(embeds, is_block[kept], features.to(embeds), item["types"][kept])
        places = to_digits(self.place(modality, item)[:, kept].T).flatten(1)  # (L', 3 * NUM_DIGITS)
        return torch.cat([embeds, places.to(embeds), notes.to(embeds)], dim=-1)

    def embed_input_ids(
        self, input_ids: torch.Tensor, multimodal_embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embeddings (tokens, hidden size) of a step; takes the notes of its videos and images for `forward`."""
        hidden_size, self.notes = self.config.text_config.hidden_size, None
        items = [(item[:, :hidden_size], item[:, hidden_size:]) for item in multimodal_embeddings or ()]
        embeds = super().embed_input_ids(input_ids, [item for item, _ in items], is_multimodal=is_multimodal)
        if items and is_multimodal is not None:
            notes = torch.cat([notes for _, notes in items]).to(embeds)
            self.notes = embeds.new_zeros(len(embeds), notes.shape[-1])
            self.notes[is_multimodal.to(embeds.device)] = notes
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden size) of a step. positions: (tokens,), or (3, tokens) of `get_mrope_...`."""
        notes, self.notes = self.notes, None  # a step without `embed_input_ids` has no vision tokens
        if notes is not None:
            notes = nn.functional.pad(notes, (0, 0, 0, positions.shape[-1] - len(notes)))  # vLLM may fill up a step
            places, notes = notes.tensor_split([3 * NUM_DIGITS], dim=-1)
            if positions.dim() == 2:
                positions = positions + from_digits(places.unflatten(-1, (3, NUM_DIGITS))).T
        return self.run(positions, inputs_embeds, notes, input_ids=input_ids, intermediate_tensors=intermediate_tensors)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of the parameters that got theirs; raises `ValueError` where the tower lacks some."""
        of_vision: dict[str, torch.Tensor] = {}

        def of_text() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name.startswith(self.vision_weights):
                    of_vision[name] = weight
                else:
                    yield name, weight

        loaded = AutoWeightsLoader(self).load_weights(of_text(), mapper=self.hf_to_vllm_mapper)
        self.vision.load_state_dict(vision_part(self.whole, self.config, of_vision).state_dict())
        return loaded | {f"vision.{name}" for name, _ in self.vision.named_parameters()}


def vision_part(whole: Any, config: Any, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """Our model `whole` without head and language model. weights: by file name; `ValueError` where some lack."""
    small = copy.deepcopy(config)
    text = small.text_config  # of a model that goes again: a loader knows the names of whole models only
    for size in {"num_hidden_layers", "vocab_size", "additional_vocab_size", "intermediate_size"} & vars(text).keys():
        setattr(text, size, 1)
    text.pad_token_id = None  # it is out of such a vocabulary
    ignored = {"_keys_to_ignore_on_load_missing": {"language_model", "lm_head"}}
    kind: Any = type("VisionOnly", (whole,), ignored)  # the language model may stay without weights
    if weights is None:
        model = kind(small)
    else:
        options = {"output_loading_info": True, "dtype": torch.get_default_dtype()}
        model, found = kind.from_pretrained(None, config=small, state_dict=weights, **options)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"The checkpoint lacks {len(missing)} weights of the vision tower and connector, such as {missing[0]}. "
                "Serve one that `save_pretrained` or `stts-hf convert` wrote."
            )
    vision = model.eval().requires_grad_(False).model
    del vision.language_model
    return vision


def make_room(rotary: Any, num_positions: int) -> None:
    """
    Makes vLLM's table of rotary embeddings reach so far. Its length goes by the tokens of a prompt, whose positions may
    be ahead of them by all that were dropped; one that is not there would end the server.
    """
    if not isinstance(rotary, MRotaryEmbedding) or len(rotary.cos_sin_cache) >= num_positions:
        return
    scaled = rotary.base if rotary.scaling_factor is None else rotary.scaling_factor  # the latter of YaRN
    frequencies = rotary._compute_inv_freq(scaled)  # noqa: SLF001  # vLLM keeps them nowhere
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float), frequencies)
    rotary.cos_sin_cache = (torch.cat([angles.cos(), angles.sin()], dim=-1) * rotary.mscale).to(rotary.cos_sin_cache)
