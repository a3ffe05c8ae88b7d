"""Several processes (DDP, FSDP2, ZeRO-3): what all batches of a step must have in common.

Gathering parameters and reducing gradients are collective. A process hangs if another one skips the vision tower,
because its batch has no video, or runs it twice, because its batch has images too. So every batch gets a video
(`always_video` of the collator), and FSDP gathers the tower with the model's root, once a step.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import IterableDataset

from stts_hf.model_parts import CONNECTOR, LANGUAGE_MODEL, VISION_TOWER, find_backbone, module_of, modules_of

REMEDIES = {
    "video": "Use an `STTSDataCollator`, which gives every batch one.",
    "image": "ZeRO-3 and `pruning_ratio=1` need images in every batch or in none.",
}


def prepare_for_processes(trainer: Any) -> None:
    """Sets up several processes: collators, FSDP, losses. Raises `ValueError` for what would hang or cut videos."""
    settings = trainer.args.accelerator_config
    streams = isinstance(trainer.train_dataset, IterableDataset) and settings.dispatch_batches is None
    alone = trainer.args.world_size == 1  # batches are cut even then, if one process is to hand them out
    if streams or settings.dispatch_batches or (settings.split_batches and not alone):
        raise ValueError(  # all frames of a batch are rows of one tensor
            "`accelerator_config` has one process read batches and cut them for the others, which would cut videos. "
            "Set `accelerator_config={'split_batches': False, 'dispatch_batches': False}`."
        )
    if alone:
        return
    for collator in (trainer.data_collator, trainer.eval_collator):
        if hasattr(collator, "always_video"):
            collator.always_video = True
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and trainer.model is not None:
        wrap_language_model_alone(plugin, trainer.model)
        # With frozen embeddings (LoRA), a video without dropped tokens, such as the black frame, brings no gradient to
        # the language model's input, and FSDP would gather and reduce in another order than the other processes.
        trainer.model.enable_input_require_grads()
        policy = plugin.mixed_precision_policy
        if getattr(policy, "output_dtype", None) is not None:
            # accelerate makes FSDP2 round all outputs, losses included.
            plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def wrap_language_model_alone(plugin: Any, model: nn.Module) -> None:
    """Completes and checks the `transformer_cls_names_to_wrap` of accelerate's FSDP plugin for an STTS `model`."""
    if plugin.auto_wrap_policy is None:  # all parameters are gathered with the root
        return
    classes = {
        part: {type(module).__name__ for whole in modules_of(model, part).values() for module in whole.modules()}
        for part in (LANGUAGE_MODEL, VISION_TOWER, CONNECTOR)
    }
    # Native language models may name the layers of the vision tower too.
    layers = sorted(classes[LANGUAGE_MODEL] & set(module_of(model, LANGUAGE_MODEL)._no_split_modules))
    named = plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or layers
    by_size = plugin.auto_wrap_policy is size_based_auto_wrap_policy
    if by_size or (classes[VISION_TOWER] | classes[CONNECTOR]) & set(named):
        found = "SIZE_BASED_WRAP" if by_size else ", ".join(named)
        raise ValueError(
            "`fsdp_auto_wrap_policy` must be TRANSFORMER_BASED_WRAP and `fsdp_transformer_layer_cls_to_wrap` "
            f"{', '.join(layers)} alone, not {found}: if parts of the vision tower are gathered separately, processes "
            "with and without images in their batch wait for each other."
        )


def shared_inputs(trainer: Any) -> dict[str, str]:
    """Pixel inputs that all processes must have or lack, beyond what the collator ensures, to "video" or "image"."""
    accelerator = trainer.accelerator
    zero3 = getattr(getattr(accelerator.state, "deepspeed_plugin", None), "zero_stage", 0) == 3
    sharded = zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None
    ddp_waits = not getattr(getattr(accelerator, "ddp_handler", None), "find_unused_parameters", True)
    if trainer.args.world_size == 1 or not (sharded or ddp_waits):
        return {}
    _, backbone = find_backbone(trainer.model)
    video, image = backbone.pixels
    inputs = {} if getattr(trainer.data_collator, "always_video", False) else {video: "video"}
    # At k = 1 no video reaches the later layers and the connector, only images do.
    return inputs | ({image: "image"} if zero3 or trainer.model.config.vision_config.pruning_ratio >= 1 else {})


def check_batches_agree(trainer: Any, batches: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Raises `ValueError` on all processes if only some have a video in a micro-batch, so that the step would hang."""
    for name, kind in shared_inputs(trainer).items():
        present = torch.zeros(trainer.args.gradient_accumulation_steps, device=device)
        for number, batch in enumerate(batches):
            present[number] = batch.get(name) is not None
        for count in trainer.accelerator.reduce(present, reduction="sum").tolist():
            if count not in (0, trainer.args.world_size):
                raise ValueError(
                    f"{count:g} of {trainer.args.world_size} processes have a {kind} in their batch at step "
                    f"{trainer.state.global_step + 1}, and the others would wait for them forever. {REMEDIES[kind]}"
                )


@contextlib.contextmanager
def whole_state_dict(accelerator: Accelerator) -> Iterator[None]:
    """Makes FSDP save the whole model, even if it shards checkpoints."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    of_checkpoints, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = of_checkpoints


def name_after_own_code(model_class: type) -> None:
    """Sets an FSDP2 class's module to that of the model's class, whose file transformers saves."""
    if model_class.__module__.startswith("torch."):
        own = next(base for base in model_class.__mro__ if not base.__module__.startswith("torch."))
        model_class.__module__ = own.__module__
