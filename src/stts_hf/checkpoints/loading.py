"""A checkpoint for use: found, and loaded by this package's code. Code that lies in it never runs."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import dangling_links

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
    elif dangling := next(dangling_links(path), None):
        problem = f"is not whole: {dangling}"
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
    from transformers import PreTrainedConfig

    from stts_hf.auto_classes import register_auto_classes
    from stts_hf.modeling.settings_stts import SELECTORS

    from .families import OWN, STOCK

    if selector not in (None, *SELECTORS):
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
    options: dict[str, Any] = {"revision": revision or "main"}
    with _loading(checkpoint):
        kind = PreTrainedConfig.get_config_dict(checkpoint, **options)[0].get("model_type")
    family = (OWN | STOCK).get(str(kind))
    if family is None:
        raise ValueError(f"checkpoint {checkpoint} is a {kind!r} model, but must be an STTS checkpoint")
    if kind not in OWN and selector in (None, "scorer"):
        raise ValueError(
            f"checkpoint {checkpoint} is a stock {family.config.family} model, which has no trained scorer: choose the "
            'selector cosine, which needs none (selector="cosine", --selector cosine), or make an STTS checkpoint of '
            "it with stts-hf convert and train that"
        )
    register_auto_classes()  # so that the video processor is the package's, too
    with _loading(checkpoint):
        config: Any = family.config.from_pretrained(checkpoint, **options)
        # Refused, or transformers would ask whether to run the code of a tokenizer.
        processor: Any = family.processor.from_pretrained(checkpoint, trust_remote_code=False, **options)
        if selector is not None:
            config.vision_config.selector = selector
    return config, processor


def load_model(checkpoint: str, config: Any, device: Any, *, revision: str | None = None, **options: Any) -> Any:
    """
    Returns the model for use on `device`; None leaves it where it was loaded. options: of `from_pretrained`. Raises
    `ValueError` where the weights cannot be loaded, or are no safetensors.
    """
    from stts_hf.auto_classes import MODEL_CLASSES

    from .tensors import check_headers

    options |= {"config": config, "revision": revision or "main", "use_safetensors": True}
    with _loading(checkpoint):
        check_headers(_folder_of_weights(checkpoint, options))  # transformers would list every name
        model: Any = MODEL_CLASSES[type(config)].from_pretrained(checkpoint, **options)
    return (model if device is None else model.to(device)).eval()


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


@contextlib.contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, StrictDataclassError, SafetensorError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be loaded: {error}") from error
