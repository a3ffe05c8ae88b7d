"""Makes the `hub_configs/stts-qwen*-tiny`: complete checkpoints small enough for a repository and tests on a CPU.

    python -m tests.make_qwen_vl_tiny hub_configs/stts-qwen3-vl-tiny
    python -m tests.make_qwen_vl_tiny hub_configs/stts-qwen2-5-vl-tiny --family qwen2_5_vl
    python -m tests.make_qwen_vl_tiny hub_configs/stts-qwen3-vl-moe-tiny --family qwen3_vl_moe
    python -m tests.make_qwen_vl_tiny hub_configs/stts-qwen3-5-tiny --family qwen3_5
    python -m tests.make_qwen_vl_tiny hub_configs/stts-qwen3-5-moe-tiny --family qwen3_5_moe

Every part is there, deepstack taps before and after the pruning layer, and windows, included; the weights are random.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from examples.study import tiny_model
from examples.study.tiny_model import VOCAB_SIZE, save_into, texts
from stts_hf import (
    STTSQwen2_5_VLConfig,
    STTSQwen2_5_VLForConditionalGeneration,
    STTSQwen3_5Config,
    STTSQwen3_5ForConditionalGeneration,
    STTSQwen3_5MoeConfig,
    STTSQwen3_5MoeForConditionalGeneration,
    STTSQwen3VLConfig,
    STTSQwen3VLForConditionalGeneration,
    STTSQwen3VLMoeConfig,
    STTSQwen3VLMoeForConditionalGeneration,
)

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH_SIZE = 8
TOKEN_PIXELS = (2 * PATCH_SIZE) ** 2  # of one frame under one token
IMAGE_PIXELS = {"shortest_edge": 4 * TOKEN_PIXELS, "longest_edge": 64 * TOKEN_PIXELS}


@dataclass(frozen=True)
class Family:
    """The classes of a backbone; vision, text: what its configs have beside the shared sizes; video_pixels: bounds."""

    config: Any
    model: Any
    processor: Any
    video_processor: Any
    video_pixels: Mapping[str, int]
    vision: Mapping[str, Any]
    text: Mapping[str, Any]


FAMILIES = {
    "qwen3_vl": Family(
        STTSQwen3VLConfig,
        STTSQwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {"shortest_edge": 32 * TOKEN_PIXELS, "longest_edge": 1024 * TOKEN_PIXELS},  # of all frames together
        {"num_position_embeddings": 144, "deepstack_visual_indexes": [2, 5]},
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen2_5_vl": Family(
        STTSQwen2_5_VLConfig,
        STTSQwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
        IMAGE_PIXELS,  # of each frame
        {  # windows of 4 x 4 blocks, and whole frames in the layer that takes the bias
            "window_size": 8 * PATCH_SIZE,
            "depth": 9,
            "fullatt_block_indexes": [3, 7],
            "tokens_per_second": 2,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 4, 4]}},
    ),
}
_DENSE = FAMILIES["qwen3_vl"]
FAMILIES["qwen3_vl_moe"] = replace(
    _DENSE,
    config=STTSQwen3VLMoeConfig,
    model=STTSQwen3VLMoeForConditionalGeneration,
    text=dict(_DENSE.text) | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
)
FAMILIES["qwen3_5"] = replace(
    _DENSE,
    config=STTSQwen3_5Config,
    model=STTSQwen3_5ForConditionalGeneration,
    vision={"num_position_embeddings": 144},
    text={  # three recurrent layers, and one of attention
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
)
_HYBRID = FAMILIES["qwen3_5"]
FAMILIES["qwen3_5_moe"] = replace(
    _HYBRID,
    config=STTSQwen3_5MoeConfig,
    model=STTSQwen3_5MoeForConditionalGeneration,
    text=dict(_HYBRID.text)
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40},
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, followed by the vision tokens."""
    return tiny_model.build_tokenizer(texts(), VISION_TOKENS)


def build_processor(chat_template: str, family: str = "qwen3_vl") -> Any:
    """Returns the native processor, with the released models' settings but for sizes: 2 frames per second."""
    of = FAMILIES[family]
    sizes: dict[str, Any] = {"patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": 2}
    return of.processor(
        image_processor=Qwen2VLImageProcessor(size=IMAGE_PIXELS, **sizes),
        video_processor=of.video_processor(size=dict(of.video_pixels), fps=2, max_frames=64, **sizes),
        tokenizer=build_tokenizer(),
        chat_template=chat_template,
    )


def text_settings(tokenizer: PreTrainedTokenizerFast, vision_tokens: Sequence[str]) -> dict[str, Any]:
    """Of a text model of 4 layers of width 96, for the tokenizer's text and these vision tokens."""
    return {
        "vocab_size": VOCAB_SIZE + len(vision_tokens),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Else `Trainer` warns that those of the tokenizer are new.
        **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def build_config(tokenizer: PreTrainedTokenizerFast, family: str = "qwen3_vl") -> Any:
    """Returns a configuration of about a million parameters: 7 or 9 ViT layers of width 64, 4 text layers of 96."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in VISION_TOKENS}
    vision = {
        "depth": 7,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "out_hidden_size": 96,
    }
    return FAMILIES[family].config(
        vision_config=vision | dict(FAMILIES[family].vision),
        text_config=text_settings(tokenizer, VISION_TOKENS) | dict(FAMILIES[family].text),
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=True,
    )


def build_model(config: Any, tokenizer: PreTrainedTokenizerFast, family: str = "qwen3_vl", seed: int = 0) -> Any:
    """Returns the model with seeded random weights, none of them zero where a checkpoint's would not be."""
    torch.manual_seed(seed)
    model = FAMILIES[family].model(config).eval()
    for name, module in model.named_modules():
        # With the library's 0.02, narrow layers say next to nothing; a new scorer would score all alike.
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            torch.nn.init.normal_(module.weight, std=0.8 / module.in_features**0.5)
    for name, weight in model.named_parameters():
        if ".experts." in name:  # a matrix of each
            torch.nn.init.normal_(weight, std=0.8 / weight.shape[-1] ** 0.5)
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.5)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def write_checkpoint(folder: Path, family: str = "qwen3_vl", seed: int = 0) -> None:
    """Makes the model and saves it into `folder`, which holds `chat_template.jinja` and links to the code already."""
    processor = build_processor((folder / "chat_template.jinja").read_text(), family)
    config = build_config(processor.tokenizer, family)
    save_into(folder, build_model(config, processor.tokenizer, family, seed), processor)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny checkpoint of a Qwen-VL backbone.")
    parser.add_argument("folder", type=Path, help="where to write it; must hold chat_template.jinja")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.family, arguments.seed)
    size = sum(file.stat().st_size for file in arguments.folder.iterdir())
    print(f"{arguments.folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
