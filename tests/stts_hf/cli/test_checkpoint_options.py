"""Which checkpoints a command takes, and what it says of others."""

import re
from pathlib import Path

import pytest
from transformers import Molmo2Processor, Molmo2VideoProcessor

from stts_hf.benchmark.models import stock_twin
from stts_hf.cli import checkpoint_options as checkpoints
from stts_hf.cli.errors import CommandError
from stts_hf.cli.main import main
from tests.checkpoints import EVERY, TINY, load_tiny
from tests.conftest import REPOSITORY
from tests.stts_hf.checkpoints.convert_files import write_qwen


@pytest.fixture(scope="module", params=EVERY)
def stock(request, tmp_path_factory, processor) -> Path:
    """A tiny model without its scorer, as a stock folder."""
    folder = tmp_path_factory.mktemp("stock")
    if request.param != "molmo2":
        return write_qwen(folder, request.param)
    stock_twin(load_tiny()).save_pretrained(folder)
    video = processor.video_processor
    Molmo2Processor(
        processor.image_processor,
        Molmo2VideoProcessor(
            patch_size=video.patch_size, size=dict(video.size), pooling_size=video.pooling_size, max_fps=video.max_fps
        ),
        processor.tokenizer,
        chat_template=processor.chat_template,
        use_single_crop_col_tokens=False,
        use_frame_special_tokens=False,
    ).save_pretrained(folder)
    assert '"model_type": "molmo2"' in (folder / "config.json").read_text()
    assert not list(folder.glob("*.py"))
    return folder


def run(clip: Path, folder: Path, tmp_path: Path, *options: str) -> int:
    command = ["run", str(clip), "What moves?", "--checkpoint", str(folder), "--output", str(tmp_path / "a.png")]
    return main([*command, "--max-new-tokens", "2", "--pruning-ratio", "0.5", *options])


def test_a_stock_folder_runs_with_the_cosine_selector(clip, stock, tmp_path, capsys):
    assert run(clip, stock, tmp_path, "--selector", "cosine") == 0
    kept, of_all = re.findall(r"^video tokens: +(\d+) of (\d+) kept", capsys.readouterr().out, re.M)[0]
    assert int(of_all) in (64, 80, 96)  # 4 or 5 frames of 16, or 2 tubelets of 48
    assert 2 * int(kept) == int(of_all)


@pytest.mark.parametrize("options", [[], ["--selector", "scorer"]], ids=["checkpoints", "scorer"])
def test_a_stock_folder_without_it_is_one_line_that_says_what_to_do(clip, stock, tmp_path, capsys, options):
    assert run(clip, stock, tmp_path, *options) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "choose the selector cosine" in line
    assert "stts-hf convert" in line


@pytest.mark.parametrize("here", [True, False], ids=["in the checkout", "elsewhere"])
def test_without_the_option_a_checkout_has_the_tiny_one_and_says_so(tmp_path, monkeypatch, capsys, here):
    monkeypatch.chdir(REPOSITORY if here else tmp_path)
    expected = "hub_configs/stts-tiny" if here else str(TINY.resolve())
    assert checkpoints.find_checkpoint(None) == expected
    assert "using stts-tiny, which knows a few shapes" in capsys.readouterr().err


def test_without_the_option_and_a_checkout_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(checkpoints, "TINY", Path("nowhere"))
    with pytest.raises(CommandError, match=r"^--checkpoint is needed"):
        checkpoints.find_checkpoint(None)
