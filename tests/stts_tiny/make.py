"""Makes `hub_configs/stts-tiny`: a complete checkpoint small enough for a repository and for tests on a CPU.

    python -m tests.stts_tiny.make hub_configs/stts-tiny

It keeps what the method is sensitive to (a 27 x 27 patch grid, 3 x 3 blocks, the released special tokens and chat
template) and shrinks everything else. The weights are random but for two things: the scorer learns to follow what
moves, and the language model learns to say that it knows nothing.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Molmo2ImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from stts_hf.evaluation import tiny_model
from stts_hf.evaluation.tiny_model import CHAT_TOKENS as CHAT_TOKENS
from stts_hf.evaluation.tiny_model import VISION_TOKENS, VOCAB_SIZE
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from tests.stts_tiny.answer import fit_answer
from tests.stts_tiny.scorer import fit_scorer
from tests.stts_tiny.text import training_sentences

PATCH_SIZE, IMAGE_SIZE = 4, {"height": 108, "width": 108}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, followed by the vision tokens."""
    return tiny_model.build_tokenizer(training_sentences())


def build_processor(chat_template: str) -> STTSProcessor:
    """Returns the processor, with the released models' settings at 108 x 108 pixels."""
    return STTSProcessor(
        image_processor=Molmo2ImageProcessor(max_crops=8, pooling_size=[2, 2], size=IMAGE_SIZE, patch_size=PATCH_SIZE),
        video_processor=STTSVideoProcessor(pooling_size=[3, 3], size=IMAGE_SIZE, patch_size=PATCH_SIZE),
        tokenizer=build_tokenizer(),
        chat_template=chat_template,
        use_single_crop_col_tokens=False,
        use_frame_special_tokens=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> STTSConfig:
    """Returns a configuration of about 1.3 million parameters: 9 ViT layers of width 64, 4 text layers of width 128."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in VISION_TOKENS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    return STTSConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 9,
            "image_size": [IMAGE_SIZE["height"], IMAGE_SIZE["width"]],
            "patch_size": PATCH_SIZE,
            **heads,
        },
        adapter_config={
            "vision_feature_layer": [8, 6],
            "hidden_size": 64,
            "intermediate_size": 256,
            "text_hidden_size": 128,
            **heads,
        },
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            # Else `Trainer` warns that those of the tokenizer are new.
            **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        },
        image_start_token_id=ids["<im_start>"],
        image_end_token_id=ids["<im_end>"],
        image_patch_id=ids["<im_patch>"],
        low_res_image_start_token_id=ids["<low_res_im_start>"],
        frame_start_token_id=ids["<frame_start>"],
        frame_end_token_id=ids["<frame_end>"],
    )


def build_model(config: STTSConfig, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> STTSForConditionalGeneration:
    """Returns the model with seeded random weights, none of them zero where a checkpoint's would not be."""
    torch.manual_seed(seed)
    model = STTSForConditionalGeneration(config).eval()
    tower = model.model.vision_tower
    # What the patches show must outweigh where they lie, or all frames look alike to a random tower.
    torch.nn.init.normal_(tower.patch_embedding.weight, std=0.2)
    # With the usual zero layer every score is 0.5, and blocks would go in the order they come.
    for module in tower.scorer.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    torch.nn.init.constant_(tower.scorer.score_layer.bias, -2.0)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def write_checkpoint(folder: Path, seed: int = 0, scorer_steps: int = 600, answer_steps: int = 200) -> None:
    """Makes the model and saves it into `folder`, which holds `chat_template.jinja` already; takes some minutes."""
    processor = build_processor((folder / "chat_template.jinja").read_text())
    model = build_model(build_config(processor.tokenizer), processor.tokenizer, seed)
    fit_scorer(model, processor.video_processor, seed, scorer_steps)
    fit_answer(model, processor, seed, answer_steps)
    save_into(folder, model, processor)


def save_into(folder: Path, model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Saves everything but a card that is there already, and leaves code files that are links as they are."""
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            target = folder / file.name
            if not target.is_symlink() and not (file.name == "README.md" and target.is_file()):
                shutil.copyfile(file, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny checkpoint.")
    parser.add_argument("folder", type=Path, help="where to write it; must hold chat_template.jinja")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.seed)
    size = sum(file.stat().st_size for file in arguments.folder.iterdir())
    print(f"{arguments.folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
