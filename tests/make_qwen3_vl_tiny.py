"""Makes `hub_configs/stts-qwen3-vl-tiny`: a complete checkpoint small enough for a repository and tests on a CPU.

    python -m tests.make_qwen3_vl_tiny hub_configs/stts-qwen3-vl-tiny

Every part of Qwen3-VL is there, deepstack taps before and after the pruning layer included; the weights are random.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from stts_hf.evaluation import tiny_model
from stts_hf.evaluation.tiny_model import VOCAB_SIZE, save_into, texts
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH_SIZE = 8
TOKEN_PIXELS = (2 * PATCH_SIZE) ** 2  # of one frame under one token
IMAGE_PIXELS = {"shortest_edge": 4 * TOKEN_PIXELS, "longest_edge": 64 * TOKEN_PIXELS}
VIDEO_PIXELS = {"shortest_edge": 32 * TOKEN_PIXELS, "longest_edge": 1024 * TOKEN_PIXELS}  # of all frames together


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, followed by the vision tokens."""
    return tiny_model.build_tokenizer(texts(), VISION_TOKENS)


def build_processor(chat_template: str) -> Qwen3VLProcessor:
    """Returns the native processor, with the released models' settings but for sizes: 2 frames per second."""
    sizes: dict[str, Any] = {"patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=IMAGE_PIXELS, **sizes),
        video_processor=Qwen3VLVideoProcessor(size=VIDEO_PIXELS, fps=2, max_frames=64, **sizes),
        tokenizer=build_tokenizer(),
        chat_template=chat_template,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> STTSQwen3VLConfig:
    """Returns a configuration of about a million parameters: 7 ViT layers and 4 text layers of width 64 and 96."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in VISION_TOKENS}
    return STTSQwen3VLConfig(
        vision_config={
            "depth": 7,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "out_hidden_size": 96,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [2, 5],
        },
        text_config={
            "vocab_size": VOCAB_SIZE + len(VISION_TOKENS),
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
            # Else `Trainer` warns that those of the tokenizer are new.
            **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        },
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=True,
    )


def build_model(
    config: STTSQwen3VLConfig, tokenizer: PreTrainedTokenizerFast, seed: int = 0
) -> STTSQwen3VLForConditionalGeneration:
    """Returns the model with seeded random weights, none of them zero where a checkpoint's would not be."""
    torch.manual_seed(seed)
    model = STTSQwen3VLForConditionalGeneration(config).eval()
    for name, module in model.named_modules():
        # With the library's 0.02, narrow layers say next to nothing; a new scorer would score all alike.
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            torch.nn.init.normal_(module.weight, std=0.8 / module.in_features**0.5)
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.5)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Makes the model and saves it into `folder`, which holds `chat_template.jinja` and links to the code already."""
    processor = build_processor((folder / "chat_template.jinja").read_text())
    save_into(folder, build_model(build_config(processor.tokenizer), processor.tokenizer, seed), processor)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny Qwen3-VL checkpoint.")
    parser.add_argument("folder", type=Path, help="where to write it; must hold chat_template.jinja")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.seed)
    size = sum(file.stat().st_size for file in arguments.folder.iterdir())
    print(f"{arguments.folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
