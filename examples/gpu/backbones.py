"""Every backbone of the package and its sizes: geometries of the benchmark, and presets that take any frame size."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from stts_hf import auto_classes
from stts_hf.benchmark.geometries import GEOMETRIES, Geometry
from stts_hf.benchmark.presets import PRESETS, Workload

HUB = Path(__file__).resolve().parents[2] / "hub_configs"
CONFIGS: dict[str, Any] = {config.native.model_type: config for config in auto_classes.CONFIGS}
TINY_GRID, GRID = (2, 3), (14, 26)  # of presets; the latter is 720p in 64 frames
RATIOS = (0.0, 0.3, 0.4, 0.5, 0.7)
WIDE = 64  # of a head of released towers, or more
# Bytes a weight: bfloat16, and in training its gradient and AdamW's two moments; shares leave room for activations.
NEEDS = {"inference": 2 / 0.8, "training": 8 / 0.6}


@functools.cache
def configs() -> dict[str, Any]:
    """
    By geometry, without those of backbones that are `lacking`. Presets of towers that take any frame size are added to
    `GEOMETRIES`.
    """
    by_type = {config.model_type: config for config in auto_classes.CONFIGS}
    for path in HUB.glob("*/config.json"):
        written = json.loads(path.read_text())
        if "image_size" not in written["vision_config"]:
            grid = TINY_GRID if path.parent.name.endswith("-tiny") else GRID
            load = by_type[written["model_type"]].from_pretrained
            GEOMETRIES[path.parent.name] = Geometry(grid, load, str(path.parent))
    found = {}
    for size, geometry in GEOMETRIES.items():
        with contextlib.suppress(ImportError):
            found[size] = geometry.config()
    return found


def lacking(name: str) -> str:
    """Why a backbone, a key of `CONFIGS`, cannot run with this transformers, or ""."""
    try:
        CONFIGS[name]()
    except ImportError as error:
        return " ".join(str(error).split())
    return ""


def sizes_of(name: str) -> list[str]:
    """Names in `GEOMETRIES` of a backbone, a key of `CONFIGS`, by width."""
    own = {size: config for size, config in configs().items() if type(config) is CONFIGS[name]}
    return sorted(own, key=lambda size: own[size].vision_config.hidden_size * own[size].text_config.hidden_size)


def is_released(size: str) -> bool:
    vocabulary: int = configs()[size].text_config.vocab_size
    return vocabulary > 2**15


def reference_size(name: str, size: str) -> str:
    """The smallest; or the smallest with heads of a released width, if there is one."""
    small = [it for it in sizes_of(name) if not is_released(it)]
    if size == "full":
        for it in small:
            vision = configs()[it].vision_config
            heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
            if vision.hidden_size // heads >= WIDE:
                return it
    return small[0]


def released_workloads(name: str, size: str, memory: float) -> list[Workload]:
    """Prompt and training step of the largest released sizes that fit so many bytes, or of the smallest size."""
    workload, found = PRESETS["qwen"].workloads[0], []
    for mode, needs in NEEDS.items():
        if size == "tiny":
            found.append(Workload(mode, sizes_of(name)[0], 8, (0.0, 0.5), text_tokens=16, decode_tokens=2))
            continue
        for it in reversed([it for it in sizes_of(name) if is_released(it)]):
            if count_weights(it) * needs < memory:
                found.append(workload._replace(mode=mode, geometry=it, ratios=RATIOS))
                break
    return found


def count_weights(size: str) -> int:
    auto_classes.register_auto_classes()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(GEOMETRIES[size].config())
    return sum(parameter.numel() for parameter in model.parameters())
