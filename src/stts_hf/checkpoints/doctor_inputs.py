"""What the doctor checks of a folder's tokenizer, processor and chat template. No code of the folder runs."""

from collections.abc import Iterator
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from stts_hf.modeling.configuration_stts import AUTO_MAP
from stts_hf.modeling.processing_stts import _TOKENS

from .checks import check_processor as processor_problems
from .checks import check_vocabulary
from .checkup import SAVE_AGAIN, Checkup, Finding
from .original import SPECIAL_TOKENS


def check_tokenizer(checkup: Checkup) -> Iterator[Finding]:
    path = checkup.folder / "tokenizer.json"
    if not path.is_file() or not (checkup.folder / "tokenizer_config.json").is_file():
        name = path.name if not path.is_file() else "tokenizer_config.json"
        yield Finding(f"{name} is missing", "copy the tokenizer of the base model, or run stts-hf convert --base")
        return
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # the library raises nothing more precise
        yield Finding(f"tokenizer.json cannot be read ({error})", "copy it again")
        return
    if checkup.config is not None:
        yield from (Finding(problem.what, problem.remedy) for problem in check_vocabulary(vocabulary, checkup.config))
    settings = checkup.json("tokenizer_config.json")
    if not settings.get("bos_token") and not settings.get("eos_token"):
        yield Finding(
            "tokenizer_config.json names neither `bos_token` nor `eos_token`, and every prompt starts with one",
            'set both to "<|im_end|>", as in the released models',
        )
    yield from _check_tokens(checkup, vocabulary, settings)
    yield from _check_generation(checkup, vocabulary, settings.get("eos_token"))


def _check_tokens(checkup: Checkup, vocabulary: dict[str, int], settings: dict[str, Any]) -> Iterator[Finding]:
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
    logging.set_verbosity(logging.CRITICAL)  # its own warnings are no findings
    try:
        loaded = AutoTokenizer.from_pretrained(checkup.folder, trust_remote_code=False, local_files_only=True)
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


def _check_generation(checkup: Checkup, vocabulary: dict[str, int], eos_token: Any) -> Iterator[Finding]:
    eos = checkup.json("generation_config.json").get("eos_token_id")
    if eos is None:
        yield Finding(
            "generation_config.json has no `eos_token_id`, so that every answer runs to its maximum length",
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


def check_processor(checkup: Checkup) -> Iterator[Finding]:
    settings = checkup.json("processor_config.json")
    if not settings:
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
    if checkup.config is not None:
        yield from (
            Finding(problem.what, problem.remedy) for problem in processor_problems(image, video, checkup.config)
        )


def check_chat_template(checkup: Checkup) -> Iterator[Finding]:
    path = checkup.folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else None
    template = template or checkup.json("tokenizer_config.json").get("chat_template")
    if not template:
        yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
        return
    try:
        for text in [entry["template"] for entry in template] if isinstance(template, list) else [template]:
            render_jinja_template([], chat_template=text)  # compiles it, and has nothing to fill it in with
    except jinja2.TemplateError as error:
        yield Finding(f"the chat template is not valid ({error})", "copy that of the base model")
