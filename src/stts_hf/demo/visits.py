"""What each browser tab has here, files, clips and what was said, all of which is gone when it is."""

import contextlib
import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

from .held_clips import HeldClips, Progress
from .page import Turn

BROKEN_OFF = 600  # seconds without a byte


@dataclasses.dataclass(eq=False)
class Visit:
    """
    A tab, until it looks at another video, or a program, until it is done.

    Attributes:
        video: the one that is looked at, or asked about.
        chosen: whether it is in the player. Programs only ask.
        turns, measured: what was asked about it, and what the answers took.
        seen: what the model saw, as it is to be drawn.
        stopped: the answer that is being written ends.
        left: it is over, and so is all that was begun for it.
        uploads: paths of its files, and which file that was: who uploads the same one writes another in its place.
        speaking: held by who writes an answer: there is one at a time, visits of a tab before this one included.
    """

    video: str | None = None
    chosen: bool = False
    turns: list[Turn] = dataclasses.field(default_factory=list)
    measured: list[Progress] = dataclasses.field(default_factory=list)
    seen: Progress | None = None
    stopped: bool = False
    left: bool = False
    speaking: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    uploads: dict[Path, Hashable] = dataclasses.field(default_factory=dict)
    overlays: Path | None = None

    def look_at(self, video: str) -> None:
        self.video, self.seen = video, None
        self.uploads[Path(video)] = which(Path(video))
        self.turns.clear()
        self.measured.clear()


def which(path: Path) -> Hashable:
    """Tells a file from another one that was at its place before."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns


class Visits:
    """
    The visit of each tab, by a name that the tab chose itself: it is never part of a path. For several threads.

    clips: held for all of them. cache: Gradio's folder, where uploads are, each in a folder of its own. kept: a file in
    there that is nobody's.
    """

    def __init__(self, clips: HeldClips, cache: Path, kept: Path | None = None):
        self.clips, self.cache, self.kept = clips, cache, kept
        self._visits: dict[str, Visit] = {}
        self._lock = threading.Lock()

    def find(self, owner: str) -> Visit | None:
        return self._visits.get(owner)

    def choose(self, owner: str, video: str | None) -> bool:
        """
        Begins another visit, and leaves the one before. Returns whether it did: it goes on where it is about this video
        already, because a question about it was taken up before.
        """
        with self._lock:
            before = self._visits.get(owner, Visit())
            if video is not None and before.video == video:
                before.chosen = True
                return False
            now = self._visits[owner] = Visit(chosen=video is not None, speaking=before.speaking)
            if video is not None:
                now.look_at(video)
        self._leave(owner, before)
        return True

    @contextlib.contextmanager
    def turn(self, owner: str, video: str) -> Iterator[Visit | None]:
        """
        The visit in which a question is to be answered, when the answer before has ended. None where the tab has chosen
        another video by then.
        """
        with self._lock:
            speaking = self._visits.setdefault(owner, Visit()).speaking
        with speaking:
            with self._lock:
                visit = self._visits.setdefault(owner, Visit(speaking=speaking))
                if visit.video != video and not visit.chosen:
                    visit.look_at(video)
                visit.stopped = False
            try:
                yield visit if visit.video == video else None
            finally:
                if visit.left:  # it may have watched a clip since
                    self.clips.let_go(owner)

    def overlay(self, visit: Visit, key: Hashable) -> Path:
        """Where the overlay for a key goes. Its folder is there, unless the visit is over."""
        with self._lock:
            if visit.overlays is None and not visit.left:
                self.cache.mkdir(parents=True, exist_ok=True)
                visit.overlays = Path(tempfile.mkdtemp(prefix="overlays-", dir=self.cache))
        return (visit.overlays or self.cache / "left") / f"{hash(key) & (2**64 - 1):x}.mp4"

    def leave(self, owner: str) -> None:
        """Lets go what a tab has."""
        with self._lock:
            visit = self._visits.pop(owner, None)
        if visit is not None:
            self._leave(owner, visit)

    def _leave(self, owner: str, visit: Visit) -> None:
        """A file that another one looks at too stays for that one. What came of uploads that broke off goes as well."""
        with self._lock:
            visit.left = True
            used = {self.kept}.union(*(other.uploads for other in self._visits.values()))
            unused = [path for path, file in visit.uploads.items() if path not in used and which(path) == file]
        self.clips.let_go(owner)
        gone = [path.parent for path in unused if path.parent.parent == self.cache]
        for path in [*gone, *([visit.overlays] if visit.overlays else [])]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.cache.glob("tmp*"):  # Gradio's, while they come in
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and time.time() - path.stat().st_mtime > BROKEN_OFF:
                    path.unlink()
