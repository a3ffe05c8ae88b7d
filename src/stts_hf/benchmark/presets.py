"""Named sets of workloads, each one command, and how to vary them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from stts_hf.benchmark.workloads import Workload

ALL = (0.0, 0.3, 0.4, 0.5)
PRUNED = (0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Clip:
    """A video of `seconds` seconds, made for the purpose, of which `frames` frames are read. size: lines, columns."""

    seconds: float
    frames: int = 64
    size: tuple[int, int] = (480, 854)


@dataclasses.dataclass(frozen=True)
class Preset:
    """
    takes: what to expect, for `--list`. workloads: in the order in which they run. repeats: most rounds of each.
    budget_minutes: what to aim at; a workload stops at 3 rounds where its share is spent. clips: files on which readers
    are compared. needs_gpu: why this is not for a CPU, or None. Raises `ValueError` for values that cannot be.
    """

    name: str
    help: str
    takes: str
    workloads: tuple[Workload, ...] = ()
    repeats: int = 7
    budget_minutes: float = 10.0
    clips: tuple[Clip, ...] = ()
    needs_gpu: str | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"`repeats` is {self.repeats}, but must be at least 1.")
        if not self.budget_minutes > 0:
            raise ValueError(f"`budget_minutes` is {self.budget_minutes}, but must be above 0.")


_TINY = Workload("tower", "tiny", 4, (0.0, 0.5), text_tokens=16, timestamp_tokens=2, decode_tokens=2)
# As many tokens beside each video token, and as many of attention beside each linear FLOP, as in 4B at as many frames.
_SMALL = Workload("inference", "molmo2-small", 64, ALL, text_tokens=858, timestamp_tokens=3)
_LONG = Workload("inference", "molmo2-small-long", 256, PRUNED, text_tokens=750, timestamp_tokens=3, checkpointing=True)
_PAPER = tuple(
    Workload(mode, "molmo2-4b", frames, ratios, batch, "varlen", backend, "bfloat16", text, checkpointing=True)
    for mode in ("inference", "training")
    # The text that makes the paper's tokens per instance, 15670 in two rows of 64 frames and 25307 in one of 256.
    for frames, batch, text in ((64, 2, 15670 // 2 - 64 * 90), (256, 1, 25307 - 256 * 90))
    # Which of them is the fastest is not known before, on either side.
    for backend, ratios in (("sdpa", ALL), ("flex_attention", PRUNED))
)
_PRESETS = (
    Preset(
        "tiny",
        "every stage once on a toy model, to see that it runs; its figures mean nothing",
        "10 s, 1 GB",
        (
            _TINY,
            dataclasses.replace(_TINY, layout="first_fit_descending"),
            dataclasses.replace(_TINY, mode="inference", batch=2),
            dataclasses.replace(_TINY, mode="training", batch=2),
        ),
        repeats=3,
        budget_minutes=0.1,
    ),
    Preset(
        "tower",
        "vision tower and connector of Molmo2 (SigLIP2 So400M/14, 25 layers)",
        "11 min, 5 GB on 2 CPU cores",
        (Workload("tower", "so400m", 8, ALL), Workload("tower", "so400m", 16, (0.5,))),
        budget_minutes=11.0,
    ),
    Preset(
        "paper",
        "Molmo2-4B with random weights at the sizes of the paper's two tables, beside the paper's speed-ups",
        "12 to 17 min worked out from FLOPs, not measured; 110 GB of GPU memory for stock Molmo2 in training",
        _PAPER,
        repeats=3,
        needs_gpu="4.9 billion weights and 33 PFLOP a round take hours on a CPU; use --preset paper-small there",
    ),
    Preset(
        "paper-small",
        "Molmo2-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
        "13 min, 14 GB on 2 CPU cores",
        (_SMALL, dataclasses.replace(_SMALL, mode="training")),
        budget_minutes=11.0,
    ),
    Preset(
        "paper-small-256",
        "the same at 256 frames: smaller still, with attention's share as in 4B at 256 frames",
        "8 min, 10 GB on 2 CPU cores",
        (_LONG, dataclasses.replace(_LONG, mode="training")),
        repeats=3,
    ),
    Preset(
        "scaling",
        "cost per frame from 1 to 1024 frames: the narrow tower on a CPU, So400M on a GPU",
        "13 min, 14 GB on 2 CPU cores",
        tuple(Workload("tower", "narrow-tower", 2**power, (0.5,)) for power in range(11)),
    ),
    Preset(
        "decode",
        "64 frames of a one-hour 480p file, and of 32 seconds, beside transformers' PyAV reader",
        "6 min, 1 GB on 2 CPU cores",
        repeats=3,
        clips=(Clip(3600.0), Clip(32.0)),
    ),
)
PRESETS = {preset.name: preset for preset in _PRESETS}


def find_preset(name: str, on_gpu: bool = False) -> Preset:
    """The preset `name`, as it is on this kind of device. Raises `ValueError` for a name that is not in `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"`preset` is {name!r}, but must be one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    if on_gpu and name in ("tower", "scaling"):
        workloads = [
            dataclasses.replace(workload, geometry="so400m", dtype="bfloat16") for workload in preset.workloads
        ]
        preset = dataclasses.replace(preset, workloads=tuple(workloads))
    return preset


def vary(
    preset: Preset,
    repeats: int | None = None,
    budget_minutes: float | None = None,
    modes: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    frames: Sequence[int] | None = None,
    **names: Sequence[Any] | None,
) -> Preset:
    """
    The same preset with other values, every combination of them. Modes choose among the preset's workloads, whose
    fields the other axes replace: `ratios`, `frames`, `batches`, `layouts`, `backends`, `dtypes`.

    Raises `ValueError`, naming argument and remedy, for values that cannot be.
    """
    if budget_minutes is not None and not preset.workloads:
        raise ValueError(f"`budget_minutes` has no effect on preset {preset.name!r}, which runs no model.")
    axes: dict[str, Any] = {"frames": frames, "ratios": ratios and [tuple(sorted(set(ratios)))]}
    axes |= {name.removesuffix("es" if name == "batches" else "s"): values for name, values in names.items()}
    chosen = {axis: values for axis, values in axes.items() if values}
    workloads = [workload for workload in preset.workloads if modes is None or workload.mode in modes]
    if (chosen or modes) and not workloads:
        has = sorted({workload.mode for workload in preset.workloads})
        raise ValueError(
            f"preset {preset.name!r} measures {' and '.join(has) or 'files'}, which these options leave out."
        )
    varied: dict[Workload, Workload] = {}  # of workloads that differ in ratios alone, the first
    for workload in workloads:
        for values in itertools.product(*chosen.values()):
            new = dataclasses.replace(workload, **dict(zip(chosen, values, strict=True)))
            varied.setdefault(dataclasses.replace(new, ratios=()), new)
    given: dict[str, Any] = {"repeats": repeats, "budget_minutes": budget_minutes}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(preset, workloads=tuple(varied.values()), **given)
