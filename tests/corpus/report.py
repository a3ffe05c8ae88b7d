"""Prints what came of each kind of file, with the worst seconds and memory; docs/study/reliability.md has the sums.

OMP_NUM_THREADS=1 python -m tests.corpus.report
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.corpus.files import BROKEN, BY_KIND, WHOLE
from tests.corpus.measuring import Outcome, read_measured


def row(kind: str, outcomes: Iterable[Outcome]) -> str:
    """A row of the table: how many files, what came of them, the most processor time and memory that one took."""
    outcomes = list(outcomes)
    refused = sum(outcome.error is not None and outcome.error[0] == "ValueError" for outcome in outcomes)
    shown = sum(len(outcome.frames) > 0 for outcome in outcomes)
    counts = {"shown": shown, "refused": refused, "failed": len(outcomes) - shown - refused}
    what = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    seconds, memory = (max(getattr(outcome, name) for outcome in outcomes) for name in ("seconds", "memory"))
    return f"| {kind} | {what} | {seconds:.2f} | {memory / 1e6:.0f} |"


def main() -> None:
    print("| files | outcome | seconds | MB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:

        def new_folder() -> Path:
            return Path(tempfile.mkdtemp(dir=folder))

        for kind, cases in BY_KIND.items():
            print(row(kind, [read_measured(case.make(new_folder())) for case in cases.values()]), flush=True)
        for kind, damages in BROKEN.items():
            outcomes = []
            whole = WHOLE[kind.partition(": ")[2]](new_folder())
            for damage in damages.values():
                broken = whole.with_name(f"broken{whole.suffix}")
                broken.write_bytes(damage(whole.read_bytes()))
                outcomes.append(read_measured(broken, every=True))
            print(row(kind, outcomes), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
