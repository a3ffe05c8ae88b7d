"""`stts-hf bench` from the command line: one whole run of the tiny preset, and everything it refuses."""

import json
import re

import pytest

from stts_hf.benchmark.meters import STAGES
from stts_hf.benchmark.presets import PRESETS
from stts_hf.cli.main import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a whole run of the tiny preset."""
    folder = tmp_path_factory.mktemp("results") / "tiny"
    words = ["bench", "--preset", "tiny", "--repeats", "1", "--frames", "2", "--device", "cpu"]
    words += ["--output", str(folder)]
    with pytest.MonkeyPatch.context() as typed:
        typed.setattr("sys.argv", ["stts-hf", *words])
        assert main(words) == 0
    return folder


@pytest.mark.slow
def test_the_result_holds_every_raw_sample(tiny):
    assert sorted(path.name for path in tiny.iterdir()) == ["README.md", "result.json"]
    found = json.loads((tiny / "result.json").read_text())
    assert found["schema"] == 2
    assert found["command"].endswith(f"stts-hf bench --preset tiny --repeats 1 --frames 2 --device cpu --output {tiny}")
    assert {"cpu", "cores", "threads", "memory", "device", "load_before", "load_after"} <= set(found["machine"])
    assert {"torch", "transformers", "stts_hf", "python", "commit"} <= set(found["versions"])
    seen = set()
    for cell in found["cells"]:
        assert cell["status"] == "ok"
        for variant in cell["variants"]:
            assert variant["peak_memory"] > 0
            for stage, measured in variant["stages"].items():
                seen.add(stage)
                (seconds,) = measured["seconds"]
                assert seconds > 0
    assert seen == set(STAGES)


@pytest.mark.slow
def test_the_page_is_made_of_the_samples_alone(tiny, capsys):
    page = (tiny / "README.md").read_text()
    (tiny / "README.md").write_text("edited by hand")
    assert main(["bench", "--render", "--output", str(tiny)]) == 0
    assert (tiny / "README.md").read_text() == page


def test_the_list_names_every_preset_and_what_it_takes(capsys):
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert re.search(rf"^{name} +{re.escape(preset.help)}$", printed, re.M)
        assert preset.takes in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tower", "--modes", "training"], "--modes leaves out tower"),
        (["--backends", "flex_attention"], "'flex_attention' needs a GPU"),
        (["--pruning-layers", "1", "5"], "`pruning_layer` is 5"),
        (["--preset", "qwen"], "preset 'qwen' is for a GPU"),
        (["--device", "abacus"], "--device abacus cannot be used here"),
        (["--render"], "--render needs --output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_name_the_option(capsys, arguments, message):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
