"""What lies in a checkpoint folder: its JSON files, which files belong to it, and where its links may lead."""

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

INSTALLED_CODE = Path(__file__).resolve().parents[1] / "modeling"
# Of no use to whoever loads a checkpoint, and never pushed; a pickle can carry code.
LEFT_OUT = ("_*", ".*", "checkpoint-*", "__pycache__", "*.pt", "*.pth", "*.bin", "*.pkl", "*.pyc")
# Whatever decides what a checkpoint answers, but for its code.
DECIDING = (
    r"((generation_|.*processor_)?config|tokenizer.*|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|chat_template\..*|.*\.safetensors(\.index\.json)?"
)
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 1
MAX_DEPTH = 100  # copying settings goes down level by level, and Python's stack ends at 1000 calls


@dataclass(frozen=True)
class Finding:
    """Something wrong: what, how to mend it, and whether the checkpoint cannot be used until then."""

    what: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def raise_findings(subject: str, findings: Iterable[Finding]) -> None:
    """Raises one `ValueError` that names every finding, or nothing."""
    listed = list(findings)
    if listed:
        raise ValueError(f"{subject}: {'; '.join(map(str, listed))}.")


def fingerprint(checkpoint: Path) -> str:
    """Of a checkpoint folder's weights, configuration, tokenizer, chat template and processor."""
    return digest_files(sorted(path for path in checkpoint.iterdir() if re.fullmatch(DECIDING, path.name)))


def digest_files(paths: Iterable[Path]) -> str:
    """Of names, sizes and contents."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, empty where the file is missing. Raises `ValueError` for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        content = None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if content is None or _is_deep(content):
        raise ValueError(f"{path} is nested deeper than the files of a checkpoint are: copy it again.")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but is {_BRIEF.repr(content)}: copy it again.")
    return content


def read_section(settings: dict[str, Any], key: str, place: object) -> dict[str, Any]:
    """The JSON object under a key, empty where there is none; raises `ValueError` for anything else."""
    section = settings.get(key)
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"`{key}` in {place} must be a JSON object, but is {_BRIEF.repr(section)}")
    return section or {}


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(MAX_DEPTH):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [value for part in parts for value in (part.values() if isinstance(part, dict) else part)]
    return bool(level)


def checkpoint_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns the files and links that belong to a checkpoint, by their path in it, and the names of what does not."""
    files: dict[str, Path] = {}
    left_out = []
    for entry in sorted(folder.iterdir()):
        if any(fnmatch(entry.name, pattern) for pattern in LEFT_OUT):
            left_out.append(entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            below, skipped = checkpoint_files(entry)
            files |= {f"{entry.name}/{name}": path for name, path in below.items()}
            left_out += [f"{entry.name}/{name}" for name in skipped]
        else:
            files[entry.name] = entry
    return files, left_out


def dangling_links(folder: Path) -> Iterator[Finding]:
    """Names the links in a folder that lead nowhere."""
    dangling = [name for name, path in checkpoint_files(folder)[0].items() if not path.exists()]
    if dangling:
        yield Finding(
            f"{len(dangling)} links lead nowhere ({', '.join(dangling[:4])}{', ...' if len(dangling) > 4 else ''})",
            "copy the folder again with cp -rL, which copies what links lead to",
        )


def check_links(folder: Path) -> Iterator[Finding]:
    """
    Links must lead to files: in the folder, in the Hub cache that the folder is part of, or to what equals a code file
    of this package, as in a preset folder.
    """
    yield from dangling_links(folder)
    for name, path in checkpoint_files(folder)[0].items():
        if path.is_symlink() and path.exists() and not _may_lead_to(folder.resolve(), path.resolve()):
            yield Finding(
                f"{name} is a link to {path.resolve()}, which is no file of this folder",
                "delete it, or put the file itself there if it belongs to the checkpoint",
            )


def _may_lead_to(folder: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    snapshots = [parent for parent in folder.parents if parent.name == "snapshots"][:1]
    own = INSTALLED_CODE / target.name
    is_own_code = target.suffix == ".py" and own.is_file() and own.read_bytes() == target.read_bytes()
    allowed = [folder, *(parent.with_name("blobs") for parent in snapshots)]
    return is_own_code or any(target.is_relative_to(place) for place in allowed)
