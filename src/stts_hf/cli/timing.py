"""How long a prompt takes: stock Molmo2, STTS that drops nothing, and STTS that drops."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, PreTrainedModel
from transformers.models.molmo2.configuration_molmo2 import Molmo2VisionConfig

TOWER, DECODER = "vision_tower", "language_model"


@dataclasses.dataclass(frozen=True)
class PrefillTimes:
    """Medians in milliseconds: the vision tower, the language model's pass over the prompt, and pixels to logits."""

    vision_tower: float
    language_model: float
    total: float


def stock_twin(model: PreTrainedModel) -> Molmo2ForConditionalGeneration:
    """Returns stock Molmo2 with the very weights of the STTS `model`: nothing is copied, the scorer is left out."""
    settings = model.config.to_dict()
    known = {field.name for field in dataclasses.fields(Molmo2VisionConfig)} - {"model_type"}
    vision = {name: value for name, value in settings["vision_config"].items() if name in known}
    config = Molmo2Config(
        vision_config=vision, adapter_config=settings["adapter_config"], text_config=settings["text_config"]
    )
    for name in ("image_start_token_id", "image_end_token_id", "image_patch_id", "low_res_image_start_token_id"):
        setattr(config, name, settings[name])
    for part in ("", "vision_config", "adapter_config", "text_config"):
        source = getattr(model.config, part) if part else model.config
        target = getattr(config, part) if part else config
        target._attn_implementation = source._attn_implementation
    with torch.device("meta"):
        stock = Molmo2ForConditionalGeneration(config)
    weights = {name: value for name, value in model.state_dict().items() if ".scorer." not in name}
    stock.load_state_dict(weights, strict=True, assign=True)
    # Buffers that are computed, not saved (the rotary frequencies), are still on the meta device.
    for name, buffer in model.named_buffers():
        parent, _, leaf = name.rpartition(".")
        if ".scorer." not in name:
            stock.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    return stock.eval()


class StageClock:
    """Times two submodules of a model while it runs; waits for the device at each reading."""

    def __init__(self, model: nn.Module):
        self.device = next(model.parameters()).device
        self.seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}
        inner = model.get_submodule("model")
        self._hooks = []
        for name in (TOWER, DECODER):
            module = inner.get_submodule(name)
            self._hooks.append(module.register_forward_pre_hook(self._start(name)))
            self._hooks.append(module.register_forward_hook(self._stop(name)))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _start(self, name: str) -> Callable:
        def hook(*_):
            self._started[name] = self.now()

        return hook

    def _stop(self, name: str) -> Callable:
        def hook(*_):
            self.seconds[name] = self.now() - self._started[name]

        return hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def time_prefills(
    variants: Mapping[str, tuple[nn.Module, dict]],
    repeats: int = 3,
    on_pass: Callable[[], None] = lambda: None,
) -> dict[str, PrefillTimes]:
    """
    Runs every variant's prompt `repeats` times after one warm-up. The variants take turns, so that a machine that slows
    down slows them all.

    Args:
        variants: name to model and the keyword arguments of its call.
        on_pass: called after each pass, `len(variants) * (repeats + 1)` times in all.
    """
    rounds: dict[str, list[PrefillTimes]] = {name: [] for name in variants}
    clocks = {name: StageClock(model) for name, (model, _) in variants.items()}
    try:
        for _ in range(repeats + 1):
            for name, (model, arguments) in variants.items():
                clock = clocks[name]
                with torch.no_grad():
                    started = clock.now()
                    model(**arguments, logits_to_keep=1, use_cache=True)
                    total = clock.now() - started
                stages = (clock.seconds[TOWER], clock.seconds[DECODER], total)
                rounds[name].append(PrefillTimes(*(1000 * seconds for seconds in stages)))
                on_pass()
    finally:
        for clock in clocks.values():
            clock.close()
    return {name: _median(measured[1:]) for name, measured in rounds.items()}


def _median(measured: list[PrefillTimes]) -> PrefillTimes:
    stages = zip(*map(dataclasses.astuple, measured), strict=True)
    return PrefillTimes(*(statistics.median(stage) for stage in stages))
