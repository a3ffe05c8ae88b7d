"""One pass of each mode, by stock Molmo2 or by STTS, cut into stages."""

from typing import Any

import torch
from torch import nn

from stts_hf.benchmark.clocks import Clock
from stts_hf.benchmark.stages import (
    BACKWARD,
    DECODE_TOKEN,
    FORWARD,
    OPTIMISER,
    TOTAL,
    StageRecorder,
)
from stts_hf.benchmark.workloads import Workload


class Runner:
    """
    Runs passes of one workload.

    Args:
        models: STTS and stock Molmo2, which share their parameters.
        inputs: arguments of both models, from `workload_inputs`.
    """

    def __init__(self, workload: Workload, models: tuple[nn.Module, nn.Module], inputs: dict[str, Any]):
        self.workload = workload
        self.model, self.stock = models
        self.inputs = inputs
        self.optimiser: torch.optim.Optimizer | None = None
        if workload.mode == "training":
            # Trainer's own choice. A step that moves nothing costs what any step costs, and keeps the weights.
            self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimiser.step()  # so that no pass pays for making the optimiser's state
            self.optimiser.zero_grad(set_to_none=True)

    def run(self, ratio: float | None, clock: Clock) -> dict[str, float]:
        """One pass at pruning ratio `k`, or by stock Molmo2 for None. Returns what `clock` says of each stage."""
        model = self.stock if ratio is None else self.model
        call = {} if ratio is None else {"pruning_ratio": ratio}
        if self.workload.mode == "training":
            return self._train(model, call, clock)
        recorder = StageRecorder(model, clock)
        try:
            with torch.no_grad():
                if self.workload.mode == "tower":
                    return self._encode(model, call, recorder)
                return self._answer(model, call, recorder)
        finally:
            recorder.close()

    def resident_memory(self) -> int:
        """Bytes that lie in memory between passes: weights, inputs, the optimiser's state."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.inputs.values()]
        if self.optimiser is not None:
            tensors += [
                value
                for state in self.optimiser.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _encode(self, model: nn.Module, call: dict[str, float], recorder: StageRecorder) -> dict[str, float]:
        names = ("pixel_values_videos", "video_token_pooling", "video_grids")
        videos = {name: self.inputs[name] for name in names}
        recorder.start()
        model.get_submodule("model").get_video_features(**videos, **call)  # type: ignore[operator]
        recorder.mark("end")
        return recorder.vision_stages()

    def _answer(self, model: nn.Module, call: dict[str, float], recorder: StageRecorder) -> dict[str, float]:
        recorder.start()
        outputs = model(**self.inputs, **call, logits_to_keep=1, use_cache=True)
        recorder.mark("end")
        stages = recorder.prompt_stages()
        count = self.workload.decode_tokens
        if count:
            cache, mask = outputs.past_key_values, self.inputs["attention_mask"]
            tokens = self.inputs["input_ids"][:, -1:]
            recorder.mark("decode_in")
            for _ in range(count):
                mask = torch.cat([mask, mask[:, :1]], dim=-1)
                model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
            recorder.mark("decode_out")
            recorder.clock.wait()
            stages[DECODE_TOKEN] = recorder.between("decode_in", "decode_out") / count
        return stages

    def _train(self, model: nn.Module, call: dict[str, float], clock: Clock) -> dict[str, float]:
        assert self.optimiser is not None
        self.optimiser.zero_grad(set_to_none=True)
        clock.wait()
        readings = [clock.read()]
        try:
            loss = model(**self.inputs, **call, use_cache=False).loss
            readings.append(clock.read())
            loss.backward()
            readings.append(clock.read())
            self.optimiser.step()
            readings.append(clock.read())
            clock.wait()
        finally:
            self.optimiser.zero_grad(set_to_none=True)
        stages = dict(zip((FORWARD, BACKWARD, OPTIMISER), map(clock.between, readings, readings[1:]), strict=False))
        return stages | {TOTAL: clock.between(readings[0], readings[-1])}
