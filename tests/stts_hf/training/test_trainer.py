"""STTSTrainer and plain Trainer on the model: bad losses, checkpointed gradients, mixed precision, what is saved."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from stts_hf.training.checkpointing import last_checkpoint
from stts_hf.training.trainer import STTSTrainer
from tests import tiny_qwen3_5
from tests.modeling.reference import assert_gradients_equal
from tests.stts_hf.training.runs import KeepGradients, Rows, arguments, collate, logged, trainer
from tests.tiny import tiny_config, tiny_model

IN_ORDER: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0}


@pytest.mark.parametrize(("broken", "logging_steps"), [("task loss", 100), ("temporal loss", 1)], ids=["save", "log"])
def test_a_loss_that_is_not_finite_is_neither_logged_nor_saved(tmp_path, broken, logging_steps):
    model = tiny_model(tiny_config(pruning_ratio=0.0))  # no bias, through which a bad score would spoil the task loss
    weight = model.model.vision_tower.scorer.score_layer if broken == "temporal loss" else model.lm_head
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "logging_steps": logging_steps}
    run = trainer(tmp_path, model=model, gradient_accumulation_steps=2, **saving, **IN_ORDER)

    class Break(KeepGradients):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                weight.weight.data.fill_(torch.nan)

    run.add_callback(Break())
    with pytest.raises(FloatingPointError) as error:
        run.train()
    message = str(error.value)
    assert "The loss of step 2 is not finite" in message
    assert ("temporal loss nan" in message) == (broken == "temporal loss")
    assert ("task loss nan" in message) == (broken == "task loss")
    assert "row-2" in message if broken == "task loss" else "row-3" in message  # row 2 has no video
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert len(logged(run, "loss")) == (logging_steps == 1)


class Reads(torch.overrides.TorchFunctionMode):
    """
    Names of the calls in stts_hf.training that read a tensor's value, which would force a host-device sync on CUDA. On
    the CPU the model reads values that it would not read there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        ours = Path(sys._getframe(1).f_code.co_filename).parent.name == "training"
        reads = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "__bool__", "__float__", "__int__"}
        if ours and name in reads:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", [{}, {"scorer_only": True}, {"pruning_ratio_range": [0.1, 0.9]}], ids=str)
def test_a_micro_batch_is_not_read_back(tmp_path, monkeypatch, setting):
    """Reads of values on the CPU stand in for host-device syncs."""
    options: dict[str, Any] = setting
    run = trainer(tmp_path, gradient_accumulation_steps=2, max_steps=2, logging_steps=2, **options)
    reads, checks = Reads(), Reads()
    step, check = run.training_step, run.loss_history.check

    def counted_step(*args, **kwargs):
        with reads:
            return step(*args, **kwargs)

    def counted_check():
        with checks:
            check()

    monkeypatch.setattr(run, "training_step", counted_step)
    monkeypatch.setattr(run.loss_history, "check", counted_check)
    run.train()
    assert reads.names == []
    assert checks.names == ["item"] * 2  # of the only log, and at the end


def test_weights_spoilt_by_a_gradient_are_not_saved(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=1)

    class Spoil(KeepGradients):
        def on_substep_end(self, *args, **kwargs):
            pass

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            model.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)

    run.add_callback(Spoil())
    with pytest.raises(FloatingPointError, match="weights after step 1 are not finite"):
        run.train()
    assert last_checkpoint(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "saved", "once", "use_reentrant"),
    # `once`: layers below the lowest weight that is trained, which do not run again.
    [("", [], 0, False), ("language_model", [], 6, True), ("vision_tower", ["scorer"], 0, True)],
    ids=["full", "lora_reentrant", "lora_in_tower_reentrant"],
)
def test_gradient_checkpointing_changes_no_gradient(tmp_path, lora, saved, once, use_reentrant):
    found = []
    settings: list[dict[str, Any]] = [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}},
    ]
    for options in settings:
        model: Any = tiny_model()
        if lora:
            torch.manual_seed(0)
            config = LoraConfig(
                r=2, target_modules=rf".*{lora}.*\.q_proj", modules_to_save=saved or None, init_lora_weights=False
            )
            model = get_peft_model(model, config)
        kept = KeepGradients()
        run = trainer(tmp_path, model=model, max_steps=1, per_device_train_batch_size=2, **IN_ORDER, **options)
        run.add_callback(kept)
        layers = [module for name, module in model.named_modules() if name.endswith("mlp") and "layers" in name]
        calls: list[int] = []
        hooks = [layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1)) for layer in layers]
        run.train()
        assert len(calls) == len(hooks) + (len(hooks) - once if options else 0)
        found.append(kept.gradients)
    assert any("scorer" in name for name in found[0]) == (lora == "" or bool(saved))
    assert all(gradient.abs().max() > 0 for name, gradient in found[0].items() if "lora_" in name)
    assert_gradients_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"args": TrainingArguments("unused", use_cpu=True)}, TypeError, "not a TrainingArguments"),
        ({"compute_loss_func": lambda *_: None}, ValueError, "`compute_loss_func` must be None"),
        ({"model": torch.nn.Linear(2, 2)}, ValueError, "is a Linear of type None; it must be an STTS model"),
    ],
    ids=["args", "compute_loss_func", "model"],
)
def test_what_cannot_be_is_refused(tmp_path, options, error, message):
    settings = {"model": tiny_model(), "args": arguments(tmp_path), "train_dataset": Rows()} | options
    with pytest.raises(error, match=message):
        STTSTrainer(**settings)


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one(tmp_path):
    """`Trainer` compiles the whole model; batches are padded, and one has no video."""
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 4, **IN_ORDER}
    eager, compiled = (
        trainer(tmp_path, torch_compile=compiled, torch_compile_backend=backend, **options)
        for compiled, backend in ((False, None), (True, "eager"))
    )
    eager.train()
    compiled.train()
    for name in ("loss", "task_loss", "temporal_loss", "rank_correlation"):
        assert logged(compiled, name) == pytest.approx(logged(eager, name), rel=1e-5)


def test_a_model_made_by_model_init_is_prepared_too(tmp_path):
    args = arguments(tmp_path, freeze=["vision_tower"], max_steps=1)
    run: Any = STTSTrainer(model_init=lambda: tiny_model(), args=args, train_dataset=Rows(), data_collator=collate)
    STTSTrainer(model_init=lambda: tiny_qwen3_5.tiny_model(), args=args, train_dataset=Rows(), data_collator=collate)
    run.train()
    assert not run.model.model.vision_tower.patch_embedding.weight.requires_grad


def test_a_stream_of_rows_whose_batches_would_be_cut_is_refused_in_one_process_too(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([Rows()[0], Rows()[1]])

    with pytest.raises(ValueError, match="'dispatch_batches': False"):
        trainer(tmp_path, data=Stream())
    whole: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
    trainer(tmp_path, data=Stream(), per_device_train_batch_size=2, max_steps=1, **whole).train()


def test_steps_that_fail_for_memory_do_not_count_in_the_log(tmp_path):
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "auto_find_batch_size": True, "max_steps": 2}
    run = trainer(tmp_path, data=Rows(length=8), **options)
    compute = run.compute_loss

    def fail(model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return compute(model, inputs, *args, **kwargs)

    run.compute_loss = fail
    run.train()
    total = [
        task + temporal for task, temporal in zip(logged(run, "task_loss"), logged(run, "temporal_loss"), strict=True)
    ]
    assert len(total) == 2
    assert total == pytest.approx(logged(run, "loss"), rel=1e-4)
