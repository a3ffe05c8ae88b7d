"""Where one pass ends a stage and begins the next, read off by hooks on the model's parts.

Hooks stand on modules that stock Molmo2 and STTS both have, so both are cut at the same places:

    start | ... | tower: layers 0..l | score, select, pack | layers l + 1.. | connector | ... | LLM and head | end

"sequence" is what the dots stand for: embedding, dropping placeholders, merging features, the mask. "Select and pack"
also has the gathers of survivors inside layer l + 1, before and after its attention, and the packing of bins behind it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from stts_hf.benchmark.clocks import Clock

VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR = "vision_tower", "score", "select_and_pack", "connector"
SEQUENCE, LANGUAGE_MODEL, DECODE_TOKEN = "sequence", "language_model", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
STAGES = (
    VISION_TOWER,
    SCORE,
    SELECT_AND_PACK,
    CONNECTOR,
    SEQUENCE,
    LANGUAGE_MODEL,
    FORWARD,
    BACKWARD,
    OPTIMISER,
    TOTAL,
    DECODE_TOKEN,
)


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) crosses the border of a stage.

    Only for passes without recomputation: gradient checkpointing runs the hooks a second time.
    """

    def __init__(self, model: nn.Module, clock: Clock):
        self.clock = clock
        self.readings: dict[str, Any] = {}
        inner = model.get_submodule("model")
        tower = inner.get_submodule("vision_tower")
        self._hooks: list[Any] = []
        self._gathers: list[tuple[str, str]] = []  # stretches of layer l + 1 that select and pack
        self._watch(tower, "tower_in", "tower_out")
        self._watch(inner.get_submodule("multi_modal_projector"), None, "connector_out")
        self._watch(inner.get_submodule("language_model"), "language_model_in", "language_model_out")
        scoring_after = getattr(tower.config, "pruning_layer", None)
        self.scores = scoring_after is not None
        if scoring_after is not None:
            layers = tower.get_submodule("layers")
            last_dense, pruned, *later = list(layers.children())[scoring_after : scoring_after + 3]
            self._watch_layer(last_dense, None, "dense_out")
            self._watch_layer(pruned, "pruned_in", "pruned_out")
            self._watch_gathers(pruned)
            if later and getattr(tower.config, "packing", None) == "first_fit_descending":
                self._watch_layer(later[0], "after_pruned_in", None)
                self._gathers.append(("pruned_out", "after_pruned_in"))
            self._watch(tower.get_submodule("scorer"), "scorer_in", "scorer_out")

    def _watch_layer(self, layer: nn.Module, before: str | None, after: str | None) -> None:
        if layer._compiled_call_impl is None:  # compiled with its hooks otherwise, and a clock cannot be
            self._watch(layer, before, after)

    def _watch_gathers(self, layer: nn.Module) -> None:
        """That of the queries, and that of the residual, whose addition cannot be told from its gather."""
        parts = [getattr(layer, name, None) for name in ("layer_norm1", "self_attn", "layer_norm2")]
        compiled = layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")
        if compiled or not all(isinstance(part, nn.Module) for part in parts):
            return
        for part, names in zip(parts, ((None, "norm1_out"), ("attn_in", "attn_out"), ("norm2_in", None)), strict=True):
            self._watch(part, *names)  # type: ignore[arg-type]
        self._gathers += [("norm1_out", "attn_in"), ("attn_out", "norm2_in")]

    def _watch(self, module: nn.Module, before: str | None, after: str | None) -> None:
        if before:
            self._hooks.append(module.register_forward_pre_hook(self._reader(before)))
        if after:
            self._hooks.append(module.register_forward_hook(self._reader(after)))

    def _reader(self, name: str) -> Callable:
        def hook(*_) -> None:
            self.readings.setdefault(name, self.clock.read())

        return hook

    def mark(self, name: str) -> None:
        self.readings[name] = self.clock.read()

    def between(self, start: str, end: str) -> float:
        return self.clock.between(self.readings[start], self.readings[end])

    def start(self) -> None:
        """Begins a pass, once all earlier work is done."""
        self.readings.clear()
        self.clock.wait()
        self.mark("start")

    def vision_stages(self) -> dict[str, float]:
        """Stages of a pass through tower and connector, after `mark("end")`."""
        self.clock.wait()
        stages = {
            VISION_TOWER: self.between("tower_in", "tower_out"),
            CONNECTOR: self.between("tower_out", "connector_out"),
            TOTAL: self.between("start", "end"),
        }
        if self.scores and self.readings.keys() >= {"dense_out", "pruned_in"}:  # at k = 1 no later layer runs
            stages[SELECT_AND_PACK] = self.between("dense_out", "pruned_in")
            # Of a layer that is compiled, or wrapped, only some may have been read.
            read = [gather for gather in self._gathers if self.readings.keys() >= {*gather}]
            stages[SELECT_AND_PACK] += sum(self.between(*gather) for gather in read)
            if "scorer_out" in self.readings:  # an untrained selector has none
                stages[SCORE] = self.between("scorer_in", "scorer_out")
                stages[SELECT_AND_PACK] -= stages[SCORE]
        return stages

    def prompt_stages(self) -> dict[str, float]:
        """Stages of a pass from pixels to logits, after `mark("end")`."""
        stages = self.vision_stages()
        stages[SEQUENCE] = self.between("start", "tower_in") + self.between("connector_out", "language_model_in")
        stages[LANGUAGE_MODEL] = self.between("language_model_in", "end")
        return stages

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
