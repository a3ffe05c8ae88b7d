"""Named sets of workloads, each one command, and how to vary them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from stts_hf.benchmark.paper import TOKENS_PER_INSTANCE
from stts_hf.benchmark.workloads import BACKENDS, DTYPES, LAYOUTS, MODES, Workload

MOST_CLIP_FRAMES = 7200  # an hour at the front end's 2 frames per second
ALL = (0.0, 0.3, 0.4, 0.5)
PRUNED = (0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Preset:
    """
    workloads: in the order in which they run. repeats: most rounds of each. budget_minutes: what to aim at; a workload
    stops at 3 rounds where its share is spent. front_end_frames: frame counts whose decoding and preprocessing are
    measured too. video_seconds, video_frames: the file for comparing readers, and how many frames to read.
    needs_gpu: why this is not for a CPU, or None. takes: what to expect, for `--list`.
    """

    name: str
    help: str
    takes: str
    workloads: tuple[Workload, ...] = ()
    repeats: int = 7
    budget_minutes: float = 10.0
    front_end_frames: tuple[int, ...] = ()
    video_seconds: float = 0.0
    video_frames: int = 64
    video_size: tuple[int, int] = (480, 854)
    needs_gpu: str | None = None


def _tiny() -> Preset:
    shape = Workload("tower", "tiny", 4, (0.0, 0.5), text_tokens=16, timestamp_tokens=2, decode_tokens=2)
    workloads = [
        dataclasses.replace(shape, mode=mode, batch=batch, layout=layout)
        for mode, batch, layout in (
            ("tower", 1, "varlen"),
            ("tower", 1, "first_fit_descending"),
            ("inference", 2, "varlen"),
            ("training", 2, "varlen"),
        )
    ]
    return Preset(
        "tiny",
        "every stage once on a toy model, to see that it runs; its figures mean nothing",
        "10 s, 1 GB",
        tuple(workloads),
        repeats=3,
        budget_minutes=0.1,
        front_end_frames=(4,),
        video_size=(120, 160),
    )


def _tower() -> Preset:
    workloads = (
        Workload("tower", "so400m", 8, ALL),
        Workload("tower", "so400m", 16, (0.5,)),
    )
    return Preset(
        "tower",
        "vision tower and connector of Molmo2 (SigLIP2 So400M/14, 25 layers)",
        "11 min, 5 GB on 2 CPU cores",
        workloads,
        budget_minutes=11.0,
    )


def _paper() -> Preset:
    # The text that makes the paper's tokens per instance, in two rows of 64 frames or one of 256.
    shapes = [
        (frames, batch, TOKENS_PER_INSTANCE[frames * batch, 0.0] // batch - frames * 90)
        for frames, batch in ((64, 2), (256, 1))
    ]
    both: dict[str, Any] = {"geometry": "molmo2-4b", "dtype": "bfloat16", "checkpointing": True}
    workloads = [
        Workload(mode=mode, frames=frames, batch=batch, backend=backend, ratios=ratios, text_tokens=text, **both)
        for mode in ("inference", "training")
        for frames, batch, text in shapes
        # Which of them is the fastest is not known before, on either side.
        for backend, ratios in (("sdpa", ALL), ("flex_attention", PRUNED))
    ]
    return Preset(
        "paper",
        "Molmo2-4B with random weights at the sizes of the paper's two tables, beside the paper's rows",
        "12 to 17 min worked out from FLOPs, not measured; 110 GB of GPU memory for stock Molmo2 in training",
        tuple(workloads),
        repeats=3,
        front_end_frames=(64, 256),
        needs_gpu="4.9 billion weights and 33 PFLOP a round take hours on a CPU; use --preset paper-small there",
    )


def _paper_small() -> Preset:
    # As many tokens beside each video token, and as many of attention beside each linear FLOP, as 4B at 64 frames.
    shape = Workload("inference", "molmo2-small", 64, ALL, text_tokens=858, timestamp_tokens=3)
    return Preset(
        "paper-small",
        "Molmo2-4B scaled down, tower and LLM alike, until 64 frames fit a CPU: prompt and training step",
        "13 min, 14 GB on 2 CPU cores",
        (shape, dataclasses.replace(shape, mode="training")),
        budget_minutes=11.0,
        front_end_frames=(64,),
    )


def _paper_small_long() -> Preset:
    shape = Workload("inference", "molmo2-small-long", 256, PRUNED, text_tokens=750, timestamp_tokens=3)
    training = dataclasses.replace(shape, mode="training", checkpointing=True)
    return Preset(
        "paper-small-256",
        "the same at 256 frames: smaller still, with attention's share as in 4B at 256 frames",
        "10 min, 10 GB on 2 CPU cores",
        (shape, training),
        front_end_frames=(256,),
    )


def _scaling() -> Preset:
    frames = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    return Preset(
        "scaling",
        "cost per frame from 1 to 1024 frames: the narrow tower on a CPU, So400M on a GPU",
        "12 min, 14 GB on 2 CPU cores",
        tuple(Workload("tower", "narrow-tower", count, (0.5,)) for count in frames),
    )


def _decode() -> Preset:
    return Preset(
        "decode",
        "64 frames of a one-hour 480p file, beside transformers' PyAV reader",
        "8 min, 1 GB",
        repeats=3,
        video_seconds=3600.0,
    )


PRESETS = {
    preset.name: preset
    for preset in (_tiny(), _tower(), _paper(), _paper_small(), _paper_small_long(), _scaling(), _decode())
}


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
    *,
    modes: Sequence[str] | None = None,
    frames: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    batches: Sequence[int] | None = None,
    layouts: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    repeats: int | None = None,
    budget_minutes: float | None = None,
) -> Preset:
    """
    The same preset with other values along the given axes, every combination of them.

    Modes choose among the preset's workloads; the other axes replace. Raises `ValueError`, naming argument and remedy,
    for values that cannot be.
    """
    given = {"modes": (modes, MODES), "layouts": (layouts, LAYOUTS)}
    given |= {"backends": (backends, BACKENDS), "dtypes": (dtypes, DTYPES)}
    for name, (values, known) in given.items():
        for value in values or ():
            if value not in known:
                raise ValueError(f"`{name}` holds {value!r}, but may hold {', '.join(known)}.")
    for name, counts in (("frames", frames), ("batches", batches)):
        for count in counts or ():
            if count < 1:
                raise ValueError(f"`{name}` holds {count}, but may hold whole numbers from 1 up.")
    for ratio in ratios or ():
        if not 0 <= ratio <= 1:
            raise ValueError(f"`ratios` holds {ratio}, but may hold shares from 0 (drop nothing) to 1 (drop all).")
    if budget_minutes is not None and not preset.workloads:
        raise ValueError(
            f"`budget_minutes` has no effect on preset {preset.name!r}, which reads files as often as `repeats` says; "
            "leave it out."
        )
    if repeats is not None and repeats < 1:
        raise ValueError(f"`repeats` is {repeats}, but must be at least 1.")
    if budget_minutes is not None and not budget_minutes > 0:
        raise ValueError(f"`budget_minutes` is {budget_minutes}, but must be above 0.")
    workloads = [workload for workload in preset.workloads if modes is None or workload.mode in modes]
    axes: dict[str, Sequence[Any] | None] = {"frames": frames, "batch": batches, "layout": layouts}
    axes |= {"backend": backends, "dtype": dtypes, "ratios": None if ratios is None else [tuple(sorted(set(ratios)))]}
    chosen = {axis: values for axis, values in axes.items() if values}
    if (chosen or modes) and not workloads:
        has = sorted({workload.mode for workload in preset.workloads})
        raise ValueError(
            f"preset {preset.name!r} measures {' and '.join(has) or 'files'}, which these options leave out."
        )
    varied = {
        dataclasses.replace(workload, **dict(zip(chosen, values, strict=True))): None
        for workload in workloads
        for values in itertools.product(*chosen.values())
    }
    # Two workloads of a preset that differed only along a replaced axis are one now; the first has its ratios.
    once = {dataclasses.replace(workload, ratios=()): workload for workload in reversed(varied)}
    kept = tuple(workload for workload in varied if workload in once.values())
    front_end: tuple[int, ...] = ()
    if preset.front_end_frames:  # for the workloads that it is compared with
        front_end = tuple(dict.fromkeys(workload.frames for workload in kept if workload.mode != "tower"))
    if front_end and max(front_end) > MOST_CLIP_FRAMES:
        raise ValueError(
            f"`frames` holds {max(front_end)}, which would need a clip of more than an hour to decode; at most "
            f"{MOST_CLIP_FRAMES} in these modes (any number with --modes tower, which decodes nothing)."
        )
    return dataclasses.replace(
        preset,
        workloads=kept,
        front_end_frames=front_end,
        repeats=preset.repeats if repeats is None else repeats,
        budget_minutes=preset.budget_minutes if budget_minutes is None else budget_minutes,
    )
