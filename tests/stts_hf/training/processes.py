"""Run by `accelerate launch` for test_distributed.py: `processes.py FOLDER SCENARIO...`, each in its own folder.

The scenarios are the same with one process, so that runs can be compared: a step is always four rows.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import yaml  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from packaging.version import Version
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from stts_hf import STTSProcessor, load_rows, prepare_rows
from stts_hf.training.config import load_config
from stts_hf.training.own_answers import answer_rows, mark_unanswered
from stts_hf.training.run import train
from stts_hf.training.trainer import STTSTrainer
from tests.checkpoints import ALL_TINIES, TINY, load_tiny
from tests.clips import write_clip
from tests.stts_hf.training.runs import KeepGradients, Rows, join, logged, sample, trainer
from tests.test_peft import TARGETS
from tests.tiny import Image, Part, Video, tiny_config, tiny_model

Inputs = dict[str, Any]

# Beside each other at the same time, as two processes take every second row: video and text, image and video, image
# with video and video, text and image. Label tokens and frames differ from row to row.
MIXED: list[list[Part]] = [
    [3, Video(2), 2],
    [12],
    [2, Image(), 5],
    [3, Video(4), 9],
    [2, Image(), Video(3), 7],
    [2, Video(3), 17],
    [20],
    [4, Image(), 3],
]
LOSSES = ("loss", "task_loss", "temporal_loss", "worth_loss")
PARTS = ("language_model", "vision_tower", "connector", "scorer")
OPTIONS: dict[str, Any] = {
    "learning_rates": dict.fromkeys(PARTS, 1e-3),
    # AdamW divides a gradient by its own size. That of a key's bias is rounding alone, as it changes no attention, and
    # would become steps of full size in directions that differ from run to run; this is far above it.
    "adam_epsilon": 1e-6,
    "train_sampling_strategy": "sequential",
}


ANSWERS = {"scorer_target": "answers", "worth_unit": 0.1}
SMOLVLM = find_spec("num2words") is not None and Version(transformers.__version__) >= Version("5.23")
OTHERS = [name for name in ALL_TINIES if name != "molmo2" and (SMOLVLM or name != "smolvlm")]
QUIETLY: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
QUIETLY |= {"adam_epsilon": OPTIONS["adam_epsilon"], "train_sampling_strategy": "sequential"}


def small_model() -> Any:
    return tiny_model(tiny_config(pruning_ratio=0.5))


class Collator:
    """Batches of `Rows`. `always_video` as in `STTSDataCollator`."""

    def __init__(self) -> None:
        self.always_video = False

    def __call__(self, items: Sequence[Inputs]) -> Inputs:
        items = [{key: value for key, value in item.items() if key != "id"} for item in items]
        if getattr(self, "always_video", False) and not any("pixel_values_videos" in item for item in items):
            black = sample([Video(1)], seed=0)
            black["pixel_values_videos"].zero_()
            items.append(black | {"labels": torch.full_like(black["input_ids"], -100)})
        return join(items)


class Plain(Collator):
    """A collator that knows nothing of `always_video`."""

    def __init__(self) -> None:
        pass


class Named(Collator):
    """Adds the rows' ids."""

    def __call__(self, items: Sequence[Inputs]) -> Inputs:
        ids = [item["id"] for item in items]
        return super().__call__(items) | {"sample_ids": ids}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows(MIXED))


def pretend_gpus() -> dict[str, Any]:
    """
    accelerate knows FSDP for GPUs alone; on CPUs it would use DDP and say nothing. Told that these are GPUs, it does
    all the rest as it would there: wrapping, sharding, gathering, saving. Returns the options that a trainer needs.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return {}
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return {"accelerator_config": {"use_configured_state": True}}


def make(folder: Path, **options: Any) -> STTSTrainer:
    """A trainer whose every step is four rows, divided among the processes there are."""
    shared = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    alone = {"per_device_train_batch_size": 4}
    batching = shared if int(os.environ.get("WORLD_SIZE", 1)) == 2 else alone
    defaults = {"data": Rows(MIXED, 80), "data_collator": Collator(), "model": small_model()} | OPTIONS | batching
    options = defaults | options | pretend_gpus()
    return trainer(folder, **options)


def describe(run: STTSTrainer) -> dict[str, Any]:
    trained: Any = run.model
    return {
        "losses": {name: logged(run, name) for name in LOSSES},
        "processes": run.args.world_size,
        "engine": run.accelerator.distributed_type.value,
        "sharded": [name for name, module in trained.named_modules() if isinstance(module, FSDPModule)],
        "steps": run.state.global_step,
    }


def full(folder: Path) -> dict[str, Any]:
    """20 steps, saved."""
    run = make(folder, max_steps=20, processing_class=STTSProcessor.from_pretrained(TINY))
    run.train()
    run.save_model(str(folder / "model"))
    return describe(run)


def lora(folder: Path) -> dict[str, Any]:
    """With the scorer trained in full and gradient checkpointing."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, modules_to_save=["scorer"])
    adapted: Any = peft.get_peft_model(small_model(), config)
    run = make(folder, model=adapted, max_steps=4, gradient_checkpointing=True)
    run.train()
    run.save_model(str(folder / "adapter"))
    return describe(run)


def scorer_only(folder: Path) -> dict[str, Any]:
    """And rows that wait for an answer, of which each process writes its share."""
    model = tiny_model(tiny_config(pruning_ratio=0.5, model_overrides=ANSWERS))
    options: dict[str, Any] = {"scorer_only": True, "num_masks": 4, "mask_rounds": 1, "data_collator": Named()}
    run = make(folder, model=model, max_steps=4, freeze=list(PARTS[:3]), **options)
    run.train()
    folder.mkdir(exist_ok=True)
    write_clip(folder / f"clip-{os.environ.get('RANK', '0')}.mp4", 10, fps=5)
    clip = str(folder / f"clip-{os.environ.get('RANK', '0')}.mp4")
    table = datasets.Dataset.from_list([{"question": word, "videos": [clip]} for word in ("One?", "Two?", "Three?")])
    processor = STTSProcessor.from_pretrained(TINY)
    rows = prepare_rows(mark_unanswered(load_rows(table), "What?", 4), processor, progress=False)
    answered = answer_rows(rows, load_tiny(), processor, folder=folder / "answers")
    return describe(run) | {"answers": list(answered["stts_answer"])}


def scorer_start(folder: Path) -> dict[str, Any]:
    """Where one process has a video in its batch and the other has none."""
    options: dict[str, Any] = {"freeze": list(PARTS[:3]), "scorer_only": True, "data_collator": Plain()}
    run = make(folder, max_steps=4, **options)
    run.train()
    run.save_model(str(folder / "model"))
    return describe(run)


def bf16(folder: Path) -> dict[str, Any]:
    run = make(folder, max_steps=4, bf16=True)
    run.train()
    outputs = run.model_wrapped(**Collator()([Rows(MIXED)[0]]))
    dtypes = {name: str(getattr(outputs, name).dtype) for name in ("loss", "task_loss", "temporal_loss")}
    return describe(run) | {"dtypes": dtypes, "ranked": len(logged(run, "rank_correlation"))}


def plain_trainer(folder: Path) -> dict[str, Any]:
    """`transformers.Trainer` as it is: gradients of one step over four rows, in one batch or in four micro-batches."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    batch = 4 if processes == 1 else 1
    batching = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch // processes}
    settings: dict[str, Any] = {"use_cpu": True, "max_steps": 1, "max_grad_norm": 0, "learning_rate": 0.0, **batching}
    settings |= {"remove_unused_columns": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(folder), train_sampling_strategy="sequential", **settings)
    kept = KeepGradients()
    run = Trainer(small_model(), args, Plain(), Rows(MIXED), callbacks=[kept])
    run.train()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept.gradients, folder / f"gradients-{run.args.process_index}.safetensors")
    return {"processes": run.args.world_size, "loss": run.state.log_history[-1]["train_loss"]}


def resumed(folder: Path) -> dict[str, Any]:
    """6 steps, and again from the checkpoint after 3."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make(folder, **options)
    whole.train()
    whole.save_model(str(folder / "whole"))
    half = make(folder, **options)
    half.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    half.save_model(str(folder / "half"), _internal_call=True)  # as `stts-hf train` does
    return describe(half) | {"whole": describe(whole)["losses"]}


def resumed_from_shards(folder: Path) -> dict[str, Any]:
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    return resumed(folder)


def write_rows(folder: Path) -> Path:
    """Rows for `command`: one with a video, one without, so each process has another kind."""
    folder.mkdir(parents=True)
    write_clip(folder / "clip.mp4", 10, fps=5)
    messages = [{"role": "user", "content": "What moves?"}, {"role": "assistant", "content": "A box."}]
    rows = [{"id": "a", "videos": ["clip.mp4"], "messages": messages}, {"id": "b", "messages": messages}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def command(folder: Path) -> dict[str, Any]:
    """`stts-hf train` with LoRA, merged at the end."""
    options = {"max_steps": 2, "per_device_train_batch_size": 1, "scorer_target": "change", **QUIETLY}
    adapter: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "merge_adapter": True}
    adapter |= {"learning_rates": {"adapter": 1e-3, "scorer": 1e-3}}
    return run_command(folder, folder.parent / "data", TINY, options | adapter)


def run_command(folder: Path, data: Path, checkpoint: Path, settings: dict[str, Any]) -> dict[str, Any]:
    shared = {"model_name_or_path": str(checkpoint), "pruning_ratio": 0.5, "num_frames": 4}
    shared |= {"train_data": str(data / "rows.jsonl"), "output_dir": str(folder / "output")}
    file = folder.parent / f"{folder.name}-{os.environ.get('RANK', '0')}.yaml"
    file.write_text(yaml.safe_dump(shared | settings | pretend_gpus()))
    torch.manual_seed(0)  # of the LoRA weights
    return describe(train(load_config(file)))


def backbones(folder: Path) -> dict[str, Any]:
    """Two steps of `stts-hf train` on each other backbone's tiny checkpoint, two rows a step, one of them text."""
    if not (data := folder.parent / "data").exists():
        write_rows(data)
    options = {"max_steps": 2, "per_device_train_batch_size": 2 // int(os.environ.get("WORLD_SIZE", 1)), **QUIETLY}
    options |= {"learning_rates": dict.fromkeys(PARTS, 1e-3), "new_scorer": True}
    folder.mkdir(exist_ok=True)
    found = {}
    for name in OTHERS:
        found[name] = run_command(folder / name, data, ALL_TINIES[name], options)
    return found


def refused(folder: Path) -> dict[str, Any]:
    """What would hang or tear batches apart."""

    def message(start: Callable[[], Any]) -> str:
        try:
            start()
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    plain = {"data_collator": Plain(), "max_steps": 1, "ddp_find_unused_parameters": False}
    matching = {"freeze": list(PARTS[:3]), "scorer_only": True}
    return {
        "sharded_teacher": message(lambda: make(folder, **matching)),
        "no_video": message(lambda: make(folder, **plain).train()),
        "stream": message(lambda: make(folder, data=Stream(), max_steps=1).train()),
    }


def not_finite(folder: Path) -> dict[str, Any]:
    """Process 1 has NaN in its second step."""
    run = make(folder, max_steps=4, save_strategy="steps", save_steps=1, data_collator=Named())

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor | None:
        return logits * torch.nan if run.args.process_index == 1 and run.state.global_step == 1 else None

    run.model.lm_head.register_forward_hook(spoil)
    try:
        run.train()
    except FloatingPointError as error:
        return {"message": str(error)}
    return {"message": "nothing was raised"}


RUNS = (
    *(full, lora, scorer_only, scorer_start, bf16, plain_trainer),
    *(resumed, refused, not_finite, resumed_from_shards, command, backbones),
)
SCENARIOS = {run.__name__: run for run in RUNS}


def main(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        result = SCENARIOS[name](folder / name)
        (folder / name).mkdir(parents=True, exist_ok=True)
        rank = os.environ.get("RANK", "0")
        (folder / name / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
