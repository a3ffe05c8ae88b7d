"""Results with samples that were made up, so that what follows from them can be worked out by hand."""

from typing import Any

from stts_hf.benchmark.presets import Workload


def variant(ratio: float | None, stages: dict[str, tuple[list[float], int]], memory: int = 2**20) -> dict[str, Any]:
    """One variant; stages as `{name: (seconds, flops)}`."""
    return {
        "name": "stock" if ratio is None else f"{ratio:g}",
        "pruning_ratio": ratio,
        "status": "ok",
        "tokens": 100,
        "peak_memory": memory,
        "stages": {name: {"seconds": seconds, "flops": flops} for name, (seconds, flops) in stages.items()},
    }


def cell(variants: list[dict[str, Any]], **workload: Any) -> dict[str, Any]:
    ratios = tuple(entry["pruning_ratio"] for entry in variants if entry["pruning_ratio"] is not None)
    given: dict[str, Any] = {"mode": "tower", "geometry": "tiny", "frames": 8, "ratios": ratios} | workload
    described = Workload(**given)
    return {
        "workload": described._asdict() | {"ratios": list(ratios)},
        "title": described.title,
        "status": "ok",
        "variants": variants,
    }


def result(cells: list[dict[str, Any]], preset: str = "tower", **more: Any) -> dict[str, Any]:
    return {
        "schema": 2,
        "preset": preset,
        "command": f"stts-hf bench --preset {preset}",
        "started": "2026-01-01 00:00 UTC",
        "seconds": 90.0,
        "finished": True,
        "machine": {
            "cpu": "a CPU",
            "cores": 2,
            "threads": 2,
            "memory": 2**34,
            "device": "cpu",
            "load_before": 0.1,
            "load_after": 1.9,
        },
        "versions": {"torch": "2.15.0"},
        "cells": cells,
    } | more


def pruned_twice() -> dict[str, Any]:
    """Stock takes 8 s; k = 0 takes 10 s, k = 0.5 takes 5 s of an ideal 4 s."""
    return cell(
        [
            variant(None, {"total": ([8.0, 7.0, 9.0], 800), "vision_tower": ([4.0, 4.0, 4.0], 400)}),
            variant(0.0, {"total": ([10.0, 10.0, 10.0], 1000), "vision_tower": ([5.0, 5.0, 5.0], 500)}),
            variant(0.5, {"total": ([5.0, 6.0, 1.0], 400), "vision_tower": ([2.0, 2.0, 2.0], 200)}),
        ]
    )
