"""The whole way: the authors' checkpoint, converted, pushed, and loaded by a process that has none of our package."""

import json
import subprocess
import sys

import pytest

from stts_hf.cli.main import main
from tests.conftest import WITHOUT_PACKAGE
from tests.fixture_files import checkpoint_forms
from tests.hub_server import LoopbackHub
from tests.stts_hf.checkpoints.convert_files import REFERENCE_LOGITS, write_base

LOGIT_TOLERANCE = 1e-4  # what the project promises; 1.4e-6 was measured


def run(environment: dict[str, str], *command: str, cwd) -> str:
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_both_forms_converted_pushed_and_loaded_give_the_reference_logits(tmp_path):
    forms = checkpoint_forms()
    base = write_base(tmp_path / "base")
    cli = ("-m", "stts_hf.cli.main")
    with LoopbackHub() as hub:
        pairs = []
        for form in forms:
            folder, name = tmp_path / form.name, f"user/{form.parent.name}-{form.name}"
            # The reference numbers are without the refill, which conversion turns on.
            options = ("--base", str(base), "--packing", "varlen")
            assert main(["convert", str(form), str(folder), *options]) == 0
            run(hub.environment(tmp_path / "push", "write-token"), *cli, "push", str(folder), name, cwd=tmp_path)
            pairs += [name, str(form.parent / "expected.safetensors")]
        fresh = hub.environment(tmp_path / "fresh", "write-token")  # an empty cache
        printed = run(fresh, "-c", WITHOUT_PACKAGE + REFERENCE_LOGITS, *pairs, cwd=tmp_path)
    worst = json.loads(printed.splitlines()[-1])
    assert len(worst) == 3 * len(forms)
    assert max(worst.values()) < LOGIT_TOLERANCE, worst
