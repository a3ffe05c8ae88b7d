"""`convert_checkpoint`: a Molmo2 folder or an original training checkpoint becomes an STTS checkpoint folder."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from transformers.utils import logging

from stts_hf.checkpoints.card import inherited_metadata, write_model_card
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor

from .atomic_folder import atomic_folder, check_apart, check_destination
from .checks import check_processor, check_sizes, check_vocabulary
from .layout import SCORER, Group, byte_size, empty_model, saved_layout
from .links import dangling_links, raise_findings
from .safetensors_files import INDEX_FILE, WEIGHTS_FILE, write_safetensors
from .settings import (
    config_of_hugging_face,
    config_of_original,
    generation_config_of,
    load_processor,
    override,
)
from .sources import (
    HuggingFaceSource,
    MemorySource,
    OriginalSource,
    TensorSource,
    check_weights,
    is_original,
    main_dtype,
    read_rows,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE = "50GB"  # as in `save_pretrained`, so that loading and saving again writes the same files
_SETTING_FILES = ["*.json", "*.jinja", "*.txt", "README.md"]
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Conversion:
    """What was made: the folder, the bytes and dtype of its weights, whether its scorer is a trained one, its settings.

    `notes` are sentences the user should know.
    """

    folder: Path
    num_bytes: int
    dtype: str
    scorer_trained: bool
    config: STTSConfig
    notes: list[str] = field(default_factory=list)


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
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda written, total: None,
) -> Conversion:
    """Writes an STTS checkpoint folder that stock transformers loads with `trust_remote_code=True`.

    Tensors are read and written a few rows at a time. `destination` appears whole or not at all.

    Args:
        source: a Molmo2 (or STTS) folder or Hub repository, or the folder of an original training checkpoint.
        base: Molmo2 folder or repository that gives tokenizer, processor and chat template; needed for an original
            training checkpoint, which has none.
        revision: branch, tag or commit of `source`, if it is a repository.
        packing, pruning_ratio, selector: in place of the source's.
        dtype: "float32", "bfloat16" or "float16"; by default what most of the source's weights are.
        max_shard_size: most bytes of one file of weights, as in `save_pretrained`.
        overwrite: replace a checkpoint that is at `destination`; it stays until the new one is complete.
        seed: of the new scorer's weights, where the source has no scorer.
        on_progress: called with the bytes written and their total.

    Raises `ValueError`, before anything is written, where source, base or settings do not fit, and for a full disk.
    """
    target = Path(destination).expanduser().absolute()
    for what, name in (("source", source), ("base", base)):
        if name is not None and Path(name).expanduser().is_dir() and not target.is_symlink():
            check_apart(target, Path(name).expanduser(), what)
    check_destination(target, overwrite)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, but must be one of {', '.join(DTYPES)}.")
    check_options(source, revision, max_shard_size, seed)
    source_folder = find_folder(source, "source", revision, ["*.safetensors"])
    original = is_original(source_folder)
    if original and base is None:
        raise ValueError(
            f"{source_folder} is an original training checkpoint, which has no tokenizer: pass --base with a Molmo2 "
            "folder or repository that gives tokenizer, processor and chat template."
        )
    base_folder = source_folder if base is None else find_folder(base, "base")
    check_apart(target, source_folder, "source")
    check_apart(target, base_folder, "base")

    processor = load_processor(base_folder)
    if processor.chat_template is None:
        raise ValueError(f"{base_folder} has no chat template: pass --base with a Molmo2 folder that has one.")
    read_config = config_of_original if original else config_of_hugging_face
    config, declared_layers = read_config(source_folder, processor)
    tensors: TensorSource = OriginalSource(source_folder) if original else HuggingFaceSource(source_folder)
    raise_findings(f"The configuration of {source_folder} cannot be", check_sizes(config, tensors.shapes))
    override(config, processor, packing, pruning_ratio, selector)
    raise_findings(
        f"The tokenizer of {base_folder} does not fit {source_folder}",
        check_vocabulary(processor.tokenizer.get_vocab(), config),
    )
    raise_findings(
        f"The processor of {base_folder} does not fit {source_folder}",
        check_processor(processor.image_processor.to_dict(), processor.video_processor.to_dict(), config),
    )

    target_dtype = main_dtype(tensors) if dtype is None else DTYPES[dtype]
    try:
        model = empty_model(config)
        model.to(target_dtype)  # type: ignore[arg-type]  # transformers wraps the method without its `self`
    except Exception as error:  # what a setting out of range raises depends on where it is used first
        raise ValueError(
            f"{source_folder / ('config.yaml' if original else 'config.json')} describes a model that cannot be built "
            f"({type(error).__name__}: {error}): correct it, or copy it again."
        ) from error
    layout = saved_layout(model)
    problems = check_weights(tensors, layout, declared_layers, config.vision_config.num_hidden_layers)
    scorer_names = {part.name for group in layout if group.is_scorer for part in group.saved}
    new_scorer = scorer_names <= set(problems.missing)
    if new_scorer:
        problems.missing = [name for name in problems.missing if name not in scorer_names]
    if problems:
        raise ValueError(f"{source_folder} does not hold the weights of this model: {problems}.")
    scorer: TensorSource = MemorySource(new_scorer_weights(model, seed)) if new_scorer else tensors
    trained = not new_scorer and is_trained(tensors, layout)

    num_bytes = byte_size(layout, target_dtype)
    check_space(target, num_bytes)
    model.generation_config = generation_config_of(base_folder, processor.tokenizer)
    result = Conversion(target, num_bytes, str(target_dtype).removeprefix("torch."), trained, config)
    mixed = sorted({str(kind).removeprefix("torch.") for kind in tensors.dtypes.values()})
    if len(mixed) > 1:
        result.notes.append(f"The source's weights are {' and '.join(mixed)}; all are {result.dtype} now.")
    if not trained and config.vision_config.selector == "scorer":
        result.notes.append(
            "The scorer is untrained, so what it drops means nothing: train it, or convert with --selector cosine, "
            "which needs no training."
        )
    try:
        with atomic_folder(target, overwrite=overwrite) as folder:
            write_settings(model, processor, folder)
            write_weights(
                folder, model, layout, {True: scorer, False: tensors}, target_dtype, max_shard_size, on_progress
            )
            repositories = [name for name in (source, base) if name and not Path(name).expanduser().is_dir()]
            base_model = next(map(str, repositories), None)
            inherited = inherited_metadata(source_folder, base_folder)
            if base_model is None and isinstance(inherited.get("base_model"), str):
                base_model = inherited.pop("base_model")
            datasets = inherited.pop("datasets", ())
            write_model_card(
                folder,
                base_model=base_model,
                license=inherited.pop("license", None),  # none is claimed where none is known
                datasets=[datasets] if isinstance(datasets, str) else datasets,
                scorer_trained=trained,
                metadata=inherited,
            )
            check_destination(target, overwrite)  # another process may have come first
    except Exception as error:
        # The tokenizer's and the safetensors library raise errors of their own, with the number in their text.
        number = getattr(error, "errno", None) or next(map(int, re.findall(r"\(os error (\d+)\)", str(error))), None)
        if number not in _FULL_DISK:
            raise
        raise ValueError(
            f"`destination` {target}: the disk is full or a limit on file sizes was reached ({os.strerror(number)}); "
            f"nothing was left there. Make room for {num_bytes / 1e9:.1f} GB, or lower --max-shard-size for a limit."
        ) from error
    return result


def check_options(source: str | Path, revision: str | None, max_shard_size: int | str, seed: int) -> None:
    """Raises `ValueError` for options of `convert_checkpoint` that cannot be."""
    number = re.fullmatch(r"(\d+(\.\d+)?)\s*[KMGT]B", str(max_shard_size).strip().upper())
    size = max_shard_size if isinstance(max_shard_size, int) else float(number[1]) if number else 0
    if size <= 0:
        raise ValueError(
            f"`max_shard_size` is {max_shard_size!r}, but must be a size above zero with a unit, such as 5GB or 500MB."
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` is {seed}, but must be from 0 to 2**64 - 1.")
    if revision is not None and Path(source).expanduser().is_dir():
        raise ValueError(
            f"`revision` is {revision!r}, but `source` {source} is a folder, which has none: leave --revision "
            "out, or name a repository."
        )


def find_folder(name: str | Path, what: str, revision: str | None = None, weights: list[str] | None = None) -> Path:
    """Returns a local folder, or that of a downloaded Hub repository. Raises `ValueError` where there is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if dangling := [name for name in dangling_links(folder) if not name.endswith(".py")]:  # no code is needed
            raise ValueError(
                f"`{what}` {name} has links that lead nowhere ({', '.join(dangling[:4])}): copy the folder again with "
                "cp -rL, which copies what links lead to."
            )
        return folder.resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or folder.exists():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"`{what}` {name} {problem}: pass a folder, or a repository as user/name.")
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=_SETTING_FILES + (weights or [])))
    except Exception as error:  # the Hub client has errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"`{what}` {name} is no folder here, and could not be downloaded as a repository: {reason}"
        ) from error


def new_scorer_weights(model: STTSForConditionalGeneration, seed: int) -> dict[str, torch.Tensor]:
    """Returns freshly initialised weights of the scorer, its last layer zero, the same for the same seed."""
    tower = model.model.vision_tower
    scorer = tower.scorer.float().to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in scorer.modules():
            tower._init_weights(module)
    return {SCORER + name: tensor for name, tensor in scorer.state_dict().items()}


def is_trained(source: TensorSource, layout: list[Group]) -> bool:
    """Whether the scorer's last layer, which starts at zero, holds anything else."""
    for group in layout:
        if group.native[0].name == f"{SCORER}score_layer.weight":
            return any(bool(rows.any()) for rows in read_rows(source, source.parts(group), 0, group.rows))
    return False


def check_space(destination: Path, num_bytes: int) -> None:
    """Raises `ValueError` where the disk of `destination` has less room than the weights need."""
    folder = next(parent for parent in destination.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ValueError(
            f"`destination` {destination}: the disk has {free / 1e9:.1f} GB left, but the weights alone need "
            f"{num_bytes / 1e9:.1f} GB. Make room, name a folder on another disk, or pass --dtype bfloat16."
        )


def write_settings(model: STTSForConditionalGeneration, processor: STTSProcessor, folder: Path) -> None:
    """Writes everything but weights and card, as `save_pretrained` of model and processor does."""
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        processor.save_pretrained(folder)
        model.save_pretrained(folder, state_dict={})
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()
    for path in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:  # that of no weights
        path.unlink(missing_ok=True)


def write_weights(
    folder: Path,
    model: STTSForConditionalGeneration,
    layout: list[Group],
    sources: dict[bool, TensorSource],
    dtype: torch.dtype,
    max_shard_size: int | str,
    on_progress: Callable[[int, int], None],
) -> None:
    """Writes the files of weights and their index. `sources`: of the scorer's weights (True) and of all others."""
    places = {}  # saved name to its group and its rows there
    for group in layout:
        first = 0
        for part in group.saved:
            places[part.name] = (group, first, first + part.rows)
            first += part.rows

    def rows(name: str) -> Iterator[torch.Tensor]:
        group, first, last = places[name]
        source = sources[group.is_scorer]
        return read_rows(source, source.parts(group), first, last)

    shapes = {part.name: part.shape for group in layout for part in group.saved}
    # In `save_pretrained` the parts of a weight share its memory, which keeps them in one file.
    split = split_state_dict_into_shards_factory(
        {name: group for name, (group, _, _) in places.items()},
        get_storage_size=lambda group: byte_size([group], dtype),
        get_storage_id=lambda group: group,
        filename_pattern=WEIGHTS_FILE.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    written, total = 0, byte_size(layout, dtype)
    for file, names in split.filename_to_tensors.items():
        for count in write_safetensors(folder / file, {name: shapes[name] for name in names}, dtype, rows):
            written += count
            on_progress(written, total)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")
