"""A run up to its trainer, made from a `TrainConfig` and checked: settings, processor, rows, model."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import torch
from huggingface_hub import HfApi
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
from stts_hf.data.loading import load_rows
from stts_hf.data.preparing import LENGTH, prepare_rows, with_column
from stts_hf.data.rows import ANSWER, read_row, row_id
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.model_parts import SCORER
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS, PruningConfig
from stts_hf.training.arguments import STTSTrainingArguments, prepare_parts, trained_parts
from stts_hf.training.config import TEXT_LINEAR, ConfigError, TrainConfig
from stts_hf.training.own_answers import answer_rows, mark_unanswered
from stts_hf.training.trainer import STTSTrainer
from stts_hf.video import processors as frames

logger = logging.get_logger(__name__)

Rows: TypeAlias = datasets.Dataset | PackedDataset


@dataclass
class TrainingSetup:
    """A run without its weights. rows: of "train" and, if it evaluates, "eval". skipped: how many of each were not."""

    config: TrainConfig
    model_config: PruningConfig
    processor: Processor
    rows: Mapping[str, Rows]
    skipped: Mapping[str, int]

    @property
    def arguments(self) -> STTSTrainingArguments:
        return self.config.training

    @property
    def needs_answers(self) -> bool:
        """Whether rows without an answer get the unpruned model's."""
        return self.arguments.scorer_only and self.model_config.scorer_target == "answers"

    @property
    def tables(self) -> dict[str, datasets.Dataset]:
        """The rows, unpacked."""
        return {name: rows.rows if isinstance(rows, PackedDataset) else rows for name, rows in self.rows.items()}

    def count_steps(self) -> tuple[int, int]:
        """Optimizer steps of the run and of an epoch. Raises `ConfigError` if there would be none."""
        arguments, rows = self.arguments, len(self.rows["train"])
        batch = arguments.per_device_train_batch_size * arguments.world_size
        batches = rows // batch if arguments.dataloader_drop_last else math.ceil(rows / batch)
        if not batches:
            problem = f"leaves nothing of {rows} rows in batches of {batch}. Take it out, or make"
            raise self.config.error("dataloader_drop_last", f"{problem} `per_device_train_batch_size` smaller.")
        epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
        steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * epoch)
        if not steps:
            raise self.config.error("num_train_epochs", "is 0, so there would be no step. Set it or `max_steps`.")
        return steps, epoch


def prepare(config: TrainConfig, *, progress: bool = True) -> TrainingSetup:
    """Makes all checks that need no weights, of settings and rows. Raises `ConfigError` and `RowError`."""
    register_auto_classes()
    model_config = load_model_config(config)
    processor = load_processor(config, model_config)
    with config.training.main_process_first(desc="reading the data"):  # the others read its cache
        names, target = ("train", "eval"), model_config.scorer_target
        rows = {name: load_data(config, name, target) for name in names if getattr(config.data, f"{name}_data")}
    run = prepare_data(TrainingSetup(config, model_config, processor, rows, dict.fromkeys(rows, 0)), progress)
    check_data(run)
    return run


def load_model_config(config: TrainConfig) -> PruningConfig:
    """Returns the checkpoint's configuration with the run's settings. Raises `ConfigError`."""
    path, revision = config.model.model_name_or_path, config.model.model_revision
    settings: dict[str, Any] = {"worth_unit": None} if config.model.new_scorer else {}  # the old scorer's
    settings |= config.model.given((*PRUNING_FIELDS, *TRAINING_FIELDS))
    name = repr(path) if Path(path).is_dir() else f"{path!r} (no folder here, so it is sought on the Hub)"
    with config.blame("model_name_or_path", f"{name} cannot be trained with its config.json and these settings"):
        family = family_of_checkpoint(path, revision)
        model_config = family.config.from_pretrained(path, revision=revision, **settings)
    why = family.model.backbone.refuses_packed_rows
    if why and config.data.pack_to is not None:
        raise config.error("pack_to", f"packs several samples into a row, but {why}. Use `max_length` or `pad_to`.")
    return model_config


def load_processor(config: TrainConfig, model_config: PruningConfig) -> Processor:
    """Returns the checkpoint's processor with the run's frame settings. Raises `ConfigError`."""
    model, data = config.model, config.data
    with config.blame("model_name_or_path", "has no usable processor"):
        options: dict[str, Any] = {"revision": model.model_revision, "config": model_config}
        processor: Processor = loading.load_processor(model.model_name_or_path, **options)
    with config.blame("num_frames", "and `max_fps` cannot be set"):
        frames.set_frames(processor.video_processor, num_frames=data.num_frames, max_fps=data.max_fps)
    ratio = model_config.vision_config.pruning_ratio
    if ratio < 1 and hasattr(processor.video_processor, "pruning_ratio"):
        processor.video_processor.pruning_ratio = ratio  # for `test_time_scaling`
    return processor


def load_data(config: TrainConfig, name: str, scorer_target: str) -> datasets.Dataset:
    """Loads the rows of `train_data` or `eval_data`. Raises `ConfigError`."""
    data = config.data
    sources, split = getattr(data, f"{name}_data"), getattr(data, f"{name}_split")
    with config.blame(f"{name}_data", "cannot be loaded"):
        rows = load_rows(sources, split=split, media_root=data.media_root, revision=data.data_revision)
        if not config.training.scorer_only:
            return rows
        learns_answers = scorer_target == "answers"
        marked = mark_unanswered(rows, data.default_question, data.max_answer_tokens if learns_answers else 0)
        return with_ids(marked) if learns_answers else marked


def with_ids(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows, each with another `id`, since masks are kept by row: of several data sets some may be the same."""
    seen, ids = Counter[str](), []
    for index, given in enumerate(rows["id"]):
        name = row_id({"id": given}, index)
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return with_column(rows, "id", ids, "string")


def prepare_data(run: TrainingSetup, progress: bool = True) -> TrainingSetup:
    """The run with rows that are checked, rendered and, with `pack_to`, packed. Raises `ConfigError` and `RowError`."""
    data, rows, skipped = run.config.data, dict[str, Rows](), dict[str, int]()
    limit = data.pack_to or data.max_length or data.pad_to
    for name, loaded in run.rows.items():
        good = prepare_rows(
            loaded,
            run.processor,
            model_config=run.model_config if limit else None,
            max_length=limit,
            on_error=data.on_error,
            headers=data.check_headers,
            allow_urls=data.allow_urls,
            progress=progress and run.arguments.process_index == 0,
        )
        if not len(good):
            most = f" of at most {limit} tokens after pruning" if limit else ""
            raise run.config.error(f"{name}_data", f"holds no row that can be used{most}.")
        skipped[name], rows[name] = run.skipped[name] + len(loaded) - len(good), good
        if data.pack_to is not None:
            seed, max_samples = run.arguments.seed, data.max_samples_per_row
            rows[name] = PackedDataset(good, good[LENGTH], data.pack_to, seed=seed, max_samples=max_samples)
    run = replace(run, rows=rows, skipped=skipped)
    run.count_steps()
    return run


def check_data(run: TrainingSetup) -> None:
    """Raises `ConfigError` if the training rows lack the lengths to sort by, or anything for the scorer to learn."""
    arguments, rows, data = run.arguments, run.rows["train"], run.config.data
    fixed = next((name for name in ("pack_to", "pad_to", "max_length") if getattr(data, name) is not None), None)
    if fixed and (run.needs_answers or arguments.pruning_ratio_range):
        why = "`scorer_target` is 'answers'" if run.needs_answers else "`pruning_ratio_range` draws ratios"
        raise run.config.error(fixed, f"counts tokens at one ratio, but {why}. Leave it out.")
    column = arguments.length_column_name
    by_length = arguments.train_sampling_strategy in ("group_by_length", "batch_rebalance")
    if by_length and column not in getattr(rows, "column_names", ()):
        problem = f"is {arguments.train_sampling_strategy!r}, but the rows have no column {column!r}."
        raise run.config.error("train_sampling_strategy", f"{problem} `max_length` measures them.")
    if not arguments.scorer_only:
        return
    problem = "so there is nothing to learn. `scorer_only` is true."
    if not any(read_row(row).videos for row in run.tables["train"]):
        raise run.config.error("train_data", f"holds no row with a video, {problem}")
    shown = frames.get_frames(run.processor.video_processor)["num_frames"]
    if shown <= getattr(run.processor.video_processor, "temporal_patch_size", 1):
        raise run.config.error("num_frames", f"is {shown}, but the first frame always stays, {problem}")


def load_model(run: TrainingSetup) -> PreTrainedModel:
    """
    Returns the model with its weights, its adapter and its frozen parts. Raises `ConfigError` if weights other than the
    scorer's are missing, and for half precision that training cannot keep.

    Beside an adapter, and if the scorer alone is trained, the trained weights become float32: bfloat16 cannot hold
    steps of 1e-4.
    """
    model, dtype = adapt(run, load_weights(run)), run.config.model.dtype
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if half and not run.config.model.use_peft and trained_parts(model) != {SCORER}:
        logger.warning(
            f"`dtype` is {dtype!r}: trained weights in half precision lose small steps. Use `dtype: float32` with "
            "`bf16: true`, or an optimizer that keeps its own float32 copies."
        )
        return model
    if half and not (run.arguments.bf16 or run.arguments.fp16):
        problem = f"is {dtype!r}, and trained weights are kept in float32, so `bf16: true` (or `fp16`) is needed."
        raise run.config.error("dtype", problem)
    for parameter in half:
        parameter.data = parameter.data.float()
    return model


def load_weights(run: TrainingSetup) -> PreTrainedModel:
    """Returns the checkpoint's model, with a new scorer if the run asks for one. Raises `ConfigError`."""
    set_seed(run.arguments.seed)  # for the adapter, and a scorer that the checkpoint lacks
    model = run.config.model
    with run.config.blame("model_name_or_path", "cannot be loaded"):
        loaded, _ = loading.load_weights(
            model.model_name_or_path,
            run.model_config,
            revision=model.model_revision,
            dtype=model.dtype,
            **model.given(["attn_implementation"]),
        )
    if model.new_scorer:
        renew_scorer(loaded, run.arguments.seed)
    return loaded


def renew_scorer(model: Any, seed: int) -> None:
    """Replaces the model's scorer by an untrained one, drawn from `seed`."""
    model.load_state_dict(new_scorer_weights(empty_model(model.config), seed), strict=False)


def adapt(run: TrainingSetup, model: PreTrainedModel) -> PreTrainedModel:
    """Adds the adapter and freezes parts. Raises `ConfigError` for settings that do not fit the model."""
    settings = run.config.model
    whole: Any = model
    if settings.use_peft:
        from peft import LoraConfig, get_peft_model

        targets = settings.lora_target_modules or [TEXT_LINEAR]
        is_names = len(targets) > 1 or re.fullmatch(r"[\w.]+", targets[0])  # else a pattern, or `all-linear`
        last_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        for name in settings.lora_modules_to_save or ():  # PEFT ignores unknown ones
            if name.rpartition(".")[2] not in last_names:
                raise run.config.error("lora_modules_to_save", f"names {name!r}, no module of the model: take it out.")
        lora = LoraConfig(
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=targets if is_names else targets[0],
            modules_to_save=settings.lora_modules_to_save or None,
            use_dora=settings.use_dora,
            use_rslora=settings.use_rslora,
        )
        with run.config.blame("use_peft", "is true, but the `lora_*` settings do not fit the model"):
            whole = get_peft_model(model, lora)
    with run.config.blame("freeze", "and the learning rates do not fit the model"):
        prepare_parts(whole, run.arguments)
    return whole


def answer_unlabelled(run: TrainingSetup, model: PreTrainedModel) -> TrainingSetup:
    """The run with the model's own answers, kept in the output folder, to rows that have none. Raises `RowError`."""
    config, arguments = run.config, run.arguments
    tables = run.tables
    if not run.needs_answers or not any(ANSWER in table.column_names for table in tables.values()):
        return run
    folder = Path(config.model.model_name_or_path)
    checkpoint = fingerprint(folder) if folder.is_dir() else f"{folder} {config.model.model_revision}"
    device, half = arguments.device, torch.bfloat16 if arguments.bf16 else torch.float16
    model.to(device)  # type: ignore[arg-type]
    with torch.autocast(device.type, half, enabled=arguments.bf16 or arguments.fp16):
        rows = {
            name: answer_rows(
                table,
                model.eval(),
                run.processor,
                folder=Path(str(arguments.output_dir)),
                identity=f"{checkpoint} {config.model.dtype} {arguments.bf16}",
                on_error=config.data.on_error,
            )
            for name, table in tables.items()
        }
    skipped = {name: run.skipped[name] + len(tables[name]) - len(rows[name]) for name in rows}
    return prepare_data(replace(run, rows=rows, skipped=skipped))  # with other answers, rows have other lengths


def make_trainer(run: TrainingSetup, model: PreTrainedModel) -> STTSTrainer:
    """Raises `ConfigError` for settings that do not fit each other, this machine, its packages or the Hub."""
    data = run.config.data
    collators = {
        name: STTSDataCollator(
            run.processor,
            model_config=run.model_config,
            on_error=data.on_error,
            replacements=rows if data.on_error == "skip" else None,  # type: ignore[arg-type]
            max_length=data.pack_to or data.max_length,
            pad_to=data.pad_to,
            return_ids=True,
            allow_urls=data.allow_urls,
        )
        for name, rows in run.rows.items()
    }
    try:
        trainer = STTSTrainer(
            model,
            run.arguments,
            data_collator=collators["train"],
            eval_collator=collators.get("eval"),
            train_dataset=run.rows["train"],
            eval_dataset=run.rows.get("eval"),
            processing_class=run.processor,
        )
        trainer.get_optimizer_cls_and_kwargs(run.arguments, model)  # imports the optimizer's package
    except (ValueError, ImportError, OSError, RuntimeError, httpx.HTTPError) as error:
        api = HfApi()
        hub = explain(error, api, run.arguments.hub_model_id or "the repository") if run.arguments.push_to_hub else None
        if hub is not None:
            raise run.config.error("push_to_hub", f"cannot be done: {hub}.") from error
        raise ConfigError(f"{run.config.source}: {' '.join(str(error).split())}") from error
    return trainer
