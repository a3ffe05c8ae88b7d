"""Loading a checkpoint by this package's code. Code that lies in the checkpoint never runs."""

import contextlib
import ctypes
import glob
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stts_hf.selectors import SELECTORS

from .files import check_has_config, raise_findings, read_json, remedy_for, usable

# Of which a machine has at least one where PyTorch may find a CUDA GPU: Linux's, Jetson's, WSL's, and ROCm's.
_OF_DRIVERS = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia")
_NO_GPU = "device {} cannot be used here: PyTorch finds no CUDA GPU; use cpu or auto"
_OF_DOWNLOADS = {"token", "cache_dir", "local_files_only"}  # among the options of `from_pretrained`


def check_checkpoint(checkpoint: str, revision: str | None = None) -> str:
    """
    Returns a checkpoint's folder or Hub name. Raises `ValueError` for a path without folder, configuration or weights,
    and for a name that the Hub, which is asked once, does not have.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        check_has_config(path)
        if not any(path.glob("*.safetensors")):
            raise ValueError(f"checkpoint {checkpoint} holds no weights: copy its *.safetensors there, or pass another")
        return str(path)
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1 or path.exists():
        raise ValueError(f"checkpoint {checkpoint} is not a folder: pass a checkpoint's folder or user/name")
    check_on_hub(checkpoint, revision)
    return checkpoint


def check_on_hub(name: str, revision: str | None) -> None:
    """Asks the Hub once for a repository that is not in the cache. Raises `ValueError` if there is none."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.utils import httpx

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
        return
    except (HFValidationError, RepositoryNotFoundError):
        reason = "the Hub has no such repository"
    except OfflineModeIsEnabled:
        reason = "it is not in the cache, and the Hub is not asked (HF_HUB_OFFLINE)"
    except httpx.TransportError as error:
        reason = f"the Hub cannot be reached ({' '.join(str(error).split())})"
    except Exception:  # of a file, a revision or rights: who loads it says so
        return
    raise ValueError(f"checkpoint {name} is not a folder, and {reason}: pass a checkpoint's folder or user/name")


def check_device(name: str) -> None:
    """Raises `ValueError` for a CUDA device on a machine that surely has none. Does not load PyTorch."""
    if not name.startswith("cuda"):
        return
    has_driver = sys.platform != "linux" or any(map(glob.glob, _OF_DRIVERS))
    with contextlib.suppress(OSError):
        has_driver = has_driver or bool(ctypes.CDLL("libcuda.so.1"))
    if "+cpu" in version("torch") or not has_driver:
        raise ValueError(_NO_GPU.format(name))


def choose_device(name: str) -> Any:
    """Returns the `torch.device`, the fastest there is for "auto". Raises `ValueError` for one that is not there."""
    check_device(name)
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(_NO_GPU.format(name))
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name} cannot be used here: {' '.join(str(error).split())[:120]}") from None
    if device.type == "meta":
        raise ValueError("device meta cannot be used here, as it holds no numbers: choose cpu or cuda")
    return device


def load_config_and_processor(
    checkpoint: str, *, revision: str | None = None, selector: str | None = None
) -> tuple[Any, Any]:
    """Returns configuration and processor. Raises `ValueError` where they, or a scorer, cannot be loaded."""
    from .checks import check_sizes
    from .families import OWN, family_of, model_type_of

    if selector not in (None, *SELECTORS):
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
    kind = model_type_of(checkpoint, revision)
    family = family_of(kind, f"checkpoint {checkpoint}")
    if kind not in OWN and (selector is None or SELECTORS[selector].is_learned):
        raise ValueError(
            f"checkpoint {checkpoint} is a stock {family.config.family} model, which has no trained scorer: choose the "
            'selector cosine, which needs none (selector="cosine", --selector cosine), or make an STTS checkpoint of '
            "it with stts-hf convert and train that"
        )
    with usable(f"checkpoint {checkpoint} cannot be loaded: its config.json", remedy_for(checkpoint)):
        config: Any = family.config.from_pretrained(checkpoint, revision=revision or "main")
        raise_findings("it does not describe a model", check_sizes(config))
        if selector is not None:
            config.vision_config.selector = selector
    return config, load_processor(checkpoint, revision=revision, config=config, kind=kind)


def load_processor(
    checkpoint: str | Path, *, revision: str | None = None, config: Any = None, kind: object = None
) -> Any:
    """
    Returns the processor, by no code of the checkpoint. Raises `ValueError` where it cannot be loaded or used, or does
    not fit the model's `config`. kind: the `model_type` of a checkpoint whose folder was checked.
    """
    from stts_hf.auto_classes import register_auto_classes
    from stts_hf.data.encoding import empty_video
    from stts_hf.video.processors import check_frames

    from .checks import check_chat_template, check_processor, check_vocabulary
    from .families import OWN, family_of, model_type_of

    register_auto_classes()
    kind = kind or model_type_of(checkpoint, revision)
    family = family_of(kind, f"checkpoint {checkpoint}")
    parts = "config.json, tokenizer, processor or chat template"
    with usable(f"checkpoint {checkpoint} cannot be loaded: its {parts}", remedy_for(checkpoint)):
        try:  # refused, or transformers asks whether to run foreign code
            processor: Any = family.processor.from_pretrained(
                checkpoint, revision=revision or "main", trust_remote_code=False
            )
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError("a class of it is code in the checkpoint, which is never run") from error
        empty_video(processor)  # tries the settings, but for those that choose frames
        check_frames(processor.video_processor)
        if None in processor.image_token_ids:
            raise ValueError(f"the tokenizer lacks {processor.image_token}")
    found = [*check_chat_template(processor)]
    if config is not None:
        found += check_vocabulary(processor.tokenizer.get_vocab(), config, family)
        if kind in OWN:  # stock configs do not say all of it
            found += check_processor(processor, config, family)
    raise_findings(f"checkpoint {checkpoint} cannot be used", found)
    return processor


def load_model(checkpoint: str, config: Any, device: Any, *, revision: str | None = None, **options: Any) -> Any:
    """Returns the model, on `device` if given. options: of `from_pretrained`. Raises `ValueError` as `load_weights`."""
    model, new_scorer = load_weights(checkpoint, config, revision=revision, **options)
    if new_scorer and SELECTORS[config.vision_config.selector].is_learned:
        raise ValueError(
            f"checkpoint {checkpoint} lacks the weights of the scorer ({', '.join(new_scorer[:3])}, ...): choose "
            'another selector (selector="cosine", --selector cosine), or train one'
        )
    return (model if device is None else model.to(device)).eval()


def load_weights(checkpoint: str, config: Any, *, revision: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """Returns the model, and which of the scorer's weights are new. Raises `ValueError` for others that are."""
    from stts_hf.auto_classes import class_of

    from .checks import WeightComparison, check_generation_config, compare_weights, is_scorer
    from .tensors import open_safetensors

    folder = _folder_of_weights(checkpoint, revision, options)
    vars(config).pop("transformers_weights", None)  # may name other files than those that are checked
    with usable(f"checkpoint {checkpoint} cannot be loaded", remedy_for(checkpoint)):
        settings = read_json(folder / "generation_config.json")
        wrong = [*check_generation_config(settings, config)]
        found = compare_weights(config, open_safetensors(folder))
    fit = WeightComparison([name for name in found.missing if not is_scorer(name)], [], found.misshapen)
    raise_findings(f"checkpoint {checkpoint} cannot be loaded", [*wrong, *fit.findings()])
    model = class_of(config).from_pretrained(
        checkpoint, config=config, revision=revision or "main", use_safetensors=True, **options
    )
    return model, [name for name in found.missing if is_scorer(name)]


def _folder_of_weights(checkpoint: str, revision: str | None, options: Mapping[str, Any]) -> Path:
    """Returns the checkpoint's folder, in the cache for a Hub repository, whose weights are downloaded."""
    from huggingface_hub import snapshot_download

    inside = options.get("subfolder") or ""
    if (folder := Path(checkpoint).expanduser()).is_dir():
        return folder / inside
    where = {name: options[name] for name in _OF_DOWNLOADS & options.keys()}
    files = [str(Path(inside, name)) for name in ("generation_config.json", "model*.safetensors", "model*.index.json")]
    with usable(f"checkpoint {checkpoint} cannot be loaded", remedy_for(checkpoint)):
        return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=files, **where)) / inside
