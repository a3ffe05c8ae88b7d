"""`convert_checkpoint`: a stock model's folder or an original training checkpoint becomes an STTS checkpoint folder."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards

from stts_hf.model_parts import SCORER, VISION_TOWER, module_of, modules_of
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.settings_stts import PruningConfig
from stts_hf.wording import listed

from .atomic_folder import atomic_folder
from .card import inherited_metadata, write_model_card
from .checks import check_generation_config, check_processor, check_vocabulary, compare_weights, empty_model, is_scorer
from .families import OWN, STOCK, family_of_checkpoint
from .files import Finding, check_folder, decides, raise_findings, read_json, usable
from .original_weights import is_original, open_original
from .settings import clean_processor, config_of_hugging_face, config_of_original, generation_config_of, override
from .tensors import StoredTensor, in_memory, main_dtype, open_safetensors, write_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What saving, downloading or converting a checkpoint leaves in a folder beside settings and weights.
_BESIDE = re.compile(
    r"additional_chat_templates|README\.md|LICENSE.*|\.gitattributes|\.cache|__pycache__"
    rf"|.*_({'|'.join(OWN | STOCK)})\.py"
)
_SETTING_FILES = ["*.json", "*.jinja", "*.txt", "README.md"]


@dataclass(frozen=True)
class Conversion:
    """The new checkpoint; `scorer_trained` says whether it has a trained one, `notes` are sentences for the user."""

    folder: Path
    num_bytes: int
    dtype: str
    scorer_trained: bool
    config: PruningConfig
    notes: list[str]


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    base: str | Path | None = None,
    revision: str | None = None,
    packing: str | None = None,
    selector: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    seed: int = 0,
    **keep: Any,
) -> Conversion:
    """Writes an STTS checkpoint folder that stock transformers loads with `trust_remote_code=True`.

    Tensors are read and written file by file. `destination` appears whole or not at all.

    Args:
        source: an STTS or stock folder or Hub repository of any backbone, or the folder of an original training
            checkpoint of STTS on Molmo2.
        base: stock folder or repository of the same kind, for tokenizer, processor and chat template; an original
            training checkpoint has none and needs it.
        revision: branch, tag or commit of `source`, if it is a repository.
        packing, selector: in place of the source's.
        dtype: "float32", "bfloat16" or "float16"; by default what most of the source's weights are.
        max_shard_size: maximum size of a file of weights, and about the memory that conversion takes.
        overwrite: replace a checkpoint that is at `destination`; it stays until the new one is complete.
        seed: of the new scorer's weights, where the source has no scorer.
        keep: `pruning_ratio`, `score_threshold`, `min_pruning_ratio`, `max_pruning_ratio` and `video_token_budget`, in
            place of the source's.

    Raises `ValueError`, before anything is written, where source, base or settings do not fit.
    """
    target = Path(destination).expanduser().resolve()
    origins = {"source": Path(source).expanduser(), "base": Path(base or source).expanduser()}
    check_destination(target, overwrite, {what: folder for what, folder in origins.items() if folder.is_dir()})
    check_options(origins["source"], revision, dtype, max_shard_size, seed)
    source_folder = find_folder(source, "source", revision, ["*.safetensors"])
    base_folder = source_folder if base is None else find_folder(base, "base")
    if unknown := keep.keys() - {*KEEP_ARGUMENTS}:
        raise TypeError(f"`convert_checkpoint` takes no {', '.join(sorted(unknown))}. Leave it out.")
    given = {"packing": packing, "selector": selector, **keep}
    overrides = {name: value for name, value in given.items() if value is not None}
    config, processor, tensors = read_source(source_folder, base_folder, overrides)
    model = empty_model(config).to(DTYPES[dtype] if dtype else main_dtype(tensors))
    outranked = KEEP_ARGUMENTS if any(name in overrides for name in KEEP_ARGUMENTS) else ()
    model.generation_config = generation_config_of(base_folder, processor.tokenizer, without=outranked)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    with atomic_folder(target, overwrite=overwrite) as folder:
        new_scorer = {} if any(map(is_scorer, tensors)) else new_scorer_weights(model, seed)
        tensors |= write_settings(model, processor, folder, new_scorer)
        trained = any(name.endswith(".score_layer.weight") and tensors[name].read().any() for name in tensors)
        num_bytes = write_safetensors(folder, tensors, model.dtype, max_shard_size)
        write_model_card(
            folder,
            base_model=next((str(origin) for origin in origins.values() if not origin.is_dir()), None),
            license=None,  # none is claimed where none is known
            scorer_trained=trained,
            metadata=inherited_metadata(source_folder, base_folder),
        )
    new_dtype, notes = str(model.dtype).removeprefix("torch."), []
    if len(dtypes) > 1:
        notes.append(f"The source's weights are {' and '.join(dtypes)}; all are {new_dtype} now.")
    if not trained and config.vision_config.selector == "scorer":
        remedy = "train it, or convert with --selector cosine, which needs no training."
        notes.append(f"The scorer is untrained, so what it drops means nothing: {remedy}")
    return Conversion(target, num_bytes, new_dtype, trained, config, notes)


def read_source(folder: Path, base: Path, overrides: Mapping[str, Any]) -> tuple[Any, Any, dict[str, StoredTensor]]:
    """Returns config, processor and the model's tensors; the scorer's may be missing. Raises `ValueError`."""
    original = is_original(folder)
    family = OWN[STTSConfig.model_type] if original else family_of_checkpoint(folder)
    processor = clean_processor(base, family)
    config = (config_of_original if original else config_of_hugging_face)(folder, family, processor)
    override(config, processor, overrides)
    unusable = check_generation_config(read_json(base / "generation_config.json"), config)
    raise_findings(f"{base} cannot be used", unusable)
    unfit = [
        *check_vocabulary(processor.tokenizer.get_vocab(), config, family),
        *check_processor(processor, config, family),
    ]
    raise_findings(f"Tokenizer or processor of {base} do not fit {folder}", unfit)
    depth, layer = config.vision_config.num_hidden_layers, re.compile(r"(resblocks|vision_tower\.layers)\.(\d+)\.")
    stored = (open_original if original else open_safetensors)(folder)
    tensors = {name: one for name, one in stored.items() if not (m := layer.search(name)) or int(m[2]) < depth}
    with usable(f"{folder} cannot be converted", "mend the source"):
        found = compare_weights(config, tensors)
    if not any(map(is_scorer, tensors)):
        found = replace(found, missing=[name for name in found.missing if not is_scorer(name)])
    findings = [*found.findings()]
    for copy, kept in empty_model(config).all_tied_weights_keys.items():
        twin = tensors.pop(copy, None) if kept in tensors else None
        if twin is not None and not torch.equal(twin.read(), tensors[kept].read()):
            what = f"`tie_word_embeddings` is True, but {copy} is another tensor than {kept}"
            findings.append(Finding(what, "set it to false in config.json, or copy the weights again"))
    raise_findings(f"{folder} cannot be converted", findings)
    return config, processor, tensors


def check_destination(destination: Path, overwrite: bool, apart_from: Mapping[str, Path] | None = None) -> None:
    """Raises `ValueError` where `destination` must not be written, or does not lie `apart_from` these folders."""
    for what, folder in (apart_from or {}).items():
        ours, other = destination.resolve(), folder.resolve()
        if ours.is_relative_to(other) or other.is_relative_to(ours):
            raise ValueError(f"`destination` {ours} and the {what} {other} must lie apart: name another folder.")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ValueError(f"`destination` {destination} is a file: name a folder that does not exist yet.")
    if not overwrite:
        raise ValueError(f"`destination` {destination} exists: pass --overwrite to replace it, or name another folder.")
    foreign = sorted(os.listdir(destination))
    with contextlib.suppress(OSError, ValueError):
        if read_json(destination / "config.json").get("model_type") in OWN | STOCK:
            foreign = [name for name in foreign if not (decides(name) or _BESIDE.fullmatch(name))]
    if foreign:
        raise ValueError(
            f"`destination` {destination} holds files of no STTS or stock checkpoint ({listed(foreign)}), and "
            "--overwrite would delete it: move that elsewhere, or name another folder."
        )


def check_options(source: Path, revision: str | None, dtype: str | None, max_shard_size: int | str, seed: int) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, but must be one of {', '.join(DTYPES)}.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` is {seed}, but must be from 0 to 2**64 - 1.")
    if revision is not None and source.is_dir():
        raise ValueError(f"`revision` is {revision!r}, but `source` {source} is a folder: leave --revision out.")
    with usable(f"`max_shard_size` is {max_shard_size!r}", "pass a size such as 5GB or 500MB"):
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)


def find_folder(name: str | Path, what: str, revision: str | None = None, weights: list[str] | None = None) -> Path:
    """Returns a local folder, or that of a downloaded Hub repository. Raises `ValueError` where there is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder)
        return folder.resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or folder.exists():
        raise ValueError(f"`{what}` {name} is no folder: pass one, or a repository as user/name.")
    subject = f"`{what}` {name} is not a folder, and could not be downloaded as a repository"
    with usable(subject, "check its name and the network, and log in where it is private"):
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=_SETTING_FILES + (weights or [])))


def new_scorer_weights(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Returns freshly initialised weights of the scorer, its last layer zero, the same for the same seed."""
    ((name, scorer),), tower = modules_of(model, SCORER).items(), module_of(model, VISION_TOWER)
    scorer = scorer.float().to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in scorer.modules():
            tower._init_weights(module)
    return {f"{name}.{last}": tensor for last, tensor in scorer.state_dict().items()}


def write_settings(
    model: Any, processor: Any, folder: Path, weights: dict[str, torch.Tensor]
) -> dict[str, StoredTensor]:
    """Writes everything but weights and card. Returns `weights` under the names that `save_pretrained` gives them."""
    processor.save_pretrained(folder)
    model.save_pretrained(folder, state_dict=dict(weights))  # which empties it
    renamed = {name: in_memory(tensor.read()) for name, tensor in open_safetensors(folder).items()} if weights else {}
    for path in [*folder.glob("*.safetensors*")]:
        path.unlink()
    return renamed
