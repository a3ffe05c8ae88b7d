"""
Part (c): videos per second of what `stts-hf predict` does, files to answers, with one model in memory.

    python -m examples.gpu.predict --device cuda --size full docs/benchmarks/gpu-predict
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from examples.clips.sample_clip import draw_sample_clip
from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.inference.engine import answer_requests
from stts_hf.inference.requests import ask_about

from .checks import describe
from .options import parse
from .runner import RESULT, UNFINISHED, WORK

TINY = Path("hub_configs/stts-tiny")
QUESTION, RATIOS = "What moves in this video?", (0.0, 0.5, 0.7)
# Videos, seconds of each, pixels, new tokens, videos at once, decoding processes.
SIZES: dict[str, tuple[int, float, tuple[int, int], int, int, int]] = {
    "tiny": (4, 2.0, (96, 128), 4, 2, 1),
    "full": (32, 32.0, (720, 1280), 32, 8, max(1, min(12, (os.cpu_count() or 2) - 2))),
}


def make_model(size: str, device: torch.device) -> tuple[Any, Any]:
    """The tiny checkpoint; or Molmo2-4B's sizes with its tokenizer, random weights and 64 frames of 378 pixels."""
    processor: Any = STTSProcessor.from_pretrained(TINY, trust_remote_code=False)
    if size == "tiny":
        tiny: Any = STTSForConditionalGeneration.from_pretrained(TINY)
        return tiny.to(device).eval(), processor
    own, large = STTSConfig.from_pretrained(TINY), GEOMETRIES["molmo2-4b"].config()
    names = [name for name in own.to_dict() if name.endswith(("_token_id", "_patch_id"))]
    text = {"vocab_size": own.text_config.vocab_size, "additional_vocab_size": own.text_config.additional_vocab_size}
    config = STTSConfig(
        vision_config=large.vision_config.to_dict(),
        adapter_config=large.adapter_config.to_dict(),
        text_config=large.text_config.to_dict() | text,
        **{name: getattr(own, name) for name in names},
    )
    video = processor.video_processor
    side = config.vision_config.image_size[0]
    video.size, video.patch_size = {"height": side, "width": side}, config.vision_config.patch_size
    video.num_frames, video.max_fps = 64, 2.0
    with torch.device(device):
        model = STTSForConditionalGeneration._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001
    torch.nn.init.normal_(model.model.vision_tower.scorer.score_layer.weight)
    return model.eval(), processor


def measure(model: Any, processor: Any, clips: list[Path], ratio: float, size: str) -> dict[str, Any]:
    _, _, _, new_tokens, at_once, workers = SIZES[size]
    started = time.perf_counter()
    requests = [ask_about(processor, str(clip), QUESTION) for clip in clips]
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    found = answer_requests(
        model, processor, requests, pruning_ratio=ratio, batch_size=at_once, num_workers=workers, share=False, **options
    )
    answers = [answer for _, answer in found]
    seconds = time.perf_counter() - started
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    in_model = sum(answer.seconds for answer in answers)
    frames = statistics.median(len(answer.timestamps) for answer in answers)
    kept = statistics.median(int(answer.keep_mask.sum()) for answer in answers if answer.keep_mask is not None)
    rates = {"videos_per_second": len(clips) / seconds, "in_model": in_model, "seconds": seconds}
    return {"ratio": ratio, "frames": frames, "tokens_kept": kept, **rates}


def page(result: dict[str, Any]) -> str:
    lines = ["| k | frames | video tokens kept | videos/s | beside k = 0 | share of time in the model |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |")
    first = result["rows"][0]["videos_per_second"]
    for row in result["rows"]:
        rate, share = row["videos_per_second"], row["in_model"] / row["seconds"]
        cells = (
            f"{row['ratio']:g}",
            row["frames"],
            row["tokens_kept"],
            f"{rate:.3g}",
            f"{rate / first:.2f}x",
            f"{share:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return f"# {result['title']}\n\n{result['device']}. {result['about']}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse(__doc__)
    number, seconds, pixels, new_tokens, at_once, workers = SIZES[arguments.size]
    model, processor = make_model(arguments.size, arguments.device)
    about = f"{number} videos of {seconds:g} s and {pixels[1]} x {pixels[0]} pixels, {at_once} at once, "
    about += f"{new_tokens} new tokens, {workers} decoding processes, random weights."
    sample = arguments.folder.parent / WORK / f"sample-{seconds:g}s-{pixels[1]}x{pixels[0]}.mp4"
    if not sample.exists():  # a minute at full size
        sample.parent.mkdir(exist_ok=True)
        part = sample.with_stem("part")
        draw_sample_clip(part, seconds=seconds, size=pixels)
        part.replace(sample)
    with tempfile.TemporaryDirectory() as folder:
        clips = [Path(folder, f"{index}.mp4") for index in range(number)]
        for clip in clips:
            shutil.copy(sample, clip)
        measure(model, processor, clips[:at_once], 0.0, arguments.size)  # what is done for the first time
        rows: list[dict[str, Any]] = []
        result = {**describe("Throughput of predict", arguments.device), "about": about, "rows": rows}
        for ratio in RATIOS:
            rows.append(measure(model, processor, clips, ratio, arguments.size))
            (arguments.folder / UNFINISHED).write_text(json.dumps(result | {"finished": False}, indent=1) + "\n")
    (arguments.folder / RESULT).write_text(json.dumps(result | {"finished": True}, indent=1) + "\n")
    (arguments.folder / UNFINISHED).unlink(missing_ok=True)
    (arguments.folder / "README.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
