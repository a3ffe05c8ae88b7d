"""The model of a run: its weights, with a new scorer, an adapter, frozen and compiled parts as it asks for them."""

import itertools
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from stts_hf.checkpoints.convert import new_scorer_weights
from stts_hf.checkpoints.layout import SCORER
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.training.build import TrainingSetup
from stts_hf.training.config import CompileSection, PeftSection, TrainConfig
from stts_hf.training.parts import freeze_parts
from stts_hf.training.strict_yaml import ConfigError

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
        loaded, found = STTSForConditionalGeneration.from_pretrained(
            model.path,
            config=run.model_config,
            revision=model.revision or "main",
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except (ValueError, OSError, ImportError) as error:
        raise run.config.error("model", f"cannot be loaded: {error}") from error
    missing = sorted(name for name in found["missing_keys"] if ".scorer." not in name)
    if missing or found["mismatched_keys"]:
        names = ", ".join((missing or sorted(map(str, found["mismatched_keys"])))[:3])
        raise run.config.error(
            "model.path", f"{model.path!r} lacks weights or holds some of other shapes: {names}, ..."
        )
    if model.new_scorer:
        with torch.device("meta"):
            empty = STTSForConditionalGeneration(run.model_config)
        weights = new_scorer_weights(empty, run.arguments.seed)
        scorer = loaded.model.vision_tower.scorer
        scorer.load_state_dict({name.removeprefix(SCORER): tensor for name, tensor in weights.items()})
    adapted = _adapt(run, loaded)
    if run.config.compile:
        compile_model(run.config, loaded)
    return adapted


def upcast_trainable(run: TrainingSetup, model: Any) -> None:
    """
    Beside an adapter, what is trained of a model in half precision becomes float32: steps of 1e-4 are smaller than
    bfloat16 can tell apart. Raises `ConfigError` where matrix products would then mix the two.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    half = [parameter for parameter in trained if parameter.dtype in (torch.bfloat16, torch.float16)]
    if not half:
        return
    if run.config.peft is None:
        logger.warning(
            f"`model.dtype` is {run.config.model.dtype!r}: trained weights in half precision lose small steps. Use "
            "`model.dtype: float32` with `training.bf16: true`, or an optimizer that keeps copies of its own."
        )
        return
    if not (run.arguments.bf16 or run.arguments.fp16):
        raise run.config.error(
            "model.dtype",
            f"is {run.config.model.dtype!r}, and what is trained is kept in float32, so `training.bf16: true` (or "
            "`fp16`) is needed.",
        )
    for parameter in half:
        parameter.data = parameter.data.float()


def compile_model(config: TrainConfig, model: Any) -> None:
    """Compiles the parts that the section names, in place. Raises `ConfigError` for a backend that there is not."""
    section = config.compile if isinstance(config.compile, CompileSection) else CompileSection()
    if section.backend not in torch.compiler.list_backends(exclude_tags=None):
        backends = ", ".join(torch.compiler.list_backends())
        raise config.error("compile.backend", f"is {section.backend!r}, but must be one of {backends}.")
    if config.data.pad_to is None:
        logger.warning(
            "`compile` without `data.pad_to`: every length of a batch is compiled anew, up to torch's recompile limit. "
            "Set `data.pad_to` to the tokens that a row may have after pruning."
        )
    parts = [model.model.vision_tower] * section.vision + [model.model.language_model] * section.decoder
    for layer in itertools.chain.from_iterable(part.layers for part in parts):
        # All layers count as one function to the compiler, and each part has several kinds of calls.
        layer.compile(backend=section.backend, mode=section.mode, fullgraph=True, recompile_limit=64)


def _adapt(run: TrainingSetup, model: Any) -> Any:
    if run.config.peft is not None:
        model = add_adapter(run.config, model, run.config.peft)
    try:
        freeze_parts(model, run.config.freeze)
    except ValueError as error:
        raise ConfigError(f"{run.config.tree.where('freeze')}{error}") from error
    return model


def add_adapter(config: TrainConfig, model: Any, section: PeftSection) -> Any:
    """A `PeftModel` around `model`. Raises `ConfigError` where nothing in it has the names of the section."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
        modules_to_save=section.modules_to_save or None,
        use_dora=section.method == "dora",
        use_rslora=section.rslora,
    )
    last_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in section.modules_to_save:
        if name.rpartition(".")[2] not in last_names:
            raise config.error("peft.modules_to_save", f"names {name!r}, but the model has no such module.")
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        raise config.error("peft.target_modules", f"does not fit the model: {error}") from error
