"""
Part (d): the study's methods with one seed, as far as the time goes; a later call goes on.

    python -m examples.gpu.study --device cuda --size full docs/benchmarks/gpu-study
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from examples.study.distraction import Look
from examples.study.make_dataset import make_dataset
from examples.study.report import write_report
from examples.study.runs import do_runs, runs_to_do
from examples.study.study import open_study, plan

from .checks import describe
from .options import parse
from .runner import RESULT, UNFINISHED, WORK

BASE = Path("docs/study/base")
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 1, "batch_size": 2, "warmup_steps": 0, "scorer_steps": 1, "ratios": (0.8,)},
    # As docs/study/README.md asks for.
    "full": {"steps": 300, "batch_size": 4, "scorer_steps": 2000},
}
# Made in two or three minutes; all of the data set's would take longer than a part has.
CLIPS = {
    "tiny": {"train": 2, "validation": 1, "test": 1},
    "full": {"train": 600, "validation": 60, "test": 240},
}
LOOK = Look(strength=1.0)  # photographs would need a package more


def main() -> None:
    arguments = parse(__doc__)
    size, ends = arguments.size, time.monotonic() + arguments.seconds
    data, folder = (arguments.folder.parent / WORK / f"study-{of}{size}" for of in ("data-", ""))
    if not (data / "test.jsonl").exists():
        shutil.rmtree(data, ignore_errors=True)
        for done, total in make_dataset(data, CLIPS[size], look=LOOK):
            if done % 100 == 0 or done == total:
                print(f"{done} of {total} clips", flush=True)
    study = open_study(folder, data, BASE, SETTINGS[size] | {"seeds": (0,), "without_options": True})
    runs = plan(study.settings, ("stts",) if size == "tiny" else ())
    workers = 1 if size == "tiny" else max(1, min(4, (os.cpu_count() or 1) // 2))
    took = 0.0
    while (left := runs_to_do(study, runs)) and time.monotonic() + took < ends:
        started = time.monotonic()
        if do_runs(study, left[:workers], lambda line: print(line, flush=True), workers=workers):
            raise SystemExit("runs failed; their tracebacks are above")
        took = max(took, time.monotonic() - started)
    names = [run.name for run in left]
    result = {**describe("The study, one seed", arguments.device), "runs": len(runs), "left": names}
    if size == "full" and len(left) < len(runs):
        write_report(folder, arguments.folder)
    (arguments.folder / UNFINISHED).unlink(missing_ok=True)
    name = UNFINISHED if left else RESULT
    (arguments.folder / name).write_text(json.dumps(result | {"finished": not left}, indent=1) + "\n")
    print(f"{len(runs) - len(left)} of {len(runs)} runs", flush=True)


if __name__ == "__main__":
    main()
