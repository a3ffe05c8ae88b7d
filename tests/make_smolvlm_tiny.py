"""Makes `hub_configs/stts-smolvlm-tiny`: a complete checkpoint small enough for a repository and tests on a CPU.

    python -m tests.make_smolvlm_tiny hub_configs/stts-smolvlm-tiny

Every part is there; the weights are random.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, SmolVLMImageProcessor

from examples.study import tiny_model
from examples.study.tiny_model import save_into, texts
from stts_hf import (
    STTSSmolVLMConfig,
    STTSSmolVLMForConditionalGeneration,
    STTSSmolVLMProcessor,
    STTSSmolVLMVideoProcessor,
)
from tests.make_qwen_vl_tiny import text_settings

TILES = tuple(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4))
VISION_TOKENS = ("<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES)
PATCH_SIZE, BLOCK_SIDE, GRID = 8, 3, 4
SIDE = PATCH_SIZE * BLOCK_SIDE * GRID


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, followed by the vision tokens."""
    tokenizer = tiny_model.build_tokenizer(texts(), VISION_TOKENS)
    tokenizer.eos_token = "<end_of_utterance>"  # ends a turn of the chat template
    return tokenizer


def build_processor(chat_template: str) -> STTSSmolVLMProcessor:
    """Returns the processor, with the released models' settings but for sizes: a frame per second, at most 16."""
    sizes: dict[str, Any] = {"max_image_size": {"longest_edge": SIDE}, "size": {"longest_edge": 3 * SIDE}}
    return STTSSmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=build_tokenizer(),
        video_processor=STTSSmolVLMVideoProcessor(num_frames=16, fps=4, do_sample_frames=True, **sizes),
        image_seq_len=GRID**2,
        chat_template=chat_template,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> STTSSmolVLMConfig:
    """Returns a configuration of about a million parameters: 7 ViT layers of width 64, 4 text layers of 96."""
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH_SIZE,
    }
    return STTSSmolVLMConfig(
        vision_config=vision,
        text_config={"model_type": "llama", **text_settings(tokenizer, VISION_TOKENS)},
        scale_factor=BLOCK_SIDE,
        image_token_id=tokenizer.get_vocab()["<image>"],
        tie_word_embeddings=True,
    )


def build_model(config: STTSSmolVLMConfig, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Any:
    """Returns the model with seeded random weights, none of them zero where a checkpoint's would not be."""
    torch.manual_seed(seed)
    model: Any = STTSSmolVLMForConditionalGeneration(config).eval()
    for name, module in model.named_modules():
        # With the library's 0.02, narrow layers say next to nothing; a new scorer would score all alike.
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            torch.nn.init.normal_(module.weight, std=0.8 / module.in_features**0.5)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny SmolVLM2 checkpoint.")
    parser.add_argument("folder", type=Path, help="where to write it; must hold chat_template.jinja")
    folder = parser.parse_args().folder
    processor = build_processor((folder / "chat_template.jinja").read_text())
    config = build_config(processor.tokenizer)
    save_into(folder, build_model(config, processor.tokenizer), processor)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
