"""`stts-hf study` in miniature: records, going on, copies, failures, a full disk, and the page of half a study."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stts_hf import STTSDataCollator, STTSForConditionalGeneration, STTSProcessor, load_rows
from stts_hf.checkpoints.files import read_json
from stts_hf.cli.main import main
from stts_hf.evaluation import study_data, study_runs
from stts_hf.evaluation.methods import METHODS
from stts_hf.evaluation.study import open_study, plan, read_records, read_settings
from stts_hf.evaluation.study_data import EncodedRows, encode_conversations
from stts_hf.evaluation.study_runs import run_study
from tests.stts_hf.evaluation.small_study import study_command, write_base, write_dataset

RUNS = ["none-0-layer2-seed0", "none-0-layer2-seed1", "stts-50-layer2-seed0", "stts-50-layer2-seed1"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Path, Path]:
    """A data set and a base checkpoint."""
    folder = tmp_path_factory.mktemp("parts")
    return write_dataset(folder / "data"), write_base(folder / "base")


@pytest.fixture(scope="module")
def done(parts, tmp_path_factory) -> Path:
    """A study of two methods and two seeds that ran to its end."""
    folder = tmp_path_factory.mktemp("study")
    assert main(study_command(folder, *parts, "--only", "images")) == 0
    return folder


def records(folder: Path) -> dict[str, dict]:
    return read_records(folder, read_settings(folder))


def outcomes(folder: Path) -> dict[str, tuple]:
    """What of the records must not depend on when, where and in which order runs were done."""
    return {
        name: (record["training"]["losses"], {asked: it["marks"] for asked, it in record["evaluations"].items()})
        for name, record in records(folder).items()
    }


def cells(page: str, heading: str, row: str) -> list[str]:
    """The cells of a row of the table under a heading."""
    table = page.partition(f"## {heading}")[2].partition("\n## ")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_every_run_has_a_record_with_a_mark_for_every_question(done):
    found = records(done)
    questions = json.loads((done / "questions.json").read_text())["questions"]
    assert sorted(found) == RUNS
    asked = found[RUNS[2]]["evaluations"]
    assert list(asked) == ["stts-50", "stts-50-frames-for-50"]
    assert len(asked["stts-50"]["marks"]) == len(questions)
    assert set(asked["stts-50"]["marks"]) <= {"0", "1"}
    of_long_clips = [question["group"] == "long" for question in questions]
    assert [mark != "-" for mark in asked["stts-50-frames-for-50"]["marks"]] == of_long_clips
    assert all(of_long_clips.count(value) for value in (True, False))


def test_a_copy_of_the_report_goes_on_as_the_study(done, parts, tmp_path, capsys):
    """On another machine, which has neither the study's folder nor any weights but the base checkpoint."""
    assert main(["study", str(done), "--report-only", "--output", str(tmp_path)]) == 0
    assert not (tmp_path / "records").exists()
    capsys.readouterr()
    assert main(study_command(tmp_path, *parts, "--only", "images", "--plan")) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"done   {name}" for name in RUNS]
    assert main(study_command(tmp_path, *parts, "--only", "images", "--seeds", "2")) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if "right," in line] == [
        "none-0-layer2-seed2",
        "stts-50-layer2-seed2",
    ]
    found = outcomes(tmp_path)
    assert {name: found.pop(name) for name in RUNS} == outcomes(done)
    assert sorted(found) == ["none-0-layer2-seed2", "stts-50-layer2-seed2"]


def test_scaled_frames_cost_the_video_tokens_of_the_unpruned_model(done):
    found = records(done)
    scaled = found[RUNS[2]]["evaluations"]["stts-50-frames-for-50"]["video_tokens"]["long"]
    assert scaled == found[RUNS[0]]["evaluations"]["none-0"]["video_tokens"]["long"]


def test_a_study_that_is_done_does_nothing_again(done, parts, monkeypatch):
    monkeypatch.setattr(study_runs, "carry_out", lambda *arguments: pytest.fail("a run was done again"))
    assert main(study_command(done, *parts, "--only", "images")) == 0


def test_a_run_gives_the_same_in_another_study(done, parts, tmp_path):
    settings = {"steps": 2, "batch_size": 2, "warmup_steps": 0, "scorer_steps": 3, "ratios": (0.5,)}
    study = open_study(tmp_path, parts[0], parts[1], settings)
    [run] = [run for run in plan(study.settings, ["images"]) if run.name == RUNS[2]]
    assert run_study(study, [run], print, keep_checkpoints=True) == []
    assert outcomes(tmp_path) == {run.name: outcomes(done)[run.name]}
    model = STTSForConditionalGeneration.from_pretrained(tmp_path / "checkpoints" / run.name)
    assert model.config.vision_config.pruning_ratio == 0.5


def test_checkpoints_go_but_for_those_that_more_ratios_would_ask(done):
    assert sorted(path.name for path in (done / "checkpoints").iterdir()) == RUNS[:2]


def test_half_a_study_has_a_page_that_says_so(done, tmp_path):
    assert main(["study", str(done), "--report-only", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "runs are missing (" in page
    assert "random-50-layer2-seed0" in page
    assert cells(page, "Methods", "Random") == ["", "", "", "", "", "", "-1.6", "", "", "0"]
    assert cells(page, "Methods", "STTS")[-1] == "2"


def test_the_page_can_be_made_of_what_a_report_wrote(done, tmp_path):
    assert main(["study", str(done), "--report-only", "--output", str(tmp_path / "one")]) == 0
    assert main(["study", str(tmp_path / "one"), "--report-only", "--output", str(tmp_path / "two")]) == 0
    names = ("README.md", "records.jsonl")
    assert [(tmp_path / "one" / name).read_text() for name in names] == [
        (tmp_path / "two" / name).read_text() for name in names
    ]


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """Runs cost nothing: their checkpoints are empty, their answers right. Gives the names of those that trained."""
    names = []

    def train(run, desk, checkpoint):
        names.append(run.name)
        checkpoint.mkdir(parents=True)
        study_runs.write_json(checkpoint / study_runs.TRAINING, {"seconds_per_step": 1.0, "losses": []})

    def ask(run, asked, desk, checkpoint):
        return dataclasses.asdict(asked) | {"marks": "1" * len(desk.questions), "llm_tokens": {}, "video_tokens": {}}

    monkeypatch.setattr(study_runs, "train", train)
    monkeypatch.setattr(study_runs, "ask", ask)
    monkeypatch.setattr(study_runs, "correlate_with_motion", lambda *arguments: {})
    return names


def test_a_failed_run_is_recorded_and_the_rest_goes_on(parts, tmp_path, monkeypatch, capsys, trained):
    train = study_runs.train

    def broken(run, *arguments):
        if run.name == RUNS[2]:
            raise RuntimeError("the scorer burnt out")
        train(run, *arguments)

    command = study_command(tmp_path, *parts, "--only", "images")
    with monkeypatch.context() as patch:
        patch.setattr(study_runs, "train", broken)
        assert main(command) == 1
    assert "stts-50-layer2-seed0 failed" in capsys.readouterr().err
    found = records(tmp_path)
    assert [name for name in RUNS if "failed" in found[name]] == [RUNS[2]]
    assert found[RUNS[2]]["failed"] == "RuntimeError: the scorer burnt out"
    assert "Traceback" in (tmp_path / found[RUNS[2]]["traceback"]).read_text()
    assert "Run stts-50-layer2-seed0 failed: RuntimeError" in (tmp_path / "README.md").read_text()
    trained.clear()
    assert main(command) == 0
    assert trained == [RUNS[2]]
    assert "failed" not in (tmp_path / "README.md").read_text()


def test_a_run_that_fails_when_it_is_asked_more_keeps_what_it_was_asked(parts, tmp_path, monkeypatch, trained):
    command = study_command(tmp_path, *parts, "--only", "images", "--seeds", "0")
    assert main(command) == 0
    before, ask, asked = records(tmp_path)[RUNS[0]]["evaluations"], study_runs.ask, []
    page = (tmp_path / "README.md").read_text()

    def broken(run, what, *arguments):
        asked.append(what.pruning_ratio)
        if len(asked) == 2:
            raise RuntimeError("the answers caught fire")
        return ask(run, what, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(study_runs, "ask", broken)
        assert main([*command, "--ratios", "0.7"]) == 1
    found = records(tmp_path)[RUNS[0]]
    assert found["failed"] == "RuntimeError: the answers caught fire"
    assert asked == [0.7, 0.7]
    assert found["evaluations"].keys() - before.keys() == {"random-inference-70"}
    assert {name: found["evaluations"][name] for name in before} == before
    row = next(line for line in page.splitlines() if line.startswith("| No pruning |"))
    assert row in (tmp_path / "README.md").read_text()
    assert main(command) == 0
    assert records(tmp_path)[RUNS[0]]["evaluations"].keys() > found["evaluations"].keys()
    assert "failed" not in records(tmp_path)[RUNS[0]]
    assert trained.count(RUNS[0]) == 1


def test_a_report_of_another_study_is_not_overwritten(done, tmp_path, capsys):
    report = tmp_path / "report"
    command = ["study", "--report-only", "--output", str(report)]
    assert main([*command, str(done)]) == 0
    held = (report / "records.jsonl").read_bytes()
    fewer = shutil.copytree(done, tmp_path / "fewer")
    (fewer / "records" / f"{RUNS[2]}.json").unlink()
    assert main([*command, str(fewer)]) == 2
    assert f"has 1 runs that this study has not ({RUNS[2]}, ...)" in capsys.readouterr().err
    settings = json.loads((report / "study.json").read_text())
    (report / "study.json").write_text(json.dumps({**settings, "steps": 7}))
    assert main([*command, str(done)]) == 2
    assert "holds the report of another study: name another folder" in capsys.readouterr().err
    assert (report / "records.jsonl").read_bytes() == held


def test_a_damaged_copy_is_refused_before_anything_is_written(done, parts, tmp_path, capsys):
    assert main(["study", str(done), "--report-only", "--output", str(tmp_path)]) == 0
    held = (tmp_path / "study.json").read_bytes()
    path = tmp_path / "records.jsonl"
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:-40] + b"\xff\n"):
        path.write_bytes(damaged)
        assert main(study_command(tmp_path, *parts, "--ratios", "0.9")) == 2
        assert re.search(r"records\.jsonl:\d+ is no record .*or delete that line", capsys.readouterr().err)
    assert (tmp_path / "study.json").read_bytes() == held


def test_a_full_disk_ends_the_study_and_loses_nothing(parts, tmp_path, monkeypatch, capsys, trained):
    write_json = study_runs.write_json

    def full(path, content):
        if path.name == "stts-50-layer2-seed0.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, content)

    command = study_command(tmp_path, *parts, "--only", "images")
    with monkeypatch.context() as patch:
        patch.setattr(study_runs, "write_json", full)
        assert main(command) == 2
    assert "no space is left" in capsys.readouterr().err
    assert list(records(tmp_path)) == [RUNS[0]]
    assert main(command) == 0
    assert trained == [RUNS[0], RUNS[2], RUNS[1], RUNS[3]]  # none twice: the weights were there


def test_ratios_that_come_later_are_asked_too_and_nothing_else(parts, tmp_path, trained, monkeypatch):
    command = study_command(tmp_path, *parts, "--only", "images", "--seeds", "0")
    assert main(command) == 0
    before, ask, asked = records(tmp_path)[RUNS[0]]["evaluations"], study_runs.ask, []

    def listen(run, one, *rest):
        asked.append(one.name)
        return ask(run, one, *rest)

    monkeypatch.setattr(study_runs, "ask", listen)
    trained.clear()
    assert main([*command, "--ratios", "0.7"]) == 0
    assert trained == []
    assert asked == ["random-inference-70", "cosine-inference-70", "tome-inference-70"]
    after = records(tmp_path)[RUNS[0]]["evaluations"]
    assert set(after) == {*before, *asked}
    assert {name: after[name] for name in before} == before


def test_a_run_that_another_process_is_at_is_left_to_it(parts, tmp_path, trained):
    study = open_study(tmp_path, parts[0], parts[1], {})
    first, second = plan(study.settings, ["images"])[:2]
    encode_conversations(study.dataset, STTSProcessor.from_pretrained(study.base), tmp_path)
    lock = tmp_path / "locks" / f"{first.name}.lock"
    lock.parent.mkdir()
    holding = f"import filelock; lock = filelock.FileLock({str(lock)!r}); lock.acquire(); print(1, flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()

    def say(line):
        holder.kill()  # which frees what it was at

    assert run_study(study, [first, second], say) == []
    assert trained == [second.name, first.name]


def test_a_question_that_cannot_be_asked_is_no_wrong_answer(parts, tmp_path):
    dataset, base = parts
    row = next(row for row in study_data.read_questions(dataset) if row.get("videos"))
    (tmp_path / row["videos"][0]).parent.mkdir()
    (tmp_path / row["videos"][0]).write_bytes(b"no video")
    desk: Any = SimpleNamespace(device=torch.device("cpu"), processor=STTSProcessor.from_pretrained(base))
    desk.questions = [row | {"media_root": str(tmp_path)}]
    run = study_runs.Run("none", 0.0, 2, 0)
    with pytest.raises(study_data.StudyError, match=rf"1 questions could not be asked: .*{row['videos'][0]}"):
        study_runs.ask(run, study_runs.Evaluation("none", 0.0), desk, base)


def test_a_run_that_could_not_be_asked_is_not_trained_again(parts, tmp_path, monkeypatch, trained):
    def unread(*arguments):
        raise study_data.StudyError("1 questions could not be asked: a.mp4 cannot be read")

    command = study_command(tmp_path, *parts, "--only", "images", "--seeds", "0")
    with monkeypatch.context() as patch:
        patch.setattr(study_runs, "ask", unread)
        assert main(command) == 1
    assert "a.mp4 cannot be read" in records(tmp_path)[RUNS[0]]["failed"]
    assert main(command) == 0
    assert trained == [RUNS[0], RUNS[2]]


@torch.no_grad()
@pytest.mark.parametrize("scores", ["moving", "constant", "other frames"])
def test_scores_are_compared_with_what_moves(parts, monkeypatch, scores):
    """Scores that are the motion itself correlate with it by 1, equal ones by 0; other clips than 16 frames are out."""
    dataset, base = parts
    study = open_study(base, dataset, base, {}, write=False)
    masks = study_data.load_motion(dataset)
    desk: Any = SimpleNamespace(study=study, device=torch.device("cpu"), motion=dict(masks))
    desk.questions = [row for row in study_data.read_questions(dataset) if row.get("videos")]
    desk.processor = STTSProcessor.from_pretrained(base)
    shares = iter([masks[clip].reshape(16, 4, 3, 4, 3).mean((2, 4)).reshape(16, 16) for clip in sorted(masks)])

    def features(**inputs):
        motion = torch.from_numpy(next(shares))
        return SimpleNamespace(token_scores=[motion if scores == "moving" else torch.full_like(motion, 0.3)])

    if scores == "other frames":
        desk.motion = {clip: mask[:8] for clip, mask in masks.items()}
    model: Any = SimpleNamespace(model=SimpleNamespace(get_video_features=features))
    monkeypatch.setattr(study_runs, "load", lambda *arguments: model)
    found = study_runs.correlate_with_motion(plan(study.settings, ["motion"])[0], desk, base)
    expected = {"moving": 1.0, "constant": 0.0}.get(scores)
    assert found == ({} if expected is None else dict.fromkeys(sorted(masks), expected))


@pytest.mark.slow
def test_every_method_trains_and_answers(parts, tmp_path):
    assert main(study_command(tmp_path, *parts, "--only", "methods", "--seeds", "0")) == 0
    page = (tmp_path / "README.md").read_text()
    assert "**Unfinished**" in page  # the other parts
    for method in METHODS.values():
        assert all(cells(page, "Methods", method.label)[:4]), method.name


def test_changed_settings_are_refused(done, parts, capsys):
    assert main(study_command(done, *parts, "--steps", "3")) == 2
    assert "--steps is 3, but" in capsys.readouterr().err


def test_a_report_of_nothing_is_refused(parts, tmp_path, capsys):
    open_study(tmp_path, parts[0], parts[1], {})
    assert main(["study", str(tmp_path), "--report-only"]) == 2
    assert "no run that is done" in capsys.readouterr().err


def test_an_encoded_conversation_is_what_the_collator_would_decode(parts, tmp_path):
    dataset, base = parts
    processor = STTSProcessor.from_pretrained(base)
    encode_conversations(dataset, processor, tmp_path)
    encoded, rows = EncodedRows(tmp_path), load_rows(dataset / "train_conversations.jsonl")
    collator = STTSDataCollator(processor)
    decoded = collator([rows[0], rows[3]])
    for name, values in collator([encoded[0], encoded[3]]).items():
        assert torch.equal(values, decoded[name]), name


@pytest.mark.slow
def test_killed_workers_lose_nothing(done, parts, tmp_path):
    """One of two workers is killed, then all; what the third start finishes equals the study that nobody disturbed."""
    command = [sys.executable, "-m", "stts_hf.cli.main", *study_command(tmp_path, *parts, "--only", "images")]

    def start() -> subprocess.Popen:
        return subprocess.Popen([*command, "--workers", "2"], start_new_session=True, stderr=subprocess.DEVNULL)

    def wait_for(pattern: str) -> None:
        until = time.monotonic() + 300
        while not list(tmp_path.glob(pattern)):
            assert time.monotonic() < until, f"no {pattern}"
            time.sleep(0.05)

    process = start()
    wait_for("locks/*")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process = start()
    wait_for("records/*.json")
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert process.wait(timeout=600) in (0, 2)
    assert main(study_command(tmp_path, *parts, "--only", "images")) == 0
    assert outcomes(tmp_path) == outcomes(done)


def test_blocks_drawn_at_random_are_others_for_each_batch_and_the_same_again(parts):
    _, base = parts
    run = study_runs.Run("random", 0.5, 2, 3)
    asked = study_runs.Evaluation("random-inference", 0.5)
    patch_size = read_json(base / "config.json")["vision_config"]["patch_size"]
    pixels = torch.zeros(16, 144, 3 * patch_size**2)
    pooling = torch.arange(144).view(4, 3, 4, 3).permute(0, 2, 1, 3).reshape(16, 9)
    inputs = {
        "pixel_values_videos": pixels,
        "video_token_pooling": torch.cat([pooling + 144 * frame for frame in range(16)]),
        "video_grids": torch.tensor([[16, 4, 4]]),
    }

    def masks() -> list[torch.Tensor]:
        desk: Any = SimpleNamespace(device=torch.device("cpu"))
        model = study_runs.load(run, asked, desk, base)
        return [model.model.get_video_features(**inputs).keep_mask[0] for _ in range(2)]

    with torch.no_grad():
        first, second = masks()
        again = masks()
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack(again), torch.stack([first, second]))
