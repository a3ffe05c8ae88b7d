"""What `stts-hf bench` measures: workloads, the table of presets, and how options vary them."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

ALL, PRUNED = (0.0, 0.3, 0.4, 0.5), (0.3, 0.4, 0.5)


class Workload(NamedTuple):
    """
    mode: "tower" (tower and connector), "inference" (pixels to logits, then `decode_tokens` tokens one by one) or
        "training" (forward, backward, optimiser step). frames: per video. batch: rows, one video each. ratios: pruning
    ratios `k`, each compared with the stock model. backend: `attn_implementation`. text_tokens: per row.
    timestamp_tokens: per frame of the tower. checkpointing: gradient checkpointing, in both models. pruning_layer: `l`;
    None takes the geometry's. clock: "wall", or "processor" for seconds of the CPU that this process gets.
    """

    mode: str
    geometry: str
    frames: int
    ratios: tuple[float, ...] = ALL
    batch: int = 1
    backend: str = "sdpa"
    dtype: str = "float32"
    text_tokens: int = 64
    timestamp_tokens: int = 7
    decode_tokens: int = 4
    checkpointing: bool = False
    selector: str = "scorer"
    pruning_layer: int | None = None
    clock: str = "wall"

    @property
    def title(self) -> str:
        rows = f"{self.batch} x " if self.batch > 1 else ""
        words = [self.mode, f"{rows}{self.frames} frames", self.geometry, self.backend, self.dtype]
        words += ["gradient checkpointing"] if self.checkpointing and self.mode == "training" else []
        words += [self.selector] if self.selector != self._field_defaults["selector"] else []
        words += [f"l = {self.pruning_layer}"] if self.pruning_layer is not None else []
        words += [f"{self.clock} time"] if self.clock != self._field_defaults["clock"] else []
        return ", ".join(words)


class Preset(NamedTuple):
    """takes: time and memory, for `--list`. repeats: timed rounds. needs_gpu: why a CPU cannot run it."""

    name: str
    help: str
    takes: str
    workloads: tuple[Workload, ...]
    repeats: int = 3
    needs_gpu: str | None = None


def prompt_and_training(workload: Workload) -> tuple[Workload, Workload]:
    return workload, workload._replace(mode="training")


_TINY = Workload("tower", "tiny", 4, (0.0, 0.5), text_tokens=16, timestamp_tokens=2, decode_tokens=2)
# The text keeps 4B's ratios of text to video tokens and of attention to linear FLOPs.
_SMALL = Workload("inference", "molmo2-small", 64, text_tokens=858, timestamp_tokens=3)
_LONG = Workload("inference", "molmo2-small-long", 256, PRUNED, text_tokens=750, timestamp_tokens=3, checkpointing=True)
_QWEN_SMALL = Workload("inference", "qwen3-vl-small", 64, (0.3, 0.5, 0.7), timestamp_tokens=1)
_SMOLVLM = Workload("inference", "smolvlm2-500m", 32, (0.0, 0.5, 0.8), timestamp_tokens=11)
_PAPER = tuple(
    Workload(mode, "molmo2-4b", frames, ratios, batch, backend, "bfloat16", text, checkpointing=True)
    for mode in ("inference", "training")
    # Text up to the paper's tokens per instance: 15670 in two rows of 64 frames, 25307 in one of 256.
    for frames, batch, text in ((64, 2, 15670 // 2 - 64 * 90), (256, 1, 25307 - 256 * 90))
    for backend, ratios in (("sdpa", ALL), ("flex_attention", PRUNED))
)
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "text_tokens": 128, "timestamp_tokens": 6, "checkpointing": True}
# The processor's pixel budget leaves 11,648 tokens of a 720p video, at 64 and at 256 frames.
_QWEN = tuple(
    _QWEN_SMALL._replace(mode=mode, geometry=geometry, frames=frames, **_LARGE)
    for mode in ("inference", "training")
    for geometry, frames in (("qwen3-vl-4b", 64), ("qwen3-vl-4b-low", 256), ("qwen3-vl-4b", 256))
)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            "every stage once on a toy model, to see that it runs; its figures mean nothing",
            "10 s, 1 GB",
            (
                _TINY,
                *prompt_and_training(_TINY._replace(mode="inference", batch=2)),
                *prompt_and_training(_TINY._replace(geometry="qwen3-vl-tiny", mode="inference", frames=8)),
            ),
        ),
        Preset(
            "tower",
            "vision tower and connector of Molmo2 (SigLIP2 So400M/14, 25 layers)",
            "11 min, 5 GB on 2 CPU cores",
            (Workload("tower", "so400m", 8), Workload("tower", "so400m", 16, (0.5,))),
        ),
        Preset(
            "paper",
            "Molmo2-4B with random weights at the sizes of the paper's two tables, beside the paper's speed-ups",
            "6 min on an H100 without flex_attention; 110 GB of GPU memory for stock Molmo2 in training",
            _PAPER,
            needs_gpu="4.9 billion weights and 33 PFLOP a round take hours on a CPU; use --preset paper-small there",
        ),
        Preset(
            "paper-small",
            "Molmo2-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
            "13 min, 14 GB on 2 CPU cores",
            prompt_and_training(_SMALL),
            repeats=4,
        ),
        Preset(
            "paper-small-256",
            "the same at 256 frames: smaller still, with attention's share as in 4B at 256 frames",
            "8 min, 10 GB on 2 CPU cores",
            prompt_and_training(_LONG),
        ),
        Preset(
            "qwen",
            "Qwen3-VL-4B with random weights: 64 and 256 frames of 720p, and 256 with four times the pixel budget",
            "not measured; 46,592 video tokens in training need more memory than one GPU of 80 GB has",
            _QWEN,
            needs_gpu="4.4 billion weights and 19 PFLOP a round take hours on a CPU; use --preset qwen-small there",
        ),
        Preset(
            "qwen-small",
            "Qwen3-VL-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
            "11 min, 12 GB on 2 CPU cores",
            prompt_and_training(_QWEN_SMALL),
        ),
        Preset(
            "qwen-more-small",
            "Qwen3-VL-30B-A3B and Qwen3.5-4B, also with experts, scaled down: prompt. Qwen3.5 loops in Python on a CPU",
            "3 min, 2 GB on 2 CPU cores",
            tuple(
                _QWEN_SMALL._replace(geometry=f"{name}-small", frames=32)
                for name in ("qwen3-vl-moe", "qwen3-5", "qwen3-5-moe")
            ),
        ),
        Preset(
            "smolvlm",
            "SmolVLM2-500M with random weights: prompt, 32 frames; with --frames and --ratios, when pruning pays",
            "30 min of one CPU core in float32, 8 in bfloat16 with AMX, worked out from FLOPs; 7 GB",
            (_SMOLVLM,),
        ),
        Preset(
            "smolvlm-small",
            "SmolVLM2-500M scaled down, tower and LLM alike: prompt, 16 frames",
            "3 min of one CPU core, 2 GB",
            (_SMOLVLM._replace(geometry="smolvlm2-small", frames=16, ratios=(0.3, 0.5, 0.7)),),
        ),
        Preset(
            "scaling",
            "cost per frame from 1 to 1024 frames: the narrow tower on a CPU, So400M on a GPU",
            "13 min, 14 GB on 2 CPU cores",
            tuple(Workload("tower", "narrow-tower", 2**power, (0.5,)) for power in range(11)),
        ),
    )
}


def find_preset(name: str, on_gpu: bool = False) -> Preset:
    """The preset `name`, a key of `PRESETS`, for a CPU or a GPU."""
    if on_gpu and name in ("tower", "scaling"):
        return vary(PRESETS[name], geometry=["so400m"], dtype=["bfloat16"])
    return PRESETS[name]


def vary(
    preset: Preset, modes: Sequence[str] | None = None, repeats: int | None = None, **axes: Sequence[Any] | None
) -> Preset:
    """The preset with other values: `modes` filters, `axes` combine. Raises `ValueError` if nothing is left."""
    chosen = {field: values for field, values in axes.items() if values}
    workloads = [workload for workload in preset.workloads if not modes or workload.mode in modes]
    if not workloads:
        has = " and ".join(sorted({workload.mode for workload in preset.workloads}))
        raise ValueError(f"--modes leaves out {has}, which is all that preset {preset.name!r} measures.")
    combinations = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
    varied: dict[Workload, Workload] = {}  # the first of workloads that differ only in their ratios
    for new in (workload._replace(**values) for workload in workloads for values in combinations):
        varied.setdefault(new._replace(ratios=()), new)
    return preset._replace(workloads=tuple(varied.values()), repeats=repeats or preset.repeats)
