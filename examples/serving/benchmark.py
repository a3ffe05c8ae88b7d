"""Requests per second and time to first token of vLLM with stock Molmo2 and with STTS, in one run on this CPU:

    python -m examples.serving.benchmark [REPORT.md]        # in the repository

A model of random weights with Molmo2's geometry (378 pixels, 81 tokens a frame) and a small language model, videos of
16 frames of noise, 16 new tokens, float32, nothing cached. Stock vLLM computes another function (stock_molmo2.py).
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
)

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor

TINY = Path("hub_configs/stts-tiny")  # whose tokenizer and tower it takes
FRAMES, SIDE, PATCH, REQUESTS, NEW_TOKENS = 16, 378, 14, 8, 16
SERVERS = {"stock vLLM": None, "STTS, 0 %": 0.0, "STTS, 50 %": 0.5}


def make_checkpoints(folder: Path) -> None:
    """The model as stock Molmo2's and as STTS's checkpoint: `folder/stock`, `folder/stts`."""
    tiny = STTSProcessor.from_pretrained(TINY)
    sizes: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    parts = Molmo2ImageProcessor(**sizes), Molmo2VideoProcessor(**sizes), tiny.tokenizer
    settings = STTSConfig.from_pretrained(TINY).to_dict()
    vision = {name: settings["vision_config"][name] for name in ("hidden_size", "intermediate_size", "head_dim")}
    vision |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
    vision |= {"image_size": [SIDE, SIDE], "patch_size": PATCH, "num_position_embeddings": (SIDE // PATCH) ** 2}
    text = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    text |= {name: settings["text_config"][name] for name in ("vocab_size", "additional_vocab_size", "rope_parameters")}
    find = tiny.tokenizer.convert_tokens_to_ids
    for_stock: dict[str, Any] = {"image_col_id": find("<im_col>"), "image_low_res_id": find("<im_low>")}
    torch.manual_seed(0)
    config = Molmo2Config(
        vision_config=vision,
        text_config=text,
        adapter_config=settings["adapter_config"] | {"text_hidden_size": 512},
        **for_stock,
        **{name: value for name, value in settings.items() if name.endswith(("_token_id", "_patch_id"))},
    )
    Molmo2ForConditionalGeneration(config).float().save_pretrained(folder / "stock")
    Molmo2Processor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stock")
    model = STTSForConditionalGeneration.from_pretrained(folder / "stock")
    model.save_pretrained(folder / "stts")
    STTSProcessor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stts")


def measure(folder: str, ratio: float | None) -> list[dict[str, float]]:
    """Of one server, in a process of its own: with requests one by one, then all at once."""
    from vllm import LLM, SamplingParams

    from examples.serving.stock_molmo2 import as_released

    llm = LLM(
        f"{folder}/{'stock' if ratio is None else 'stts'}",
        hf_overrides=as_released if ratio is None else {"pruning_ratio": ratio},
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=16384,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        enforce_eager=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    metadata = {"total_num_frames": FRAMES, "fps": 2.0, "duration": FRAMES / 2, "frames_indices": list(range(FRAMES))}
    metadata |= {"do_sample_frames": False, "video_backend": "opencv"}
    noise = np.random.default_rng(0)

    def request() -> Any:
        frames = noise.integers(0, 256, (FRAMES, SIDE, SIDE, 3), np.uint8)
        return {"prompt": "<|video|>What moves?", "multi_modal_data": {"video": [(frames, metadata)]}}

    def run(requests: list[Any]) -> list[float]:
        """Seconds to the first token of each."""
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        for number, one in enumerate(requests):
            started[str(number)] = time.perf_counter()
            llm.llm_engine.add_request(str(number), one, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                first.setdefault(output.request_id, time.perf_counter())
        return [first[number] - started[number] for number in started]

    run([request()])
    found = []
    for together in (1, REQUESTS):
        requests = [request() for _ in range(REQUESTS)]
        started, waits = time.perf_counter(), []
        for begin in range(0, REQUESTS, together):
            waits += run(requests[begin : begin + together])
        rate = REQUESTS / (time.perf_counter() - started)
        found.append({"at once": together, "rate": rate, "first": statistics.median(waits)})
    return found


def main() -> None:
    lines = [
        "| server | requests at once | requests per second | median time to first token |",
        "| --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoints(Path(folder))
        for name, ratio in SERVERS.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                for row in process.submit(measure, folder, ratio).result():
                    lines.append(f"| {name} | {row['at once']} | {row['rate']:.2f} | {row['first']:.2f} s |")
    report = "\n".join(lines)
    print(report)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(report + "\n")


if __name__ == "__main__":
    main()
