"""`stts-hf calibrate` on stts-tiny: the threshold, the files it writes, resuming, and what is refused."""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import stts_hf
from examples.clips.files import write_video
from stts_hf.inference import calibration
from stts_hf.inference.calibration import Calibration
from stts_hf.model_parts import SCORER, module_of
from stts_hf.modeling.budget_stts import KeepRule
from tests.checkpoints import TINY, load_tiny

NUMBER = 12


def noise(number: int) -> np.ndarray:
    """A video (F, H, W, 3): grey, and from some frame on noise, in a region that differs from clip to clip."""
    random = np.random.default_rng(number)
    frames = np.full((16, 96, 96, 3), 120, np.uint8)
    since, side = random.integers(1, 14), random.integers(24, 96)
    frames[since:, :side, :side] = random.integers(0, 255, (16 - since, side, side, 3), np.uint8)
    return frames


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Clips, a file that is no video, and what the command printed and wrote about them."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "clips").mkdir()
    for number in range(NUMBER):
        write_video(folder / f"clips/{number}.mp4", noise(number), 4)
    (folder / "clips/words.mp4").write_bytes(b"no video\n" * 100)
    return folder


@pytest.fixture
def run(here, captured):
    """Runs the command, which decodes in a thread; returns exit status, stdout and stderr."""

    def run(*arguments: object, checkpoint: object = TINY, videos: str = "clips"):
        return captured(["calibrate", str(checkpoint), videos, *map(str, arguments), "--workers", "0"])

    return run


def threshold_of(out: str) -> float:
    return float(re.findall(r"^threshold: +(\S+), by (\d+) videos$", out, re.M)[0][0])


def kept_by(assistant: Any, clips: Path) -> list[float]:
    paths = sorted(path for path in clips.glob("*.mp4") if path.name != "words.mp4")
    answers = assistant.answer_batch(map(str, paths), "What moves?", max_new_tokens=1)
    return [answer.video_tokens_kept / answer.video_tokens for answer in answers]


def test_the_model_keeps_the_asked_share_with_the_threshold_that_is_found(run, here):
    status, out, err = run("--keep", "40%", "--output", "new")
    assert status == 1
    assert err.splitlines()[-1] == "stts-hf calibrate: error: 1 rows could not be answered"
    found = stts_hf.load(here / "new", device="cpu")
    assert found.model.config.vision_config.score_threshold == threshold_of(out)
    shares = kept_by(found, here / "clips")
    assert abs(np.mean(shares) - 0.4) < 0.01
    assert max(shares) - min(shares) > 0.2
    assert f"{np.mean(shares):.1%} +-" in out
    assert re.search(rf"^per video: +{min(shares):.1%} to {max(shares):.1%}, quartiles", out, re.M)
    assert re.search(r"^per second: +\S+ tokens to \S+ tokens, quartiles", out, re.M)
    assert (here / "calibration.png").read_bytes()[:4] == b"\x89PNG"
    assert "`score_threshold`" in (here / "new" / "README.md").read_text()
    assert not (TINY / "calibration.jsonl").exists()


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped_and_scores_what_has_changed(run, here, monkeypatch):
    whole = run("--keep", "0.4")[1]
    lines = Path("calibration.jsonl").read_bytes().splitlines(keepends=True)
    scored: list[str] = []
    score_rows = calibration.score_rows

    def record(model, processor, rows, **options):
        scored.extend(Path(row["video"]).name for row in rows)
        return score_rows(model, processor, rows, **options)

    monkeypatch.setattr(calibration, "score_rows", record)
    Path("calibration.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:40])
    shutil.copy("clips/0.mp4", "clips/1.mp4")
    status, out, err = run("--keep", "0.4")
    assert len(scored) == 4  # two that were lost, the one that changed and the one with an error
    assert {"1.mp4", "words.mp4"} <= {*scored}
    assert f"{NUMBER + 1 - 4} of {NUMBER + 1} rows are answered" in err
    assert threshold_of(out) != threshold_of(whole)
    Path("clips/words.mp4").unlink()
    scored.clear()
    assert run("--keep", "0.6")[0] == 0
    assert scored == []  # another share needs no score anew
    status, _, err = run("--keep", "0.6", "--num-frames", "4")
    assert status == 2
    assert "--scores calibration.jsonl holds answers of other settings: processing was" in err


def test_videos_of_a_data_set_are_told_by_their_content(run):
    for name, numbers in (("one", (0, 1)), ("other", (0, 2))):
        videos = [{"bytes": Path(f"clips/{number}.mp4").read_bytes(), "path": None} for number in numbers]
        features = datasets.Features({"id": datasets.Value("string"), "video": datasets.Video(decode=False)})
        datasets.Dataset.from_dict({"id": ["a", "b"], "video": videos}, features).to_parquet(f"{name}.parquet")
    first = threshold_of(run("--keep", "0.4", videos="one.parquet")[1])
    status, out, err = run("--keep", "0.4", videos="other.parquet")
    assert status == 0
    assert "1 of 2 rows are answered" in err
    assert threshold_of(out) != first
    assert threshold_of(run("--keep", "0.4", "--scores", "new.jsonl", videos="other.parquet")[1]) == threshold_of(out)


@pytest.mark.slow
def test_write_changes_the_configs_alone_and_a_share_over_tokens_keeps_bounds(run, here):
    shutil.copytree(TINY, "mine")
    generation = Path("mine/generation_config.json")
    held = json.loads(generation.read_bytes())
    generation.write_text(json.dumps(held | {"pruning_ratio": 0.9}))  # `generate` would take it for the threshold
    files = {path.name: path.read_bytes() for path in Path("mine").iterdir()}
    status, out, _ = run(
        "--keep", "0.5", "--write", "--mean", "tokens", "--max-pruning-ratio", "0.6", checkpoint="mine"
    )
    assert status == 1
    assert re.search(r"^written: +mine/config.json$", out, re.M)
    changed = {path.name for path in Path("mine").iterdir() if files.get(path.name) != path.read_bytes()}
    assert changed == {"config.json", "generation_config.json"}
    assert json.loads(generation.read_text()) == held
    vision = json.loads(Path("mine/config.json").read_text())["vision_config"]
    assert vision["score_threshold"] == threshold_of(out)
    assert vision["max_pruning_ratio"] == 0.6
    shares = kept_by(stts_hf.load("mine", device="cpu"), here / "clips")
    assert abs(np.mean(shares) - 0.5) < 0.01
    assert min(shares) >= 0.4


def test_a_line_to_copy_without_a_place_to_write_to(run):
    out = run("--keep", "0.4", "--selector", "cosine")[1]
    (line,) = re.findall(r"^in python: +(.*)$", out, re.M)
    loaded = eval(line, {"stts_hf": stts_hf})
    assert loaded.model.config.vision_config.selector == "cosine"
    assert loaded.model.config.vision_config.score_threshold == threshold_of(out)


@pytest.mark.slow
def test_made_up_videos_keep_the_share_that_was_fitted_to_others():
    """Within two points on held-out videos of the same kind, with scores of any level."""
    random = np.random.default_rng(0)

    def videos(number: int, rule: KeepRule) -> Calibration:
        records = []
        for level in random.beta(2, 6, number):
            frames = int(random.integers(2, 33))
            scores = random.beta(20 * level + 0.1, 20 - 20 * level, 16 * frames - 16).astype("<f4")
            packed = base64.b64encode(scores.tobytes())
            records.append({"scores": packed, "frames": frames, "blocks": 16})
        return Calibration(records, rule)

    for rule in (KeepRule(threshold=0.0), KeepRule(threshold=0.0, bounds=(0.2, 0.85))):
        for mean in ("videos", "tokens"):
            seen, others = videos(2000, rule), videos(2000, rule)
            for share in (0.25, 0.4, 0.6):
                threshold = seen.find_threshold(share, mean)
                assert abs(seen.share(threshold, mean) - share) < 0.001
                assert abs(others.share(threshold, mean) - share) < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0.01"], r"--keep 0.01 is 1.0%, but must be from .* first frame of each video stays"),
        (["--keep", "0.9", "--min-pruning-ratio", "0.5"], r"--keep 0.9 is 90.0%, but must be from .* to 50"),
        (["--keep", "0.4", "--selector", "random"], "are not comparable between videos"),
        (["--keep", "0.4", "--write", "--output", "x"], "not allowed with argument --write"),
        (["--keep", "0.4", "--output", "clips"], "is there already and is not written over"),
        (["--keep", "0.4", "--scores", "a.txt"], "--scores a.txt must be a file that ends in .jsonl"),
        (["--keep", "40"], "must be a share"),
        ([], "the following arguments are required: --keep"),
    ],
    ids=["too little", "too much", "random", "twice", "exists", "ending", "percent", "missing"],
)
def test_wrong_arguments_are_one_line(run, capsys, arguments, message):
    try:
        status, _, err = run(*arguments)
    except SystemExit as end:
        status, err = end.code, capsys.readouterr().err
    assert status == 2
    assert re.search(message, err.splitlines()[-1])


def test_checkpoints_without_a_level_and_folders_without_videos_are_refused(run, here):
    Path("none").mkdir()
    shutil.copy("clips/words.mp4", "none")
    assert "no video can be scored: Cannot read" in run("--keep", "0.4", videos="none")[2]
    model = load_tiny()
    with torch.no_grad():
        module_of(model, SCORER).score_layer.weight.zero_()
    shutil.copytree(TINY, "untrained")
    model.save_pretrained("untrained")
    assert (
        "has an untrained scorer; train it"
        in run("--keep", "0.4", "--scores", "other.jsonl", checkpoint="untrained")[2]
    )
    shutil.copytree(TINY, "answers")
    config = json.loads(Path("answers/config.json").read_text()) | {"worth_unit": None}
    Path("answers/config.json").write_text(json.dumps(config))
    assert "`worth_unit` = None" in run("--keep", "0.4", checkpoint="answers")[2]
    Path("linked").mkdir()
    for path in TINY.iterdir():
        (Path("linked") / path.name).symlink_to(path)
    assert (
        "--write needs a folder with a config.json of its own"
        in run("--keep", "0.4", "--write", checkpoint="linked")[2]
    )
