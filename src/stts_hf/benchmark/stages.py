"""Where one stage of a pass ends and the next begins, read off by hooks on modules. No other file hooks the model.

    start | ... | tower: layers 0..l | score, select, pack | layers l + 1.. | connector | ... | LLM and head | end

Stock Molmo2 and STTS have the same borders. "sequence" is what the dots stand for: embedding, dropping placeholders,
merging features, the mask. "select and pack" includes the gathers of survivors inside layer `l + 1`, before and after
its attention, and the packing of bins after it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from stts_hf.benchmark.clocks import Clock

VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR = "vision_tower", "score", "select_and_pack", "connector"
SEQUENCE, LANGUAGE_MODEL, DECODE_TOKEN = "sequence", "language_model", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
ENCODING = (VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR)
STAGES = (*ENCODING, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER, TOTAL, DECODE_TOKEN)  # as in tables


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) crosses the border of a stage.

    Gradient checkpointing runs hooks a second time, so this is for inference only. Raises `AttributeError` where the
    model lacks a module that stages are cut at.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.readings: dict[str, Any] = {}
        self._gathers: list[tuple[str, str]] = []  # parts of layer l + 1, and after it, that select and pack
        tower = _part(model, "model.vision_tower")
        cuts: list[tuple[nn.Module, str | None, str | None]] = [  # module, reading before it, reading after it
            (tower, "tower_in", "tower_out"),
            (_part(model, "model.multi_modal_projector"), None, "connector_out"),
            (_part(model, "model.language_model"), "language_model_in", None),
        ]
        pruning_layer = getattr(tower.config, "pruning_layer", None)
        if pruning_layer is not None:  # not stock Molmo2
            dense, pruned, *later = list(_part(tower, "layers").children())[pruning_layer : pruning_layer + 3]
            cuts += [
                (dense, None, "dense_out"),
                (pruned, "pruned_in", "pruned_out"),
                (_part(tower, "scorer"), "scorer_in", "scorer_out"),
                # The queries' gather, and the residual's, which cannot be told apart from its addition.
                (_part(pruned, "layer_norm1"), None, "norm1_out"),
                (_part(pruned, "self_attn"), "attention_in", "attention_out"),
                (_part(pruned, "layer_norm2"), "norm2_in", None),
            ]
            self._gathers += [("norm1_out", "attention_in"), ("attention_out", "norm2_in")]
            if later and getattr(tower.config, "packing", None) == "first_fit_descending":
                cuts.append((later[0], "after_pruned_in", None))
                self._gathers.append(("pruned_out", "after_pruned_in"))
        self._hooks: list[Any] = []
        for module, before, after in cuts:
            if before:
                self._hooks.append(module.register_forward_pre_hook(self._reader(before)))
            if after:
                self._hooks.append(module.register_forward_hook(self._reader(after)))

    def _reader(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.readings.setdefault(name, self.clock.read())

        return hook

    def mark(self, name: str) -> None:
        """Reads the clock now."""
        self.readings[name] = self.clock.read()

    def between(self, start: str, end: str) -> float:
        """What the clock says from one reading to another. Raises `RuntimeError` where a pass did not get there."""
        if missing := {start, end} - self.readings.keys():
            raise RuntimeError(f"No module of the pass has read {', '.join(sorted(missing))}; see {__name__}.")
        return self.clock.between(self.readings[start], self.readings[end])

    def start(self) -> None:
        """Begins a pass, once all earlier work is done."""
        self.readings.clear()
        self.clock.synchronize()
        self.mark("start")

    def vision_stages(self) -> dict[str, float]:
        """Stages of a pass through tower and connector, after `mark("end")`."""
        self.clock.synchronize()
        stages = {
            VISION_TOWER: self.between("tower_in", "tower_out"),
            CONNECTOR: self.between("tower_out", "connector_out"),
            TOTAL: self.between("start", "end"),
        }
        if "pruned_in" in self.readings:  # not at k = 1, where no later layer runs
            stages[SELECT_AND_PACK] = self.between("dense_out", "pruned_in")
            stages[SELECT_AND_PACK] += sum(self.between(*gather) for gather in self._gathers)
            if "scorer_out" in self.readings:  # untrained selectors have none
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
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()


def _part(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise AttributeError(
            f"Stages are cut at {name!r} of {type(module).__name__}, which has no such module: adapt {__name__}."
        ) from error
