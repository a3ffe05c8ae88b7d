"""Model, processor, data and trainer from a `TrainConfig`: what is cheap to check first, weights last."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from stts_hf import register_auto_classes
from stts_hf.convert.checkpoint import new_scorer_weights
from stts_hf.convert.layout import SCORER
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.collator import STTSDataCollator
from stts_hf.training.config import TRAINING_DEFAULTS, CompileSection, PeftSection, TrainConfig
from stts_hf.training.data import check_rows, load_rows
from stts_hf.training.lengths import measure_lengths
from stts_hf.training.packing import PackedDataset
from stts_hf.training.parts import freeze_parts
from stts_hf.training.rows import RowError
from stts_hf.training.strict_yaml import ConfigError
from stts_hf.training.trainer import STTSTrainer

logger = logging.get_logger(__name__)

VISION_SETTINGS = (  # in the order in which they can be changed one by one
    "selector",
    "selector_seed",
    "pruning_ratio",
    "pruning_layer",
    "score_rescaling",
    "packing",
    "refill_single_frame_bins",
)
MODEL_SETTINGS = ("temporal_loss_weight", "detach_temporal_target", "pruned_position_ids")


@dataclass
class Run:
    """All of a run but its weights; `train_rows` and `eval_rows` are data sets for the `collator`."""

    config: TrainConfig
    arguments: STTSTrainingArguments
    model_config: STTSConfig
    processor: STTSProcessor
    collator: STTSDataCollator
    train_rows: Any
    eval_rows: Any | None
    skipped: int


def prepare(config: TrainConfig, *, progress: bool = True) -> Run:
    """
    Everything that can be known before weights are loaded: settings that fit the model, all rows looked at, lengths
    measured where rows are packed. Raises `ConfigError` that names the key, and `RowError` that names the rows.
    """
    register_auto_classes()
    arguments = make_arguments(config)
    progress = progress and arguments.process_index == 0
    model_config = load_model_config(config)
    processor = load_processor(config, model_config)
    sources = ["train"] if config.data.eval is None else ["train", "eval"]
    with arguments.main_process_first(desc="reading the data"):  # one process downloads, the others find it
        opened = {name: open_rows(config, name) for name in sources}
    made = {
        name: make_rows(config, name, rows, arguments.seed, model_config, processor, progress)
        for name, rows in opened.items()
    }
    train_rows, eval_rows = made["train"][0], made["eval"][0] if "eval" in made else None
    skipped = sum(number for _, number in made.values())
    data = config.data
    collator = STTSDataCollator(
        processor,
        model_config=model_config,
        on_error=data.on_error,
        replacements=train_rows if data.on_error == "skip" else None,
        max_length=data.pack_to or data.max_length,
        pad_to=data.pad_to,
        return_ids=True,
        always_video=arguments.world_size > 1,
    )
    return Run(config, arguments, model_config, processor, collator, train_rows, eval_rows, skipped)


def make_arguments(config: TrainConfig) -> STTSTrainingArguments:
    """Raises `ConfigError` for what `TrainingArguments` refuses."""
    given: dict[str, Any] = TRAINING_DEFAULTS | config.training
    try:
        arguments = STTSTrainingArguments(
            **given, learning_rates=dict(config.learning_rates) or None, freeze=list(config.freeze)
        )
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{config.tree.where('training')}`training`: {error}") from error
    if arguments.eval_strategy != "no" and config.data.eval is None:
        raise config.error("training.eval_strategy", f"is {given['eval_strategy']!r}, but `data.eval` names no rows.")
    return arguments


def load_model_config(config: TrainConfig) -> STTSConfig:
    """The checkpoint's configuration with the run's settings in it. Raises `ConfigError`, for other models' too."""
    model = config.model
    try:
        found = STTSConfig.from_pretrained(model.path, revision=model.revision or "main")
    except (ValueError, OSError) as error:
        raise config.error("model.path", f"cannot be trained: {error}") from error
    if config.stts.refill_single_frame_bins is False:
        found.vision_config.refill_single_frame_bins = False
    for target, names in ((found.vision_config, VISION_SETTINGS), (found, MODEL_SETTINGS)):
        for name, value in config.stts.given(names).items():
            try:
                setattr(target, name, value)
            except ValueError as error:
                raise config.error(f"stts.{name}", f"does not fit the model: {error}") from error
    return found


def load_processor(config: TrainConfig, model_config: STTSConfig) -> STTSProcessor:
    """The checkpoint's processor with the run's frames. Raises `ConfigError`."""
    model, data = config.model, config.data
    try:
        processor = STTSProcessor.from_pretrained(model.path, revision=model.revision or "main")
    except (ValueError, OSError, TypeError) as error:
        raise config.error("model.path", f"{model.path!r} has no processor that can be used: {error}") from error
    for name in ("num_frames", "max_fps"):
        value = getattr(data, name)
        if value is not None:
            setattr(processor.video_processor, name, value)
    ratio = model_config.vision_config.pruning_ratio
    if ratio < 1:
        processor.video_processor.pruning_ratio = ratio  # what its `test_time_scaling` counts with
    return processor


def open_rows(config: TrainConfig, name: str) -> Any:
    """The rows of `data.<name>` as they are. Raises `ConfigError` where they cannot be loaded."""
    data = config.data
    options = {} if data.revision is None else {"revision": data.revision}
    split = data.eval_split if name == "eval" else data.split
    try:
        return load_rows(getattr(data, name), split=split, media_root=data.media_root, **options)
    except RowError:
        raise
    except (ValueError, OSError) as error:
        raise config.error(f"data.{name}", f"cannot be loaded: {error}") from error


def make_rows(
    config: TrainConfig,
    name: str,
    rows: Any,
    seed: int,
    model_config: STTSConfig,
    processor: STTSProcessor,
    progress: bool = False,
) -> tuple[Any, int]:
    """
    The rows of `data.<name>`, checked and, with `pack_to`, packed; and how many were left out. Raises `ConfigError`
    where none is left and `RowError` where rows are bad.
    """
    data = config.data
    good = check_rows(rows, processor, on_error=data.on_error, progress=progress)
    if not good:
        raise config.error(f"data.{name}", "holds no row that can be used.")
    skipped = len(rows) - len(good)
    if skipped:
        rows = rows.select(good)
    limit = data.pack_to or data.max_length or data.pad_to
    if limit is None:
        return rows, skipped
    lengths = measure_lengths(
        rows, processor, model_config=model_config, max_length=limit, on_error=data.on_error, progress=progress
    )
    usable = [index for index, length in enumerate(lengths) if length is not None]
    if not usable:
        raise config.error(f"data.{name}", f"holds no row of at most {limit} tokens after pruning.")
    skipped += len(rows) - len(usable)
    if data.pack_to is None:
        return rows.select(usable) if len(usable) < len(rows) else rows, skipped
    packed = PackedDataset(
        rows, lengths, data.pack_to, seed=seed, max_samples=data.max_samples_per_row, on_error=data.on_error
    )
    return packed, skipped


def make_empty_model(run: Run) -> Any:
    """The model without weights, with its adapter and its frozen parts, for counting."""
    with torch.device("meta"):
        model = STTSForConditionalGeneration(run.model_config)
        return _adapt(run, model)


def load_model(run: Run) -> Any:
    """
    The model with its weights, its adapter and its frozen parts. Raises `ConfigError` where weights are missing that
    are not the scorer's.
    """
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


def keep_precision(run: Run, model: Any) -> None:
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
    model.compile_parts(section.vision, section.decoder, backend=section.backend, mode=section.mode)


def _adapt(run: Run, model: Any) -> Any:
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


def make_trainer(run: Run, model: Any) -> STTSTrainer:
    """Raises `ConfigError` for settings that do not fit each other."""
    try:
        return STTSTrainer(
            model,
            run.arguments,
            data_collator=run.collator,
            train_dataset=run.train_rows,
            eval_dataset=run.eval_rows,
            processing_class=run.processor,
        )
    except ValueError as error:
        raise ConfigError(f"{run.config.tree.where('training')}{error}") from error
