"""
Part (e): Qwen3-VL in vLLM on this device: whether it computes what `generate` computes, and its requests per second
beside vLLM's own model, without and with vLLM's own pruning (EVS).

    python -m examples.gpu.serving --device cuda --size full docs/benchmarks/gpu-vllm
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from examples.serving import benchmark
from stts_hf import STTSQwen3VLConfig, STTSQwen3VLForConditionalGeneration
from stts_hf.benchmark.geometries import GEOMETRIES

from .checks import describe
from .options import parse
from .runner import RESULT, UNFINISHED

# With STTS; and vLLM's own Qwen3-VL, which takes videos with transformers before 5.20 alone.
STTS, STOCK = Path(".venv-vllm-gpu/bin/python"), Path(".venv-vllm-gpu-stock/bin/python")
FRAMES, SIDE = 64, 448
RATIO = 0.5


def python_with_vllm() -> str | None:
    """Of an environment that holds vLLM and this package's needs."""
    if STTS.exists():
        return str(STTS)
    return None if importlib.util.find_spec("vllm") is None else sys.executable


def make_large(folder: Path, device: torch.device) -> None:
    """Qwen3-VL-4B's sizes with the tiny checkpoint's tokenizer, random weights in bfloat16, stock and STTS."""
    processor: Any = Qwen3VLProcessor.from_pretrained(benchmark.QWEN3_VL, trust_remote_code=False)
    for part in (processor.image_processor, processor.video_processor):
        part.patch_size = 16
    processor.video_processor.size = {"shortest_edge": 4096, "longest_edge": FRAMES * SIDE**2}
    tiny: Any = STTSQwen3VLConfig.from_pretrained(benchmark.QWEN3_VL)
    large = GEOMETRIES["qwen3-vl-4b"].config()
    own = STTSQwen3VLConfig.vision_settings
    config = Qwen3VLConfig(
        vision_config={k: v for k, v in large.vision_config.to_dict().items() if k not in (*own, "model_type")},
        text_config=large.text_config.to_dict() | {"vocab_size": tiny.text_config.vocab_size},
        **{name: value for name, value in tiny.to_dict().items() if name.endswith("_token_id")},
    )
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001
    model.save_pretrained(folder / "stock")
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a server takes what is free
    pruning: Any = {"pruning_layer": large.vision_config.pruning_layer, "dtype": torch.bfloat16}
    STTSQwen3VLForConditionalGeneration.from_pretrained(folder / "stock", **pruning).save_pretrained(folder / "stts")
    for name in ("stock", "stts"):
        processor.save_pretrained(folder / name)


def check_parity(python: str, seconds: float) -> str:
    """The last line of the tests that compare vLLM with `generate`."""
    command = [python, "-m", "pytest", "-m", "vllm", "-q", "tests/stts_hf/serving/test_parity.py", "-k", "qwen3_vl"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    print(ran.stdout, ran.stderr, flush=True)
    return (ran.stdout.strip().splitlines() or ["no output"])[-1]


def measure(python: str, size: str, device: torch.device) -> list[str]:
    """Rows of the table, the first beside which the others stand."""
    stock = str(STOCK) if STOCK.exists() else None
    kinds: list[tuple[float | None, float | None, str]] = [(None, None, stock), (None, RATIO, stock)] if stock else []
    kinds += [(0.0, None, python), (RATIO, None, python)]
    options = ["--dtype", "bfloat16", "--max-model-len", "16384"] if size == "full" else []
    shown: dict[str, Any] = {"frames": FRAMES, "side": SIDE} if size == "full" else {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if size == "full":
            make_large(folder / "Qwen3-VL", device)
        else:
            benchmark.make_qwen3_vl(folder / "Qwen3-VL")
        first: dict[int, float] = {}
        for ratio, evs, of in kinds:  # one at a time: each takes the GPU's memory for its cache
            with benchmark.Server(folder, "Qwen3-VL", ratio, of, evs=evs, options=options, **shown) as server:
                for at_once, number in benchmark.REQUESTS.items():
                    found = [server.measure(at_once, number) for _ in range(benchmark.ROUNDS)]
                    rate = sorted(one["rate"] for one in found)[len(found) // 2]
                    beside = rate / first.setdefault(at_once, rate)
                    cells = ["Qwen3-VL", server.name, found[0]["length"], at_once]
                    cells += [benchmark.spread(one[key] for one in found) for key in ("rate", "first")]
                    rows.append(f"| {' | '.join(map(str, cells))} | {beside:.2f} |")
                    print(rows[-1], flush=True)
    return rows


def main() -> None:
    arguments = parse(__doc__)
    python, started = python_with_vllm(), time.monotonic()
    if python is None:
        raise ModuleNotFoundError("vllm is not installed: docs/benchmarks/on_a_gpu.md says how")
    os.environ["PYTHONPATH"] = os.pathsep.join(["src", "."])
    result: dict[str, Any] = {**describe("Qwen3-VL in vLLM", arguments.device), "finished": False}
    result["parity"] = check_parity(python, arguments.seconds / 2)
    (arguments.folder / UNFINISHED).write_text(json.dumps(result, indent=1) + "\n")
    result["rows"] = measure(python, arguments.size, arguments.device)
    result |= {"finished": True, "seconds": time.monotonic() - started}
    (arguments.folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (arguments.folder / UNFINISHED).unlink(missing_ok=True)
    parts = [f"# {result['title']}", f"{result['device']}. Tests of parity: {result['parity']}."]
    parts.append("\n".join([*benchmark.HEAD, *result["rows"]]))
    (arguments.folder / "README.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
