"""The model of a run: its weights, with a new scorer, an adapter and frozen parts as it asks for them."""

import re
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from stts_hf.checkpoints.convert import new_scorer_weights
from stts_hf.checkpoints.layout import SCORER
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.training.build import TrainingSetup
from stts_hf.training.config import TEXT_LINEAR, ConfigError, TrainConfig
from stts_hf.training.parts import freeze_parts

logger = logging.get_logger(__name__)


def make_empty_model(run: TrainingSetup) -> Any:
    """The model without weights, with its adapter and its frozen parts, for counting."""
    with torch.device("meta"):
        model = STTSForConditionalGeneration(run.model_config)
        return _adapt(run, model)


def load_model(run: TrainingSetup) -> Any:
    """
    The model with its weights, its adapter and its frozen parts. Raises `ConfigError` where weights are missing that
    are not the scorer's.
    """
    set_seed(run.arguments.seed)  # the adapter and a scorer that the checkpoint lacks are drawn here
    model = run.config.model
    dtype = "auto" if model.dtype == "auto" else getattr(torch, model.dtype)
    options: dict[str, Any] = {}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    try:
        pair: Any = STTSForConditionalGeneration.from_pretrained(
            model.model_name_or_path,
            config=run.model_config,
            revision=model.model_revision,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except (ValueError, OSError, ImportError) as error:
        raise run.config.error("model_name_or_path", f"cannot be loaded: {error}") from error
    loaded, found = pair
    missing = sorted(name for name in found["missing_keys"] if ".scorer." not in name)
    if missing or found["mismatched_keys"]:
        names = ", ".join((missing or sorted(map(str, found["mismatched_keys"])))[:3])
        raise run.config.error(
            "model_name_or_path",
            f"{model.model_name_or_path!r} lacks weights or holds some of other shapes: {names}, ...",
        )
    if model.new_scorer:
        with torch.device("meta"):
            empty = STTSForConditionalGeneration(run.model_config)
        weights = new_scorer_weights(empty, run.arguments.seed)
        scorer = loaded.model.vision_tower.scorer
        scorer.load_state_dict({name.removeprefix(SCORER): tensor for name, tensor in weights.items()})
    if run.arguments.torch_compile and run.config.data.pad_to is None:
        logger.warning(
            "`torch_compile` without `pad_to`: every length of a batch is compiled again, up to torch's recompile "
            "limit. Set `pad_to` to the tokens that a row may have after pruning."
        )
    return _adapt(run, loaded)


def upcast_trainable(run: TrainingSetup, model: Any) -> None:
    """
    Beside an adapter, what is trained of a model in half precision becomes float32: steps of 1e-4 are smaller than
    bfloat16 can tell apart. Raises `ConfigError` where matrix products would then mix the two.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    half = [parameter for parameter in trained if parameter.dtype in (torch.bfloat16, torch.float16)]
    if not half:
        return
    if not run.config.model.use_peft:
        logger.warning(
            f"`dtype` is {run.config.model.dtype!r}: trained weights in half precision lose small steps. Use "
            "`dtype: float32` with `bf16: true`, or an optimizer that keeps copies of its own."
        )
        return
    if not (run.arguments.bf16 or run.arguments.fp16):
        raise run.config.error(
            "dtype",
            f"is {run.config.model.dtype!r}, and what is trained is kept in float32, so `bf16: true` (or `fp16`) is "
            "needed.",
        )
    for parameter in half:
        parameter.data = parameter.data.float()


def _adapt(run: TrainingSetup, model: Any) -> Any:
    if run.config.model.use_peft:
        model = add_adapter(run.config, model)
    try:
        freeze_parts(model, run.arguments.freeze or ())
    except ValueError as error:
        raise ConfigError(f"{run.config.source}: {error}") from error
    return model


def add_adapter(config: TrainConfig, model: Any) -> Any:
    """A `PeftModel` around `model`. Raises `ConfigError` where nothing in it has the names that are asked for."""
    from peft import LoraConfig, get_peft_model

    settings = config.model
    targets = settings.lora_target_modules or [TEXT_LINEAR]
    is_names = len(targets) > 1 or re.fullmatch(r"[\w.]+", targets[0])  # else a pattern, or `all-linear`
    last_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in settings.lora_modules_to_save or ():
        if name.rpartition(".")[2] not in last_names:
            raise config.error("lora_modules_to_save", f"names {name!r}, but the model has no such module.")
    lora = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if is_names else targets[0],
        modules_to_save=settings.lora_modules_to_save or None,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise config.error("lora_target_modules", f"does not fit the model: {error}") from error
