"""The command line on the tiny checkpoint: what it prints, what it writes, and how it says no."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM

from stts_hf.benchmark.models import stock_twin
from stts_hf.cli import stock_times as timing
from stts_hf.cli.main import main
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.checkpoints import QWENS, TINIES
from tests.clips import write_no_video

# 2 seconds at 4 frames per second, and the last frame: 0, 0.2, 0.5, 0.7, ... 1.7 s and the end.
NUM_FRAMES, NUM_TOKENS = 9, 9 * 16


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_sample_clip(path, seconds=2.0, fps=10, size=(64, 96))
    return path


@pytest.fixture
def run(clip, hub_configs, tmp_path, capsys):
    """Runs the command on the clip; returns exit status, stdout, stderr and the picture's path."""

    def run(*arguments: str, video: Path | str = clip, checkpoint: Path | str | None = None):
        sheet = tmp_path / "sheet.png"
        checkpoint = hub_configs / "stts-tiny" if checkpoint is None else checkpoint
        command = ["run", str(video), "What moves?", "--checkpoint", str(checkpoint), "--output", str(sheet)]
        status = main([*command, "--max-new-tokens", "3", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err, sheet

    return run


def test_it_answers_counts_and_draws(run):
    status, out, err, sheet = run()
    assert status == 0
    assert re.search(r"^question: +What moves\?$", out, re.M)
    assert re.search(r"^answer: +\S", out, re.M)
    assert re.search(r"^frames: +9 sampled from 0\.00 s to 1\.90 s of a video of 2\.00 s$", out, re.M)
    # floor(0.5 * 144) = 72 of 144 are dropped.
    assert re.search(r"^video tokens: +72 of 144 kept", out, re.M)
    assert str(sheet) in out
    with Image.open(sheet) as image:
        assert image.width > 600
    for step in ("Loading", "Decoding", "Answering", "Drawing"):
        assert step in err


def test_the_prompt_shrinks_by_what_was_dropped(run):
    _, out, _, _ = run()
    left, whole = map(int, re.findall(r"prompt: +(\d+) of (\d+) tokens", out)[0])
    assert whole - left == 72


@pytest.mark.parametrize("other", QWENS)
def test_another_backbone_takes_the_same_command(run, other):
    """Of 20 frames in 2 s four, in two tubelets of 4 x 6 blocks, in the size they have."""
    tiny, last = TINIES[other], {"qwen3_vl": "1.9", "qwen2_5_vl": "1.5"}[other]  # native sampling, not alike
    status, out, _, sheet = run("--time", checkpoint=tiny)
    assert status == 0
    assert re.search(rf"^frames: +4 sampled from 0\.00 s to {last}0 s of a video of 2\.00 s$", out, re.M)
    assert re.search(r"^video tokens: +24 of 48 kept", out, re.M)
    assert re.search(r"^stock model .*\(1\.00x\)", out, re.M)
    with Image.open(sheet) as image:
        assert image.width > 600
    # ceil(2 / (1 - 0.5)) = 4
    assert "2 sampled" in run("--num-frames", "2", checkpoint=tiny)[1]
    scaled = ("--num-frames", "2", "--test-time-scaling", "--pruning-ratio", "0.5")
    assert "4 sampled" in run(*scaled, checkpoint=tiny)[1]


@pytest.mark.parametrize(("ratio", "kept"), [("0", 144), ("0.3", 144 - 43), ("0.4", 144 - 57), ("0.9", 16), ("1", 0)])
def test_pruning_ratio(run, ratio, kept):
    # At 0.9 the budget exceeds all frames but the first, which then stays in full; at 1 that goes too.
    status, out, _, _ = run("--pruning-ratio", ratio)
    assert status == 0
    assert f"{kept} of {NUM_TOKENS} kept" in out


def test_selectors_drop_different_blocks(run):
    pictures = {run("--selector", name)[3].read_bytes() for name in ("scorer", "cosine", "random")}
    assert len(pictures) == 3


def test_num_frames_limits_the_frames(run):
    assert "2 sampled from 0.00 s to 1.90 s" in run("--num-frames", "2")[1]


def test_test_time_scaling_looks_at_more_frames(run):
    # ceil(2 / (1 - 0.5)) = 4
    assert "4 sampled" in run("--num-frames", "2", "--test-time-scaling", "--pruning-ratio", "0.5")[1]


def test_the_answer_comes_before_pictures_and_times(run, monkeypatch, capsys):
    printed_by_then = {}

    def note_down(step):
        return lambda *_: printed_by_then.update({step: capsys.readouterr().out}) or {}

    monkeypatch.setattr("stts_hf.cli.answer_report.draw", note_down("draw"))
    monkeypatch.setattr(timing, "time_prompts", note_down("time"))
    monkeypatch.setattr(timing, "print_times", lambda times: None)
    run("--time")
    assert re.search(r"^answer: +\S", printed_by_then["draw"], re.M)
    assert "picture:" in printed_by_then["time"]


def test_times_are_taken_only_when_asked_for(run, monkeypatch):
    monkeypatch.setattr(timing, "time_prompts", lambda *_, **__: pytest.fail("nobody asked for times"))
    status, out, err, _ = run()
    assert status == 0
    assert "stock model" not in out
    assert "Timing" not in err


def test_no_bar_goes_into_a_log(run):
    _, _, err, _ = run("--time")
    assert "\r" not in err
    assert "%|" not in err


def test_an_address_is_read_only_where_that_is_allowed(run):
    status, out, err, _ = run(video="https://example.com/clip.mp4")
    assert (status, out) == (2, "")
    assert err == (
        "stts-hf run: error: VIDEO https://example.com/clip.mp4 is an address, which is downloaded only with "
        "--allow-urls; pass the path of a video file\n"
    )


def test_an_address_that_is_allowed_is_answered_about_and_drawn(run, clip):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(clip.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/{clip.name}"
            status, out, _, sheet = run("--allow-urls", video=address)
        finally:
            server.shutdown()
    assert status == 0
    assert f"72 of {NUM_TOKENS} kept" in out
    assert sheet.is_file()


def test_times_compare_the_stock_model_with_and_without_dropping(run):
    _, out, _, _ = run("--time")
    rows = [line for line in out.splitlines() if line.startswith(("stock", "STTS"))]
    assert [re.split(r"\s{2,}", row)[0] for row in rows] == ["stock model", "STTS, none dropped", "STTS, 50% dropped"]
    for row in rows:
        assert len(re.findall(r"\d+\.\d \(\d+\.\d\dx\)", row)) == 3
    assert rows[0].count("(1.00x)") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--test-time-scaling", "--pruning-ratio", "1"], "--test-time-scaling needs"),
        (
            ["--test-time-scaling", "--pruning-ratio", "0.9999999"],
            "test_time_scaling=True needs pruning_ratio of at most",
        ),
        (["--output", "missing_folder/sheet.png"], "a folder that does not exist"),
        (["--output", "sheet.txt"], "must end in .png"),
        (["--device", "abacus"], "--device abacus cannot be used here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_clear_line(run, arguments, words):
    status, out, err, _ = run(*arguments)
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("stts-hf run: error: ")
    assert words in last
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--pruning-ratio", "1.5", "is 1.5, but must be a share from 0"),
        ("--pruning-ratio", "-0.1", "is -0.1, but must be a share from 0"),
        ("--pruning-ratio", "nan", "is nan, but must be a share from 0"),
        ("--num-frames", "0", "is 0, but must be at least 1"),
        ("--max-new-tokens", "0", "is 0, but must be at least 1"),
    ],
)
def test_values_out_of_range_are_one_clear_line(run, capsys, option, value, words):
    with pytest.raises(SystemExit) as ended:
        run(option, value)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"stts-hf run: error: argument {option}: {words}")


@pytest.mark.parametrize("token", ["<|image|>", "<|video|>", "<im_patch>"])
def test_a_question_that_holds_a_control_token_is_at_fault(clip, hub_configs, tmp_path, monkeypatch, capsys, token):
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(clip), f"What is {token}?", "--checkpoint", str(hub_configs / "stts-tiny")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"stts-hf run: error: question holds {token!r}, a control token")


def test_an_output_that_is_a_folder_is_one_clear_line(run, tmp_path):
    (tmp_path / "sheet.png").mkdir()
    status, out, err, _ = run("--output", str(tmp_path / "sheet.png"))
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("is there already and cannot be written over; name another file")


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "truncated"])
def test_what_is_not_a_video_is_one_clear_line(run, tmp_path, kind):
    path = tmp_path / "video.mp4"
    write_no_video(path, kind)
    status, out, err, sheet = run(video=path)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("stts-hf run: error: ")
    assert "Traceback" not in err
    assert not sheet.exists()


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ("./no_such_folder", "is not a folder"),
        ("nobody/no-such-model", "cannot be loaded"),
        ("EMPTY", "holds no weights"),
        ("OTHER", "is a 'qwen3' model, but must be an STTS checkpoint"),
        ("NO_WEIGHTS", "holds no weights"),
        ("NO_PROCESSOR", "cannot be loaded"),
    ],
)
def test_a_wrong_checkpoint_is_one_clear_line(run, hub_configs, tmp_path, checkpoint, words):
    folder = tmp_path / "checkpoint"
    if checkpoint == "NO_WEIGHTS":
        folder = hub_configs / "stts-molmo2-4b"
    else:
        folder.mkdir()
    if checkpoint in ("OTHER", "NO_PROCESSOR"):
        config = {"OTHER": '{"model_type": "qwen3"}', "NO_PROCESSOR": '{"model_type": "stts"}'}
        (folder / "config.json").write_text(config[checkpoint])
        (folder / "model.safetensors").touch()
    status, _, err, _ = run(checkpoint=folder if checkpoint.isupper() else checkpoint)
    assert status == 2
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from stts_hf.cli.main import build_parser; build_parser().format_help(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_packages_code_runs(hub_configs, tmp_path):
    code = """
import argparse, sys
from stts_hf.cli.checkpoint_options import load_model, load_processor
from stts_hf.cli.progress import import_libraries
import_libraries()
assert "transformers.models.auto.processing_auto" in sys.modules, "seconds of imports are left for later"
import torch
options = argparse.Namespace(revision=None, selector="cosine", dtype="auto")
config, processor = load_processor(sys.argv[1], options)
model = load_model(sys.argv[1], config, torch.device("cpu"), options)
print(type(model).__module__.split(".")[0], type(processor).__module__.split(".")[0])
print(type(processor.video_processor).__module__.split(".")[0], model.model.vision_tower.config.selector)
"""
    command = [sys.executable, "-c", code, str(hub_configs / "stts-tiny")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert printed.split() == ["stts_hf"] * 3 + ["cosine"]


@pytest.fixture(scope="module")
def tiny_prompt(hub_configs):
    model = AutoModelForMultimodalLM.from_pretrained(hub_configs / "stts-tiny", trust_remote_code=True).eval()
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(144).view(4, 3, 4, 3).permute(0, 2, 1, 3).reshape(16, 9)
    video_token = model.config.image_patch_id
    input_ids = torch.tensor([[1, *[video_token] * 32, 2, 3]])
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == video_token).long(),
        "pixel_values_videos": torch.rand(2, 144, 192, generator=generator),
        "video_token_pooling": torch.cat([block, block + 144]),
        "video_grids": torch.tensor([[2, 4, 4]]),
    }
    return model, inputs


@torch.no_grad()
def test_the_stock_twin_is_the_same_model(tiny_prompt):
    model, inputs = tiny_prompt
    twin = stock_twin(model)
    # The scorer's bias is off at k = 0, so what is left is the stock model up to float32 rounding.
    torch.testing.assert_close(twin(**inputs).logits, model(**inputs, pruning_ratio=0.0).logits, atol=1e-5, rtol=1e-5)


def test_the_stock_twin_copies_no_weights(tiny_prompt):
    model, _ = tiny_prompt
    ours = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in ours for parameter in stock_twin(model).parameters())


def test_every_variant_is_warmed_up_and_takes_turns(tiny_prompt):
    model, inputs = tiny_prompt
    order = []

    def note(ratio):
        return lambda *_: order.append(ratio)

    twin = stock_twin(model)
    model.register_forward_pre_hook(note("stts"))
    twin.register_forward_pre_hook(note("stock"))
    times = timing.time_prompts({"a": (twin, inputs), "b": (model, inputs)}, repeats=2)
    model._forward_pre_hooks.clear()
    assert order == ["stock", "stts"] * 3
    for vision_tower, language_model, total in times.values():
        assert 0 < vision_tower + language_model < total


def test_nothing_dropped_is_not_timed_twice(tiny_prompt):
    model, inputs = tiny_prompt
    assert list(timing.compare_with_stock(model, inputs, 0.0)) == ["stock model", "STTS, none dropped"]
