"""What is measured: workloads, the table of presets, each one command, and how to vary them."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from stts_hf.selectors import UNTRAINED

ALL, PRUNED = (0.0, 0.3, 0.4, 0.5), (0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Workload:
    """
    mode: "tower" (tower and connector), "inference" (pixels to logits, then `decode_tokens` tokens one by one) or
        "training" (forward, backward, optimiser step). frames: of each video. batch: rows, each with one video.
    ratios: pruning ratios `k`; the stock model always runs beside them. layout: `packing` of the survivors.
    backend: `attn_implementation`. text_tokens: of a row besides the video's. timestamp_tokens: before each frame of
    the tower. checkpointing: recompute activations in the backward pass, on both sides. selector: one of STTS's, or
    "evs", which drops after the tower. pruning_layer: `l`, the geometry's if it is None.
    """

    mode: str
    geometry: str
    frames: int
    ratios: tuple[float, ...] = ALL
    batch: int = 1
    layout: Literal["varlen", "first_fit_descending"] = "varlen"
    backend: str = "sdpa"
    dtype: str = "float32"
    text_tokens: int = 64
    timestamp_tokens: int = 7
    decode_tokens: int = 4
    checkpointing: bool = False
    selector: str = "scorer"
    pruning_layer: int | None = None

    @property
    def title(self) -> str:
        rows = f"{self.batch} x " if self.batch > 1 else ""
        words = [self.mode, f"{rows}{self.frames} frames", self.geometry, self.layout, self.backend, self.dtype]
        if self.checkpointing and self.mode == "training":
            words.append("gradient checkpointing")
        if self.selector != Workload.selector:
            words.append(self.selector)
        if self.pruning_layer is not None:
            words.append(f"l = {self.pruning_layer}")
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Preset:
    """
    takes: what to expect, for `--list`. workloads: in the order in which they run. repeats: timed rounds of each.
    needs_gpu: why this is not for a CPU, or None.
    """

    help: str
    takes: str
    workloads: tuple[Workload, ...]
    repeats: int = 3
    needs_gpu: str | None = None
    name: str = ""


def prompt_and_training(workload: Workload) -> tuple[Workload, Workload]:
    return workload, replace(workload, mode="training")


_TINY = Workload("tower", "tiny", 4, (0.0, 0.5), text_tokens=16, timestamp_tokens=2, decode_tokens=2)
# As many tokens beside each video token, and as many of attention beside each linear FLOP, as in 4B at as many frames.
_SMALL = Workload("inference", "molmo2-small", 64, text_tokens=858, timestamp_tokens=3)
_LONG = Workload("inference", "molmo2-small-long", 256, PRUNED, text_tokens=750, timestamp_tokens=3, checkpointing=True)
_QWEN_SMALL = Workload("inference", "qwen3-vl-small", 64, (0.3, 0.5, 0.7), timestamp_tokens=1)
_PAPER = tuple(
    Workload(mode, "molmo2-4b", frames, ratios, batch, "varlen", backend, "bfloat16", text, checkpointing=True)
    for mode in ("inference", "training")
    # The text that makes the paper's tokens per instance, 15670 in two rows of 64 frames and 25307 in one of 256.
    for frames, batch, text in ((64, 2, 15670 // 2 - 64 * 90), (256, 1, 25307 - 256 * 90))
    # Which of them is the fastest is not known before, on either side.
    for backend, ratios in (("sdpa", ALL), ("flex_attention", PRUNED))
)
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "text_tokens": 128, "timestamp_tokens": 6, "checkpointing": True}
# What is left of 720p under the processor's pixel budget is 11,648 tokens, of 64 frames and of 256.
_QWEN = tuple(
    replace(_QWEN_SMALL, mode=mode, geometry=geometry, frames=frames, **_LARGE)
    for mode in ("inference", "training")
    for geometry, frames in (("qwen3-vl-4b", 64), ("qwen3-vl-4b-low", 256), ("qwen3-vl-4b", 256))
)
_PRESETS = {
    "tiny": Preset(
        "every stage once on a toy model, to see that it runs; its figures mean nothing",
        "10 s, 1 GB",
        (
            _TINY,
            replace(_TINY, layout="first_fit_descending"),
            *prompt_and_training(replace(_TINY, mode="inference", batch=2)),
            *prompt_and_training(replace(_TINY, geometry="qwen3-vl-tiny", mode="inference", frames=8)),
        ),
    ),
    "tower": Preset(
        "vision tower and connector of Molmo2 (SigLIP2 So400M/14, 25 layers)",
        "11 min, 5 GB on 2 CPU cores",
        (Workload("tower", "so400m", 8), Workload("tower", "so400m", 16, (0.5,))),
    ),
    "paper": Preset(
        "Molmo2-4B with random weights at the sizes of the paper's two tables, beside the paper's speed-ups",
        "12 to 17 min worked out from FLOPs, not measured; 110 GB of GPU memory for stock Molmo2 in training",
        _PAPER,
        needs_gpu="4.9 billion weights and 33 PFLOP a round take hours on a CPU; use --preset paper-small there",
    ),
    "paper-small": Preset(
        "Molmo2-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
        "13 min, 14 GB on 2 CPU cores",
        prompt_and_training(_SMALL),
        repeats=4,
    ),
    "paper-small-256": Preset(
        "the same at 256 frames: smaller still, with attention's share as in 4B at 256 frames",
        "8 min, 10 GB on 2 CPU cores",
        prompt_and_training(_LONG),
    ),
    "qwen": Preset(
        "Qwen3-VL-4B with random weights: 64 and 256 frames of 720p, and 256 frames with four times the pixel budget",
        "not measured; 46,592 video tokens in training need more memory than one GPU of 80 GB has",
        _QWEN,
        needs_gpu="4.4 billion weights and 19 PFLOP a round take hours on a CPU; use --preset qwen-small there",
    ),
    "qwen-small": Preset(
        "Qwen3-VL-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
        "11 min, 12 GB on 2 CPU cores",
        prompt_and_training(_QWEN_SMALL),
    ),
    "training-free": Preset(
        "the same prompt, pruned without training: cosine in the ViT, EVS after it, random",
        "7 min, 4 GB on 2 CPU cores",
        tuple(replace(_QWEN_SMALL, selector=selector) for selector in (*UNTRAINED, "evs")),
    ),
    "scaling": Preset(
        "cost per frame from 1 to 1024 frames: the narrow tower on a CPU, So400M on a GPU",
        "13 min, 14 GB on 2 CPU cores",
        tuple(Workload("tower", "narrow-tower", 2**power, (0.5,)) for power in range(11)),
    ),
}
PRESETS = {name: replace(preset, name=name) for name, preset in _PRESETS.items()}


def find_preset(name: str, on_gpu: bool = False) -> Preset:
    """The preset `name`, a key of `PRESETS`, as it is on this kind of device."""
    preset = PRESETS[name]
    if on_gpu and name in ("tower", "scaling"):
        return replace(preset, workloads=vary(preset, geometry=["so400m"], dtype=["bfloat16"]).workloads)
    return preset


def vary(
    preset: Preset, modes: Sequence[str] | None = None, repeats: int | None = None, **axes: Sequence[Any] | None
) -> Preset:
    """
    The same preset with other values. `modes` chooses among its workloads; `axes` replaces their fields of these names,
    every combination of the values, where there are any.

    Raises `ValueError` where nothing is left to measure.
    """
    chosen = {field: values for field, values in axes.items() if values}
    workloads = [workload for workload in preset.workloads if not modes or workload.mode in modes]
    if not workloads:
        has = " and ".join(sorted({workload.mode for workload in preset.workloads}))
        raise ValueError(f"preset {preset.name!r} measures {has}, which --modes leaves out.")
    varied: dict[Workload, Workload] = {}  # of workloads that differ in ratios alone, the first
    for workload, values in itertools.product(workloads, itertools.product(*chosen.values())):
        new = replace(workload, **dict(zip(chosen, values, strict=True)))
        varied.setdefault(replace(new, ratios=()), new)
    return replace(preset, workloads=tuple(varied.values()), repeats=repeats or preset.repeats)
