"""
The model of the study: Molmo2 in small, which sees 16 frames of 12 x 12 patches (4 x 4 blocks) and knows few words.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Molmo2ImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from stts_hf.checkpoints.atomic_folder import move_files
from stts_hf.data.prompts import CHOICE_INSTRUCTION
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

from .questions import compose_image, compose_long, compose_short

VOCAB_SIZE = 1024
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# In the released tokenizers' order. Their ids follow the text vocabulary: the LM head has no row for them.
VISION_TOKENS = (
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<low_res_im_start>",
    "<|image|>",
    "<im_low>",
    "<frame_start>",
    "<frame_end>",
    "<|video|>",
)
SPACE = "\u0120"  # as byte-level tokenizers write it
EMBEDDING_STD = 0.5
PATCH_SIZE, GRID, NUM_FRAMES, MAX_FPS = 8, 12, 16, 4
SIZE = PATCH_SIZE * GRID


def texts() -> Iterator[str]:
    """What the tokenizer is trained on: questions and answers."""
    for compose, number in ((compose_short, 400), (compose_long, 150), (compose_image, 150)):
        for seed in range(number):
            for question in compose(seed)[1]:
                yield f"user\n{question.text}"
                yield f"assistant\n{question.answer}"
                yield f"A. {question.answer}\nB. {question.answer}\nC. {question.answer}\nD. {question.answer}\n"
                yield f"{CHOICE_INSTRUCTION}<"


def build_tokenizer(
    sentences: Iterable[str], vision_tokens: tuple[str, ...] = VISION_TOKENS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens, trained on the sentences, followed by the vision tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CHAT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    # The special tokens' ids must not depend on how many merges the text gave.
    missing = VOCAB_SIZE - len(CHAT_TOKENS) - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"|<EXTRA_TOKENS_{index}>|" for index in range(missing)])
    tokenizer.add_special_tokens([*CHAT_TOKENS, *vision_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        # As in the released checkpoints: no BOS of its own, the end of a turn serves.
        bos_token="<|im_end|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=36864,
    )


def build_processor(chat_template: str) -> STTSProcessor:
    """The processor, with the released models' settings but for size and frames."""
    size = {"height": SIZE, "width": SIZE}
    return STTSProcessor(
        image_processor=Molmo2ImageProcessor(max_crops=8, pooling_size=[2, 2], size=size, patch_size=PATCH_SIZE),
        video_processor=STTSVideoProcessor(
            pooling_size=[3, 3], size=size, patch_size=PATCH_SIZE, num_frames=NUM_FRAMES, max_fps=MAX_FPS
        ),
        tokenizer=build_tokenizer(texts()),
        chat_template=chat_template,
        use_single_crop_col_tokens=False,
        use_frame_special_tokens=False,
    )


def build_model(config: STTSConfig, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> STTSForConditionalGeneration:
    """
    The model with seeded random weights; its scorer knows nothing yet. Its head begins as its embeddings, in which a
    word is the same with and without a space before it, so that what was seen can be said by copying.
    """
    torch.manual_seed(seed)
    model = STTSForConditionalGeneration(config)
    for name, module in model.named_modules():
        # With the library's 0.02, narrow layers say next to nothing, and nothing is learned.
        if isinstance(module, torch.nn.Linear) and "scorer" not in name:
            torch.nn.init.normal_(module.weight, std=0.8 / module.in_features**0.5)
    embeddings: Any = model.get_input_embeddings().weight
    torch.nn.init.normal_(embeddings, std=EMBEDDING_STD)
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        for token, index in vocabulary.items():
            if token.startswith(SPACE) and token[1:] in vocabulary:
                embeddings[vocabulary[token[1:]]] = embeddings[index]
        model.lm_head.weight.copy_(embeddings[:VOCAB_SIZE] / (EMBEDDING_STD * config.text_config.hidden_size**0.5))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def save_into(folder: Path, model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Saves both into a folder that is there, whose card and links to code stay, the config last."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            target = folder / file.name
            if target.is_symlink() or (file.name == "README.md" and target.is_file()):
                file.unlink()
        move_files(Path(temporary), folder, "config.json")
