"""What vLLM's stock Molmo2 computes differently from transformers', on a tiny random checkpoint. Needs no STTS:

    python stock_molmo2.py          # vLLM 0.32 on a CPU, transformers 5.23

Prints the largest difference of first-token log-probabilities between vLLM, transformers, and transformers with what
vLLM does put in its place: the block of vision tokens cut into frames or causal, placeholders overwritten.
"""

import os
import tempfile
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
    PreTrainedTokenizerFast,
)
from vllm import LLM, SamplingParams

FRAMES, SIDE, PATCH = 4, 108, 6
SPECIAL = (
    "<im_start> <im_end> <im_patch> <im_col> <low_res_im_start> <|image|> <im_low> <frame_start> <frame_end> <|video|>"
)
WORDS = ["<eos>", "<unk>", *"0123456789.", "what", "moves"]
VOCABULARY = 32  # of the head; the special tokens come behind it
QUESTION = "<|video|> what moves"


def make_checkpoint(folder: str) -> tuple[Molmo2ForConditionalGeneration, Molmo2Processor]:
    """A tiny Molmo2 with random weights, large enough to matter, and its processor, saved to a folder."""
    ids = {word: place for place, word in enumerate(WORDS)}
    ids |= {token: VOCABULARY + place for place, token in enumerate(SPECIAL.split())}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", additional_special_tokens=SPECIAL.split()
    )
    sizes: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    processor = Molmo2Processor(Molmo2ImageProcessor(**sizes), Molmo2VideoProcessor(**sizes), tokenizer)
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "patch_size": PATCH,
    }
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "image_size": [SIDE, SIDE]}
    vision |= {"num_position_embeddings": (SIDE // PATCH) ** 2}
    adapter: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    adapter |= {"head_dim": 16, "vision_feature_layer": [2, 0], "text_hidden_size": 64}
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    text |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY, "additional_vocab_size": 32}
    config = Molmo2Config(
        vision_config=vision,
        adapter_config=adapter,
        text_config=text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        image_patch_id=ids["<im_patch>"],
        image_start_token_id=ids["<im_start>"],
        image_end_token_id=ids["<im_end>"],
        image_col_id=ids["<im_col>"],  # type: ignore[call-arg]  # this and the next for vLLM
        image_low_res_id=ids["<im_low>"],
        low_res_image_start_token_id=ids["<low_res_im_start>"],
        frame_start_token_id=ids["<frame_start>"],
        frame_end_token_id=ids["<frame_end>"],
    )
    torch.manual_seed(0)
    model = Molmo2ForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def as_released(config: Any) -> Any:
    """The settings under the names of the released checkpoints' own configuration, which vLLM reads."""
    if not hasattr(config, "vision_config"):  # an empty one, with which vLLM asks whether the model's type changes
        return config
    vision, adapter, text = config.vision_config, config.adapter_config, config.text_config
    config.vit_config = SimpleNamespace(**vision.to_dict())
    config.vit_config.image_default_input_size, config.vit_config.image_patch_size = (
        vision.image_size,
        vision.patch_size,
    )
    config.vit_config.image_num_pos = vision.num_position_embeddings
    adapter.vit_layers, adapter.pooling_attention_mask = adapter.vision_feature_layer, True
    text.use_qk_norm, text.rope_theta = text.qk_norm_type is not None, text.rope_parameters["rope_theta"]
    return config


def vllm_log_probabilities(folder: str, frames: np.ndarray, metadata: dict[str, Any]) -> torch.Tensor:
    """Of the first token, (vocabulary,)."""
    llm = LLM(
        folder,
        hf_overrides=as_released,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        max_logprobs=-1,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    request: Any = {"prompt": QUESTION, "multi_modal_data": {"video": [(frames, metadata)]}}
    found = llm.generate(request, sampling)[0].outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in range(VOCABULARY)])


@torch.no_grad()
def transformers_log_probabilities(
    model: Molmo2ForConditionalGeneration, inputs: Any, block: str = "video", overwrite: bool = False
) -> torch.Tensor:
    """
    Of the first token, (vocabulary,), with vision tokens that see all of their `block`: "video", "frame", or "none"
    for causal ones; `overwrite` puts features in the place of the placeholders' embeddings instead of adding them.
    """
    ids = inputs["input_ids"]
    features = model.model.get_video_features(
        inputs["pixel_values_videos"], inputs["video_token_pooling"], inputs["video_grids"]
    ).pooler_output
    embeds = model.get_input_embeddings()(ids)
    patches = ids == model.config.image_patch_id
    embeds[patches] = torch.cat(list(features)) + (0 if overwrite else embeds[patches])
    is_vision = inputs["mm_token_type_ids"][0] == 1
    blocks = is_vision.long() if block == "video" else (is_vision.long().diff(prepend=torch.zeros(1)) == 1).cumsum(0)
    same = (blocks[:, None] == blocks) & is_vision & is_vision[:, None] if block != "none" else torch.tensor(False)
    mask = torch.ones(len(blocks), len(blocks), dtype=torch.bool).tril() | same
    hidden = model.model.language_model(inputs_embeds=embeds, attention_mask=mask[None, None]).last_hidden_state
    return model.lm_head(hidden[0, -1]).log_softmax(-1)


def main() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES, SIDE, SIDE, 3), np.uint8)
    metadata: dict[str, Any] = {"total_num_frames": FRAMES, "fps": 2.0, "duration": FRAMES / 2}
    metadata |= {"frames_indices": list(range(FRAMES)), "video_backend": "opencv"}
    with tempfile.TemporaryDirectory() as folder:
        model, processor = make_checkpoint(folder)
        inputs = processor(
            text=QUESTION, videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        vllm = vllm_log_probabilities(folder, frames, metadata | {"do_sample_frames": False})
    with torch.no_grad():
        transformers = model(**inputs).logits[0, -1].log_softmax(-1)
    same = bool(vllm.argmax() == transformers.argmax())
    print(f"prompt of {inputs['input_ids'].shape[1]} tokens; same most likely token: {same}")
    print("\n| transformers with | difference to transformers | difference to vLLM |\n| --- | --- | --- |")
    for name, options in {
        "nothing changed": {},
        "placeholders overwritten": {"overwrite": True},
        "blocks of a frame": {"block": "frame"},
        "blocks of a frame, placeholders overwritten": {"block": "frame", "overwrite": True},
        "causal vision tokens": {"block": "none"},
        "causal vision tokens, placeholders overwritten": {"block": "none", "overwrite": True},
    }.items():
        changed = transformers_log_probabilities(model, inputs, **options)  # type: ignore[arg-type]
        to_each = (float((changed - other).abs().max()) for other in (transformers, vllm))
        print(f"| {name} | {' | '.join(f'{difference:.1e}' for difference in to_each)} |")


if __name__ == "__main__":
    main()
