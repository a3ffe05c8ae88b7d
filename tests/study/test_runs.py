"""The runs of a study in miniature: records, going on, copies, failures, kills, and the page of half a study."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import torch

from examples.study import data, runs
from examples.study.__main__ import main
from examples.study.report import write_report
from examples.study.runs import do_run, do_runs, runs_to_do
from examples.study.study import Evaluation, Run, open_study, plan, read_records, read_settings
from stts_hf import STTSConfig, STTSDataCollator, STTSForConditionalGeneration, STTSProcessor, load_rows
from stts_hf.training import trainer
from tests.conftest import REPOSITORY
from tests.study.small_study import SETTINGS, study_command, write_base, write_dataset

pytestmark = pytest.mark.study
ONLY = ["none", "stts"]
RUNS = [f"{name}-layer2-seed{seed}" for name in ONLY for seed in (0, 1)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Path, Path]:
    """A data set and a base checkpoint."""
    folder = tmp_path_factory.mktemp("parts")
    return write_dataset(folder / "data"), write_base(folder / "base")


def begin(folder: Path, parts: tuple[Path, Path], **settings: Any):
    study = open_study(folder, *parts, SETTINGS | settings)
    data.encode_conversations(study.dataset, data.load_processor(study.base), folder)
    return study


@pytest.fixture(scope="module")
def done(parts, tmp_path_factory) -> Path:
    """A study of two methods and two seeds that ran to its end, in this process."""
    study = begin(tmp_path_factory.mktemp("study"), parts)
    for run in plan(study.settings, ONLY):
        do_run(study, run)
    write_report(study.folder, study.folder)
    return study.folder


def records(folder: Path) -> dict[str, dict]:
    return read_records(folder, read_settings(folder))


def outcomes(folder: Path) -> dict[str, tuple]:
    """What of the records must not depend on when, where and in which order runs were done."""
    return {
        name: (record["training"]["losses"], {asked: it["marks"] for asked, it in record["evaluations"].items()})
        for name, record in records(folder).items()
    }


def test_every_run_has_a_record_with_a_mark_for_every_question(done):
    found = records(done)
    questions = json.loads((done / "questions.json").read_text())["main"]["questions"]
    assert sorted(found) == RUNS
    asked = found[RUNS[2]]["evaluations"]
    assert list(asked) == ["stts-80", "stts-50-frames-for-50"]
    assert len(asked["stts-80"]["marks"]) == len(questions)
    assert set(asked["stts-80"]["marks"]) <= {"0", "1"}
    of_long_clips = [question["group"] == "long" for question in questions]
    assert [mark != "-" for mark in asked["stts-50-frames-for-50"]["marks"]] == of_long_clips
    assert all(of_long_clips.count(value) for value in (True, False))
    assert {path.name for path in done.iterdir()} == {
        *("study.json", "questions.json", "records", "encoded", "scorers"),
        *("README.md", "accuracy.png"),
    }


def test_a_run_gives_the_same_in_another_study(done, parts, tmp_path):
    study = begin(tmp_path, parts)
    [run] = [run for run in plan(study.settings, ONLY) if run.name == RUNS[2]]
    do_run(study, run, keep_checkpoint=True)
    assert outcomes(tmp_path) == {run.name: outcomes(done)[run.name]}
    assert STTSForConditionalGeneration.from_pretrained(tmp_path / "checkpoints" / run.name)


def test_a_copy_of_the_report_goes_on_as_the_study(done, parts, tmp_path, capsys):
    """On another machine, which has neither the study's folder nor any weights but the base checkpoint."""
    assert main(["report", str(done), "--output", str(tmp_path)]) == 0
    assert not (tmp_path / "records").exists()
    assert main(study_command(tmp_path, *parts, "--only", *ONLY, "--plan", "--seeds", "2")) == 0
    new = [f"{name}-layer2-seed2" for name in ONLY]
    found = sorted(capsys.readouterr().out.splitlines())
    assert found == [*(f"done   {name}" for name in RUNS), *(f"to do  {name}" for name in new)]
    assert outcomes(tmp_path) == outcomes(done)


def test_ratios_that_come_later_are_asked_in_runs_that_prune(done, parts):
    study = open_study(done, parts[0], parts[1], {"ratios": (0.7,)}, write=False)
    assert sorted(run.name for run in runs_to_do(study, plan(study.settings, ONLY))) == RUNS[2:]


def test_the_frozen_base_is_asked_what_its_record_lacks_alone(parts, tmp_path, monkeypatch):
    study, run = begin(tmp_path, parts), Run("scorer-answers", 2, 0)
    do_run(study, run, only=["cosine-inference"])
    before = records(tmp_path)[run.name]
    assert [run] == runs_to_do(study, [run], ["cosine-inference", "scorer-answers"])
    asked = []

    def ask(_: Any, one: Any, *__: Any) -> Any:
        asked.append(one.name)
        return before["evaluations"]["cosine-inference-80"]

    monkeypatch.setattr(runs, "ask", ask)
    do_run(study, run, only=["scorer-answers"])
    after = records(tmp_path)[run.name]
    assert asked == ["scorer-answers-80"]
    assert after["evaluations"].keys() == {"cosine-inference-80", "scorer-answers-80"}
    assert after["seconds"] > before["seconds"]
    assert not runs_to_do(study, [run], ["cosine-inference", "scorer-answers"])


def test_what_was_measured_for_a_scorer_is_not_measured_again(parts, tmp_path):
    study, run = begin(tmp_path, parts), Run("stts-answers", 2, 0)
    do_run(study, run, keep_checkpoint=True)
    config = STTSConfig.from_pretrained(tmp_path / "checkpoints" / run.name)
    assert (config.scorer_target, config.vision_config.score_bias) == ("answers", False)
    assert config.worth_unit
    (tmp_path / "scorers" / "answers-layer2-seed0.pt").unlink()  # as after a kill
    before = (tmp_path / "scorers" / "answers-layer2-seed0" / "_masks_0.jsonl").read_bytes()
    learnt = outcomes(tmp_path)
    do_run(study, run)
    assert (tmp_path / "scorers" / "answers-layer2-seed0" / "_masks_0.jsonl").read_bytes() == before
    assert outcomes(tmp_path) == learnt


def test_all_methods_draw_the_same_ratios(parts, tmp_path, monkeypatch):
    study, drawn = begin(tmp_path, parts), []
    real = trainer.draw_ratios

    def draw(*arguments):
        drawn.append(real(*arguments))
        return drawn[-1]

    monkeypatch.setattr(trainer, "draw_ratios", draw)
    found = []
    for name in ("cosine", "stts", "stts-answers", "tome"):
        drawn.clear()
        runs.train(Run(name, 2, 0), runs.Desk(study), tmp_path / name)
        found.append(tuple(map(tuple, drawn[-2:])))  # of training, behind those of a scorer that learns alone
    assert len(set(found)) == 1
    assert found[0]


def test_a_report_of_another_study_is_not_overwritten(done, tmp_path, capsys):
    output = tmp_path / "report"
    assert main(["report", str(done), "--output", str(output)]) == 0
    held = (output / "records.jsonl").read_text().splitlines(keepends=True)
    fewer = tmp_path / "fewer"
    assert main(["report", str(done), "--output", str(fewer)]) == 0
    (fewer / "records.jsonl").write_text("".join(held[:-1]))
    assert main(["report", str(fewer), "--output", str(output)]) == 2
    assert RUNS[3] in capsys.readouterr().err
    settings = json.loads((output / "study.json").read_text())
    (output / "study.json").write_text(json.dumps({**settings, "steps": 7}))
    assert main(["report", str(done), "--output", str(output)]) == 2
    assert "another study" in capsys.readouterr().err
    assert (output / "records.jsonl").read_text() == "".join(held)


def test_a_damaged_copy_is_refused_before_anything_is_written(done, parts, tmp_path, capsys):
    assert main(["report", str(done), "--output", str(tmp_path)]) == 0
    held = (tmp_path / "study.json").read_bytes()
    path = tmp_path / "records.jsonl"
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:-40] + b"\xff\n"):
        path.write_bytes(damaged)
        assert main(study_command(tmp_path, *parts, "--ratios", "0.9")) == 2
        assert "records.jsonl:4" in capsys.readouterr().err
    assert (tmp_path / "study.json").read_bytes() == held


def test_two_commands_do_not_do_one_study(parts, tmp_path):
    study = begin(tmp_path, parts)
    with filelock.FileLock(tmp_path / "study.lock"), pytest.raises(data.StudyError, match="another process"):
        do_runs(study, plan(study.settings), print)


def test_a_question_that_cannot_be_asked_is_no_wrong_answer(parts, tmp_path):
    dataset, base = parts
    row = next(row for row in data.read_questions(dataset) if row.get("videos"))
    (tmp_path / row["videos"][0]).parent.mkdir()
    (tmp_path / row["videos"][0]).write_bytes(b"no video")
    desk: Any = SimpleNamespace(device=torch.device("cpu"), processor=STTSProcessor.from_pretrained(base))
    desk.questions = [row | {"media_root": str(tmp_path), "look": "main"}]
    with pytest.raises(data.StudyError, match=rf"1 questions could not be asked: .*{row['videos'][0]}"):
        runs.ask(Run("none", 2, 0), Evaluation("none", 0.0), desk, base)


@torch.no_grad()
@pytest.mark.parametrize("scores", ["moving", "constant", "other frames"])
def test_scores_are_compared_with_what_moves(parts, monkeypatch, scores):
    """Scores that are the motion itself correlate with it by 1, equal ones by 0; other clips than 16 frames are out."""
    dataset, base = parts
    masks = data.load_masks(dataset, "motion")
    kept = {clip: mask[:8] for clip, mask in masks.items()} if scores == "other frames" else masks
    desk: Any = SimpleNamespace(device=torch.device("cpu"), masks=lambda _: kept)
    desk.questions = [row | {"media_root": str(dataset), "look": "main"} for row in data.read_questions(dataset)]
    desk.processor = STTSProcessor.from_pretrained(base)
    shares = iter([masks[clip].reshape(16, 4, 3, 4, 3).mean((2, 4)).reshape(16, 16) for clip in sorted(masks)])

    def features(**inputs):
        motion = torch.from_numpy(next(shares))
        return SimpleNamespace(token_scores=[motion if scores == "moving" else torch.full_like(motion, 0.3)])

    model: Any = SimpleNamespace(model=SimpleNamespace(get_video_features=features))
    monkeypatch.setattr(runs, "load", lambda *arguments: model)
    found = runs.correlate_with_motion(Run("stts", 2, 0), desk, base)
    expected = {"moving": 1.0, "constant": 0.0}.get(scores)
    assert found == ({} if expected is None else dict.fromkeys(sorted(masks), expected))


def test_an_encoded_conversation_is_what_the_collator_would_decode(parts, tmp_path):
    dataset, base = parts
    processor = STTSProcessor.from_pretrained(base)
    data.encode_conversations(dataset, processor, tmp_path)
    encoded, rows = data.EncodedRows(tmp_path), load_rows(dataset / "train_conversations.jsonl")
    collator = STTSDataCollator(processor)
    decoded = collator([rows[0], rows[3]])
    for name, values in collator([encoded[0], encoded[3]]).items():
        assert torch.equal(values, decoded[name]), name


def workers_of(process: subprocess.Popen) -> set[int]:
    """The processes of its pool that do runs."""
    found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def test_kills_and_failures_lose_nothing(done, parts, tmp_path):
    """The command is killed, then one of its two processes, then a run fails; the fourth start ends the study."""
    command = [sys.executable, "-m", "examples.study", *study_command(tmp_path, *parts, "--only", *ONLY)]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}

    def start(*options: str) -> subprocess.Popen:
        process = [*command, "--workers", "2", *options]
        return subprocess.Popen(process, start_new_session=True, stderr=subprocess.PIPE, env=environment)

    def wait_for(pattern: str) -> None:
        until = time.monotonic() + 600
        while not list(tmp_path.glob(pattern)):
            assert time.monotonic() < until, f"no {pattern}"
            time.sleep(0.05)

    process = start()
    wait_for("encoded/*.pt")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process, first = start(), set[int]()
    while not list(tmp_path.glob("records/*.json")):
        first |= workers_of(process)
        assert process.poll() is None
        time.sleep(0.05)
    while not (later := workers_of(process) - first):  # a worker that has just begun: it cannot have ended its run
        assert process.poll() is None
    os.kill(later.pop(), signal.SIGKILL)
    assert process.wait(timeout=600) == 2
    (tmp_path / "scorers").mkdir(exist_ok=True)
    scorer = tmp_path / "scorers" / "change-layer2-seed1.pt"
    scorer.write_bytes(b"none")
    (tmp_path / "records" / f"{RUNS[3]}.json").unlink(missing_ok=True)
    process = start()
    _, printed = process.communicate(timeout=600)
    assert process.returncode == 1
    assert b"Traceback" in printed
    assert f"run {RUNS[3]} failed".encode() in printed
    assert set(records(tmp_path)) == set(RUNS[:3])
    scorer.unlink()
    assert start().wait(timeout=600) == 0
    assert outcomes(tmp_path) == outcomes(done)
