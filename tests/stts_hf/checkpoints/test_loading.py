"""A checkpoint is loaded by the package's code, whatever code lies in it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stts_hf.checkpoints.loading import load_config_and_processor, load_model
from tests.checkpoints import TINIES, TINY

TRAP = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('the code ran')\n"
EVERY_CLASS = ("AutoConfig", "AutoModel", "AutoModelForMultimodalLM", "AutoProcessor", "AutoVideoProcessor")


def with_trap(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint, every module of which would end the process, with classes of such a module for all."""
    shutil.copytree(source, folder)
    for module in [*folder.glob("*.py"), folder / "trap.py"]:
        module.write_text(TRAP)
    traps: dict[str, Any] = dict.fromkeys(EVERY_CLASS, "trap.Trap") | {"AutoTokenizer": [None, "trap.Trap"]}
    for file in (folder / f"{name}.json" for name in ("config", "processor_config", "tokenizer_config")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": traps}))
    return folder


@pytest.mark.parametrize("backbone", TINIES)
def test_no_code_of_a_checkpoint_runs(backbone, tmp_path):
    folder = with_trap(TINIES[backbone], tmp_path / "checkpoint")
    config, processor = load_config_and_processor(str(folder))
    model = load_model(str(folder), config, torch.device("cpu"))
    assert type(model).__module__.startswith("stts_hf.")
    assert processor.tokenizer("moves")["input_ids"]
    assert not list(tmp_path.rglob("ran"))


def test_a_pickle_is_not_opened(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    config, _ = load_config_and_processor(str(folder))
    with pytest.raises(ValueError, match=r"cannot be loaded: .*model\.safetensors"):
        load_model(str(folder), config, torch.device("cpu"))
