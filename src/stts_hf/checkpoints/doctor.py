"""What is wrong with a checkpoint, in plain words; runs none of its code and reads no weights.

The first four checks compare its parts with each other, which conversion does too. `examine` does all to a folder.
"""

import ast
import contextlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from stts_hf.modeling.settings_stts import PruningConfig

from .atomic_folder import stale_weights
from .families import OWN, STOCK, Family
from .files import INSTALLED_CODE, Finding, check_links, check_texts, read_json, read_section, usable
from .layout import EMBEDDING, Group, empty_model, saved_layout
from .settings import load_processor
from .tensors import StoredTensor, main_dtype, open_safetensors, weight_files

SAVE_AGAIN = "load it with the stts_hf package and save it again, or run stts-hf convert on it"
_REQUIRED: dict[str, Collection[str]] = {  # entries of `auto_map` beside those of config.json, which has them all
    "processor_config.json": ["AutoProcessor"],
    "the video_processor of processor_config.json": ["AutoVideoProcessor"],
}


def check_sizes(config: Any, tensors: Mapping[str, StoredTensor] | None = None) -> Iterator[Finding]:
    """Compares the sizes in a model's config with 0 and those of tensors, before a model of such sizes is built."""
    largest = max((side for tensor in (tensors or {}).values() for side in tensor.shape), default=math.inf)
    for section in config.sub_configs:
        for name, value in getattr(config, section).to_dict().items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            is_depth = name in ("num_hidden_layers", "depth")
            is_side = name.endswith(("_size", "_heads", "head_dim", "num_position_embeddings"))
            limit = len(tensors) if is_depth and tensors else 4 * largest if is_side else math.inf
            if value > limit:
                yield Finding(
                    f"`{section}.{name}` is {value}, which is far more than the weights have ({len(tensors or ())} "
                    f"tensors, {largest} rows at most)",
                    "correct it in the configuration, or copy that again",
                )
            elif value < (name != "additional_vocab_size") and (is_side or is_depth):
                yield Finding(f"`{section}.{name}` is {value}", "set it to the model's, at least 1")


_WHOLE = ("num_beams", "num_return_sequences", "max_length", "max_new_tokens")
_FROM_0 = ("top_k", "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
_NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")
_FLAGS = ("do_sample", "use_cache", "early_stopping", "renormalize_logits", "remove_invalid_values")


def check_generation_config(settings: dict[str, Any], config: Any) -> Iterator[Finding]:
    """Compares the settings that every answer depends on with what they may be, and token ids with the model's."""
    where = "in generation_config.json"
    text = config.text_config
    total = text.vocab_size + (getattr(text, "additional_vocab_size", 0) or 0)

    def is_whole(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    for name, value in settings.items():
        needed = None
        if value is None:
            continue
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and value else [value]
            if not all(is_whole(one, 0) and one < total for one in ids):
                needed = f"a token id from 0 to {total - 1}"
        elif name in _WHOLE + _FROM_0 and not is_whole(value, int(name in _WHOLE)):
            needed = f"a whole number of at least {int(name in _WHOLE)}"
        elif name in _NUMBERS and (not isinstance(value, int | float) or isinstance(value, bool)):
            needed = "a number"
        elif name in _FLAGS and not isinstance(value, bool) and value != "never":
            needed = "true or false"
        if needed:
            yield Finding(f"`{name}` {where} is {value!r}", f"it must be {needed}")
            return
    with usable(f"the settings {where} do not fit each other", "correct or delete them"):
        GenerationConfig.from_dict(settings).validate()


def check_weights(
    tensors: Mapping[str, StoredTensor], layout: list[Group], declared_layers: int = 0, kept_layers: int = 0
) -> Iterator[Finding]:
    """Compares the names and shapes of tensors with the model's.

    Args:
        declared_layers: ViT layers from `kept_layers` up to this one may be there; the model has no use for them.
    """
    used: set[str] = set()
    missing, wrong_shapes = [], []
    for group in layout:
        wanted = group.names_in(tensors)
        used |= wanted.keys()
        if absent := [name for name in wanted if name not in tensors]:
            missing += absent
            continue
        wrong = {name for name, shape in wanted.items() if tensors[name].shape != shape}
        pieces = {name for name in filter(EMBEDDING.fullmatch, wanted) if tensors[name].shape[1:] == wanted[name][1:]}
        if sum(tensors[name].shape[0] - wanted[name][0] for name in pieces) == 0:
            wrong -= pieces
        wrong_shapes += [
            f"{name} {list(tensors[name].shape)} instead of {list(wanted[name])}" for name in sorted(wrong)
        ]
    unneeded = rf"(resblocks|vision_tower\.layers)\.({'|'.join(map(str, range(kept_layers, declared_layers)))})\."
    unexpected = sorted(name for name in tensors.keys() - used if not re.search(unneeded, name))
    problems = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong_shapes}
    texts = [
        f"{len(names)} tensors are {kind}: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for kind, names in problems.items()
        if names
    ]
    if texts:
        only_scorer = all(".scorer." in name for name in missing) and not unexpected and not wrong_shapes
        remedy = "give it a new scorer with stts-hf convert" if only_scorer else "copy or convert the weights again"
        yield Finding(f"the weights are not those of the configuration ({'; '.join(texts)})", remedy)


def check_vocabulary(vocabulary: Mapping[str, int], config: Any, family: Family) -> Iterator[Finding]:
    """Compares a tokenizer's token ids (text to id) with the special ids and the vocabulary size of a config."""
    text = config.text_config
    additional = getattr(text, "additional_vocab_size", 0)  # embedded alone: the LM head has no rows for them
    total, largest = text.vocab_size + additional, max(vocabulary.values(), default=0)
    if largest >= total:
        of = f" and `additional_vocab_size` {additional}" if additional else ""
        yield Finding(
            f"the tokenizer has ids up to {largest}, but the model embeds {total} tokens "
            f"(`vocab_size` {text.vocab_size}{of})",
            "take the tokenizer that the model was trained with",
        )
        return
    wrong = []
    first = text.vocab_size if additional else 0  # elsewhere the LM head has rows, so that it could be generated
    for field, token in family.special_tokens.items():
        number = getattr(config, field)
        if vocabulary.get(token, number) != number:
            wrong.append(f"{token} is {vocabulary[token]} in the tokenizer but {number} in the config's `{field}`")
        elif not first <= number < total:
            least = f"`vocab_size` {first}" if first else "0"
            wrong.append(f"`{field}` {number} must be from {least} to {total - 1}")
    if wrong:
        yield Finding(", ".join(wrong), "take the tokenizer that the model was trained with, or correct config.json")


def check_processor(processor: Any, config: Any, family: Family) -> Iterator[Finding]:
    """Compares the settings of the image and of the video processor with the vision config."""
    for name, settings in family.settings(config.vision_config).items():
        found = getattr(processor, name).to_dict()
        for key, value in settings.items():
            if found.get(key) != value:
                yield Finding(
                    f"`{key}` of the {name} is {found.get(key)}, but the vision config has {value}",
                    f"set `{key}` in processor_config.json to {value}",
                )


def check_chat_template(processor: Any) -> Iterator[Finding]:
    """Makes a prompt about a video."""
    if not processor.chat_template:
        yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
        return
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    with usable("the chat template makes no prompt about a video", "copy that of the base model"):
        processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def find_family(folder: Path) -> Family | None:
    """What the checkpoint is made of, ours or a stock one; None where it is neither (`configuration` says so)."""
    with contextlib.suppress(ValueError):
        return (OWN | STOCK).get(str(read_json(folder / "config.json").get("model_type")))
    return None


def read_config(folder: Path) -> PruningConfig | None:
    """The configuration, None where it cannot be read (`configuration` says why)."""
    try:
        raw = read_json(folder / "config.json")
        family = OWN.get(str(raw.get("model_type")))
        return family.config.from_dict(raw) if family else None
    except Exception:
        return None


def configuration(folder: Path) -> Iterator[Finding]:
    raw = read_json(folder / "config.json")
    family = OWN.get(str(raw.get("model_type")))
    if family is None:
        kinds = " or ".join(map(repr, OWN))
        what = f"is of a {raw.get('model_type')!r} model, not of an {kinds} model" if raw else "is missing"
        yield Finding(f"config.json {what}", "name a checkpoint folder, or make one with stts-hf convert")
        return
    with usable("config.json has a setting that cannot be", "correct it in config.json"):
        family.config.from_dict(raw)
    card = folder / "README.md"
    with usable("README.md is no text", SAVE_AGAIN):
        has_metadata = card.is_file() and card.read_text(encoding="utf-8").startswith("---\n")
    if not has_metadata:
        state = "has no metadata" if card.is_file() else "is missing"
        yield Finding(f"README.md {state}, so that the Hub cannot tell what this is", SAVE_AGAIN, fatal=False)


def code(folder: Path) -> Iterator[Finding]:
    yield from check_links(folder)
    if (family := find_family(folder)) is None:
        return
    auto_map = family.config.auto_classes
    processor = read_json(folder / "processor_config.json")
    parts = {name: read_json(folder / name) for name in ("config.json", "tokenizer_config.json")}
    parts["processor_config.json"] = processor
    for key in ("image_processor", "video_processor"):
        parts[f"the {key} of processor_config.json"] = read_section(processor, key, "processor_config.json")
    for place, settings in parts.items():
        found = read_section(settings, "auto_map", place)
        needed = auto_map.keys() & _REQUIRED.get(place, auto_map if place == "config.json" else ())
        for name in sorted({*found, *needed} if settings else ()):
            if found.get(name) != auto_map.get(name):
                remedy = f'set it to "{auto_map[name]}"' if name in auto_map else "delete it"
                yield Finding(f"`auto_map` in {place} has {found.get(name)!r} for {name}", remedy)
    yield from _modules(folder, auto_map)
    own = {path.name: path.read_bytes() for path in INSTALLED_CODE.glob("*_stts*.py")}
    files = sorted(path for path in folder.glob("*_stts*.py") if path.is_file())
    if different := [path.name for path in files if own.get(path.name) != path.read_bytes()]:
        yield Finding(
            f"{len(different)} code files differ from the installed stts_hf package's ({', '.join(different)})",
            f"if that is not meant, {SAVE_AGAIN}",
            fatal=False,
        )


def _modules(folder: Path, auto_map: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the modules that hold the classes of an `auto_map`, and whatever they import."""
    references = sorted({tuple(reference.split(".")) for reference in auto_map.values()})
    for module, needed_by in needed_modules(folder, auto_map).items():
        path = folder / f"{module}.py"
        if not path.is_file():
            if not path.is_symlink():  # `check_links` has said so
                yield Finding(f"{path.name} is missing, and {needed_by} needs it", SAVE_AGAIN)
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield Finding(f"{path.name} is not valid Python ({error})", SAVE_AGAIN)
            continue
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for home, name in references:
            if home == module and name not in classes:
                yield Finding(f"{path.name} defines no class {name}, which an `auto_map` names", SAVE_AGAIN)


def needed_modules(folder: Path, auto_map: Mapping[str, str]) -> dict[str, str]:
    """The modules of an `auto_map`'s classes and those that they import, there or not, and what needs each."""
    needed_by = dict.fromkeys(sorted({reference.split(".")[0] for reference in auto_map.values()}), "an `auto_map`")
    queue = list(needed_by)
    for module in queue:  # grows on the way
        path = folder / f"{module}.py"
        with contextlib.suppress(ValueError):  # no text
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
    if pickles := sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in folder.glob(kind)):
        yield Finding(
            f"{', '.join(pickles)} may hold code that runs when it is loaded",
            "delete it unless you made it; only safetensors are needed",
            fatal=False,
        )
    read = [path.name for path in weight_files(folder)]
    first = SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in read else SAFE_WEIGHTS_INDEX_NAME
    if unread := stale_weights(os.listdir(folder), [*read, first]):
        yield Finding(
            f"{', '.join(unread)} is not read, since {first} is", "delete what is of an earlier save", fatal=False
        )
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
    main_dtype(tensors)  # refuses weights of other kinds
    declared = str(config.dtype).removeprefix("torch.")
    found = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    if found != [declared]:
        yield Finding(
            f"config.json says {declared} as `dtype`, but the weights are {' and '.join(found)}",
            "correct `dtype` in config.json, or make all weights of one dtype with stts-hf convert --dtype",
            fatal=False,
        )
    wrong = list(check_sizes(config, tensors))
    if wrong:
        yield from wrong
        return
    with usable("config.json describes a model that cannot be built", "correct it in config.json"):
        model = empty_model(config)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in model.all_tied_weights_keys}
    yield from check_weights(tensors, saved_layout(model))


def tokenizer(folder: Path) -> Iterator[Finding]:
    """Tokenizer, processor and chat template: all that makes a prompt."""
    if (family := find_family(folder)) is None:
        return
    check_texts(folder)
    processor = load_processor(folder, family)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()  # without what loading adds
    if (config := read_config(folder)) is not None:
        yield from check_vocabulary(vocabulary, config, family)
        yield from check_processor(processor, config, family)
        yield from check_generation_config(read_json(folder / "generation_config.json"), config)
    eos = read_json(folder / "generation_config.json").get("eos_token_id")
    expected = processor.tokenizer.eos_token_id
    if expected is not None and expected not in (eos if isinstance(eos, list) else [eos]):
        endless = ", so that every answer runs to its maximum length" if eos is None else ""
        yield Finding(
            f"`eos_token_id` in generation_config.json is {eos}, but that of the tokenizer is {expected}{endless}",
            f"set it to {expected}",
            fatal=eos is not None,
        )
    yield from check_chat_template(processor)
    kind = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    remedy = 'copy tokenizer_config.json of the base model, or set `tokenizer_class` in it to "TokenizersBackend"'
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its own warnings are no findings
    try:
        with usable(f"the tokenizer cannot be loaded as a {kind}", remedy):
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            if odd := sorted(loaded.get_vocab().items() ^ vocabulary.items()):
                raise ValueError(f"it differs from tokenizer.json in {', '.join(token for token, _ in odd[:3])}")
    finally:
        logging.set_verbosity(verbosity)


def examine(folder: str | Path) -> dict[str, list[Finding]]:
    """
    Returns the findings of every check by its name, in order; an empty list where all is well.

    Raises `ValueError` where `folder` is no folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`folder` {folder} is not a folder: name that of a checkpoint.")
    findings: dict[str, list[Finding]] = {}
    for check in (configuration, code, weights, tokenizer):
        found = findings.setdefault(check.__name__, [])
        try:
            found.extend(check(folder))
        except (ValueError, OSError) as error:
            found.append(Finding(str(error).rstrip("."), "mend that, and run stts-hf doctor again"))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:  # JSON that nobody writes
            found.append(Finding(f"the {check.__name__} has a setting of a wrong kind ({error})", SAVE_AGAIN))
    return findings
