"""The result as a page of Markdown tables; every figure is worked out from the raw samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from stts_hf.benchmark.findings import best_backend_rows, flatness, paper_rows, verdicts
from stts_hf.benchmark.measure import STOCK
from stts_hf.benchmark.paper import SPEED_UPS, THROUGHPUT
from stts_hf.benchmark.readers import OURS, PYAV
from stts_hf.benchmark.stages import SCORE, SELECT_AND_PACK, STAGES, TOTAL, VISION_TOWER
from stts_hf.benchmark.statistics import interquartile_range, median, summarise

LEGEND = """\
Median and interquartile range of the timed passes. *Speed-up*: stock's median over this one's. *FLOP ideal*: stock's
FLOPs over this variant's, by `torch.utils.flop_counter` (matrix products and attention; nothing for norms, activations,
sorting and copying). *Share*: speed-up over ideal; above 100 % where the part that has no FLOPs shrinks faster than
the FLOPs do, or where less data fits a cache better. *Memory*: the most that a pass holds beyond weights, inputs and
the optimiser's state."""

_BACKENDS = {"pyav": "PyAV", "torchcodec": "torchcodec"}


def markdown(result: Mapping[str, Any]) -> str:
    """The page for a result, ending in a newline."""
    parts = [f"# stts-hf bench: {result['preset']}", *_unfinished(result), _made_with(result)]
    if result["cells"]:
        parts.append(LEGEND)
    for cell in result["cells"]:
        parts.append(f"## {cell['title'][0].upper()}{cell['title'][1:]}")
        if cell["status"] != "ok":
            parts.append(f"Not measured: {cell['status']} ({cell['reason']}).")
            continue
        parts.append(_variants(cell))
        if any(variant["status"] == "ok" for variant in cell["variants"]):
            parts.append(_stages(cell))
    parts += _paper(result) + _best_backends(result) + _scaling(result)
    if result.get("front_end"):
        parts += ["## Before the model", _front_end(result["front_end"])]
    if result.get("readers"):
        parts += ["## Reading a long file", _readers(result["readers"])]
    found = verdicts(result)
    if found:
        parts += ["## Where it pays, and where it does not", "\n".join(f"- {line}" for line in found)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _unfinished(result: Mapping[str, Any]) -> list[str]:
    if result.get("finished", True):  # older results do not say
        return []
    return [f"**Unfinished**: the run ended early, after {len(result['cells'])} of {result['workloads']} workloads."]


def _made_with(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {_gib(machine['memory'])} GiB"
    if "gpu" in machine:
        where += f"; {machine['gpu']}, {_gib(machine['gpu_memory'])} GiB, CUDA {machine['cuda']}"
    load = f"load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after"
    samples = "result.json" if result.get("finished", True) else "unfinished.json"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"Made by `{result['command']}` (not edited by hand; raw samples in `{samples}`).\n\n"
        f"{result['started']}, {result['seconds'] / 60:.1f} minutes, {machine['device']}: {where}; {load}. {known}."
    )


def _variants(cell: Mapping[str, Any]) -> str:
    summary = summarise(cell)
    frames = cell["workload"]["frames"] * cell["workload"]["batch"]
    rows = []
    for variant in cell["variants"]:
        name = _label(variant["name"])
        if variant["status"] != "ok":
            rows.append([name, variant["status"], *["-"] * 8])
            continue
        total = summary[variant["name"]][TOTAL]
        tokens = str(variant["video_tokens"])
        if variant["row_tokens"] is not None:
            tokens += f" of {variant['row_tokens']}"
        rows.append(
            [
                name,
                _milliseconds(total["median"]),
                _milliseconds(total["spread"]),
                _times(total["speed_up"]),
                "-" if total["flops"] is None else f"{total['flops'] / 1e9:.4g}",
                _times(total["ideal"]),
                _percent(total["share"]),
                f"{variant['peak_memory'] / 2**20:.4g}",
                f"{frames / total['median']:.3g}",
                tokens,
            ]
        )
    header = ["variant", "median, ms", "IQR, ms", "speed-up", "GFLOP", "FLOP ideal", "share", "memory, MiB"]
    count = len(cell["order"])
    rounds = f"\n\n{count} timed rounds, after one of warm-up. Video tokens are those of one row."
    return table([*header, "frames/s", "video tokens"], rows) + rounds + f" {_resident(cell)}" + _reasons(cell)


def _reasons(cell: Mapping[str, Any]) -> str:
    """Why variants have no figures, or no FLOPs."""
    lines = []
    for variant in cell["variants"]:
        if variant["status"] != "ok":
            lines.append(f"{_label(variant['name'])}: {variant['status']} ({variant['reason']}).")
        elif variant.get("not_counted"):
            lines.append(f"{_label(variant['name'])}: FLOPs were not counted; {variant['not_counted']}.")
    return "".join(f"\n\n{line}" for line in lines)


def _resident(cell: Mapping[str, Any]) -> str:
    held = [variant["resident_memory"] for variant in cell["variants"] if variant["status"] == "ok"]
    return f"Weights, inputs and the optimiser's state are {held[0] / 2**20:.0f} MiB for every variant." if held else ""


def _stages(cell: Mapping[str, Any]) -> str:
    summary = summarise(cell)
    names = list(summary)
    rows = []
    for stage in STAGES:
        if not any(stage in stages for stages in summary.values()):
            continue
        row = [stage.replace("_", " ")]
        for name in names:
            found = summary[name].get(stage)
            text = "-"
            if found:
                text = _milliseconds(found["median"])
                if name != STOCK and found["speed_up"] is not None:
                    ideal = f" of {found['ideal']:.2f}" if found["ideal"] is not None else ""
                    text += f" ({found['speed_up']:.2f}{ideal})"
                if stage in (SCORE, SELECT_AND_PACK):
                    text += f" ({found['median'] / summary[name][VISION_TOWER]['median']:.1%} of the tower)"
            row.append(text)
        rows.append(row)
    return table(["stage, ms (speed-up of ideal)", *map(_label, names)], rows)


def _paper(result: Mapping[str, Any]) -> list[str]:
    if result["preset"] != "paper":
        return []
    rows = [
        [
            mode,
            str(frames),
            f"{ratio:.0%}",
            f"{theirs:.2f}x",
            _times(ours),
            _times(ideal),
            "-" if ours is None else "yes" if ours > theirs else "**no**",
        ]
        for mode, frames, ratio, theirs, ours, ideal in paper_rows(result["cells"])
    ]
    header = ["phase", "frames", "k", "paper", "here", "FLOP ideal", "beaten"]
    note = (
        "The paper's figures are throughput against its own system without pruning (8 H100; inference on MLVU, which "
        "includes answers); ours are one pass against stock Molmo2 in the same process on the machine above."
    )
    return ["## Beside the paper's tables", table(header, rows), note + _own_throughput()]


def _own_throughput() -> str:
    """Says where the paper's speed-up is not the ratio of the throughputs that stand beside it."""
    differing = []
    for (mode, frames, ratio), printed in SPEED_UPS.items():
        gain = THROUGHPUT[mode, frames, ratio] / THROUGHPUT[mode, frames, 0.0]
        if abs(gain - printed) > 0.01:
            differing.append(f"{mode}, {frames} frames, {ratio:.0%}: {gain:.2f}x")
    return f" By the paper's own batches per second it is, where that differs, {'; '.join(differing)}."


def _best_backends(result: Mapping[str, Any]) -> list[str]:
    rows = [
        [what, _label(name), f"{gain:.2f}x", how, stock]
        for what, name, gain, how, stock in best_backend_rows(result["cells"])
    ]
    header = ["workload", "variant", "speed-up", "its backend, layout", "stock's backend"]
    return ["## Best against best", table(header, rows)] if rows else []


def _scaling(result: Mapping[str, Any]) -> list[str]:
    towers = [cell for cell in result["cells"] if cell["workload"]["mode"] == "tower" and cell["status"] == "ok"]
    if len({cell["workload"]["frames"] for cell in towers}) < 3:
        return []
    names = list(dict.fromkeys(variant["name"] for cell in towers for variant in cell["variants"]))
    rows = []
    for cell in towers:
        summary = summarise(cell)
        frames = cell["workload"]["frames"] * cell["workload"]["batch"]
        rows.append(
            [str(frames)]
            + [_milliseconds(summary[name][TOTAL]["median"] / frames) if name in summary else "-" for name in names]
        )
    flat = [(name, flatness(towers, name)) for name in names]
    lines = [f"{_label(name)}: {ratio - 1:.1%}" for name, ratio in flat if ratio is not None]
    note = "Most expensive over cheapest frame from 16 to 256 frames: " + "; ".join(lines) + "." if lines else ""
    return ["## Cost per frame", table(["frames", *(f"{_label(name)}, ms" for name in names)], rows), note]


def _front_end(front_end: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for found in front_end:
        rows.append(
            [
                f"{found['frames']} frames, {found['height']} lines",
                *(_with_spread(found.get(part, ())) for part in ("decode", "preprocess", "decode_and_preprocess")),
                f"{found['frames'] / median(found['decode_and_preprocess']):.3g}",
            ]
        )
    header = ["sampled at 2 frames per second", "decode, ms (IQR)", "preprocess, ms (IQR)"]
    return table([*header, "decode and preprocess, ms (IQR)", "frames/s"], rows) + _decoded_with(front_end)


def _with_spread(samples: Sequence[float]) -> str:
    """Median and interquartile range; older results have no samples of some parts."""
    return f"{_milliseconds(median(samples))} ({_milliseconds(interquartile_range(samples))})" if samples else "-"


def _readers(readers: Mapping[str, Any]) -> str:
    video = readers["video"]
    found = {reader["name"]: reader for reader in readers["readers"]}
    slowest = median(found[PYAV]["seconds"])
    rows = []
    for name, reader in found.items():
        taken = median(reader["seconds"])
        same = {True: "yes", False: "**no**", None: "-"}[reader["same_frames"]]
        rows.append(
            [
                name,
                f"{taken:.2f} ({interquartile_range(reader['seconds']):.2f})",
                f"{slowest / taken:.1f}x",
                f"{max(reader['peak_memory']) / 1e6:.0f}",
                f"{readers['frames'] / taken:.3g}",
                same,
            ]
        )
    header = ["reader", "median, s (IQR)", "speed-up", "peak memory, MB", "frames/s", f"same frames as {OURS}"]
    about = (
        f"{readers['frames']} frames spread over {video['seconds'] / 60:.0f} minutes of {video['width']}x"
        f"{video['height']} at {video['fps']} frames per second (H.264, {video['bytes'] / 1e6:.0f} MB, made by the "
        "benchmark). Each run is a process of its own; memory is the peak above what it held after its imports."
    )
    ours = [reader for name, reader in found.items() if name != PYAV]
    return table(header, rows) + "\n\n" + about + _decoded_with(ours)


def _decoded_with(measured: Sequence[Mapping[str, Any]]) -> str:
    """A paragraph on what decoded for our reader; nothing for older results, which do not say."""
    names = sorted(
        {
            _BACKENDS.get(found["video_backend"], found["video_backend"])
            for found in measured
            if found.get("video_backend")
        }
    )
    return f"\n\n{OURS} decoded with {' and '.join(names)}." if names else ""


def _label(name: str) -> str:
    return "stock Molmo2" if name == STOCK else f"k = {name}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _gib(value: int) -> str:
    return f"{value / 2**30:.0f}"
