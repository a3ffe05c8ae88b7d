"""The page over all parts: what ran, what was left out, and us beside the paper and beside EVS, whatever came out."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .runner import Outcome

# Inference and training at 50 %, by frames of a batch: the paper's tables, of its own system on eight H100.
PAPER = {("inference", 128): 1.61, ("inference", 256): 2.22, ("training", 128): 1.62, ("training", 256): 2.25}
Results = Mapping[str, Mapping[str, Any]]
WRONG = ("failed", "differs")  # states of a path


def rows_of(results: Results, *names: str) -> Iterator[Mapping[str, Any]]:
    """Cells of the parts, which have a workload."""
    for name in names:
        for cell in results.get(name, {}).get("cells", ()):
            if "workload" in cell:
                yield cell


def speed_up(cell: Mapping[str, Any], ratio: float) -> tuple[float, float] | None:
    """Over the stock model, and the FLOP ideal; None where one of both was not measured."""
    variants = {variant["pruning_ratio"]: variant for variant in cell["variants"] if variant["status"] == "ok"}
    if None not in variants or ratio not in variants:
        return None
    stock, pruned = (variants[key]["stages"]["total"] for key in (None, ratio))
    return (
        statistics.median(stock["seconds"]) / statistics.median(pruned["seconds"]),
        stock["flops"] / pruned["flops"],
    )


def range_of(cell: Mapping[str, Any], ratio: float) -> str:
    """Milliseconds of a variant's passes: "median (least to most)"."""
    [seconds] = (it["stages"]["total"]["seconds"] for it in cell["variants"] if it["pruning_ratio"] == ratio)
    middle, least, most = (1000 * of(seconds) for of in (statistics.median, min, max))
    return f"{middle:.0f} ({least:.0f} to {most:.0f})"


def memory(cell: Mapping[str, Any], ratio: float) -> str:
    """GiB of stock and pruned."""
    found = {variant["pruning_ratio"]: variant for variant in cell["variants"]}
    said = (
        f"{it['peak_memory'] / 2**30:.1f}" if (it := found.get(key)) and it["status"] == "ok" else "-"
        for key in (None, ratio)
    )
    return " / ".join(said)


def beside_paper(results: Results) -> str:
    lines = [
        "| at 50 % | the paper | here | FLOP ideal | share | memory, GiB | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    cells = list(rows_of(results, "molmo2", "molmo2-training", "molmo2-flex"))
    for (mode, frames), paper in PAPER.items():
        fitting = [
            cell
            for cell in cells
            if cell["workload"]["geometry"].startswith("molmo2-4b")
            and (cell["workload"]["mode"], cell["workload"]["frames"] * cell["workload"]["batch"]) == (mode, frames)
        ]
        for cell in fitting:
            numbers = ["not measured", "", ""]
            if found := speed_up(cell, 0.5):
                numbers = [f"{found[0]:.2f}x", f"{found[1]:.2f}x", f"{found[0] / found[1]:.0%}"]
            row = [f"{mode}, {frames} frames", f"{paper:.2f}x", *numbers, memory(cell, 0.5), cell["title"]]
            lines.append(f"| {' | '.join(row)} |")
        if not fitting:
            lines.append(f"| {mode}, {frames} frames | {paper:.2f}x | not measured | | | | |")
    return "\n".join(lines)


def beside_evs(results: Results) -> str:
    lines = ["| Qwen3-VL | k | ms | speed-up over stock | FLOP ideal |", "| --- | ---: | ---: | ---: | ---: |"]
    for cell in rows_of(results, "evs"):
        name = "EVS, after the ViT" if cell["workload"]["selector"] == "evs" else "STTS, in the ViT"
        for ratio in cell["workload"]["ratios"]:
            if found := speed_up(cell, ratio):
                lines.append(
                    f"| {name}, {cell['workload']['selector']} | {ratio:g} | {range_of(cell, ratio)} | "
                    f"{found[0]:.2f}x | {found[1]:.2f}x |"
                )
    if len(lines) == 2:
        lines.append("| not measured | | | | |")
    served = results.get("vllm", {})
    in_vllm = "In vLLM: not measured."
    if "rows" in served:
        from examples.serving.benchmark import HEAD

        in_vllm = f"In vLLM (tests of parity: {served['parity']}):\n\n" + "\n".join([*HEAD, *served["rows"]])
    return "\n".join(lines) + f"\n\n{in_vllm}"


def what_ran(outcomes: Sequence[Outcome], results: Results) -> str:
    lines = ["| part | | s | |", "| --- | --- | ---: | --- |"]
    for outcome in outcomes:
        name = outcome.part.name
        result = results.get(name, {})
        link = f"[{name}](gpu-{name}/README.md)" if result.get("finished") else name
        said, state = outcome.reason or summary(result), outcome.state
        if any(check["state"] in WRONG for check in result.get("checks", ())):
            state = "**rows failed**"
        lines.append(f"| ({outcome.part.letter}) {link} | {state} | {outcome.seconds:.0f} | {said.replace('|', ' ')} |")
    return "\n".join(lines)


def summary(result: Mapping[str, Any]) -> str:
    """A line about a part's result."""
    if "checks" in result:
        states = [check["state"] for check in result["checks"]]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if "cells" in result:
        variants = [variant["status"] for cell in result["cells"] for variant in cell["variants"]]
        return f"{variants.count('ok')} of {len(variants)} variants measured"
    if "runs" in result:
        return f"{result['runs'] - len(result['left'])} of {result['runs']} runs"
    return f"{len(result['rows'])} rows" if "rows" in result else ""


def left_out(outcomes: Sequence[Outcome], results: Results) -> list[str]:
    """Parts and paths that were left out, each with its reason."""
    parts = [f"{outcome.part.name}: {outcome.reason}" for outcome in outcomes if outcome.state == "left out"]
    paths = [
        f"{name}: {check['name']}, {check['dtype']}: {check['reason']}"
        for name, result in results.items()
        for check in result.get("checks", ())
        if check["state"] == "left out"
    ]
    return parts + paths


def wrong(outcomes: Sequence[Outcome], results: Results) -> list[str]:
    """Parts that failed, and paths that failed or differ."""
    parts = [f"{it.part.name}: {it.state} ({it.reason})" for it in outcomes if it.state in ("failed", "unfinished")]
    paths = [
        f"{name}: {check['name']}, {check['dtype']}: {check['state']} {check['reason']}"
        for name, result in results.items()
        for check in result.get("checks", ())
        if check["state"] in WRONG
    ]
    return parts + paths


def page(outcomes: Sequence[Outcome], results: Results, about: str) -> str:
    def listed(lines: Sequence[str]) -> str:
        return "\n".join(f"- {line}" for line in lines) or "Nothing."

    parts = [
        "# `make gpu`",
        about,
        what_ran(outcomes, results),
        "## Beside the paper",
        "Speed-ups over stock Molmo2-4B with random weights; the paper's are over its own system without pruning, on "
        "eight H100. Geometry `molmo2-4b-short` has a small vocabulary, since stock's logits do not fit this GPU.",
        beside_paper(results),
        "## Beside EVS",
        beside_evs(results),
        "## Failed",
        listed(wrong(outcomes, results)),
        "## Left out",
        listed(left_out(outcomes, results)),
    ]
    return "\n\n".join(parts) + "\n"
