"""The parts of a run, made from a `TrainConfig` and checked: settings, processor, data, model, trainer."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import httpx
from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from stts_hf.auto_classes import register_auto_classes
from stts_hf.checkpoints import loading
from stts_hf.checkpoints.checks import empty_model
from stts_hf.checkpoints.convert import new_scorer_weights
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.checkpoints.files import fingerprint
from stts_hf.checkpoints.push import explain
from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.encoding import Processor
from stts_hf.data.loading import accepts_option, load_rows
from stts_hf.data.preparing import LENGTH, prepare_rows
from stts_hf.data.rows import ANSWER, PROMPT
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.model_parts import SCORER, modules_of
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS, PruningConfig
from stts_hf.training.arguments import STTSTrainingArguments, freeze_parts
from stts_hf.training.config import TEXT_LINEAR, ConfigError, TrainConfig
from stts_hf.training.own_answers import answer_rows, mark_unanswered
from stts_hf.training.scorer_alone import check_scorer_alone, only_scorer_is_trained
from stts_hf.training.trainer import STTSTrainer
from stts_hf.video import processors as frames

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.get_logger(__name__)


@dataclass
class TrainingSetup:
    """A run without weights; `train_rows` and `eval_rows` are data sets for `collator` and `eval_collator`."""

    config: TrainConfig
    model_config: PruningConfig
    processor: Processor
    collator: STTSDataCollator
    eval_collator: STTSDataCollator
    train_rows: Any
    eval_rows: Any | None
    skipped: dict[str, int]

    @property
    def arguments(self) -> STTSTrainingArguments:
        return self.config.training


def prepare(config: TrainConfig, *, progress: bool = True) -> TrainingSetup:
    """
    Everything that can be known before weights are loaded: settings that fit the model, all rows read, lengths measured
    where rows are packed. Raises `ConfigError` that names the setting, and `RowError` that names the rows.
    """
    register_auto_classes()
    data, arguments = config.data, config.training
    progress = progress and arguments.process_index == 0
    model_config = load_model_config(config)
    processor = configure_processor(config, model_config)
    with arguments.main_process_first(desc="reading the data"):  # one process downloads, the others find it
        opened = {name: open_rows(config, name) for name in ("train", "eval") if getattr(data, f"{name}_data")}
    return assemble(config, model_config, processor, opened, progress)


def assemble(
    config: TrainConfig, model_config: PruningConfig, processor: Processor, opened: dict[str, Any], progress: bool
) -> TrainingSetup:
    """The run of the rows that `open_rows` or `answer_rows` gave; raises as `prepare`."""
    data, arguments = config.data, config.training
    rows = {name: make_rows(config, name, there, model_config, processor, progress) for name, there in opened.items()}
    train_rows, eval_rows = rows["train"][0], rows["eval"][0] if "eval" in rows else None
    check_sampling(config, train_rows)
    if arguments.scorer_alone:
        check_videos(config, train_rows, processor)
    collator = STTSDataCollator(
        processor,
        model_config=model_config,
        on_error=data.on_error,
        replacements=train_rows if data.on_error == "skip" else None,
        max_length=data.pack_to or data.max_length,
        pad_to=data.pad_to,
        return_ids=True,
        always_video=arguments.world_size > 1,
        allow_urls=data.allow_urls,
    )
    eval_collator = copy.copy(collator)
    eval_collator.replacements = eval_rows if data.on_error == "skip" else None
    skipped = {name: number for name, (_, number) in rows.items()}
    return TrainingSetup(config, model_config, processor, collator, eval_collator, train_rows, eval_rows, skipped)


def load_model_config(config: TrainConfig) -> PruningConfig:
    """The checkpoint's configuration with the run's settings in it. Raises `ConfigError`, for other models' too."""
    path, revision = config.model.model_name_or_path, config.model.model_revision
    settings = config.model.given((*PRUNING_FIELDS, *TRAINING_FIELDS))
    try:
        return family_of_checkpoint(path, revision).config.from_pretrained(path, revision=revision, **settings)
    except (ValueError, OSError, StrictDataclassError) as error:
        name = repr(path) if Path(path).is_dir() else f"{path!r} (no folder here, so it is sought on the Hub)"
        raise config.error("model_name_or_path", f"{name} cannot be trained with these settings: {error}") from error


def configure_processor(config: TrainConfig, model_config: PruningConfig) -> Processor:
    """The checkpoint's processor with the run's frames. Raises `ConfigError`."""
    model = config.model
    try:
        processor = loading.load_processor(model.model_name_or_path, revision=model.model_revision)
    except ValueError as error:
        raise config.error("model_name_or_path", f"has no usable processor: {error}") from error
    video_processor = processor.video_processor
    frames.set_frames(video_processor, num_frames=config.data.num_frames, max_fps=config.data.max_fps)
    ratio = model_config.vision_config.pruning_ratio
    if ratio < 1 and hasattr(video_processor, "pruning_ratio"):
        video_processor.pruning_ratio = ratio  # what its `test_time_scaling` counts with
    return processor


def open_rows(config: TrainConfig, name: str) -> Any:
    """The rows of `train_data` or `eval_data` as they are. Raises `ConfigError` where they cannot be loaded."""
    data = config.data
    sources, split, revision = getattr(data, f"{name}_data"), getattr(data, f"{name}_split"), data.data_revision
    every_source = [*data.train_data, *(data.eval_data or [])]
    if accepts_option(every_source, "revision") and not accepts_option(sources, "revision"):
        revision = None  # it is the other one's
    try:
        rows = load_rows(sources, split=split, media_root=data.media_root, revision=revision)
    except (ValueError, OSError) as error:
        raise config.error(f"{name}_data", f"cannot be loaded: {error}") from error
    if not config.training.scorer_alone:
        return rows
    room = 0 if config.training.temporal_loss_only else data.max_answer_tokens  # nobody will write an answer
    return mark_unanswered(rows, data.default_question, room)


def make_rows(
    config: TrainConfig, name: str, rows: Any, model_config: PruningConfig, processor: Processor, progress: bool
) -> tuple[Any, int]:
    """
    The rows of `train_data` or `eval_data`, read and rendered and, with `pack_to`, packed; and how many were left out.
    Raises `ConfigError` where none is left and `RowError` where rows are bad.
    """
    data = config.data
    limit = data.pack_to or data.max_length or data.pad_to
    good = prepare_rows(
        rows,
        processor,
        model_config=model_config if limit else None,
        max_length=limit,
        on_error=data.on_error,
        headers=data.check_headers,
        allow_urls=data.allow_urls,
        progress=progress,
    )
    skipped = len(rows) - len(good)
    if not len(good):
        most = f" of at most {limit} tokens after pruning" if limit else ""
        raise config.error(f"{name}_data", f"holds no row that can be used{most}.")
    if data.pack_to is None:
        return good, skipped
    seed, most_samples = config.training.seed, data.max_samples_per_row
    return PackedDataset(good, good[LENGTH], data.pack_to, seed=seed, max_samples=most_samples), skipped


def table_of(rows: Any) -> Any:
    """The data set that `rows` are, or that they pack."""
    return rows.rows if isinstance(rows, PackedDataset) else rows


def check_sampling(config: TrainConfig, rows: Any) -> None:
    """Raises `ConfigError` for an order by lengths that the rows do not have: `Trainer` would look for `input_ids`."""
    strategy, column = config.training.train_sampling_strategy, config.training.length_column_name
    by_length = strategy in ("group_by_length", "batch_rebalance")
    if by_length and column not in (getattr(rows, "column_names", None) or ()):
        problem = f"is {strategy!r}, but the rows have no column {column!r}. `max_length` measures them."
        raise config.error("train_sampling_strategy", problem)


def check_videos(config: TrainConfig, rows: Any, processor: Processor) -> None:
    """Raises `ConfigError` where the scorer alone is trained and no row has a video, or none a second frame."""
    setting, shown = config.training.scorer_alone, frames.get_frames(processor.video_processor)["num_frames"]
    if not any(processor.video_token in prompt for prompt in table_of(rows)[PROMPT]):
        problem = "holds no row with a video, so there is nothing to learn."
        raise config.error("train_data", f"{problem} {setting}.")
    each = getattr(processor.video_processor, "temporal_patch_size", 1)  # frames that the tower sees as one
    if config.training.temporal_loss_only and shown <= each:
        problem = f"is {shown}, but the temporal loss compares a frame with the one before it"
        raise config.error("num_frames", f"{problem}, so there is nothing to learn. {setting}.")


def make_empty_model(run: TrainingSetup) -> PreTrainedModel:
    """The model without weights, with its adapter and its frozen parts, for counting."""
    with torch.device("meta"):
        return _adapt(run, empty_model(run.model_config))


def load_model(run: TrainingSetup) -> PreTrainedModel:
    """
    The model with its weights, its adapter and its frozen parts. Raises `ConfigError` where weights are missing that
    are not the scorer's, and for half precision that training cannot keep.

    Beside an adapter, and where the scorer alone is trained, what is trained of a model in half precision becomes
    float32: steps of 1e-4 are smaller than bfloat16 can tell apart.
    """
    model, dtype = _adapt(run, load_weights(run)), run.config.model.dtype
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if half and not run.config.model.use_peft and not only_scorer_is_trained(model):
        logger.warning(
            f"`dtype` is {dtype!r}: trained weights in half precision lose small steps. Use `dtype: float32` with "
            "`bf16: true`, or an optimizer that keeps copies of its own."
        )
        return model
    if half and not (run.arguments.bf16 or run.arguments.fp16):
        problem = "and what is trained is kept in float32, so `bf16: true` (or `fp16`) is needed."
        raise run.config.error("dtype", f"is {dtype!r}, {problem}")
    for parameter in half:
        parameter.data = parameter.data.float()
    return model


def load_weights(run: TrainingSetup) -> PreTrainedModel:
    """The checkpoint's model, with a new scorer where the run asks for one. Raises `ConfigError` as `load_model`."""
    set_seed(run.arguments.seed)  # an adapter, and a scorer that the checkpoint lacks, are drawn from here on
    model = run.config.model
    try:
        loaded, _ = loading.load_weights(
            model.model_name_or_path,
            run.model_config,
            revision=model.model_revision,
            dtype="auto" if model.dtype == "auto" else getattr(torch, model.dtype),
            **model.given(["attn_implementation"]),
        )
    except ValueError as error:
        raise run.config.error("model_name_or_path", f"cannot be loaded: {error}") from error
    if model.new_scorer:
        renew_scorer(loaded, run.arguments.seed)
    return loaded


def renew_scorer(model: Any, seed: int) -> None:
    """Puts a scorer that has learned nothing, the same for the same seed, in place of the model's."""
    weights = new_scorer_weights(empty_model(model.config), seed)
    ((name, scorer),) = modules_of(model, SCORER).items()
    scorer.load_state_dict({key.removeprefix(f"{name}."): tensor for key, tensor in weights.items()})


def _adapt(run: TrainingSetup, model: PreTrainedModel) -> Any:
    whole: Any = add_adapter(run.config, model) if run.config.model.use_peft else model
    try:
        freeze_parts(whole, run.arguments.freeze or ())
        check_scorer_alone(whole, run.arguments)
    except ValueError as error:
        raise ConfigError(f"{run.config.source}: {error}") from error
    return whole


def add_adapter(config: TrainConfig, model: PreTrainedModel) -> "PeftModel":
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


def make_trainer(run: TrainingSetup, model: PreTrainedModel) -> STTSTrainer:
    """Raises `ConfigError` for settings that do not fit each other, this machine, its packages or the Hub."""
    try:
        trainer = STTSTrainer(
            model,
            run.arguments,
            data_collator=run.collator,
            eval_collator=run.eval_collator,
            train_dataset=run.train_rows,
            eval_dataset=run.eval_rows,
            processing_class=run.processor,
        )
        trainer.get_optimizer_cls_and_kwargs(run.arguments, model)  # else its package is missed at the first step
    except (ValueError, ImportError, OSError, RuntimeError, httpx.HTTPError) as error:
        api = HfApi()
        hub = explain(error, api, run.arguments.hub_model_id or "the repository") if run.arguments.push_to_hub else None
        if hub is not None:
            raise run.config.error("push_to_hub", f"cannot be done: {hub}.") from error
        raise ConfigError(f"{run.config.source}: {' '.join(str(error).split())}") from error
    return trainer


def answer_unlabelled(run: TrainingSetup, trainer: STTSTrainer) -> TrainingSetup:
    """
    The run, and its trainer, with an answer of the model's own to every row that has none; they are kept in the output
    folder. Raises `RowError` as `answer_rows`.
    """
    config, arguments = run.config, run.arguments
    if not arguments.distillation_weight:
        return run
    tables = {"train": run.train_rows, "eval": run.eval_rows}
    rows = {name: table_of(table) for name, table in tables.items() if table is not None}
    if not any(ANSWER in table.column_names for table in rows.values()):
        return run
    settings, folder = config.model, Path(config.model.model_name_or_path)
    checkpoint = fingerprint(folder) if folder.is_dir() else f"{folder} {settings.model_revision}"
    identity = f"{checkpoint} {settings.dtype} {arguments.bf16}"
    device, half = arguments.device, torch.bfloat16 if arguments.bf16 else torch.float16
    model = trainer.model.to(device).eval()
    with torch.autocast(device.type, half, enabled=arguments.bf16 or arguments.fp16):
        answered = {
            name: answer_rows(
                table,
                model,
                run.processor,
                folder=Path(str(arguments.output_dir)),
                identity=identity,
                on_error=config.data.on_error,
            )
            for name, table in rows.items()
        }
    new = assemble(config, run.model_config, run.processor, answered, arguments.process_index == 0)
    lost = {name: len(rows[name]) - len(table) for name, table in answered.items()}
    new.skipped = {name: run.skipped[name] + lost[name] + number for name, number in new.skipped.items()}
    trainer.train_dataset, trainer.eval_dataset = new.train_rows, new.eval_rows
    trainer.data_collator, trainer.eval_collator = new.collator, new.eval_collator
    return new
