"""From a checkpoint to the page: what can be chosen, and the Space, which serves the same."""

import re
import subprocess
import sys
import threading

import pytest
import torch

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.inference.assistant import VideoAssistant
from stts_hf.model_parts import usable_selectors, with_selector
from tests.checkpoints import TINY
from tests.conftest import REPOSITORY
from tests.stts_hf.demo.conftest import WITHOUT_GRADIO

pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
SPACE = REPOSITORY / "examples" / "space"


@pytest.mark.parametrize(
    ("trained", "own", "offered"),
    [
        (True, "scorer", ["scorer", "cosine", "random"]),
        (True, "random", ["random", "scorer", "cosine"]),
        (False, "cosine", ["cosine", "random"]),
    ],
    ids=["scorer", "random", "untrained"],
)
def test_a_selector_can_be_chosen_where_the_checkpoint_has_it(trained, own, offered):
    model = STTSForConditionalGeneration.from_pretrained(TINY, selector=own)
    if not trained:
        torch.nn.init.zeros_(model.model.vision_tower.scorer.score_layer.weight)
    assert usable_selectors(model) == offered


def test_another_selector_shares_the_weights_and_not_the_configuration(assistant, video):
    other = VideoAssistant(with_selector(assistant.model, "cosine"), assistant.processor)
    pairs = zip(assistant.model.parameters(), other.model.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    kept = [one.watch(str(video), pruning_ratio=0.5).keep_mask for one in (assistant, other)]
    assert assistant.model.config.vision_config.selector == "scorer"
    assert not torch.equal(*kept)
    assert kept[0].sum() == kept[1].sum()


def test_the_page_is_sent_without_a_copy_of_the_model(served, assistant, monkeypatch):
    copied = threading.Event()
    monkeypatch.setattr(type(assistant.model), "__deepcopy__", lambda self, memo: copied.set(), raising=False)
    import httpx

    assert "Ask a video" in httpx.get(served.url, timeout=60).text
    assert not copied.is_set()


@pytest.mark.slow
def test_the_space_is_put_together_as_its_readme_says_and_serves_the_same_page(tmp_path):
    (commands,) = re.findall(r"```bash\n(.*?)```", (SPACE / "README.md").read_text(), re.S)
    for command in commands.splitlines():
        if command.startswith("cp "):
            subprocess.run(command.replace("my-space", str(tmp_path / "space")), shell=True, check=True, cwd=REPOSITORY)
    code = (
        "import app, stts_hf; print(stts_hf.__file__);"
        "print(*sorted(type(block).__name__ + str(block.elem_id) for block in app.page.blocks.blocks.values()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "space", check=True, capture_output=True, text=True, timeout=600
    )
    package, blocks = ran.stdout.splitlines()[-2:]
    assert package.startswith(str(tmp_path))
    from stts_hf.demo.serving import build

    page = build(
        VideoAssistant(STTSForConditionalGeneration.from_pretrained(TINY), STTSProcessor.from_pretrained(TINY))
    )
    same = sorted(type(block).__name__ + str(block.elem_id) for block in page.blocks.blocks.values())
    assert blocks == " ".join(same)


def test_the_space_names_the_gradio_that_is_known_to_work():
    settings = dict(re.findall(r"^(\w+): (\S+)$", (SPACE / "README.md").read_text(), re.M))
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.M))
    assert settings["sdk"] == "gradio"
    assert settings["sdk_version"] == pins["gradio"]
    assert (SPACE / settings["app_file"]).is_file()


def test_the_space_asks_for_what_the_package_needs():
    import tomllib

    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert (SPACE / "requirements.txt").read_text().splitlines() == needed
