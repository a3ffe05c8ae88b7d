"""State of each browser tab: its video and conversation, dropped when the tab is closed."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from stts_hf.modeling.budget_stts import KeepRule

from .held_clips import HeldClips, Progress
from .page import Turn


@dataclasses.dataclass(eq=False)
class Visit:
    """
    State of a tab until it shows another video, or of a program until it is done.

    Attributes:
        video: path of the current video.
        chosen: whether it is in the player; programs only ask.
        turns, measured: the conversation and its measurements.
        seen: the progress whose overlay is to be shown.
        drawn: selector and rule of the overlay that is shown.
        answering: the turn of the running answer.
        stopped: whether the running answer is to end.
        left: whether the visit is over; its running work ends.
        speaking: lock of the running answer, one at a time, shared with earlier visits of the tab.
    """

    video: str | None = None
    chosen: bool = False
    turns: list[Turn] = dataclasses.field(default_factory=list)
    measured: list[Progress] = dataclasses.field(default_factory=list)
    seen: Progress | None = None
    drawn: tuple[str, KeepRule] | None = None
    answering: Turn | None = None
    stopped: bool = False
    left: bool = False
    speaking: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def look_at(self, video: str) -> None:
        self.video, self.seen, self.drawn = video, None, None
        self.turns.clear()
        self.measured.clear()


class Visits:
    """The visit of each tab, by an id that the client chooses. Thread-safe. clips: held for all visits."""

    def __init__(self, clips: HeldClips):
        self.clips = clips
        self._visits: dict[str, Visit] = {}
        self._lock = threading.Lock()

    def find(self, owner: str) -> Visit | None:
        return self._visits.get(owner)

    def choose(self, owner: str, video: str | None) -> bool:
        """Starts a new visit and leaves the one before; False if a question about this video arrived earlier."""
        with self._lock:
            before = self._visits.get(owner, Visit())
            if video is not None and before.video == video:
                before.chosen = True
                return False
            now = self._visits[owner] = Visit(chosen=video is not None, speaking=before.speaking)
            if video is not None:
                now.look_at(video)
            before.left = True
        self.clips.let_go(owner)
        return True

    @contextlib.contextmanager
    def turn(self, owner: str, video: str) -> Iterator[Visit | None]:
        """Waits for the tab's previous answer, then gives the visit, or None if the tab has left this video by then."""
        with self._lock:
            speaking = self._visits.setdefault(owner, Visit()).speaking
        with speaking:
            with self._lock:
                visit = self._visits.setdefault(owner, Visit(speaking=speaking))
                if visit.video != video and not visit.chosen:
                    visit.look_at(video)
                visit.answering, visit.stopped = None, False
            try:
                yield visit if visit.video == video else None
            finally:
                visit.answering = None
                if visit.left:  # it may have read a video since
                    self.clips.let_go(owner)

    def leave(self, owner: str) -> None:
        """Drops the state of a tab and its clips, and ends its answer."""
        with self._lock:
            visit = self._visits.pop(owner, Visit())
            visit.left = True
        self.clips.let_go(owner)
