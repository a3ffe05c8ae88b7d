"""Configuration and processor of a converted checkpoint: the source's settings, in STTS's terms."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, Molmo2ImageProcessor, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.molmo2.configuration_molmo2 import Molmo2Config

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

from .files import read_json, read_section
from .original import convert_original_config, load_original_config


@contextlib.contextmanager
def usable(subject: str, remedy: str) -> Iterator[None]:
    """Turns whatever reading settings raises, which has errors of many kinds, into one `ValueError`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if not isinstance(error, OSError | ValueError | StrictDataclassError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{subject} ({reason}): {remedy}.") from error


def load_processor(folder: Path) -> STTSProcessor:
    """Returns the processor of a Molmo2 or STTS folder, without running code of its own. Raises `ValueError`."""
    has_settings = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    if not has_settings or not (folder / "tokenizer.json").is_file():
        missing = "tokenizer.json" if has_settings else "processor_config.json"
        raise ValueError(
            f"{folder} has no {missing}: pass --base with a Molmo2 folder or repository that has tokenizer and "
            "processor."
        )
    for kind in ("processor", "preprocessor", "video_preprocessor", "tokenizer"):
        read_json(folder / f"{kind}_config.json")  # says which file is damaged
    read_json(folder / "tokenizer.json")
    remedy = "copy its files again, or pass --base with another Molmo2 folder"
    with usable(f"The tokenizer or processor in {folder} cannot be used", remedy):
        settings = STTSProcessor.get_processor_dict(str(folder))[0]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        image = Molmo2ImageProcessor.from_pretrained(folder).to_dict()
        video = STTSVideoProcessor.from_pretrained(folder).to_dict()
        for name in ("auto_map", "is_local", "local_files_only"):  # of the source and of this machine
            tokenizer.init_kwargs.pop(name, None)
        # Built from known settings alone: the rest of a source, its `auto_map` above all, would be saved again.
        names = inspect.signature(STTSProcessor.__init__).parameters
        parts: dict[str, Any] = {
            "image_processor": Molmo2ImageProcessor(**_known(image, Molmo2ImageProcessor)),
            "video_processor": STTSVideoProcessor(**_known(video, STTSVideoProcessor)),
            "tokenizer": tokenizer,
            "chat_template": settings.get("chat_template") or tokenizer.chat_template,
        }
        return STTSProcessor(**{name: value for name, value in settings.items() if name in names} | parts)


def config_of_hugging_face(folder: Path, processor: STTSProcessor) -> tuple[STTSConfig, int]:
    """Returns the configuration of a Molmo2 or STTS folder, and how many ViT layers its file declares.

    Raises `ValueError` for the configuration of another model.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if kind not in (Molmo2Config.model_type, STTSConfig.model_type):
        raise ValueError(f"{folder / 'config.json'} is of a {kind!r} model, but must be of a 'molmo2' or 'stts' model.")
    key = "vision_config" if raw.get("vision_config") else "vit_config"
    declared = read_section(raw, key, folder / "config.json").get("num_hidden_layers") or 0
    if kind == Molmo2Config.model_type:
        raw = STTSConfig.as_stts(raw)
        window = processor.video_processor.pooling_size
        if isinstance(window, list | tuple):  # `check_processor` refuses all else
            raw[key] = {**(raw.get(key) or {}), "pooling_size": list(window)}
    with usable(f"{folder / 'config.json'} cannot be used", "correct it, or copy it again"):
        return drop_unknown_fields(STTSConfig.from_dict(raw)), declared


def config_of_original(folder: Path, processor: STTSProcessor) -> tuple[STTSConfig, int]:
    """The same for an original training checkpoint; its frame settings go into `processor`."""
    original = load_original_config(folder)
    with usable(f"{folder / 'config.yaml'} cannot be used", "correct it, or copy it again"):
        config = STTSConfig(**convert_original_config(original, processor.tokenizer.get_vocab()))
        _set_frames(processor, config, original["mm_preprocessor"]["video"])
    return config, original["vision_backbone"]["vit"]["image_num_layers"]


def override(config: STTSConfig, processor: STTSProcessor, given: Mapping[str, Any]) -> None:
    """Puts fields of the vision config in place of the source's. Raises `ValueError` for values that do not fit."""
    for name, value in given.items():
        with usable(f"`{name}` {value!r} cannot be used", "choose another"):
            setattr(config.vision_config, name, value)
    if config.vision_config.packing != "first_fit_descending":
        config.vision_config.refill_single_frame_bins = False
    if given.get("pruning_ratio", 1) < 1:
        processor.video_processor.pruning_ratio = given["pruning_ratio"]  # what its `test_time_scaling` counts with


def generation_config_of(folder: Path, tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Returns the folder's generation settings; special tokens it does not name are the tokenizer's."""
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
    path = folder / "generation_config.json"
    named = {key: value for key, value in read_json(path).items() if not key.startswith("_") and value is not None}
    with usable(f"{path} cannot be used", "correct it, or delete it"):
        config = GenerationConfig.from_dict(tokens | named)
        config.validate(strict=True)  # as saving it does
    return config


def _set_frames(processor: STTSProcessor, config: STTSConfig, video: Mapping[str, Any]) -> None:
    vision = config.vision_config
    size = dict(zip(("height", "width"), vision.image_size, strict=True))
    changes: dict[str, Any] = {"patch_size": vision.patch_size, "size": size, "pooling_size": list(vision.pooling_size)}
    if video.get("max_frames"):
        changes["num_frames"] = video["max_frames"]
    max_fps = video.get("max_fps")
    if isinstance(max_fps, list):  # one is drawn at random for each video in training
        max_fps = max(max_fps, default=None)
    if max_fps:
        changes["max_fps"] = max_fps
    if vision.pruning_ratio < 1:
        changes["pruning_ratio"] = vision.pruning_ratio
    settings = _known(processor.video_processor.to_dict(), STTSVideoProcessor)
    processor.video_processor = STTSVideoProcessor(**{**settings, **changes})
    image = _known(processor.image_processor.to_dict(), Molmo2ImageProcessor)
    processor.image_processor = Molmo2ImageProcessor(**{**image, "patch_size": vision.patch_size, "size": size})
    if video.get("use_frame_special_tokens") is not None:
        processor.use_frame_special_tokens = video["use_frame_special_tokens"]


def _known(settings: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in processor.valid_kwargs.__annotations__}


def drop_unknown_fields(config: STTSConfig) -> STTSConfig:
    """The same settings without fields that no config class knows: those of remote code, and notes of a saved file."""

    def own_fields(part: PreTrainedConfig) -> dict[str, Any]:
        names = type(part).__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
        return {name: value for name, value in part.to_dict().items() if name in names}

    sections = ("vision_config", "adapter_config", "text_config")
    return STTSConfig(**own_fields(config) | {name: own_fields(getattr(config, name)) for name in sections})
