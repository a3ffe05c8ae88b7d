"""`examine`: what is wrong with a checkpoint folder, in plain words. Runs none of its code and reads no weights."""

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.chat_template_utils import render_jinja_template

from stts_hf.modeling.configuration_stts import AUTO_MAP, STTSConfig

from .atomic_folder import stale_weights
from .checks import check_processor, check_sizes, check_vocabulary, check_weights
from .files import INSTALLED_CODE, Finding, check_links, read_json
from .layout import empty_model, saved_layout
from .settings import load_processor
from .tensors import StoredTensor, open_safetensors, weight_files

SAVE_AGAIN = "load it with the stts_hf package and save it again, or run stts-hf convert on it"
_TABLES = ("auto_map", "video_processor", "image_processor", "vision_config", "text_config", "adapter_config")


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a JSON file, empty where it is missing; raises `ValueError` where it is damaged."""
    settings = read_json(folder / name)
    parts: dict[str, Any] = {
        "": settings,
        **{f"{key}.": settings.get(key) for key in ("video_processor", "image_processor")},
    }
    for prefix, part in parts.items():
        for key in _TABLES if isinstance(part, dict) else ():
            if part.get(key) is not None and not isinstance(part[key], dict):
                raise ValueError(f"`{prefix}{key}` in {name} must be a JSON object, but is {part[key]!r}")
    return settings


def read_config(folder: Path) -> STTSConfig | None:
    """The configuration, None where it cannot be read (`configuration` says why)."""
    try:
        raw = read_settings(folder, "config.json")
        return STTSConfig.from_dict(raw) if raw.get("model_type") == STTSConfig.model_type else None
    except Exception:
        return None


def configuration(folder: Path) -> Iterator[Finding]:
    if not (folder / "config.json").is_file():
        yield Finding("config.json is missing", "name a checkpoint folder, or copy the file from where it came")
        return
    raw = read_settings(folder, "config.json")
    if raw.get("model_type") != STTSConfig.model_type:
        yield Finding(
            f"config.json is of a {raw.get('model_type')!r} model, not of an 'stts' model",
            "make an STTS checkpoint of it with stts-hf convert",
        )
        return
    try:
        STTSConfig.from_dict(raw)
    except Exception as error:  # strict configs raise errors of their own for wrong types
        yield Finding(f"config.json has a setting that cannot be: {error}", "correct it in config.json")
    card = folder / "README.md"
    if not card.is_file() or not card.read_text(encoding="utf-8").startswith("---\n"):
        state = "has no metadata" if card.is_file() else "is missing"
        yield Finding(f"README.md {state}, so that the Hub cannot tell what this is", SAVE_AGAIN, fatal=False)


def code(folder: Path) -> Iterator[Finding]:
    yield from check_links(folder)
    config, processor = read_settings(folder, "config.json"), read_settings(folder, "processor_config.json")
    video = processor.get("video_processor") or {}
    for name, reference in AUTO_MAP.items():
        file, settings = {
            "AutoProcessor": ("processor_config.json", processor),
            "AutoVideoProcessor": ("processor_config.json", video),
        }.get(name, ("config.json", config))
        found = (settings.get("auto_map") or {}).get(name)
        if settings and found != reference:
            yield Finding(f"`auto_map` in {file} has {found!r} for {name}", f'set it to "{reference}"')
    references = set(AUTO_MAP.values())
    tokenizer = read_settings(folder, "tokenizer_config.json")
    for settings in (config, processor, video, processor.get("image_processor") or {}, tokenizer):
        for names in (settings.get("auto_map") or {}).values():
            references |= {name for name in (names if isinstance(names, list) else [names]) if name is not None}
    wanted: dict[str, list[str]] = {}
    for reference in sorted(references, key=str):
        if not isinstance(reference, str) or "--" in reference or reference.count(".") != 1:
            yield Finding(f"an `auto_map` names {reference!r}, which is not in this folder", SAVE_AGAIN)
        else:
            module, name = reference.split(".")
            wanted.setdefault(module, []).append(name)
    yield from _modules(folder, wanted)
    own = {path.name: path.read_bytes() for path in INSTALLED_CODE.glob("*_stts.py")}
    files = sorted(path for path in folder.glob("*_stts.py") if path.is_file())
    if different := [path.name for path in files if own.get(path.name) != path.read_bytes()]:
        yield Finding(
            f"{len(different)} code files differ from the installed stts_hf package's ({', '.join(different)})",
            f"if that is not meant, {SAVE_AGAIN}",
            fatal=False,
        )


def _modules(folder: Path, wanted: dict[str, list[str]]) -> Iterator[Finding]:
    """Checks the modules that hold the `wanted` classes, and whatever they import."""
    origins, queue = dict.fromkeys(wanted, "an `auto_map`"), sorted(wanted)
    for module in queue:  # grows on the way
        path = folder / f"{module}.py"
        if not path.is_file():
            if not path.is_symlink():  # `check_links` has said so
                yield Finding(f"{path.name} is missing, and {origins[module]} needs it", SAVE_AGAIN)
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield Finding(f"{path.name} is not valid Python ({error})", SAVE_AGAIN)
            continue
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name in wanted.get(module, ()):
            if name not in classes:
                yield Finding(f"{path.name} defines no class {name}, which an `auto_map` names", SAVE_AGAIN)
        new = [sibling for sibling in get_relative_imports(path) if sibling not in origins]
        origins |= dict.fromkeys(new, path.name)
        queue += new


def weights(folder: Path) -> Iterator[Finding]:
    yield from _stray_files(folder)
    tensors = open_safetensors(folder)
    config = read_config(folder)
    if config is None:
        return
    if isinstance(getattr(config, "quantization_config", None), dict):
        yield Finding(
            "the weights are quantised, so their names, shapes and dtypes were not compared with config.json",
            "load the model once to be sure",
            fatal=False,
        )
        return
    yield from _dtypes(tensors, str(config.dtype).removeprefix("torch."))
    too_large = list(check_sizes(config, tensors))
    yield from too_large or check_weights(tensors, saved_layout(empty_model(config)))


def _stray_files(folder: Path) -> Iterator[Finding]:
    if (folder / "adapter_config.json").is_file():
        yield Finding(
            "adapter_config.json makes transformers load an adapter in place of this checkpoint",
            "move the adapter's files into a folder of their own",
        )
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in folder.glob(kind))
    if pickles:
        yield Finding(
            f"{', '.join(pickles)} may hold code that runs when it is loaded",
            "delete it unless you made it; only safetensors are needed",
            fatal=False,
        )
    read = [path.name for path in weight_files(folder)]
    first = SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in read else SAFE_WEIGHTS_INDEX_NAME
    if unread := stale_weights(os.listdir(folder), [*read, first]):
        yield Finding(
            f"{', '.join(unread)} is not read, since {first} is",
            "delete what is of an earlier save",
            fatal=False,
        )


def _dtypes(tensors: dict[str, StoredTensor], declared: str) -> Iterator[Finding]:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    odd = sorted(dtype for dtype in dtypes if isinstance(dtype, str))
    found = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if odd:
        yield Finding(f"some weights are {', '.join(odd)}", "convert a checkpoint that is not quantised")
    elif found != [declared]:
        yield Finding(
            f"config.json says {declared} as `dtype`, but the weights are {' and '.join(found)}",
            "correct `dtype` in config.json, or make all weights of one dtype with stts-hf convert --dtype",
            fatal=False,
        )


def tokenizer(folder: Path) -> Iterator[Finding]:
    """Tokenizer, processor and chat template: all that makes a prompt."""
    processor = load_processor(folder)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()  # without what loading adds
    if (config := read_config(folder)) is not None:
        yield from check_vocabulary(vocabulary, config)
        yield from check_processor(processor, config)
    yield from _tokenizer_class(folder, vocabulary)
    eos = read_settings(folder, "generation_config.json").get("eos_token_id")
    expected = processor.tokenizer.eos_token_id
    if expected is not None and expected not in (eos if isinstance(eos, list) else [eos]):
        endless = ", so that every answer runs to its maximum length" if eos is None else ""
        yield Finding(
            f"`eos_token_id` in generation_config.json is {eos}, but that of the tokenizer is {expected}{endless}",
            f"set it to {expected}",
            fatal=eos is not None,
        )
    templates = processor.chat_template
    if not templates:
        yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
    try:
        for text in templates.values() if isinstance(templates, dict) else [templates or ""]:
            render_jinja_template([], chat_template=text)  # compiles it, and has nothing to fill it in with
    except jinja2.TemplateError as error:
        yield Finding(f"the chat template is not valid ({error})", "copy that of the base model")


def _tokenizer_class(folder: Path, vocabulary: dict[str, int]) -> Iterator[Finding]:
    settings = read_settings(folder, "tokenizer_config.json")
    if (settings.get("auto_map") or {}).get("AutoTokenizer"):
        return
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its own warnings are no findings
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        odd = sorted(loaded.get_vocab().items() ^ vocabulary.items())
        problem = f"it differs from tokenizer.json in {', '.join(token for token, _ in odd[:3])}" if odd else None
    except Exception as error:  # every tokenizer class has errors of its own
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    finally:
        logging.set_verbosity(verbosity)
    if problem:
        yield Finding(
            f"the tokenizer cannot be loaded as a {settings.get('tokenizer_class')} ({problem})",
            'copy tokenizer_config.json of the base model, or set `tokenizer_class` in it to "TokenizersBackend"',
        )


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (configuration, code, weights, tokenizer)


def examine(folder: str | Path) -> dict[str, list[Finding]]:
    """
    Returns the findings of every check by its name, in order; an empty list where all is well.

    Raises `ValueError` where `folder` is no folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`folder` {folder} is not a folder: name that of a checkpoint.")
    findings: dict[str, list[Finding]] = {check.__name__: [] for check in CHECKS}
    for check in CHECKS:
        found = findings[check.__name__]
        try:
            found.extend(check(folder))
        except (ValueError, OSError) as error:
            found.append(Finding(str(error).rstrip("."), "then run stts-hf doctor again"))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:  # JSON that nobody writes
            found.append(Finding(f"the {check.__name__} has a setting of a wrong kind ({error})", SAVE_AGAIN))
    return findings
