"""State of each browser tab: files, clips and conversation, deleted when the tab is closed."""

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
    State of a tab until it shows another video, or of a program until it is done.

    Attributes:
        video: path of the current video.
        chosen: whether it is in the player; programs only ask.
        turns, measured: the conversation and its measurements.
        seen: the progress whose overlay is to be drawn.
        stopped: whether the running answer is to end.
        left: whether the visit is over; its running work ends.
        uploads: paths of its files and their identity, since another upload of a file replaces it at the same path.
        speaking: lock of the running answer, one at a time, shared with earlier visits of the tab.
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
    """The identity of a file, which differs from that of an earlier file at the same path."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns


class Visits:
    """
    The visit of each tab, by an id that the client chooses and that is never part of a path. Thread-safe.

    clips: held for all visits. cache: Gradio's folder with one folder per upload. kept: a file there that is never
    deleted.
    """

    def __init__(self, clips: HeldClips, cache: Path, kept: Path | None = None):
        self.clips, self.cache, self.kept = clips, cache, kept
        self._visits: dict[str, Visit] = {}
        self._lock = threading.Lock()

    def find(self, owner: str) -> Visit | None:
        return self._visits.get(owner)

    def choose(self, owner: str, video: str | None) -> bool:
        """
        Starts a new visit and leaves the one before. Returns False if a visit of this video exists, because a question
        about it arrived earlier.
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
        Waits for the tab's previous answer to end, then gives the visit for a question; None if the tab has chosen
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
                if visit.left:  # it may have read a video since
                    self.clips.let_go(owner)

    def overlay(self, visit: Visit, key: Hashable) -> Path:
        """The overlay's path for a key, in a folder that exists unless the visit is over."""
        with self._lock:
            if visit.overlays is None and not visit.left:
                self.cache.mkdir(parents=True, exist_ok=True)
                visit.overlays = Path(tempfile.mkdtemp(prefix="overlays-", dir=self.cache))
        return (visit.overlays or self.cache / "left") / f"{hash(key) & (2**64 - 1):x}.mp4"

    def leave(self, owner: str) -> None:
        """Deletes all state of a tab."""
        with self._lock:
            visit = self._visits.pop(owner, None)
        if visit is not None:
            self._leave(owner, visit)

    def _leave(self, owner: str, visit: Visit) -> None:
        """Deletes a visit's files, except those another visit uses, and the remains of interrupted uploads."""
        with self._lock:
            visit.left = True
            used = {self.kept}.union(*(other.uploads for other in self._visits.values()))
            unused = [path for path, file in visit.uploads.items() if path not in used and which(path) == file]
        self.clips.let_go(owner)
        gone = [path.parent for path in unused if path.parent.parent == self.cache]
        for path in [*gone, *([visit.overlays] if visit.overlays else [])]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.cache.glob("tmp*"):  # Gradio's partial uploads
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and time.time() - path.stat().st_mtime > BROKEN_OFF:
                    path.unlink()
