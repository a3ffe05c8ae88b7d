"""The page says what the samples say."""

import pytest

from stts_hf.benchmark.presets import PRESETS
from stts_hf.benchmark.report import markdown
from tests.stts_hf.benchmark.made_up import cell, pruned_twice, result, variant


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells of the table's rows by the first of them."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return {line[0].strip(): [part.strip() for part in line[1:]] for line in lines}


def failing() -> dict:
    broken = pruned_twice()
    broken["variants"][0] = {"name": "stock", "pruning_ratio": None, "status": "out of memory", "reason": "1 TB"}
    return broken


def test_the_table_holds_every_figure():
    rows = rows_of(markdown(result([pruned_twice()])))
    assert rows["**tower, 8 frames, tiny, sdpa, float32**, 3 rounds"] == ["", "", ""]
    assert rows["total"][0] == "8000 ± 1000"
    assert rows["total"][2] == "5000 ± 2500, 1.600x of 2.000 (80.0%)"
    assert rows["vision tower"][1] == "5000 ± 0.00, 0.800x of 0.800 (100.0%)"
    assert rows["GFLOP"][2] == "4e-07"
    assert rows["memory, MiB"][2] == "1"
    assert rows["frames/s"] == ["1", "0.8", "1.6"]
    assert rows["tokens of a row"] == ["100"] * 3


def test_what_failed_says_so_and_why():
    lost = pruned_twice() | {"status": "failed", "reason": "RuntimeError: no kernel", "variants": []}
    page = markdown(result([failing(), lost]))
    assert rows_of(page)["**tower, 8 frames, tiny, sdpa, float32**"] == [""] * 3
    assert "| **tower, 8 frames, tiny, sdpa, float32**, 3 rounds | out of memory |  |  |" in page
    assert ", stock: out of memory (1 TB)." in page
    assert "float32: failed (RuntimeError: no kernel)." in page


def of_the_paper(mode: str, frames: int, batch: int) -> dict:
    stages = {"total": ([2.0], 4)}
    return cell(
        [variant(None, stages), variant(0.4, stages)], mode=mode, geometry="molmo2-4b", frames=frames, batch=batch
    )


def test_the_papers_speed_ups_stand_beside_ours():
    rows = rows_of(markdown(result([of_the_paper("training", 256, 1)], "paper")))
    assert rows["speed-up in the paper"] == ["", "1.88"]
    rows = rows_of(markdown(result([of_the_paper("inference", 64, 2)], "paper")))
    assert rows["speed-up in the paper"] == ["", "1.3"]
    assert "speed-up in the paper" not in rows_of(markdown(result([of_the_paper("inference", 64, 1)], "paper")))


@pytest.mark.parametrize(("frames", "tokens"), [(128, 15670), (256, 25307)])
def test_the_paper_preset_has_the_papers_tokens(frames, tokens):
    from stts_hf.benchmark.geometries import GEOMETRIES

    workloads = [workload for workload in PRESETS["paper"].workloads if workload.batch * workload.frames == frames]
    assert workloads
    for workload in workloads:
        rows, cols = GEOMETRIES[workload.geometry].config().vision_config.block_grid
        of_frame = workload.timestamp_tokens + 2 + rows * cols
        assert workload.batch * (workload.frames * of_frame + workload.text_tokens) == tokens
