"""Files of weights that claim more tensors than any model has are refused at once, in one short sentence."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from stts_hf.checkpoints.convert import convert_checkpoint
from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.loading import load_config_and_processor, load_model
from stts_hf.checkpoints.push import check_folder
from tests.checkpoints import TINY


def with_more(folder: Path, number: int, form: str) -> Path:
    """stts-tiny, with so many empty tensors more in its one file, or as names in an index of shards."""
    shutil.copytree(TINY, folder)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if form == "index":
        names = json.loads(raw[8 : 8 + size]).keys() - {"__metadata__"}
        weight_map = dict.fromkeys([*names, *(f"x{index}" for index in range(number))], "model-1.safetensors")
        file.rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    more = "".join(f',"x{index}":{empty}' for index in range(number))
    header = (raw[8 : 8 + size].decode().rstrip()[:-1] + more + "}").encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    return folder


@pytest.mark.parametrize(
    ("number", "form"),
    [(100_000, "header"), (150_000, "index")],
)
def test_more_tensors_than_any_model_has_are_refused_at_once(tmp_path, number, form):
    folder = with_more(tmp_path / "checkpoint", number, form)
    config, _ = load_config_and_processor(str(folder))
    messages, start = [], time.perf_counter()
    for use in (
        lambda: load_model(str(folder), config, torch.device("cpu")),
        lambda: convert_checkpoint(folder, tmp_path / "converted"),
        lambda: check_folder(folder),
    ):
        with pytest.raises(
            ValueError, match=r"bytes of names of tensors, .* at most 4,000,000: get it from its origin"
        ) as refusal:
            use()
        messages.append(str(refusal.value))
    (finding,) = examine(folder)["weights"]
    messages.append(str(finding))
    assert time.perf_counter() - start < 10  # the rest of the checkpoint is read each time
    assert "bytes of names of tensors" in messages[-1]
    assert max(map(len, messages)) < 400
