"""Files of a checkpoint folder: JSON that is read safely, the list of files that belong to it, and checks of links."""

import contextlib
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stts_hf.errors import is_disk_full, is_out_of_memory
from stts_hf.wording import listed

INSTALLED_CODE = Path(__file__).resolve().parents[1] / "modeling"
# The files that decide what a checkpoint answers, beside weights and code.
SETTING_FILES = {
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja"),
}
WEIGHTS = r"[^/]+\.safetensors(\.index\.json)?"
# The other files of a checkpoint, by their path in its folder. Whatever else lies there is the user's.
_OTHERS = re.compile(
    rf"(?![._])({WEIGHTS}|tokenizer\.model|vocab\.txt|additional_chat_templates/[^/]+\.jinja|README\.md"
    r"|(LICENSE|NOTICE)[^/]*|[^/]+\.(py|png|jpe?g|gif|webp|svg))"
)
SECTIONS = ("image_processor", "video_processor", "text_config", "vision_config", "adapter_config")
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 1
MAX_REASON = 400  # characters of a library's own message


@dataclass(frozen=True)
class Finding:
    """A problem, its remedy, and whether the checkpoint is unusable until it is mended."""

    what: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def raise_findings(subject: str, findings: Iterable[Finding]) -> None:
    """Raises one `ValueError` that names every finding, or nothing."""
    if found := [*map(str, findings)]:
        raise ValueError(f"{subject}: {'; '.join(found)}.")


@contextlib.contextmanager
def usable(subject: str, remedy: str) -> Iterator[None]:
    """Turns a library's errors over a broken file into a `ValueError`; a shortage of memory or disk passes."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{subject} ({reason_of(error)}): {remedy}.") from error


def reason_of(error: Exception) -> str:
    """Returns an error's message on one line, shortened. Raises a shortage of memory or disk again."""
    if is_out_of_memory(error) or is_disk_full(error):
        raise error
    reason = " ".join(str(error).split()).rstrip(".")
    if not reason or isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError | RecursionError):
        reason = f"{type(error).__name__}: {reason}"
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


def fingerprint(checkpoint: Path) -> str:
    """Returns a digest of a checkpoint folder's weights, configuration, tokenizer, chat template and processor."""
    named = (path for path in checkpoint.iterdir() if decides(path.name))
    return digest_files(sorted(path for path in named if path.is_file()))  # reading a pipe or a device never ends


def digest_files(paths: Iterable[Path]) -> str:
    """Returns a digest of the names, sizes and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(os.fsencode(f"{path.name} {path.stat().st_size}\n"))
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, empty where the file is missing. Raises `ValueError` for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _check_depth(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but is {_BRIEF.repr(content)}: copy it again.")
    return content


def _check_depth(content: Any, levels: int = 100) -> None:
    """Raises `ValueError` for deeper JSON: libraries copy it level by level, and Python's stack ends at 1000 calls."""
    if not levels:
        raise ValueError("nested too deep")
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        _check_depth(part, levels - 1)


def read_section(settings: dict[str, Any], key: str, place: object) -> dict[str, Any]:
    """Returns the JSON object under a key, empty where the key is missing. Raises `ValueError` for anything else."""
    section = settings.get(key)
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"`{key}` in {place} must be a JSON object, but is {_BRIEF.repr(section)}")
    return section or {}


def check_texts(folder: Path) -> None:
    """Raises `ValueError` for a JSON file of a checkpoint, or a section of one, that is not an object."""
    for path in sorted(folder.glob("*.json")):
        if decides(path.name):
            settings = read_json(path)
            for section in SECTIONS:
                read_section(settings, section, path)
            if path.name in ("added_tokens.json", "vocab.json") and not all(
                type(one) is int for one in settings.values()
            ):
                raise ValueError(f"{path} must map tokens to ids: copy it again")


def check_folder(folder: Path) -> None:
    """Raises `ValueError` for links out of a folder, and for settings of wrong kinds."""
    files = checkpoint_files(folder)
    used = {name: path for name, path in files.items() if path.suffix != ".py" or not path.exists()}  # code never runs
    if astray := next(check_links(folder, used), None):
        raise ValueError(f"{folder} is not whole: {astray}")
    check_texts(folder)


def check_has_config(folder: Path) -> None:
    """Raises `ValueError` for a folder that is no checkpoint, whatever else lies in it."""
    if not os.path.lexists(folder / "config.json"):
        raise ValueError(
            f"checkpoint {folder} has no config.json: name a checkpoint's folder, or make one with stts-hf convert"
        )


def remedy_for(checkpoint: str | Path) -> str:
    """What to do about a checkpoint, a folder or a Hub repository, that cannot be loaded."""
    if Path(checkpoint).is_dir():
        return "copy the checkpoint again"
    return "check its name and the network, and log in where it is a private repository"


def every_file(folder: Path) -> dict[str, Path]:
    """Returns every file and link below a folder, by its path there; links are not followed."""
    return _by_name(folder, folder.rglob("*"))


def _by_name(folder: Path, paths: Iterable[Path]) -> dict[str, Path]:
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    return {name: path for name, path in named.items() if path.is_symlink() or not path.is_dir()}


def belongs(name: str) -> bool:
    """Whether a path in a folder is one of a checkpoint's files."""
    return name in SETTING_FILES or _OTHERS.fullmatch(name) is not None


def decides(name: str) -> bool:
    """Whether a file's name is that of weights or settings: of what a checkpoint's answers depend on, but for code."""
    return name in SETTING_FILES or re.fullmatch(WEIGHTS, name) is not None


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Returns the files and links that belong to a checkpoint, by their path in its folder."""
    files = _by_name(folder, [*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
    return {name: path for name, path in files.items() if belongs(name)}


def check_links(folder: Path, files: Mapping[str, Path] | None = None) -> Iterator[Finding]:
    """Yields files that are not regular, or link to other than the checkpoint's files, its Hub cache and our code."""
    files = checkpoint_files(folder) if files is None else files
    if dangling := [name for name, path in files.items() if not path.exists()]:
        yield Finding(
            f"{len(dangling)} links lead nowhere ({listed(dangling)})",
            "copy the folder again with cp -rL, which copies what links lead to",
        )
    for name, path in files.items():
        in_place = folder.resolve() / name  # elsewhere where the file, or a folder on its way, is a link
        if path.exists() and path.resolve() != in_place and not _may_lead_to(folder.resolve(), path.resolve()):
            yield Finding(
                f"{name} is a link to {path.resolve()}, which is no file of this folder",
                "delete it, or put the file itself there if it belongs to the checkpoint",
            )
        elif path.exists() and not path.is_file():
            yield Finding(f"{name} is not a regular file", "put the file itself there, or delete it")


def _may_lead_to(folder: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    snapshots = [parent for parent in folder.parents if parent.name == "snapshots"][:1]
    own = INSTALLED_CODE / target.name
    is_own_code = target.suffix == ".py" and own.is_file() and own.read_bytes() == target.read_bytes()
    if target.is_relative_to(folder):
        return belongs(target.relative_to(folder).as_posix())
    return is_own_code or any(target.is_relative_to(parent.with_name("blobs")) for parent in snapshots)
