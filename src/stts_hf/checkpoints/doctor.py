"""Finds what is wrong with a checkpoint folder; runs none of its code and reads no weights."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import Tokenizer
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stts_hf.modeling.settings_stts import PruningConfig

from .atomic_folder import stale_weights
from .checks import check_generation_config, check_processor, check_vocabulary, compare_weights
from .families import own_family
from .files import INSTALLED_CODE, Finding, check_links, check_texts, read_json, read_section, reason_of, usable
from .loading import load_processor
from .tensors import open_safetensors, weight_files

SAVE_AGAIN = "load it with the stts_hf package and save it again, or run stts-hf convert on it"


def configuration(folder: Path) -> Iterator[Finding]:
    check_texts(folder)
    config = _read_config(folder)
    yield from check_generation_config(read_json(folder / "generation_config.json"), config)
    card = folder / "README.md"
    with usable("README.md is no text", SAVE_AGAIN):
        has_metadata = card.is_file() and card.read_text(encoding="utf-8").startswith("---\n")
    if not has_metadata:
        state = "has no metadata" if card.is_file() else "is missing"
        yield Finding(f"README.md {state}, so that the Hub cannot tell what this is", SAVE_AGAIN, fatal=False)


def code(folder: Path) -> Iterator[Finding]:
    yield from check_links(folder)
    auto_map = _read_config(folder).auto_classes
    processor = read_json(folder / "processor_config.json")
    video = read_section(processor, "video_processor", "processor_config.json")
    needed = {
        "config.json": (read_json(folder / "config.json"), auto_map.keys()),
        "processor_config.json": (processor, auto_map.keys() & {"AutoProcessor"}),
        "the video_processor of processor_config.json": (video, auto_map.keys() & {"AutoVideoProcessor"}),
        "tokenizer_config.json": (read_json(folder / "tokenizer_config.json"), ()),
    }
    for place, (settings, names) in needed.items():
        found = read_section(settings, "auto_map", place)
        for name in sorted({*found, *names} if settings else ()):
            if found.get(name) != auto_map.get(name):
                remedy = f'set it to "{auto_map[name]}"' if name in auto_map else "delete it"
                yield Finding(f"`auto_map` in {place} has {found.get(name)!r} for {name}", remedy)
    for module, needed_by in needed_modules(folder, auto_map).items():
        path = folder / f"{module}.py"
        if not path.is_file() and not path.is_symlink():  # of links `check_links` has said so
            yield Finding(f"{path.name} is missing, and {needed_by} needs it", SAVE_AGAIN)
    own = {path.name: path.read_bytes() for path in INSTALLED_CODE.glob("*_stts*.py")}
    files = sorted(path for path in folder.glob("*_stts*.py") if path.is_file())
    if different := [path.name for path in files if own.get(path.name) != path.read_bytes()]:
        yield Finding(
            f"{len(different)} code files differ from the installed stts_hf package's ({', '.join(different)})",
            f"if that is not meant, {SAVE_AGAIN}",
            fatal=False,
        )


def needed_modules(folder: Path, auto_map: Mapping[str, str]) -> dict[str, str]:
    """Returns the modules of an `auto_map`'s classes and those they import, missing ones too, and who needs each."""
    needed_by = dict.fromkeys(sorted({reference.split(".")[0] for reference in auto_map.values()}), "an `auto_map`")
    queue = list(needed_by)
    for module in queue:  # grows on the way
        path = folder / f"{module}.py"
        with usable(f"{path.name} is no text", SAVE_AGAIN):
            new = [name for name in get_relative_imports(path) if name not in needed_by] if path.is_file() else []
        needed_by |= dict.fromkeys(new, path.name)
        queue += new
    return needed_by


def weights(folder: Path) -> Iterator[Finding]:
    if (folder / "adapter_config.json").is_file():
        yield Finding(
            "adapter_config.json makes transformers load an adapter in place of this checkpoint",
            "move the adapter's files into a folder of their own",
        )
    read = [path.name for path in weight_files(folder)]
    first = SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in read else SAFE_WEIGHTS_INDEX_NAME
    if unread := stale_weights(os.listdir(folder), [*read, first]):
        yield Finding(f"{', '.join(unread)} is not read, since {first} is", "delete what is older", fatal=False)
    config = _read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        what = "the weights are quantised, so their names and shapes were not compared with config.json"
        yield Finding(what, "load the model once to be sure", fatal=False)
    yield from compare_weights(config, open_safetensors(folder)).findings()


def tokenizer(folder: Path) -> Iterator[Finding]:
    """Checks tokenizer, processor and chat template."""
    for name in ("tokenizer.json", "processor_config.json"):
        if not (folder / name).is_file():
            yield Finding(f"{name} is missing", "copy that of the base model")
            return
    config = _read_config(folder)
    family = own_family(folder)
    processor = load_processor(folder, kind=family.config.model_type)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    yield from check_vocabulary(vocabulary, config, family)
    yield from check_processor(processor, config, family)
    if odd := sorted(processor.tokenizer.get_vocab().items() ^ vocabulary.items()):  # which loading adds
        names = ", ".join(token for token, _ in odd[:3])
        yield Finding(f"tokenizer_config.json names tokens that tokenizer.json lacks ({names})", "correct it")
    eos = read_json(folder / "generation_config.json").get("eos_token_id")
    expected = processor.tokenizer.eos_token_id
    if expected is not None and expected not in (eos if isinstance(eos, list) else [eos]):
        endless = ", so that every answer runs to its maximum length" if eos is None else ""
        yield Finding(
            f"`eos_token_id` in generation_config.json is {eos}, but that of the tokenizer is {expected}{endless}",
            f"set it to {expected}",
            fatal=eos is not None,
        )


def _read_config(folder: Path) -> PruningConfig:
    """Raises `ValueError` for a folder of anything but an STTS model."""
    family = own_family(folder)
    with usable("config.json has a setting that cannot be", "correct it in config.json"):
        return family.config.from_dict(read_json(folder / "config.json"))


def examine(folder: str | Path) -> dict[str, list[Finding]]:
    """Returns the findings of every check by its name. Raises `ValueError` where `folder` is no folder."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`folder` {folder} is not a folder. Name a checkpoint's folder.")
    findings: dict[str, list[Finding]] = {}
    for check in (configuration, code, weights, tokenizer):
        found = findings.setdefault(check.__name__, [])
        try:
            found.extend(check(folder))
        except Exception as error:  # of a library, over JSON that nobody writes
            found.append(Finding(reason_of(error), "mend that, and run stts-hf doctor again"))
    return findings
