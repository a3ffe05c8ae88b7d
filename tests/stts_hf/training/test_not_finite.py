"""A loss that is not finite on one of two processes ends both, and neither saves what it did."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from stts_hf.training.checkpointing import last_checkpoint
from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_nan_on_one_process_ends_all_and_names_its_row(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.stts_hf.training.not_finite_run", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert "The loss of step 2 is not finite on process 1" in result.stderr
    assert "Rows of the batch: row-3. " in result.stderr
    last = last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-1")
    assert all(tensor.isfinite().all() for tensor in load_file(f"{last}/model.safetensors").values())
