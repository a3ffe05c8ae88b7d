"""`examine`: what is wrong with a checkpoint folder, in plain words. Runs none of its code and reads no weights."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import logging
from transformers.utils.chat_template_utils import _compile_jinja_template

import stts_hf.modeling as installed
from stts_hf.modeling.configuration_stts import AUTO_MAP, STTSConfig
from stts_hf.modeling.processing_stts import _TOKENS
from stts_hf.modeling.saving_stts import MODEL_GATE, PROCESSOR_GATE

from .checks import check_processor, check_vocabulary, check_weights
from .layout import empty_model, saved_layout
from .original import SPECIAL_TOKENS
from .safetensors_files import INDEX_FILE, WEIGHTS_FILE, read_weight_map
from .sources import HuggingFaceSource, read_json

INSTALLED_CODE = Path(next(iter(installed.__path__)))
_TABLES = ("auto_map", "video_processor", "image_processor", "vision_config", "text_config", "adapter_config")
SAVE_AGAIN = "load it with the stts_hf package and save it again, or run stts-hf convert on it"


@dataclass(frozen=True)
class Finding:
    """Something wrong: what, how to mend it, and whether the checkpoint cannot be used until then."""

    what: str
    remedy: str
    fatal: bool = True


class Checkup:
    """One folder and what its checks share. Every check yields `Finding`s, none where all is well."""

    def __init__(self, folder: Path):
        self.folder = folder

    def json(self, name: str) -> dict[str, Any]:
        """The contents of a JSON file, empty where it is missing; raises `ValueError` where it is damaged."""
        settings = read_json(self.folder / name) if (self.folder / name).is_file() else {}
        parts: dict[str, Any] = {
            "": settings,
            **{f"{key}.": settings.get(key) for key in ("video_processor", "image_processor")},
        }
        for prefix, part in parts.items():
            for key in _TABLES if isinstance(part, dict) else ():
                if part.get(key) is not None and not isinstance(part[key], dict):
                    raise ValueError(f"`{prefix}{key}` in {name} must be a JSON object, but is {part[key]!r}")
        return settings

    def stage_of(self, gate: str) -> Path | None:
        """What a save that was cut off left, where it took the file `gate` away and still holds the new one."""
        if (self.folder / gate).exists():
            return None
        return next((left for left in sorted(self.folder.glob("_saving-*")) if (left / gate).is_file()), None)

    @cached_property
    def config(self) -> STTSConfig | None:
        """The configuration, None where it cannot be read (`check_config` says why)."""
        try:
            raw = self.json("config.json")
            return STTSConfig.from_dict(raw) if raw.get("model_type") == STTSConfig.model_type else None
        except Exception:
            return None

    @cached_property
    def weights(self) -> HuggingFaceSource | None:
        """Names, shapes and dtypes of the weights, None where they cannot be read (`check_weights` says why)."""
        try:
            return HuggingFaceSource(self.folder)
        except (ValueError, OSError):
            return None

    def check_config(self) -> Iterator[Finding]:
        if not (self.folder / "config.json").is_file():
            if self.stage_of(MODEL_GATE):  # `check_card` says what to do
                return
            yield Finding("config.json is missing", "name a checkpoint folder, or copy the file from where it came")
            return
        raw = self.json("config.json")
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

    def check_code(self) -> Iterator[Finding]:
        references = set(AUTO_MAP.values())
        processor = self.json("processor_config.json")
        for settings in (
            processor,
            processor.get("video_processor") or {},
            processor.get("image_processor") or {},
            self.json("tokenizer_config.json"),
            self.json("config.json"),
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
            path = self.folder / f"{module}.py"
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

    def check_code_version(self) -> Iterator[Finding]:
        different = []
        for path in sorted(self.folder.glob("*_stts.py")):
            own = INSTALLED_CODE / path.name
            if path.is_file() and (not own.is_file() or own.read_bytes() != path.read_bytes()):
                different.append(path.name)
        if different:
            yield Finding(
                f"{len(different)} code files differ from the installed stts_hf package's ({', '.join(different)})",
                f"if that is not meant, {SAVE_AGAIN}",
                fatal=False,
            )

    def check_weights(self) -> Iterator[Finding]:
        try:
            source = HuggingFaceSource(self.folder)
        except (ValueError, OSError) as error:
            yield Finding(str(error).rstrip("."), "then run stts-hf doctor again")
            return
        if self.config is None:
            return
        problems = check_weights(source, saved_layout(empty_model(self.config)))
        if problems:
            only_scorer = not problems.unexpected and not problems.wrong_shapes
            only_scorer &= all(".scorer." in name for name in problems.missing)
            remedy = "give it a new scorer with stts-hf convert" if only_scorer else "copy or convert the weights again"
            yield Finding(f"the weights are not those that config.json describes: {problems}", remedy)
        if (self.folder / "adapter_config.json").is_file():
            yield Finding(
                "adapter_config.json makes transformers load an adapter in place of this checkpoint",
                "move the adapter's files into a folder of their own",
            )
        yield from self._check_files()

    def _check_files(self) -> Iterator[Finding]:
        single, index = (self.folder / name for name in (WEIGHTS_FILE, INDEX_FILE))
        shards = {path.name for path in self.folder.glob("model-*-of-*.safetensors")}
        named = set(read_weight_map(index).values()) if index.is_file() and not single.is_file() else set()
        if single.is_file() and (index.is_file() or shards):
            yield Finding(
                f"{WEIGHTS_FILE} is read, and the shards beside it are not",
                f"delete {INDEX_FILE} and the shards, or {WEIGHTS_FILE} if it is the older",
                fatal=False,
            )
        elif shards - named:
            yield Finding(f"{INDEX_FILE} does not name {', '.join(sorted(shards - named))}", "delete them", fatal=False)
        pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in self.folder.glob(kind))
        if pickles:
            yield Finding(
                f"{', '.join(pickles)} may hold code that runs when it is loaded",
                "delete it unless you made it; only safetensors are needed",
                fatal=False,
            )

    def check_dtypes(self) -> Iterator[Finding]:
        if self.weights is None:
            return
        found = {str(dtype).removeprefix("torch.") for dtype in self.weights.dtypes.values()}
        odd = sorted(found - {"float32", "bfloat16", "float16"})
        if odd:
            yield Finding(f"some weights are {', '.join(odd)}", "convert a checkpoint that is not quantised")
        elif len(found) > 1:
            yield Finding(
                f"the weights are of several dtypes ({', '.join(sorted(found))}), and loading makes them one",
                "convert it with stts-hf convert --dtype",
                fatal=False,
            )
        declared = str(self.json("config.json").get("dtype") or "").removeprefix("torch.")
        if len(found) == 1 and declared not in found:
            yield Finding(
                f"config.json says {declared or 'nothing'} as `dtype`, but the weights are {found.pop()}",
                "correct `dtype` in config.json, or the model is loaded in another dtype than it was saved in",
                fatal=False,
            )

    def check_tokenizer(self) -> Iterator[Finding]:
        path = self.folder / "tokenizer.json"
        if not path.is_file() or not (self.folder / "tokenizer_config.json").is_file():
            name = path.name if not path.is_file() else "tokenizer_config.json"
            yield Finding(f"{name} is missing", "copy the tokenizer of the base model, or run stts-hf convert --base")
            return
        try:
            vocabulary = Tokenizer.from_file(str(path)).get_vocab()
        except Exception as error:  # the library raises nothing more precise
            yield Finding(f"tokenizer.json cannot be read ({error})", "copy it again")
            return
        if self.config is not None:
            yield from (Finding(problem.what, problem.remedy) for problem in check_vocabulary(vocabulary, self.config))
        settings = self.json("tokenizer_config.json")
        if not settings.get("bos_token") and not settings.get("eos_token"):
            yield Finding(
                "tokenizer_config.json names neither `bos_token` nor `eos_token`, and every prompt starts with one",
                'set both to "<|im_end|>", as in the released models',
            )
        yield from self._check_tokens(vocabulary, settings)
        yield from self._check_generation(vocabulary, settings.get("eos_token"))

    def _check_tokens(self, vocabulary: dict[str, int], settings: dict[str, Any]) -> Iterator[Finding]:
        needed = {*_TOKENS, "<|image|>", "<|video|>"} - set(SPECIAL_TOKENS.values())
        if missing := sorted(needed - vocabulary.keys()):
            yield Finding(f"the tokenizer lacks {', '.join(missing)}", "take the tokenizer of a Molmo2 model")
        sound = True
        for key in ("bos_token", "eos_token", "pad_token"):
            token = settings.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if text is not None and (not isinstance(text, str) or text not in vocabulary):
                sound = False
                yield Finding(
                    f"`{key}` in tokenizer_config.json is {text!r}, which the tokenizer does not have",
                    "copy tokenizer_config.json of the base model",
                )
        if not sound or settings.get("auto_map", {}).get("AutoTokenizer"):
            return
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # what it says while it loads is no finding
        try:
            loaded = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)
            problem = None if loaded.get_vocab() == vocabulary else "it has other tokens than tokenizer.json"
        except Exception as error:  # every tokenizer class has errors of its own
            problem = " ".join(str(error).split())[:200] or type(error).__name__
        finally:
            logging.set_verbosity(verbosity)
        if problem:
            yield Finding(
                f"the tokenizer cannot be loaded as a {settings.get('tokenizer_class')} ({problem})",
                'set `tokenizer_class` in tokenizer_config.json to "TokenizersBackend"',
            )

    def _check_generation(self, vocabulary: dict[str, int], eos_token: Any) -> Iterator[Finding]:
        eos = self.json("generation_config.json").get("eos_token_id")
        if eos is None:
            yield Finding(
                "generation_config.json has no `eos_token_id`, so that answers go on to their longest length",
                "set it to the id of the tokenizer's `eos_token`",
                fatal=False,
            )
            return
        text = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        expected = vocabulary.get(text) if text else None
        if expected is not None and expected not in (eos if isinstance(eos, list) else [eos]):
            yield Finding(
                f"`eos_token_id` in generation_config.json is {eos}, but {text} is {expected} in the tokenizer",
                f"set it to {expected}",
            )

    def check_processor(self) -> Iterator[Finding]:
        settings = self.json("processor_config.json")
        if not settings:
            if self.stage_of(PROCESSOR_GATE):  # `check_card` says what to do
                return
            yield Finding("processor_config.json is missing", "run stts-hf convert --base with a folder that has one")
            return
        video, image = settings.get("video_processor"), settings.get("image_processor")
        if not video or not image:
            name = "video_processor" if not video else "image_processor"
            yield Finding(f"processor_config.json has no `{name}`", SAVE_AGAIN)
            return
        expected = AUTO_MAP["AutoProcessor"]
        if (settings.get("auto_map") or {}).get("AutoProcessor") != expected:
            yield Finding("processor_config.json names no AutoProcessor in `auto_map`", f'set it to "{expected}"')
        expected = AUTO_MAP["AutoVideoProcessor"]
        if (video.get("auto_map") or {}).get("AutoVideoProcessor") != expected:
            yield Finding("the `video_processor` names no AutoVideoProcessor in `auto_map`", f'set it to "{expected}"')
        if self.config is not None:
            yield from (Finding(problem.what, problem.remedy) for problem in check_processor(image, video, self.config))

    def check_chat_template(self) -> Iterator[Finding]:
        path = self.folder / "chat_template.jinja"
        template = path.read_text(encoding="utf-8") if path.is_file() else None
        template = template or self.json("tokenizer_config.json").get("chat_template")
        if not template:
            yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
            return
        try:
            for text in [entry["template"] for entry in template] if isinstance(template, list) else [template]:
                _compile_jinja_template(text)  # in a sandbox, as transformers does before it fills it in
        except jinja2.TemplateError as error:
            yield Finding(f"the chat template is not valid ({error})", "copy that of the base model")

    def check_card(self) -> Iterator[Finding]:
        card = self.folder / "README.md"
        if not card.is_file() or not card.read_text(encoding="utf-8").startswith("---\n"):
            state = "has no metadata" if card.is_file() else "is missing"
            yield Finding(f"README.md {state}, so that the Hub cannot tell what this is", SAVE_AGAIN, fatal=False)
        unfinished = {stage: gate for gate in (MODEL_GATE, PROCESSOR_GATE) if (stage := self.stage_of(gate))}
        for left in sorted(self.folder.glob("_saving-*")):
            if gate := unfinished.get(left):
                yield Finding(
                    f"a save was cut off: {gate} and perhaps more is still in {left.name}",
                    f"move the files of {left.name} up into the folder, {gate} last, then run stts-hf doctor again; "
                    "or save again",
                )
                continue
            yield Finding(f"{left.name} is left of a save that was cut off", "save again, or delete it", fatal=False)


CHECKS: dict[str, Callable[[Checkup], Iterator[Finding]]] = {
    "configuration": Checkup.check_config,
    "code": Checkup.check_code,
    "code version": Checkup.check_code_version,
    "weights": Checkup.check_weights,
    "dtypes": Checkup.check_dtypes,
    "tokenizer": Checkup.check_tokenizer,
    "processor": Checkup.check_processor,
    "chat template": Checkup.check_chat_template,
    "model card": Checkup.check_card,
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
