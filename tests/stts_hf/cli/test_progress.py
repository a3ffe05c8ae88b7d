"""What commands say while they work: on a terminal how far they are, and in a log no bars."""

import io
import re

from stts_hf.cli.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_how_fast_and_how_long_still(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_bar(200, "row", done=100) as bar:
        bar.start_t -= 10
        bar.update(50)
        bar.refresh()
    shown = terminal.getvalue().split("\r")
    assert any(re.search(r"75%.*150/200 \[00:1\d<00:1\d, +[45]\.\d+row/s\]", line) for line in shown), shown


def test_a_log_shows_no_bar(capsys):
    with progress_bar(2, "row") as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")
