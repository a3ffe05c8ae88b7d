"""Requests per second and time to first token of vLLM with stock models and with STTS, in one run on this CPU:

    python -m examples.serving.benchmark [REPORT.md]        # in the repository

Models of random weights, small, but with the released ones' shape: as many patches and tokens a frame, a tower that
takes about half of a prompt's work, of whose layers a fifth runs before anything is dropped. Videos of 16 frames of
noise, 16 new tokens, float32, nothing cached. Stock vLLM computes another function for Molmo2 (stock_molmo2.py).
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler alone takes a minute to compile
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import numpy as np
import torch
from transformers import (
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from stts_hf import (
    STTSConfig,
    STTSForConditionalGeneration,
    STTSProcessor,
    STTSQwen3VLConfig,
    STTSQwen3VLForConditionalGeneration,
)

MOLMO2, QWEN3_VL = Path("hub_configs/stts-tiny"), Path("hub_configs/stts-qwen3-vl-tiny")  # whose tokenizers they take
FRAMES, SIDE, PATCH, NEW_TOKENS = 16, 378, 14, 16
SIDE_OF_QWEN, PATCH_OF_QWEN = 288, 16  # 81 tokens for two frames
REQUESTS = {1: 4, 8: 16}  # how many, by how many at once
LAYERS, PRUNING_LAYER = 12, 1
TOWER: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384}
TEXT: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 2}
# None: vLLM's own model. Its Qwen3-VL of 0.32 takes no videos with transformers 5.23, which STTS needs.
SERVERS: list[tuple[str, float | None]] = [("Molmo2", ratio) for ratio in (None, 0.0, 0.5)]
SERVERS += [("Qwen3-VL", ratio) for ratio in (0.0, 0.5)]


def make_checkpoints(folder: Path) -> None:
    """Each model as a stock and as STTS's checkpoint: `folder/Molmo2/stock`, `folder/Molmo2/stts` and so on."""
    torch.manual_seed(0)
    make_molmo2(folder / "Molmo2")
    make_qwen3_vl(folder / "Qwen3-VL")


def make_molmo2(folder: Path) -> None:
    tokenizer: Any = STTSProcessor.from_pretrained(MOLMO2).tokenizer
    sizes: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    parts = Molmo2ImageProcessor(**sizes), Molmo2VideoProcessor(**sizes), tokenizer
    settings = STTSConfig.from_pretrained(MOLMO2).to_dict()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    vision = {**TOWER, **heads, "num_hidden_layers": LAYERS, "image_size": [SIDE, SIDE], "patch_size": PATCH}
    adapter = {**TOWER, **heads, "text_hidden_size": TEXT["hidden_size"], "vision_feature_layer": [LAYERS - 1]}
    kept = ("vocab_size", "additional_vocab_size", "rope_parameters")
    find = tokenizer.convert_tokens_to_ids
    for_stock: dict[str, Any] = {"image_col_id": find("<im_col>"), "image_low_res_id": find("<im_low>")}
    config = Molmo2Config(
        vision_config=vision | {"num_position_embeddings": (SIDE // PATCH) ** 2},
        text_config=TEXT | {name: settings["text_config"][name] for name in kept},
        adapter_config=settings["adapter_config"] | adapter,
        **for_stock,
        **{name: value for name, value in settings.items() if name.endswith(("_token_id", "_patch_id"))},
    )
    Molmo2ForConditionalGeneration(config).float().save_pretrained(folder / "stock")
    Molmo2Processor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stock")
    model = STTSForConditionalGeneration.from_pretrained(folder / "stock", pruning_layer=PRUNING_LAYER)
    model.save_pretrained(folder / "stts")
    STTSProcessor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stts")


def make_qwen3_vl(folder: Path) -> None:
    processor: Any = Qwen3VLProcessor.from_pretrained(QWEN3_VL)
    for part in (processor.image_processor, processor.video_processor):
        part.patch_size = PATCH_OF_QWEN
    processor.video_processor.size = {"shortest_edge": 4096, "longest_edge": FRAMES * SIDE_OF_QWEN**2}
    settings = STTSQwen3VLConfig.from_pretrained(QWEN3_VL).to_dict()
    vision = {**TOWER, "num_heads": 4, "depth": LAYERS, "patch_size": PATCH_OF_QWEN}
    vision |= {"out_hidden_size": TEXT["hidden_size"], "deepstack_visual_indexes": [3, 6, 9]}
    rope = settings["text_config"]["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    config = Qwen3VLConfig(
        vision_config=vision | {"num_position_embeddings": 1024},
        text_config=TEXT | {"vocab_size": settings["text_config"]["vocab_size"], "rope_parameters": rope},
        **{name: value for name, value in settings.items() if name.endswith("_token_id")},
    )
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder / "stock")
    pruning: Any = {"pruning_layer": PRUNING_LAYER}
    STTSQwen3VLForConditionalGeneration.from_pretrained(folder / "stock", **pruning).save_pretrained(folder / "stts")
    for name in ("stock", "stts"):
        processor.save_pretrained(folder / name)


def measure(folder: str, model: str, ratio: float | None) -> list[dict[str, float]]:
    """Of one server, in a process of its own: with requests one by one, then eight at once."""
    from vllm import LLM, SamplingParams

    from examples.serving.stock_molmo2 import as_released

    overrides: Any = {"pruning_ratio": ratio} if ratio is not None else as_released if model == "Molmo2" else {}
    llm = LLM(
        f"{folder}/{model}/{'stock' if ratio is None else 'stts'}",
        hf_overrides=overrides,
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=16384,
        max_num_seqs=max(REQUESTS),
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        enforce_eager=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    metadata = {"total_num_frames": FRAMES, "fps": 2.0, "duration": FRAMES / 2, "frames_indices": list(range(FRAMES))}
    metadata |= {"do_sample_frames": False, "video_backend": "opencv"}
    side = SIDE if model == "Molmo2" else SIDE_OF_QWEN
    video = "<|video|>" if model == "Molmo2" else "<|vision_start|><|video_pad|><|vision_end|>"
    noise, names = np.random.default_rng(0), iter(range(10**6))

    def request() -> Any:
        frames = noise.integers(0, 256, (FRAMES, side, side, 3), np.uint8)
        return {"prompt": f"{video}What moves?", "multi_modal_data": {"video": [(frames, metadata)]}}

    def run(requests: list[Any]) -> tuple[list[float], int]:
        """Seconds to the first token of each, and how many tokens a prompt has."""
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        length = 0
        for one in requests:
            name = str(next(names))
            started[name] = time.perf_counter()
            llm.llm_engine.add_request(name, one, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                first.setdefault(output.request_id, time.perf_counter())
                length = len(output.prompt_token_ids)
        return [first[name] - started[name] for name in started], length

    run([request()])
    found = []
    for together, number in REQUESTS.items():
        requests = [request() for _ in range(number)]
        started, waits, length = time.perf_counter(), [], 0
        for begin in range(0, number, together):
            more, length = run(requests[begin : begin + together])
            waits += more
        rate = number / (time.perf_counter() - started)
        found.append({"at once": together, "rate": rate, "first": statistics.median(waits), "length": length})
    return found


def main() -> None:
    lines = [
        "| model | server | tokens of a prompt | requests at once | requests per second | median time to first token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoints(Path(folder))
        for model, ratio in SERVERS:
            server = "stock vLLM" if ratio is None else f"STTS, {ratio:.0%}"
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                for row in process.submit(measure, folder, model, ratio).result():
                    cells = [
                        model,
                        server,
                        row["length"],
                        row["at once"],
                        f"{row['rate']:.2f}",
                        f"{row['first']:.2f} s",
                    ]
                    lines.append(f"| {' | '.join(map(str, cells))} |")
                    print(lines[-1], flush=True)
    report = "\n".join(lines)
    print(f"\n{report}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(report + "\n")


if __name__ == "__main__":
    main()
