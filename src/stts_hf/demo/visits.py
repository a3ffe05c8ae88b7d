"""What each browser tab has here, files and clips, which are gone when it is."""

import shutil
import tempfile
import threading
from collections.abc import Hashable
from pathlib import Path

from .answering import HeldClips


class Visits:
    """
    Files and clips of each tab, by a name that the tab chose itself: it is never part of a path. For several threads.

    clips: held for all of them. cache: Gradio's folder, where uploads are, each in a folder of its own.
    """

    def __init__(self, clips: HeldClips, cache: Path):
        self.clips, self.cache = clips, cache
        self._uploads: dict[str, set[Path]] = {}
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()

    def brings(self, owner: str, upload: str) -> None:
        """Notes a file that a tab looks at."""
        with self._lock:
            self._uploads.setdefault(owner, set()).add(Path(upload))

    def overlay(self, owner: str, key: Hashable) -> Path:
        """Where the overlay for a key goes. Its folder is there."""
        with self._lock:
            folder = self._folders.get(owner)
            if folder is None:
                self.cache.mkdir(parents=True, exist_ok=True)
                folder = self._folders[owner] = Path(tempfile.mkdtemp(prefix="overlays-", dir=self.cache))
        return folder / f"{hash(key) & (2**64 - 1):x}.mp4"

    def leave(self, owner: str) -> None:
        """Lets go what a tab has. A file that another one looks at too stays for that one."""
        self.clips.let_go(owner)
        with self._lock:
            folder = self._folders.pop(owner, None)
            unused = self._uploads.pop(owner, set()).difference(*self._uploads.values())
        gone = [path.parent for path in unused if path.parent.parent == self.cache]
        for path in [*gone, *([folder] if folder else [])]:
            shutil.rmtree(path, ignore_errors=True)
