"""A checkpoint for use: found, and loaded by this package's code. Code that lies in it never runs."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stts_hf.selectors import SELECTORS

from .files import check_links, check_texts, raise_findings, read_json, usable

# Of `from_pretrained`'s options those that say where on the Hub, and in which cache, a file is.
_WHERE = {"revision", "token", "cache_dir", "local_files_only", "subfolder"}


def check_checkpoint(checkpoint: str) -> str:
    """The folder, or the Hub repository, of this name. Raises `ValueError` for a folder that is none, or not whole."""
    looks_like_a_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
    path = Path(checkpoint).expanduser()
    problem = None
    if not path.is_dir():
        if looks_like_a_path or path.exists():
            problem = "is not a folder; pass a checkpoint's folder or user/name"
    elif astray := next((one for one in check_links(path) if not one.what.split(" ")[0].endswith(".py")), None):
        problem = f"is not whole: {astray}"
    elif not any(path.glob("*.safetensors")):
        problem = "holds no weights (*.safetensors)"
    if problem is not None:
        raise ValueError(f"checkpoint {checkpoint} {problem}")
    return str(path) if path.is_dir() else checkpoint


def choose_device(name: str) -> Any:
    """Returns the `torch.device`, the fastest there is for "auto". Raises `ValueError` for one that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name} cannot be used here: {' '.join(str(error).split())[:120]}") from None
    if device.type == "meta":
        raise ValueError("device meta cannot be used here: it has shapes, but no numbers")
    return device


def load_config_and_processor(
    checkpoint: str, *, revision: str | None = None, selector: str | None = None
) -> tuple[Any, Any]:
    """
    Returns configuration and processor. selector: in place of the configuration's. Raises `ValueError` for a checkpoint
    that cannot be loaded, or has no scorer where that is to select.
    """
    from .checks import check_sizes
    from .families import OWN, STOCK, model_type_of

    if selector not in (None, *SELECTORS):
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
    with usable(f"checkpoint {checkpoint} cannot be loaded", _remedy(checkpoint)):
        _check_folder(checkpoint)
        kind = model_type_of(checkpoint, revision)
    family = (OWN | STOCK).get(str(kind))
    if family is None:
        raise ValueError(f"checkpoint {checkpoint} is a {kind!r} model, but must be an STTS checkpoint")
    if kind not in OWN and (selector is None or SELECTORS[selector].is_learned):
        raise ValueError(
            f"checkpoint {checkpoint} is a stock {family.config.family} model, which has no trained scorer: choose the "
            'selector cosine, which needs none (selector="cosine", --selector cosine), or make an STTS checkpoint of '
            "it with stts-hf convert and train that"
        )
    with usable(f"checkpoint {checkpoint} cannot be loaded: its config.json", _remedy(checkpoint)):
        config: Any = family.config.from_pretrained(checkpoint, revision=revision or "main")
        raise_findings("it does not describe a model", check_sizes(config))
        if selector is not None:
            config.vision_config.selector = selector
    return config, load_processor(checkpoint, revision=revision)


def load_processor(checkpoint: str | Path, *, revision: str | None = None) -> Any:
    """
    Returns the processor of an STTS or stock checkpoint, by this package's and transformers' code alone. Raises
    `ValueError` where it cannot be loaded, or makes no prompt about a video.
    """
    from .checks import check_chat_template
    from .families import family_of_checkpoint

    _check_folder(checkpoint)
    with usable(f"checkpoint {checkpoint} cannot be loaded: its tokenizer or processor", _remedy(checkpoint)):
        try:  # refused, or transformers asks whether to run foreign code
            processor: Any = family_of_checkpoint(checkpoint, revision).processor.from_pretrained(
                checkpoint, revision=revision or "main", trust_remote_code=False
            )
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError("a class of it is code in the checkpoint, which is never run") from error
    raise_findings(f"checkpoint {checkpoint} cannot be used", check_chat_template(processor))
    return processor


def load_model(checkpoint: str, config: Any, device: Any, *, revision: str | None = None, **options: Any) -> Any:
    """
    Returns the model for use on `device`; None leaves it where it was loaded. options: of `from_pretrained`. Raises
    `ValueError` where the weights cannot be loaded, are no safetensors, or lack what the model needs.
    """
    model, new_scorer = load_weights(checkpoint, config, revision=revision, **options)
    if new_scorer and SELECTORS[config.vision_config.selector].is_learned:
        raise ValueError(
            f"checkpoint {checkpoint} lacks the weights of the scorer ({', '.join(new_scorer[:3])}, ...): choose "
            'another selector (selector="cosine", --selector cosine), or train one'
        )
    return (model if device is None else model.to(device)).eval()


def load_weights(checkpoint: str, config: Any, *, revision: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """
    Returns the model, and the names of the scorer's weights that the checkpoint lacks: they are new. Raises
    `ValueError` where others are missing, or any have other shapes; transformers would make them up.
    """
    _check_generation_config(checkpoint, config, revision)
    options |= {"config": config, "revision": revision or "main", "use_safetensors": True}
    try:
        with usable(f"checkpoint {checkpoint} cannot be loaded: its weights", _remedy(checkpoint)):
            model, found = _from_pretrained(checkpoint, config, options)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, TypeError) and any(repr(name) in str(cause) for name in options):
            raise cause from None  # the caller's option, not the checkpoint
        raise
    missing, shapes = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    lacking = [name for name in missing if ".scorer." not in name]
    if lacking or shapes:
        names = lacking or [f"{name} {list(there)} instead of {list(needed)}" for name, there, needed in shapes]
        kind = "lacks weights that the model needs" if lacking else "holds weights of other shapes than the model's"
        raise ValueError(
            f"checkpoint {checkpoint} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): copy the "
            "weights again, or correct config.json"
        )
    return model, missing


def _from_pretrained(checkpoint: str, config: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of its weights."""
    from stts_hf.auto_classes import MODEL_CLASSES

    from .checks import check_sizes
    from .layout import empty_model
    from .tensors import check_headers, main_dtype, open_safetensors

    folder = _folder_of_weights(checkpoint, options)
    check_headers(folder)  # transformers would list every name
    if any(folder.glob("*.safetensors")):
        tensors = open_safetensors(folder)
        raise_findings("config.json and the weights differ", check_sizes(config, tensors))
        if getattr(config, "quantization_config", None) is None:
            main_dtype(tensors)  # refuses integers, which would be cast
    try:
        return MODEL_CLASSES[type(config)].from_pretrained(
            checkpoint, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        with usable("config.json describes a model that cannot be built", "correct it"):
            empty_model(config)  # whose fault it is
        raise


def _check_folder(checkpoint: str | Path) -> None:
    if (folder := Path(checkpoint).expanduser()).is_dir():  # else it is one of the Hub
        check_texts(folder)


def _check_generation_config(checkpoint: str, config: Any, revision: str | None) -> None:
    from transformers import GenerationConfig

    from .checks import check_generation_config

    with usable(f"checkpoint {checkpoint} cannot be loaded: its generation_config.json", "correct it, or delete it"):
        if (folder := Path(checkpoint).expanduser()).is_dir():
            settings = read_json(folder / "generation_config.json")
        else:
            try:
                settings = GenerationConfig.from_pretrained(checkpoint, revision=revision or "main").to_dict()
            except OSError:  # there need be none
                return
        raise_findings("it does not fit", check_generation_config(settings, config))


def _folder_of_weights(checkpoint: str, options: Mapping[str, Any]) -> Path:
    """The checkpoint's folder. Of a repository of the Hub the one in the cache that its weights were downloaded to."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    from .tensors import MAX_HEADER_BYTES

    if (folder := Path(checkpoint).expanduser()).is_dir():
        return folder
    where = {name: options[name] for name in _WHERE & options.keys()}
    with contextlib.suppress(OSError):  # what is not there, `from_pretrained` says better
        return Path(str(cached_file(checkpoint, SAFE_WEIGHTS_NAME, **where))).parent
    with contextlib.suppress(OSError):
        index = Path(str(cached_file(checkpoint, SAFE_WEIGHTS_INDEX_NAME, **where)))
        if index.stat().st_size <= MAX_HEADER_BYTES:
            get_checkpoint_shard_files(checkpoint, str(index), **where)
        folder = index.parent
    return folder


def _remedy(checkpoint: str | Path) -> str:
    if Path(checkpoint).is_dir():
        return "copy the checkpoint again"
    return "check its name and the network, and log in where it is a private repository"
