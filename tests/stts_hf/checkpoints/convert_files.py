"""Small stock folders in every form that conversion takes, and a base for the reference checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
    Molmo2VisionConfig,
    PreTrainedTokenizerFast,
)

from examples.study.tiny_model import VISION_TOKENS
from stts_hf.checkpoints.families import STOCK
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.settings_stts import PRUNING_FIELDS
from tests.checkpoints import ALL_TINIES
from tests.tiny import TEXT_VOCABULARY, randomise, tiny_config

CHAT_TEMPLATE = "{% for message in messages %}<|video|>{{ message['content'] }}{% endfor %}<|im_end|>"
CODE_THAT_MUST_NOT_RUN = "raise SystemExit('the code of a source was run')\n"


def build_tokenizer(vocab_size: int = TEXT_VOCABULARY, tokens: tuple[str, ...] = VISION_TOKENS):
    """`vocab_size` text tokens, then the vision tokens in the released order: 512 to 521, as in the fixtures."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    filler = [f"|<EXTRA_{index}>|" for index in range(vocab_size - len(alphabet) - 2)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in filler])
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", *tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_end|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def write_base(folder: Path, patch_size: int = 2, side: int = 54, **tokenizer_options) -> Path:
    """Tokenizer, processor, chat template and generation settings of a stock Molmo2, without weights."""
    size = {"height": side, "width": side}
    Molmo2Processor(
        Molmo2ImageProcessor(patch_size=patch_size, size=size, pooling_size=[2, 2]),
        Molmo2VideoProcessor(patch_size=patch_size, size=size, pooling_size=[3, 3], num_frames=17),
        build_tokenizer(**tokenizer_options),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    GenerationConfig(bos_token_id=511, eos_token_id=511, pad_token_id=510).save_pretrained(folder)
    return folder


def stock_model(of: STTSConfig | None = None) -> Molmo2ForConditionalGeneration:
    """Stock Molmo2 of the size of `tiny_config`, or of another config, every weight random."""
    settings = (of or tiny_config()).to_dict()
    vision = {name: value for name, value in settings["vision_config"].items() if name != "model_type"}
    extras = set(vision) - set(Molmo2VisionConfig().to_dict())
    config = Molmo2Config(
        vision_config={name: value for name, value in vision.items() if name not in extras},
        adapter_config=settings["adapter_config"],
        text_config=settings["text_config"],
        **{name: value for name, value in settings.items() if name.endswith(("_token_id", "image_patch_id"))},
    )
    model = Molmo2ForConditionalGeneration(config).eval()
    randomise(model)
    return model


def write_molmo2(folder: Path, form: str) -> Path:
    """A stock Molmo2 folder: "original" key layout, "native" key layout, in "shards", or as first released."""
    write_base(folder, side=18)
    stock_model().save_pretrained(
        folder,
        save_original_format=form != "native",
        max_shard_size="40KB" if form == "shards" else "50GB",
    )
    if form == "released":
        as_released(folder)
    return folder


def as_released(folder: Path) -> None:
    """Config and processor files as in the first releases: other names, 27 declared layers, code of their own."""
    config = json.loads((folder / "config.json").read_text())
    vision, adapter, text = config.pop("vision_config"), config["adapter_config"], config["text_config"]
    config["vit_config"] = vision
    vision["image_default_input_size"] = vision.pop("image_size")
    vision["image_patch_size"] = vision.pop("patch_size")
    vision["image_num_pos"] = vision.pop("num_position_embeddings")
    vision["num_hidden_layers"] += 2
    adapter["vit_layers"] = adapter.pop("vision_feature_layer")
    text["qkv_bias"] = text.pop("attention_bias")
    config["auto_map"] = {"AutoModelForImageTextToText": "modeling_molmo2.Molmo2ForConditionalGeneration"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_molmo2.py").write_text(CODE_THAT_MUST_NOT_RUN)

    processor = json.loads((folder / "processor_config.json").read_text())
    auto_map = {"AutoProcessor": "processing_molmo2.Molmo2Processor"}
    image = processor.pop("image_processor") | {"auto_map": auto_map}
    video = processor.pop("video_processor") | {"auto_map": auto_map, "frame_sample_mode": "uniform_last_frame"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "processor_config.json").write_text(json.dumps(processor | {"auto_map": auto_map}))
    (folder / "processing_molmo2.py").write_text(CODE_THAT_MUST_NOT_RUN)


def stock_qwen(backbone: str = "qwen3_vl", tied: bool = True) -> Any:
    """A stock Qwen of the size of its tiny checkpoint, embedding and head tied or not, every weight random."""
    settings = json.loads((ALL_TINIES[backbone] / "config.json").read_text())
    vision = {name: value for name, value in settings["vision_config"].items() if name not in PRUNING_FIELDS}
    native: Any = STOCK[backbone].config.native
    config = native(
        vision_config=vision | {"model_type": f"{backbone}_vision"},
        text_config=settings["text_config"],
        tie_word_embeddings=tied,
        **{name: value for name, value in settings.items() if name.endswith(("_token_id", "scale_factor"))},
    )
    model: Any = AutoModelForImageTextToText.from_config(config).eval()
    randomise(model)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(ALL_TINIES[backbone])
    return model


def write_qwen(folder: Path, backbone: str = "qwen3_vl", tied: bool = True, **options: Any) -> Path:
    """The folder of a `stock_qwen` with its processor; options of `save_pretrained`."""
    stock_qwen(backbone, tied).save_pretrained(folder, **options)
    STOCK[backbone].processor.from_pretrained(ALL_TINIES[backbone]).save_pretrained(folder)
    return folder


def write_qwen3_vl(folder: Path, form: str) -> Path:
    """A stock Qwen3-VL folder: "qwen3_vl" in one file, "qwen3_vl_shards", or "qwen3_vl_released" as first released."""
    write_qwen(folder, max_shard_size="40KB" if form == "qwen3_vl_shards" else "50GB")
    if form == "qwen3_vl_released":
        as_released_qwen3_vl(folder)
    return folder


def as_released_qwen3_vl(folder: Path) -> None:
    """Files and settings as of transformers 4.57: other names, and as some have it, the tied head a second time."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "tie_word_embeddings": True}
    config["vision_config"]["model_type"] = "qwen3_vl"
    del config["vision_config"]["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((folder / "processor_config.json").read_text())
    for part, name in (("image_processor", "preprocessor"), ("video_processor", "video_preprocessor")):
        of_class = {"processor_class": "Qwen3VLProcessor"}
        (folder / f"{name}_config.json").write_text(json.dumps(processor[part] | of_class))
    (folder / "processor_config.json").unlink()
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": "Qwen2Tokenizer"}))
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Run with pairs of a checkpoint (folder or Hub name) and its `expected.safetensors`: the largest error of the
# reference logits, dense and pruned under both position rules, of every auto class.
REFERENCE_LOGITS = """
import sys
import json, torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers import AutoProcessor, AutoVideoProcessor
worst = {}
for folder, fixture in zip(sys.argv[1::2], sys.argv[2::2]):
    load = lambda auto, **options: auto.from_pretrained(folder, trust_remote_code=True, **options)
    assert type(load(AutoProcessor)).__name__ == "STTSProcessor"
    assert type(load(AutoVideoProcessor)).__name__ == "STTSVideoProcessor"
    expected = load_file(fixture)
    frames, side, window = len(expected["pixel_patches"]), 27, 3
    table = torch.arange(frames * side * side).view(frames, side // window, window, side // window, window)
    inputs = {
        "input_ids": expected["input_ids"][None],
        "mm_token_type_ids": expected["mm_token_type_ids"][None],
        "pixel_values_videos": expected["pixel_patches"],
        "video_token_pooling": table.transpose(2, 3).reshape(-1, window * window),
        "video_grids": torch.tensor([[frames, side // window, side // window]]),
    }
    for auto, ratio, rule, name in (
        (AutoModel, 0.0, "original", "logits_dense"),
        (AutoModelForImageTextToText, None, "original", "logits_original_positions"),
        (AutoModelForMultimodalLM, None, "compact", "logits_compact_positions"),
    ):
        config = load(AutoConfig)
        config.pruned_position_ids = rule
        model = load(auto, config=config).eval()
        with torch.no_grad():
            logits = model(**inputs, pruning_ratio=ratio).logits[0]
            model.generate(**inputs, max_new_tokens=2)
        worst[folder + name] = (logits - expected[name]).abs().max().item()
print(json.dumps(worst))
"""
