"""Configuration and processor of a converted checkpoint: the source's settings, in STTS's terms."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from stts_hf.keeping import set_rule
from stts_hf.modeling.settings_stts import PruningConfig

from .families import Family
from .files import read_json, usable
from .loading import load_processor
from .original import convert_original_config, load_original_config


def clean_processor(folder: Path, family: Family) -> Any:
    """Returns the processor of a stock or STTS folder, without running code of its own. Raises `ValueError`."""
    stock = family.config.family
    has_settings = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    if not has_settings or not (folder / "tokenizer.json").is_file():
        what = f"{folder} lacks tokenizer.json or processor_config.json"
        raise ValueError(f"{what}: pass --base with a {stock} folder or repository that has both.")
    known = [base.__name__ for base in family.processor.__mro__]  # a list, as a broken file may give one too
    for kind in ("processor", "preprocessor", "video_preprocessor", "tokenizer"):
        path = folder / f"{kind}_config.json"
        made_for = read_json(path).get("processor_class")  # says which file is damaged, too
        if made_for is not None and made_for not in known:
            raise ValueError(
                f"`processor_class` in {path} is {made_for!r}, but the model is a {stock} one, whose processor is a "
                f"{family.processor.__name__}: pass --base with a {stock} folder or repository."
            )
    processor = load_processor(folder, kind=family.config.model_type)
    # Built again from known settings alone: a source's others, its `auto_map` above all, would be saved again.
    for name in ("auto_map", "is_local", "local_files_only"):
        processor.tokenizer.init_kwargs.pop(name, None)
    names = inspect.signature(family.processor.__init__).parameters
    settings: dict[str, Any] = {name: value for name, value in vars(processor).items() if name in names}
    for name in ("image_processor", "video_processor"):
        settings[name] = _built_again(getattr(processor, name), getattr(family, name))
    return family.processor(**settings)


def config_of_hugging_face(folder: Path, family: Family, processor: Any) -> Any:
    """Returns the configuration of a stock or STTS folder."""
    raw = read_json(folder / "config.json")
    if raw.get("model_type") == family.config.native.model_type:
        raw = family.config.as_stts(raw)
        window = getattr(processor.video_processor, "pooling_size", None)
        if isinstance(window, list | tuple):  # `check_processor` refuses all else
            key = next((name for name in family.config.vision_names if raw.get(name)), family.config.vision_names[-1])
            raw[key] = {**(raw.get(key) or {}), "pooling_size": list(window)}
    with usable(f"{folder / 'config.json'} cannot be used", "correct it, or copy it again"):
        return drop_unknown_fields(family.config.from_dict(raw))


def config_of_original(folder: Path, family: Family, processor: Any) -> Any:
    """The same for an original training checkpoint; its frame settings go into `processor`."""
    original = load_original_config(folder)
    with usable(f"{folder / 'config.yaml'} cannot be used", "correct it, or copy it again"):
        config = family.config(**convert_original_config(original, processor.tokenizer.get_vocab()))
        _set_frames(processor, family, config, original["mm_preprocessor"]["video"])
    return config


def override(config: Any, processor: Any, given: Mapping[str, Any]) -> None:
    """Puts fields of the vision config in place of the source's. Raises `ValueError` for values that do not fit."""
    for name, value in given.items():
        with usable(f"`{name}` {value!r} cannot be used", "choose another"):
            set_rule(config.vision_config, {name: value})
    with usable("the settings cannot be used together", "choose others"):
        config.keep_rule(given)
    if given.get("packing") == "varlen":
        config.vision_config.refill_single_frame_bins = False
    if given.get("pruning_ratio", 1) < 1 and hasattr(processor.video_processor, "pruning_ratio"):
        processor.video_processor.pruning_ratio = given["pruning_ratio"]  # what its `test_time_scaling` counts with


def generation_config_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, without: Collection[str] = ()
) -> GenerationConfig:
    """Returns the folder's generation settings, `without` some; special tokens it does not name are the tokenizer's."""
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
    path = folder / "generation_config.json"
    named = {key: value for key, value in read_json(path).items() if not key.startswith("_") and value is not None}
    for name in without:
        named.pop(name, None)
    with usable(f"{path} cannot be used", "correct it, or delete it"):
        config = GenerationConfig.from_dict(tokens | named)
        config.validate(strict=True)  # as saving it does
    return config


def _set_frames(processor: Any, family: Family, config: Any, video: Mapping[str, Any]) -> None:
    needed, ratio = family.settings(config), config.vision_config.pruning_ratio
    max_fps = video.get("max_fps")
    if isinstance(max_fps, list):  # one is drawn at random for each video in training
        max_fps = max(max_fps, default=None)
    limits = {"num_frames": video.get("max_frames"), "max_fps": max_fps}
    needed["video_processor"] |= {name: value for name, value in limits.items() if value}
    needed["video_processor"] |= {"pruning_ratio": ratio} if ratio < 1 else {}
    for name, changes in needed.items():
        setattr(processor, name, _built_again(getattr(processor, name), getattr(family, name), **changes))
    if video.get("use_frame_special_tokens") is not None:
        processor.use_frame_special_tokens = video["use_frame_special_tokens"]


def _built_again(processor: Any, kind: Any, **changes: Any) -> Any:
    """An image or video processor of this class, with those of its settings that the class knows, and changes."""
    known = kind.valid_kwargs.__annotations__
    return kind(**{name: value for name, value in processor.to_dict().items() if name in known} | changes)


def drop_unknown_fields(config: PruningConfig) -> Any:
    """The same settings without fields that no config class knows: those of remote code, and notes of a saved file."""

    def own_fields(part: PreTrainedConfig) -> dict[str, Any]:
        names = type(part).__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
        names |= {*part.attribute_map.values()}  # what a file calls some of them
        return {name: value for name, value in part.to_dict().items() if name in names}

    sections = {name: own_fields(getattr(config, name)) for name in config.sub_configs}
    return type(config)(**own_fields(config) | sections)
