"""`examine`: what is wrong with a checkpoint folder, in plain words. Runs none of its code and reads no weights."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_imports

import stts_hf.modeling as installed
from stts_hf.modeling.configuration_stts import AUTO_MAP, STTSConfig

from .checks import check_weights as weight_problems
from .checkup import SAVE_AGAIN, Checkup, Finding
from .doctor_inputs import check_chat_template, check_processor, check_tokenizer
from .layout import empty_model, saved_layout
from .safetensors_files import INDEX_FILE, WEIGHTS_FILE, read_weight_map
from .sources import HuggingFaceSource

INSTALLED_CODE = Path(next(iter(installed.__path__)))


def check_config(checkup: Checkup) -> Iterator[Finding]:
    if not (checkup.folder / "config.json").is_file():
        yield Finding("config.json is missing", "name a checkpoint folder, or copy the file from where it came")
        return
    raw = checkup.json("config.json")
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
    auto_map = raw.get("auto_map") or {}
    for name, reference in AUTO_MAP.items():
        if auto_map.get(name) != reference:
            yield Finding(
                f"`auto_map` in config.json has {auto_map.get(name)!r} for {name}", f'set it to "{reference}"'
            )


def check_code(checkup: Checkup) -> Iterator[Finding]:
    references = set(AUTO_MAP.values())
    processor = checkup.json("processor_config.json")
    for settings in (
        processor,
        processor.get("video_processor") or {},
        processor.get("image_processor") or {},
        checkup.json("tokenizer_config.json"),
        checkup.json("config.json"),
    ):
        for reference in (settings.get("auto_map") or {}).values():
            names = reference if isinstance(reference, list) else [reference]
            for name in names:
                if name is not None and not isinstance(name, str):
                    yield Finding(f"an `auto_map` names {name!r}, which is no class", SAVE_AGAIN)
            references |= {name for name in names if name and isinstance(name, str)}
    wanted: dict[str, list[str]] = {}
    for reference in sorted(references):
        if "--" in reference or reference.count(".") != 1:
            yield Finding(f"an `auto_map` names {reference!r}, which is not in this folder", SAVE_AGAIN)
        else:
            module, name = reference.split(".")
            wanted.setdefault(module, []).append(name)
    seen: set[str] = set()
    queue = [(module, "an `auto_map`") for module in sorted(wanted)]
    while queue:
        module, origin = queue.pop(0)
        if module in seen:
            continue
        seen.add(module)
        path = checkup.folder / f"{module}.py"
        if not path.is_file():
            state = "is a link that leads nowhere" if path.is_symlink() else "is missing"
            yield Finding(f"{path.name} {state}, and {origin} needs it", SAVE_AGAIN)
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            yield Finding(f"{path.name} is not valid Python ({error})", SAVE_AGAIN)
            continue
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name in wanted.get(module, ()):
            if name not in classes:
                yield Finding(f"{path.name} defines no class {name}, which an `auto_map` names", SAVE_AGAIN)
        queue += [(sibling, path.name) for sibling in get_relative_imports(path)]


def check_code_version(checkup: Checkup) -> Iterator[Finding]:
    different = []
    for path in sorted(checkup.folder.glob("*_stts.py")):
        own = INSTALLED_CODE / path.name
        if path.is_file() and (not own.is_file() or own.read_bytes() != path.read_bytes()):
            different.append(path.name)
    if different:
        yield Finding(
            f"{len(different)} code files differ from the installed stts_hf package's ({', '.join(different)})",
            f"if that is not meant, {SAVE_AGAIN}",
            fatal=False,
        )


def check_weights(checkup: Checkup) -> Iterator[Finding]:
    try:
        source = HuggingFaceSource(checkup.folder)
    except (ValueError, OSError) as error:
        yield Finding(str(error).rstrip("."), "then run stts-hf doctor again")
        return
    if checkup.config is None:
        return
    if checkup.is_quantised:
        yield Finding(
            "the weights are quantised, so their names, shapes and dtypes were not compared with config.json",
            "load the model once to be sure",
            fatal=False,
        )
    elif problems := weight_problems(source, saved_layout(empty_model(checkup.config))):
        only_scorer = not problems.unexpected and not problems.wrong_shapes
        only_scorer &= all(".scorer." in name for name in problems.missing)
        remedy = "give it a new scorer with stts-hf convert" if only_scorer else "copy or convert the weights again"
        yield Finding(f"the weights are not those that config.json describes: {problems}", remedy)
    if (checkup.folder / "adapter_config.json").is_file():
        yield Finding(
            "adapter_config.json makes transformers load an adapter in place of this checkpoint",
            "move the adapter's files into a folder of their own",
        )
    yield from _check_files(checkup)


def _check_files(checkup: Checkup) -> Iterator[Finding]:
    single, index = (checkup.folder / name for name in (WEIGHTS_FILE, INDEX_FILE))
    shards = {path.name for path in checkup.folder.glob("model-*-of-*.safetensors")}
    named = set(read_weight_map(index).values()) if index.is_file() and not single.is_file() else set()
    if single.is_file() and (index.is_file() or shards):
        yield Finding(
            f"{WEIGHTS_FILE} is read, and the shards beside it are not",
            f"delete {INDEX_FILE} and the shards, or {WEIGHTS_FILE} if it is the older",
            fatal=False,
        )
    elif shards - named:
        yield Finding(f"{INDEX_FILE} does not name {', '.join(sorted(shards - named))}", "delete them", fatal=False)
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in checkup.folder.glob(kind))
    if pickles:
        yield Finding(
            f"{', '.join(pickles)} may hold code that runs when it is loaded",
            "delete it unless you made it; only safetensors are needed",
            fatal=False,
        )


def check_dtypes(checkup: Checkup) -> Iterator[Finding]:
    if checkup.weights is None or checkup.is_quantised:
        return
    found = {str(dtype).removeprefix("torch.") for dtype in checkup.weights.dtypes.values()}
    odd = sorted(found - {"float32", "bfloat16", "float16"})
    if odd:
        yield Finding(f"some weights are {', '.join(odd)}", "convert a checkpoint that is not quantised")
    elif len(found) > 1:
        yield Finding(
            f"the weights are of several dtypes ({', '.join(sorted(found))}), and loading makes them one",
            "convert it with stts-hf convert --dtype",
            fatal=False,
        )
    declared = str(checkup.json("config.json").get("dtype") or "").removeprefix("torch.")
    if len(found) == 1 and declared not in found:
        yield Finding(
            f"config.json says {declared or 'nothing'} as `dtype`, but the weights are {found.pop()}",
            "correct `dtype` in config.json, or the model is loaded in another dtype than it was saved in",
            fatal=False,
        )


def check_card(checkup: Checkup) -> Iterator[Finding]:
    card = checkup.folder / "README.md"
    if not card.is_file() or not card.read_text(encoding="utf-8").startswith("---\n"):
        state = "has no metadata" if card.is_file() else "is missing"
        yield Finding(f"README.md {state}, so that the Hub cannot tell what this is", SAVE_AGAIN, fatal=False)


CHECKS: dict[str, Callable[[Checkup], Iterator[Finding]]] = {
    "configuration": check_config,
    "code": check_code,
    "code version": check_code_version,
    "weights": check_weights,
    "dtypes": check_dtypes,
    "tokenizer": check_tokenizer,
    "processor": check_processor,
    "chat template": check_chat_template,
    "model card": check_card,
}


def examine(folder: str | Path) -> dict[str, list[Finding]]:
    """
    Returns the findings of every check by its name, in order; an empty list where all is well.

    Raises `ValueError` where `folder` is no folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`folder` {folder} is not a folder: name that of a checkpoint.")
    checkup = Checkup(folder)
    findings: dict[str, list[Finding]] = {name: [] for name in CHECKS}
    for name, check in CHECKS.items():
        try:
            findings[name].extend(check(checkup))
        except (ValueError, OSError) as error:
            findings[name].append(Finding(str(error).rstrip("."), "copy the file again"))
        except (TypeError, AttributeError, KeyError) as error:  # JSON whose values are of kinds nobody writes
            findings[name].append(
                Finding(f"the {name} cannot be checked, since a setting is of a wrong kind ({error})", SAVE_AGAIN)
            )
    return findings
