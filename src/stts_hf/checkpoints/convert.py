"""`convert_checkpoint`: a stock model's folder or an original training checkpoint becomes an STTS checkpoint folder."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards

from stts_hf.model_parts import SCORER, VISION_TOWER, module_of, modules_of
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.settings_stts import PruningConfig
from stts_hf.shortages import is_disk_full, is_forbidden

from .atomic_folder import atomic_folder, check_destination
from .card import inherited_metadata, write_model_card
from .checks import (
    WeightComparison,
    check_chat_template,
    check_generation_config,
    check_processor,
    check_sizes,
    check_vocabulary,
    compare_weights,
    empty_model,
    is_scorer,
)
from .families import OWN, family_of
from .files import Finding, check_folder, raise_findings, read_json, usable
from .original_weights import is_original, open_original
from .settings import config_of_hugging_face, config_of_original, generation_config_of, load_processor, override
from .tensors import StoredTensor, in_memory, main_dtype, open_safetensors, write_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SETTING_FILES = ["*.json", "*.jinja", "*.txt", "README.md"]


@dataclass(frozen=True)
class Conversion:
    """
    The new folder, the bytes and dtype of its weights, whether its scorer is a trained one, its settings, and `notes`:
    sentences the user should know.
    """

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
    pruning_ratio: float | None = None,
    selector: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    seed: int = 0,
) -> Conversion:
    """Writes an STTS checkpoint folder that stock transformers loads with `trust_remote_code=True`.

    Tensors are read and written file by file. `destination` appears whole or not at all.

    Args:
        source: a Molmo2, dense Qwen3-VL or STTS folder or Hub repository, or the folder of an original training
            checkpoint of STTS on Molmo2.
        base: stock folder or repository of the same kind, for tokenizer, processor and chat template; an original
            training checkpoint has none and needs it.
        revision: branch, tag or commit of `source`, if it is a repository.
        packing, pruning_ratio, selector: in place of the source's.
        dtype: "float32", "bfloat16" or "float16"; by default what most of the source's weights are.
        max_shard_size: most bytes of one file of weights, and about what conversion takes of memory.
        overwrite: replace a checkpoint that is at `destination`; it stays until the new one is complete.
        seed: of the new scorer's weights, where the source has no scorer.

    Raises `ValueError`, before anything is written, where source, base or settings do not fit, and for a full disk.
    """
    target = Path(destination).expanduser().resolve()
    origins = {"source": Path(source).expanduser(), "base": Path(base or source).expanduser()}
    check_destination(target, overwrite, {what: folder for what, folder in origins.items() if folder.is_dir()})
    check_options(origins["source"], revision, dtype, max_shard_size, seed)
    source_folder = find_folder(source, "source", revision, ["*.safetensors"])
    base_folder = source_folder if base is None else find_folder(base, "base")
    given = {"packing": packing, "pruning_ratio": pruning_ratio, "selector": selector}
    found = read_source(source_folder, base_folder, {name: value for name, value in given.items() if value is not None})
    needs_scorer = leave_out_unused(found)
    model = empty_model(found.config).to(DTYPES[dtype] if dtype else main_dtype(found.tensors))
    model.generation_config = generation_config_of(base_folder, found.processor.tokenizer)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in found.tensors.values()})
    with destination_errors(target), atomic_folder(target, overwrite=overwrite) as folder:
        new_scorer = new_scorer_weights(model, seed) if needs_scorer else {}
        tensors = found.tensors | write_settings(model, found.processor, folder, new_scorer)
        trained = any(name.endswith(".score_layer.weight") and tensors[name].read().any() for name in tensors)
        num_bytes = write_safetensors(folder, tensors, model.dtype, max_shard_size)
        write_model_card(
            folder,
            base_model=next((str(origin) for origin in origins.values() if not origin.is_dir()), None),
            license=None,  # none is claimed where none is known
            scorer_trained=trained,
            metadata=inherited_metadata(source_folder, base_folder),
        )
        check_destination(target, overwrite)  # another process may have come first
    new_dtype, notes = str(model.dtype).removeprefix("torch."), []
    if len(dtypes) > 1:
        notes.append(f"The source's weights are {' and '.join(dtypes)}; all are {new_dtype} now.")
    if not trained and found.config.vision_config.selector == "scorer":
        remedy = "train it, or convert with --selector cosine, which needs no training."
        notes.append(f"The scorer is untrained, so what it drops means nothing: {remedy}")
    return Conversion(target, num_bytes, new_dtype, trained, found.config, notes)


@dataclass
class Source:
    """The parts of a source; `declared_layers` of the ViT may be more than the model has."""

    folder: Path
    config: PruningConfig
    processor: Any
    tensors: dict[str, StoredTensor]
    declared_layers: int


def read_source(folder: Path, base: Path, overrides: Mapping[str, Any]) -> Source:
    """Raises `ValueError` where settings, tokenizer or processor cannot be used or do not fit each other."""
    original, path = is_original(folder), folder / "config.json"
    family = OWN[STTSConfig.model_type] if original else family_of(read_json(path).get("model_type"), path)
    processor = load_processor(base, family)
    read_config = config_of_original if original else config_of_hugging_face
    config, declared_layers = read_config(folder, family, processor)
    tensors = open_original(folder) if original else open_safetensors(folder)
    raise_findings(f"The configuration of {folder} cannot be used", check_sizes(config, tensors))
    override(config, processor, overrides)
    generation_config = read_json(base / "generation_config.json")
    unusable = [*check_chat_template(processor), *check_generation_config(generation_config, config)]
    raise_findings(f"{base} cannot be used", unusable)
    vocabulary = processor.tokenizer.get_vocab()
    unfit = [*check_vocabulary(vocabulary, config, family), *check_processor(processor, config, family)]
    raise_findings(f"Tokenizer or processor of {base} do not fit {folder}", unfit)
    return Source(folder, config, processor, tensors, declared_layers)


def leave_out_unused(source: Source) -> bool:
    """
    Leaves out ViT layers that the model does not have and second copies of tied weights. Returns whether the source has
    no scorer. Raises `ValueError` where the weights are not the model's.
    """
    layers = range(source.config.vision_config.num_hidden_layers, source.declared_layers)
    unused = re.compile(rf"(resblocks|vision_tower\.layers)\.({'|'.join(map(str, layers))})\.")
    for name in [*filter(unused.search, source.tensors)]:
        del source.tensors[name]
    with usable(f"{source.folder} cannot be converted", "mend the source"):
        found = compare_weights(source.config, source.tensors)
    needs_scorer = not any(map(is_scorer, source.tensors))
    missing = [name for name in found.missing if not (needs_scorer and is_scorer(name))]
    findings = list(WeightComparison(missing, found.unexpected, found.misshapen).findings())
    for copy, kept in empty_model(source.config).all_tied_weights_keys.items():
        twin = source.tensors.pop(copy, None) if kept in source.tensors else None
        if twin is not None and not torch.equal(twin.read(), source.tensors[kept].read()):
            what = f"`tie_word_embeddings` is True, but {copy} is another tensor than {kept}"
            findings.append(Finding(what, "set it to false in config.json, or copy the weights again"))
    raise_findings(f"{source.folder} cannot be converted", findings)
    return needs_scorer


@contextlib.contextmanager
def destination_errors(target: Path) -> Iterator[None]:
    """Turns a full disk and missing rights into `ValueError` with a remedy."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            problem = "the disk is full or a limit on file sizes was reached"
            remedy = "Make room, pass --dtype bfloat16, or lower --max-shard-size for a limit."
        elif is_forbidden(error):
            problem, remedy = "it cannot be written", "Allow it, or name another folder."
        else:
            raise
        raise ValueError(f"`destination` {target}: {problem} ({error}). Nothing was changed there. {remedy}") from error


def check_options(source: Path, revision: str | None, dtype: str | None, max_shard_size: int | str, seed: int) -> None:
    """Raises `ValueError` for options of `convert_checkpoint` out of range."""
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
    subject = f"`{what}` {name} is no folder here, and could not be downloaded as a repository"
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
    """
    Writes everything but weights and card, as `save_pretrained` of model and processor does. Returns `weights` under
    their names in files.
    """
    processor.save_pretrained(folder)
    model.save_pretrained(folder, state_dict=dict(weights))  # which empties it
    renamed = {name: in_memory(tensor.read()) for name, tensor in open_safetensors(folder).items()} if weights else {}
    for path in [*folder.glob("*.safetensors*")]:
        path.unlink()
    return renamed
