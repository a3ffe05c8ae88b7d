"""Where one stage of a pass ends and the next begins, read off by hooks on modules. No other file hooks the model.

    start | ... | tower: layers 0..l | score, select, pack | layers l + 1.. | connector | ... | LLM and head | end

Stock Molmo2 and STTS have the same borders. "sequence" is what the dots stand for: embedding, dropping placeholders,
merging features, the mask. "select and pack" includes the gathers of survivors inside layer `l + 1`, before and after
its attention, and the packing of bins after it.
"""

import functools
from typing import Any

from torch import nn

from stts_hf.benchmark.meters import Clock

VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR = "vision_tower", "score", "select_and_pack", "connector"
SEQUENCE, LANGUAGE_MODEL, DECODE_TOKEN = "sequence", "language_model", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
ENCODING = (VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR)
STAGES = (*ENCODING, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER, TOTAL, DECODE_TOKEN)  # as in tables


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) in its `with` block crosses the border of a
    stage. Gradient checkpointing runs hooks a second time, so this is for inference only.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.readings: dict[str, Any] = {}
        self._gathers: list[tuple[str, str]] = []  # parts of layer l + 1, and after it, that select and pack
        tower = model.get_submodule("model.vision_tower")
        cuts: list[tuple[nn.Module, str | None, str | None]] = [  # module, reading before it, reading after it
            (tower, "tower_in", "tower_out"),
            (model.get_submodule("model.multi_modal_projector"), None, "connector_out"),
            (model.get_submodule("model.language_model"), "language_model_in", None),
        ]
        pruning_layer = getattr(tower.config, "pruning_layer", None)
        if pruning_layer is not None:  # not stock Molmo2
            dense, pruned, *later = list(tower.get_submodule("layers").children())[pruning_layer : pruning_layer + 3]
            cuts += [
                (dense, None, "dense_out"),
                (pruned, "pruned_in", "pruned_out"),
                (tower.get_submodule("scorer"), "scorer_in", "scorer_out"),
                # The queries' gather, and the residual's, which cannot be told apart from its addition.
                (pruned.get_submodule("layer_norm1"), None, "norm1_out"),
                (pruned.get_submodule("self_attn"), "attention_in", "attention_out"),
                (pruned.get_submodule("layer_norm2"), "norm2_in", None),
            ]
            self._gathers += [("norm1_out", "attention_in"), ("attention_out", "norm2_in")]
            if later and getattr(tower.config, "packing", None) == "first_fit_descending":
                cuts.append((later[0], "after_pruned_in", None))
                self._gathers.append(("pruned_out", "after_pruned_in"))
        self._hooks: list[Any] = []
        for module, before, after in cuts:
            if before:
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._read, before)))
            if after:
                self._hooks.append(module.register_forward_hook(functools.partial(self._read, after)))

    def _read(self, name: str, *_: Any) -> None:
        self.readings.setdefault(name, self.clock.read())

    def __enter__(self) -> "StageRecorder":
        self.clock.synchronize()
        self._read("start")
        return self

    def __exit__(self, *_: Any) -> None:
        self._read("end")
        for hook in self._hooks:
            hook.remove()

    def stages(self) -> dict[str, float]:
        """What the clock says of each stage, after the block; without a language model's stages where none ran."""
        self.clock.synchronize()
        stages = {
            VISION_TOWER: self._between("tower_in", "tower_out"),
            CONNECTOR: self._between("tower_out", "connector_out"),
            TOTAL: self._between("start", "end"),
        }
        if "pruned_in" in self.readings:  # not at k = 1, where no later layer runs
            stages[SELECT_AND_PACK] = self._between("dense_out", "pruned_in")
            stages[SELECT_AND_PACK] += sum(self._between(*gather) for gather in self._gathers)
            if "scorer_out" in self.readings:  # untrained selectors have none
                stages[SCORE] = self._between("scorer_in", "scorer_out")
                stages[SELECT_AND_PACK] -= stages[SCORE]
        if "language_model_in" in self.readings:
            stages[SEQUENCE] = self._between("start", "tower_in") + self._between("connector_out", "language_model_in")
            stages[LANGUAGE_MODEL] = self._between("language_model_in", "end")
        return stages

    def _between(self, start: str, end: str) -> float:
        return self.clock.between(self.readings[start], self.readings[end])
