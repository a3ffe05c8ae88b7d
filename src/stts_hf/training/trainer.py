"""`transformers.Trainer` with a learning rate by part, losses normalised over the step, and logs of the pruning."""

import itertools
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from stts_hf.checkpoints.families import OWN
from stts_hf.checkpoints.trainer_card import ModelCardTrainerMixin
from stts_hf.data.encoding import align_labels
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.model_parts import VISION_TOWER, find_backbone
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.modeling.pruning_stts import PruningOutput
from stts_hf.selectors import SELECTORS
from stts_hf.training import distributed
from stts_hf.training.arguments import STTSTrainingArguments, learns_answers, prepare_parts, split_groups, trained_parts
from stts_hf.training.checkpointing import accept_saved_names, find_checkpoint, staged
from stts_hf.training.losses import COUNTS, LOSSES, LossHistory, PruningMetrics, count, describe
from stts_hf.training.scorer_alone import StateCache, score_videos
from stts_hf.training.termination import Termination, TrainingTerminated, prepare_workers
from stts_hf.training.worth import AnswersTarget, draw_ratios, worth_loss

logger = logging.get_logger(__name__)

NON_MODEL_KEYS = ("sample_ids", "skipped_ids")  # entries of a batch for the trainer


class STTSTrainer(ModelCardTrainerMixin, Trainer):
    """
    `Trainer` for an STTS model of any backbone, alone or inside a `PeftModel`. docs/training.md lists its logs and
    describes its checkpoints.

    Batches may hold two lists of str that the model does not get: `sample_ids` to name rows in errors, `skipped_ids`
    to count rows that the collator left out. `train` raises `FloatingPointError` with the batch's ids if a loss is not
    finite, at the latest when it would log or save, and `TrainingTerminated` once it has saved after SIGTERM.

    Args:
        model, kwargs: as in `Trainer`.
        args: an `STTSTrainingArguments`.
        eval_collator: replaces `data_collator` in `evaluate` and `predict`, such as one whose `replacements` are no
            training rows.

    Raises:
        TypeError: `args` is of another class.
        ValueError: an option of `Trainer` is incompatible with STTS's losses.
    """

    args: STTSTrainingArguments
    model: Any
    arguments_class: ClassVar[type[STTSTrainingArguments]] = STTSTrainingArguments
    # This and `model_accepts_loss_kwargs` tell `Trainer` that `compute_loss` normalises over accumulated micro-batches.
    loss_is_scaled_for_ga = True

    def __init__(
        self, model: Any = None, args: STTSTrainingArguments | None = None, *, eval_collator: Any = None, **kwargs: Any
    ) -> None:
        args = self.arguments_class(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, self.arguments_class):
            raise TypeError(f"`args` must be an {self.arguments_class.__name__}, not a {type(args).__name__}.")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("`compute_loss_func` must be None: the model computes its losses itself.")
        if args.scorer_only and kwargs.get("compute_metrics") is not None:
            raise ValueError(
                "`scorer_only` is true, so there are no predictions for `compute_metrics`. Leave it out; `eval_loss` "
                "is the scorer's."
            )
        self.eval_collator = eval_collator
        self.termination = Termination()
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = True
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process would be used through DataParallel, which cannot split a batch "
                "of videos. Start one process per GPU with `accelerate launch`, or show one with CUDA_VISIBLE_DEVICES."
            )
        distributed.prepare_for_processes(self)
        if self.model_init is None:
            self._prepare_model(self.model)
        self.add_callback(self.termination)
        self.statistics = PruningMetrics(self.args.device)
        self.loss_history = LossHistory(self.accelerator)
        self._eval_statistics: PruningMetrics | None = None
        self._step_counts: torch.Tensor | None = None  # (3,) of `count`, over the step
        self._parts_of_loss: dict[str, torch.Tensor] = {}
        self._keys: list[str] = []  # of the rows of the batch

    def _prepare_model(self, model: Any) -> None:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        if model_type not in OWN:
            raise ValueError(
                f"`model` is a {type(model).__name__} of type {model_type!r}; it must be an STTS model. `stts-hf "
                "convert` makes one of a stock checkpoint."
            )
        why = OWN[model_type].model.backbone.refuses_packed_rows
        if why and any(isinstance(vars(self).get(name), PackedDataset) for name in ("train_dataset", "eval_dataset")):
            raise ValueError(f"A `PackedDataset` puts several samples into a row, but {why}. Pass its rows unpacked.")
        measures_masks = learns_answers(model.config, self.args)
        if (self.args.scorer_only or measures_masks) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            setting = "`scorer_only` is true" if self.args.scorer_only else "`scorer_target` is 'answers'"
            raise ValueError(
                f"{setting}, but FSDP or DeepSpeed would shard the model, which the scorer's loss runs by itself. Use "
                "DDP: examples/accelerate/ddp.yaml."
            )
        prepare_parts(model, self.args)
        self.states = StateCache(self.args.state_cache_gb) if self.args.state_cache_gb else None
        self.answers: AnswersTarget | None = None
        if measures_masks:
            if model.config.worth_unit is None and self.args.world_size > 1:
                raise ValueError(
                    "`worth_unit` is None, but each of several processes would measure another. Set it, such as "
                    "`worth_unit: 0.01`, or take the one that a short run of one process saves in its config."
                )
            self.answers = AnswersTarget(model, self.args)
        checkpointing = self.args.gradient_checkpointing_kwargs
        if self.args.gradient_checkpointing and isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
            # It computes no gradients if no input requires one, as with LoRA and with frozen parts. transformers makes
            # text embeddings require them; PEFT's copy of a fully trained tower has a patch embedding too.
            for name, module in model.named_modules() if VISION_TOWER in trained_parts(model) else ():
                if name.endswith((".patch_embed", ".patch_embedding")):
                    module.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        if isinstance(model, PreTrainedModel):  # a `PeftModel` loads its own adapter
            accept_saved_names(model)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._prepare_model(model)
        return model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As in `Trainer`, its groups split by part, each with the part's rate."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            rates: Any = self.args.learning_rates
            optimizer.param_groups = split_groups(optimizer, self.model if model is None else model, rates)
        return optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; True takes the last whole checkpoint. Raises `TrainingTerminated` after SIGTERM."""
        output_dir = str(self.args.output_dir)
        checkpoint = find_checkpoint(output_dir, resume_from_checkpoint)
        self.statistics.reset()
        self.loss_history.batches.clear()
        with self.termination.heard():
            result = super().train(checkpoint, *args, **kwargs)
        self._step_counts = None
        self.loss_history.check()
        if self.termination.agreed:
            self.accelerator.wait_for_everyone()
            raise TrainingTerminated(
                f"SIGTERM ended the training: step {self.state.global_step} is saved in {output_dir!r}. Resume it with "
                "`resume_from_checkpoint=True`."
            )
        return result

    def get_train_dataloader(self) -> DataLoader:
        return prepare_workers(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return prepare_workers(super().get_eval_dataloader(*args, **kwargs), self.eval_collator)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return prepare_workers(super().get_test_dataloader(*args, **kwargs), self.eval_collator)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The step's micro-batches, and its label tokens over all processes."""
        self.statistics.resume()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        distributed.check_batches_agree(self, batches, device)
        counts = sum((self._count(batch).to(device) for batch in batches), torch.zeros(3, device=device))
        if self.args.world_size > 1:
            stop = torch.tensor([float(self.termination.requested)], device=device)
            everywhere: Any = self.accelerator.reduce(torch.cat([counts, stop]), reduction="sum")
            self.termination.agree(everywhere[3])
            counts = everywhere[:3] if self.args.average_tokens_across_devices else counts
        self._step_counts = counts.clamp_min(1)
        return batches, self._step_counts[0]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        As in `Trainer`. Forces no host-device sync: logs, saves and the end of the run check the losses. With
        `scorer_target="answers"`, measuring answer losses does.
        """
        ids, skipped = (inputs.pop(key, None) for key in NON_MODEL_KEYS)
        if self.answers is not None or self.states is not None:
            self._keys = row_keys(inputs, ids)
        grids = inputs.get(self._backbone.video_inputs[-1])
        if self.args.pruning_ratio_range is not None and grids is not None:
            if inputs.get("pruned_length") is not None:
                raise ValueError(
                    "`pruning_ratio_range` draws a ratio for each video, but the collator's `pad_to` makes rows of one "
                    "length. Leave one of the two out."
                )
            inputs["pruning_ratio"] = draw_ratios(self.args.pruning_ratio_range, [random.random() for _ in grids])
        self.statistics.add("skipped_rows", len(skipped or ()))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.statistics.steps += self.accelerator.sync_gradients  # not where `auto_find_batch_size` tries again
        self.loss_history.add(self.state.global_step + 1, self._parts_of_loss, ids)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's share of the step's loss; outside training, the loss of the batch alone."""
        training = model.training and self._eval_statistics is None
        counts, alone = self._count(inputs), self.args.scorer_only
        step = self._step_counts if training else None
        if step is None:  # in evaluation, or called by hand
            step = counts.clamp_min(1)
        seen = TowerCache()  # of the blocks that are scored
        given = {**inputs, "tower_cache": seen}
        outputs: Any = self._score(model, given, training) if alone else model(**given, num_items_in_batch=step[0])
        task = outputs.task_loss.float()  # a sum that is divided by `step[0]` already
        temporal = torch.zeros_like(task)
        if outputs.temporal_loss is not None:
            temporal = (outputs.temporal_loss * (counts[1] / step[1]).to(outputs.temporal_loss.device)).to(task.device)
        worth = (self._learn_worth(inputs, outputs, training) / step[2]).to(task.device)
        router = torch.zeros_like(task)
        if (aux_loss := outputs.get("aux_loss")) is not None:
            router = (aux_loss * (counts[0] / step[0]).to(aux_loss.device)).to(task.device)
        # DDP and FSDP take the mean of the processes' gradients; with counts of all processes it must be their sum.
        scale = self.args.world_size if training and self.args.average_tokens_across_devices else 1
        losses = dict(zip(LOSSES, (task, temporal, worth, router), strict=True))
        loss = scale * self._total(losses)
        if training and not loss.requires_grad:  # only the scorer is trained, and the batch is text
            loss = loss + 0 * next(p for p in model.parameters() if p.requires_grad).sum()
        self._parts_of_loss = {name: losses[name].detach() for name in self._logged_losses}
        statistics = self.statistics if training else self._eval_statistics
        if statistics is not None:
            with torch.no_grad():
                numbers = dict(zip(COUNTS, counts, strict=True))
                is_learned = SELECTORS[self._backbone.config.vision_config.selector].is_learned
                statistics.observe(outputs, inputs, seen.blocks if is_learned else None)
                sums = {name: losses[name] * (scale if training else numbers[of]) for name, of in LOSSES.items()}
                for name, value in (numbers | sums).items():
                    statistics.add(name, value)
        return (loss, outputs) if return_outputs else loss

    def _count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return count(batch, self._backbone, with_labels=not self.args.scorer_only)

    def _learn_worth(self, inputs: Mapping[str, Any], outputs: Any, training: bool) -> torch.Tensor:
        """
        Sum over the rows of the scorer's loss by answers; outside training, of the answer loss of what it drops. 0 for
        another target, and without videos.
        """
        nothing = torch.zeros((), device=self.args.device)
        if self.answers is None or inputs.get(self._backbone.video_inputs[0]) is None:
            return nothing
        batch = {name: value for name, value in inputs.items() if name not in ("pruning_ratio", *NON_MODEL_KEYS)}
        with self.accelerator.autocast():
            if not training:
                return self.answers.deployed(self.model, batch)
            done = self.state.global_step / max(self.state.max_steps, 1)
            masks = self.answers.masks(self.model, batch, self._keys, done)
        return worth_loss(outputs.token_scores, masks, self.model.config.worth_unit)

    def _score(self, model: Any, inputs: dict[str, Any], training: bool) -> PruningOutput:
        """`score_videos` in place of the model's `forward`: DDP reduces only gradients of calls through it."""

        def score(**batch: Any) -> PruningOutput:
            with self.accelerator.autocast():
                return score_videos(self.model, batch, self.states if training else None, self._keys)

        attributes = vars(self.model)
        replaced = {name: attributes[name] for name in ("forward",) if name in attributes}  # accelerate's wrapper
        self.model.forward = score
        try:
            return model(**inputs)
        finally:
            del self.model.forward
            attributes |= replaced

    @property
    def _backbone(self) -> Any:
        return find_backbone(self.model)[1]

    @property
    def _logged_losses(self) -> tuple[str, ...]:
        if self.args.scorer_only:
            return ("temporal_loss",) if self.answers is None else ("worth_loss",)
        of_scorer = ("temporal_loss",) if self.answers is None else ("temporal_loss", "worth_loss")
        return ("task_loss", *of_scorer, *(("router_loss",) if self._router_weight else ()))

    @property
    def _router_weight(self) -> float:
        """Of a mixture's routers, where the config asks for their loss."""
        text = self.model.config.text_config
        return text.router_aux_loss_coef if getattr(text, "output_router_logits", False) else 0.0

    def _total(self, losses: Mapping[str, Any]) -> Any:
        """The loss that is trained on."""
        temporal = self.model.config.temporal_loss_weight * losses.get("temporal_loss", 0)
        of_scorer = temporal + losses.get("worth_loss", 0)
        of_text = losses.get("task_loss", 0) + self._router_weight * losses.get("router_loss", 0)
        return of_scorer if self.args.scorer_only else of_scorer + of_text

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with the statistics of the steps since the last log in logs of the training loss."""
        if self.is_in_train and "loss" in logs:
            self.loss_history.check()
            sums, kept_shares = self.statistics.read(self.accelerator)
            each = max(self.statistics.steps * self.args.world_size, 1)
            logs |= {name: sums[name] / each for name in self._logged_losses}
            logs |= describe(sums)
            for name in ("llm_tokens", "video_tokens"):
                logs[f"{name}_per_second"] = sums[name] / max(sums["seconds"], 1e-9)
            if sums["skipped_rows"]:
                logs["skipped_rows"] = sums["skipped_rows"]
            # One curve per frame position, to TensorBoard alone: they are too many for the console.
            for writer in filter(None, (getattr(c, "tb_writer", None) for c in self.callback_handler.callbacks)):
                for frame, share in enumerate(kept_shares[: self.args.log_frame_positions]):
                    writer.add_scalar(f"kept_share/frame_{frame:03d}", share, self.state.global_step)
            self.statistics.reset()
        super().log(logs, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """As in `Trainer`; logits and labels are those of the shortened sequence, (B, L', vocabulary) and (B, L')."""
        if self._eval_statistics is not None:
            self._eval_statistics.add("skipped_rows", len(inputs.get("skipped_ids") or ()))
        inputs = {key: value for key, value in inputs.items() if key not in NON_MODEL_KEYS}
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if inputs.get("labels") is None and not self.args.scorer_only:
                loss, outputs = None, model(**inputs)
            else:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only or self.args.scorer_only:
            return loss, None, None
        labels = inputs.get("labels")
        return loss, outputs.logits, None if labels is None else align_labels(outputs.kept_indices, labels)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; `eval_loss` is the mean over all label tokens and blocks, for any batch size."""
        prefix = kwargs.get("metric_key_prefix", "eval")
        self._eval_statistics = statistics = PruningMetrics(self.args.device)
        self.statistics.pause()
        try:
            output: Any = super().evaluation_loop(*args, **kwargs)
        finally:
            self._eval_statistics = None
        sums, _ = statistics.read(self.accelerator)
        if sums["labels"] or sums["blocks"]:
            found = {name: sums[name] / max(sums[LOSSES[name]], 1) for name in self._logged_losses}
            found |= {"loss": self._total(found)} | describe(sums)
            output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        if sums["skipped_rows"]:
            output.metrics[f"{prefix}_skipped_rows"] = sums["skipped_rows"]
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        As in `Trainer`. Outside a checkpoint it saves the whole model, also if FSDP shards checkpoints, and replaces an
        earlier model in the folder only once it is complete. Raises `FloatingPointError` instead of saving a checkpoint
        whose losses or weights are not finite.
        """
        distributed.name_after_own_code(type(self.accelerator.unwrap_model(self.model)))
        folder = Path(output_dir or str(self.args.output_dir))
        if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            self.statistics.pause()
            self.loss_history.check()
            self._check_weights()
            if self.args.should_save:  # of an earlier save at this step: the last file of a checkpoint makes it whole
                (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            super().save_model(str(folder), _internal_call)
            return
        with distributed.whole_state_dict(self.accelerator), staged(folder, self.args.should_save) as stage:
            super().save_model(str(stage), _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _check_weights(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        shards: list[Any] = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in trained]
        finite = [shard.detach().isfinite().all().to(self.args.device) for shard in shards]
        bad = (~torch.stack(finite)).any().float()
        if self.accelerator.reduce(bad, reduction="sum").item():
            raise FloatingPointError(
                f"The weights after step {self.state.global_step} are not finite, but the losses are: a gradient was "
                "not. They are not saved. Resume from the last checkpoint."
            )


def row_keys(inputs: Mapping[str, Any], ids: Sequence[str] | None) -> list[str]:
    """
    A key for each row (B, L): the id and a checksum of its tokens, which hold its frames' times. Raises `ValueError`
    where the collator gives no ids, or other than one for each row.
    """
    rows = inputs["input_ids"]
    if ids is not None and len(ids) == len(rows) - 1:  # the collator's `always_video` has added a black one
        ids = [*ids, "<empty video>"]
    if ids is None or len(ids) != len(rows):
        raise ValueError(
            f"`scorer_target` 'answers' and `state_cache_gb` need row ids, but a batch of {len(rows)} rows has "
            f"{'no' if ids is None else len(ids)} `sample_ids`. Use a collator with "
            "`return_ids=True` and no packing, or `scorer_target: change`."
        )
    mask = inputs.get("attention_mask")
    shown = [row if mask is None else row[mask[index].bool()] for index, row in enumerate(rows)]
    return [f"{name}:{zlib.crc32(row.cpu().numpy().tobytes()):08x}" for name, row in zip(ids, shown, strict=True)]
