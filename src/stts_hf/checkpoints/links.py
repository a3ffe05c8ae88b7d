"""Findings about a checkpoint folder, and where its links may lead."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

INSTALLED_CODE = Path(__file__).resolve().parents[1] / "modeling"
# Of no use to whoever loads a checkpoint, and never pushed; a pickle can carry code.
LEFT_OUT = ("_*", ".*", "checkpoint-*", "__pycache__", "*.pt", "*.pth", "*.bin", "*.pkl", "*.pyc")


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


def check_links(folder: Path) -> Iterator[Finding]:
    """
    Links must lead to files: in the folder, in the Hub cache that the folder is part of, or to what equals a code file
    of this package, as in a preset folder.
    """
    dangling = dangling_links(folder)
    if dangling:
        yield Finding(
            f"{len(dangling)} links lead nowhere ({', '.join(dangling[:4])}{', ...' if len(dangling) > 4 else ''})",
            "copy the folder again with cp -rL, which copies what links lead to",
        )
    for path in _links(folder):
        if not path.exists():
            continue
        target = path.resolve()
        if not target.is_file():
            yield Finding(
                f"{path.relative_to(folder)} is a link to {target}, which is no file", "put the folder itself there"
            )
        elif not _may_lead_to(folder, target):
            yield Finding(
                f"{path.relative_to(folder)} is a link that leads out of the folder, to {target}",
                "delete it, or put the file itself there if it belongs to the checkpoint",
            )


def dangling_links(folder: Path) -> list[str]:
    """Paths in `folder` of the links that lead nowhere."""
    return [str(path.relative_to(folder)) for path in _links(folder) if not path.exists()]


def _links(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in LEFT_OUT):
            continue
        if path.is_symlink():
            yield path
        elif path.is_dir():
            yield from _links(path)


def _may_lead_to(folder: Path, target: Path) -> bool:
    folder = folder.resolve()
    if target.is_relative_to(folder):
        return True
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    if snapshots is not None and target.is_relative_to(snapshots.parent / "blobs"):
        return True
    own = INSTALLED_CODE / target.name
    return target.suffix == ".py" and own.is_file() and own.read_bytes() == target.read_bytes()
