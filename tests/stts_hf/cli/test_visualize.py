"""`stts-hf visualize` on the tiny checkpoints: what it writes of each backbone, and how it says no."""

import base64
import functools
import http.server
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

from examples.clips.sample_clip import draw_sample_clip
from stts_hf.benchmark.models import stock_twin
from stts_hf.cli.main import main
from stts_hf.inference.engine import answer_videos
from tests.checkpoints import ALL_TINIES, EVERY, load_tiny
from tests.small_disk import small_disk
from tests.stts_hf.visualize.test_html_report import Page

QUESTION = "What <b>moves</b>?"
PER_SELECTOR = ("contact_sheet.{}.png", "overlay.{}.mp4")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    draw_sample_clip(path, seconds=2.0, fps=10, size=(64, 96))
    return path


@pytest.fixture(scope="module", params=EVERY)
def shown(request, clip, tmp_path_factory):
    """What the command writes and prints for a backbone."""
    checkpoint = ALL_TINIES[request.param]
    folder = tmp_path_factory.mktemp("shown") / "made" / "output"
    command = ["visualize", str(clip), "--checkpoint", str(checkpoint), "--output", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *text, **_: printed.append(" ".join(map(str, text))))
        few = ["--max-new-tokens", "3", "--repeats", "1", "--num-frames", "4"]
        status = main([*command, "--question", QUESTION, *few])
    return SimpleNamespace(folder=folder, status=status, printed="\n".join(printed), checkpoint=checkpoint)


@pytest.fixture
def run(clip, hub_configs, tmp_path, capsys):
    """Runs the command with one selector and no times; returns exit status, stdout, the last line of stderr, folder."""

    def run(*arguments: str, video: Path | str = clip, checkpoint: Path | None = None, selector: str = "cosine"):
        folder = tmp_path / "output"
        command = ["visualize", str(video), "--checkpoint", str(checkpoint or hub_configs / "stts-tiny")]
        command += ["--output", str(folder), "--max-new-tokens", "1", "--repeats", "0", "--num-frames", "2"]
        command += ["--selectors", *selector.split()] if selector else []
        status = main([*command, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err.splitlines()[-1], folder

    return run


def test_every_selector_gets_its_pictures_and_videos(shown):
    assert shown.status == 0
    names = [name.format(selector) for name in PER_SELECTOR for selector in ("scorer", "cosine", "random")]
    assert sorted(path.name for path in shown.folder.iterdir()) == sorted([*names, "comparison.png", "report.html"])
    for path in shown.folder.glob("*.png"):
        with Image.open(path) as image:
            image.load()
            assert image.width > 600
    for path in shown.folder.glob("*.mp4"):
        with av.open(str(path)) as container:
            assert sum(1 for _ in container.decode(video=0)) == 20
    assert [path.name for path in shown.folder.parent.iterdir()] == ["output"]  # nothing is left beside it


def test_the_page_holds_what_the_model_keeps_with_each_selector(shown, clip):
    """Compared with a model that is loaded for each of them."""
    page = Page(shown.folder / "report.html")
    processor = AutoProcessor.from_pretrained(shown.checkpoint)
    whole, *pruned = page.data["selectors"]
    assert whole["name"] == "nothing dropped"
    assert set(base64.b64decode(whole["mask"])) == {1}
    assert str(shown.checkpoint) not in page.source
    for entry in pruned:
        model = AutoModelForMultimodalLM.from_pretrained(shown.checkpoint, selector=entry["name"]).eval()
        (answer,) = answer_videos(
            model, processor, [str(clip)], QUESTION, max_new_tokens=3, processing={"num_frames": 4}
        )
        assert answer.keep_mask is not None
        assert answer.answer is not None
        assert [*base64.b64decode(entry["mask"])] == answer.keep_mask.int().flatten().tolist()
        assert page.data["times"] == pytest.approx(answer.timestamps, abs=1e-3)
        assert (page.data["rows"], page.data["columns"]) == answer.grid
        assert (page.data["tubelet"], len(page.data["frames"])) == (answer.tubelet, answer.num_frames)
        assert answer.answer in "".join(page.texts["p"])
        kept = f"{answer.video_tokens_kept} of {answer.video_tokens} video tokens kept"
        assert re.search(rf"^{entry['name']}: +{kept}; ", shown.printed, re.M)
    assert QUESTION in "".join(page.texts["p"])
    assert page.data["clip"]


def test_the_times_of_the_page_are_those_printed(shown):
    after = shown.printed.partition("median, ms")[2]
    printed = {line.split("  ")[0]: line for line in after.splitlines()}
    cells = [text for text in Page(shown.folder / "report.html").texts["td"] if re.fullmatch(r"\d+\.\d", text.strip())]
    for name in ("stock model", "scorer", "cosine", "random"):
        times = re.findall(r" (\d+\.\d)(?= |$)", printed[name])
        assert len(times) == 3
        assert set(times) <= {cell.strip() for cell in cells}


@pytest.mark.parametrize("kind", ["stock", "untrained"])
def test_without_a_trained_scorer_the_others_are_shown(run, processor, tmp_path, kind):
    model = load_tiny()
    torch.nn.init.zeros_(model.model.vision_tower.scorer.score_layer.weight)
    (stock_twin(model) if kind == "stock" else model).save_pretrained(tmp_path / kind)
    processor.save_pretrained(tmp_path / kind)
    status, out, _, folder = run(checkpoint=tmp_path / kind, selector="")
    assert status == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "question",
        "nothing dropped",
        "cosine",
        "random",
        "page",
    ]
    assert "has no trained scorer" in "".join(Page(folder / "report.html").texts["p"])
    shutil.rmtree(folder)
    status, out, last, _ = run(checkpoint=tmp_path / kind, selector="cosine scorer")
    assert (status, out) == (2, "")
    assert "has no trained scorer" in last
    assert not folder.exists()


@pytest.mark.slow
def test_an_address_that_is_allowed_is_downloaded_once(run, clip):
    asked: list[str] = []

    class Listing(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    handler = functools.partial(Listing, directory=str(clip.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            status, _, _, folder = run("--allow-urls", video=f"http://127.0.0.1:{server.server_port}/{clip.name}")
        finally:
            server.shutdown()
    assert (status, asked) == (0, [f"/{clip.name}"])
    assert Page(folder / "report.html").texts["dd"][0] == clip.name


def test_a_folder_that_is_there_is_not_touched(run, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine.txt").write_text("mine")
    status, _, last, folder = run()
    assert (status, str(folder) in last) == (2, True)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(run, tmp_path):
    with small_disk(20_000):
        status, _, last, folder = run()
    assert status == 2
    assert last.startswith(f"stts-hf visualize: error: --output {folder} is not written")
    assert not [path for path in tmp_path.iterdir() if "output" in path.name]
