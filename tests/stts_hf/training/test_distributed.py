"""Two processes under DDP and FSDP2 (gloo, CPU), started by `accelerate launch` with the shipped configs, against one.

Each engine is launched once and goes through the scenarios of processes.py; the tests look at what they left.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from filelock import FileLock
from safetensors.torch import load_file
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from stts_hf import STTSProcessor
from stts_hf.data.collator import STTSDataCollator
from stts_hf.training.checkpointing import last_checkpoint
from stts_hf.training.distributed import prepare_for_processes, shared_inputs, wrap_language_model_alone
from tests.backbones import BACKBONES, HYBRID_MIXTURES, HYBRIDS, MIXTURES
from tests.checkpoints import TINY, load_tiny
from tests.conftest import REPOSITORY
from tests.stts_hf.training.processes import OTHERS, main, small_model, write_rows
from tests.tiny import tiny_config, tiny_model

CONFIGS = REPOSITORY / "examples" / "accelerate"
SCENARIOS = {
    "ddp": (
        *("full", "lora", "scorer_only", "scorer_start", "plain_trainer"),
        *("resumed", "refused", "not_finite", "command", "backbones"),
    ),
    "fsdp2": ("full", "lora", "bf16", "resumed", "refused", "resumed_from_shards", "command", "backbones"),
}
ENGINES = list(SCENARIOS)
TOLERANCE = 1e-4  # what the project promises; losses differ by 1e-6 and weights by 1e-5


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Folder that is filled on first use, for all of pytest-xdist's workers together."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder, filled = root / f"processes-{name}", root / f"processes-{name}.filled"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                fill(folder)
                filled.touch()
        assert filled.exists(), f"{name} failed before"
        return folder

    return folder_of


@pytest.fixture(scope="module")
def launched(run_once):
    """Folder of an engine's run, launched on first use."""

    def launch(engine: str) -> Path:
        def fill(folder: Path) -> None:
            write_rows(folder / "data")
            environment = {
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'src'}",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"{CONFIGS / engine}.yaml"]
            command += ["--num_processes", "2", "--main_process_port", "0"]  # 0: any free port
            command += [str(REPOSITORY / "tests" / "stts_hf" / "training" / "processes.py"), str(folder)]
            result = subprocess.run(
                [*command, *SCENARIOS[engine]],
                env=environment,
                capture_output=True,
                text=True,
                timeout=900,  # on a busy machine too
            )
            assert result.returncode == 0, result.stderr[-4000:]

        return run_once(engine, fill)

    return launch


@pytest.fixture(scope="module")
def alone(run_once) -> Path:
    """Folder of the same runs in this process."""
    scenarios = ("full", "lora", "scorer_only", "scorer_start", "plain_trainer", "backbones")
    return run_once("alone", lambda folder: main(folder, scenarios))


def results(folder: Path, scenario: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / scenario / f"result-{rank}.json").read_text())


def assert_losses_close(found: dict[str, list[float]], expected: dict[str, list[float]], steps: int) -> None:
    for name in (name for name, values in expected.items() if values):
        assert len(found[name]) == steps
        assert max(expected[name][:steps]) > 0
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(expected[name][:steps]), atol=TOLERANCE, rtol=0, msg=name
        )


def assert_weights_close(folders: tuple[Path, Path], file: str, tolerance: float = TOLERANCE) -> None:
    found, expected = (load_file(folder / file) for folder in folders)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_is_what_the_config_says(launched, engine):
    """accelerate turns to other engines in silence where it finds no GPU."""
    found = results(launched(engine), "full")
    assert found["processes"] == 2
    assert found["engine"] == {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}[engine]
    layers = [f"model.language_model.layers.{i}" for i in range(2)]
    names = ["", "model.language_model.embed_tokens", *layers, "lm_head"]
    assert found["sharded"] == (names if engine == "fsdp2" else [])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_as_one_over_20_steps(launched, alone, engine):
    assert_losses_close(results(launched(engine), "full")["losses"], results(alone, "full")["losses"], 20)
    assert_weights_close((launched(engine), alone), "full/model/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_every_backbone_as_one(launched, alone, engine, name):
    """By `stts-hf train`, from the tiny checkpoint; one process has a video, the other has text."""
    found, expected = (results(folder, "backbones")[name] for folder in (launched(engine), alone))
    assert (found["processes"], expected["processes"]) == (2, 1)
    assert len(found["sharded"]) == (7 if engine == "fsdp2" else 0)  # all, embeddings, four layers, the head
    assert_losses_close(found["losses"], expected["losses"], 2)
    saved, reference = (
        load_file(f"{path}/backbones/{name}/output/model.safetensors") for path in (launched(engine), alone)
    )
    if engine == "fsdp2" and "lm_head.weight" not in reference:  # which gathers tied weights under both names
        (embeddings,) = (tensor for key, tensor in saved.items() if key.endswith("embed_tokens.weight"))
        assert torch.equal(saved.pop("lm_head.weight"), embeddings)
    assert saved.keys() == reference.keys()
    for key, tensor in saved.items():
        torch.testing.assert_close(tensor, reference[key], atol=TOLERANCE, rtol=0, msg=key)


@pytest.mark.slow
def test_two_processes_of_plain_trainer_have_the_gradients_of_one(launched, alone):
    """Two micro-batches of one row in each, beside one batch of four; one process has a row without a video."""
    found, expected = (results(folder, "plain_trainer") for folder in (launched("ddp"), alone))
    assert (found["processes"], expected["processes"]) == (2, 1)
    for rank in (0, 1):
        assert_weights_close_to(
            load_file(launched("ddp") / "plain_trainer" / f"gradients-{rank}.safetensors"),
            load_file(alone / "plain_trainer" / "gradients-0.safetensors"),
        )


def assert_weights_close_to(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert expected["model.vision_tower.scorer.score_layer.weight"].abs().max() > 0
    for name, tensor in found.items():  # sums of another order of rows, on gradients of order 1
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_the_compared_runs_learn(alone):
    losses = results(alone, "full")["losses"]["loss"]
    assert sum(losses[-2:]) < sum(losses[:2]) - 0.2  # two steps go once over the rows
    before, after = (m.state_dict() for m in (small_model(), load_tiny(alone / "full" / "model")))
    changes = {name: (after[name] - before[name]).abs().max().item() for name in before}
    moved = [name for name, change in changes.items() if change > 10 * TOLERANCE]
    assert len(moved) > 0.8 * len(changes)
    assert sum(".scorer." in name for name in moved) > 8


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_lora_with_the_scorer_in_full_trains_and_saves_as_with_one_process(launched, alone, engine):
    assert_losses_close(results(launched(engine), "lora")["losses"], results(alone, "lora")["losses"], 4)
    assert_weights_close((launched(engine), alone), "lora/adapter/adapter_model.safetensors")
    adapters = [path / "lora" / "adapter" for path in (launched(engine), alone)]
    assert len({frozenset(file.name for file in adapter.iterdir()) for adapter in adapters}) == 1


@pytest.mark.slow
def test_two_processes_learn_what_blocks_are_worth_as_one_does(launched, alone):
    found, expected = (results(folder, "scorer_only") for folder in (launched("ddp"), alone))
    assert_losses_close(found["losses"], expected["losses"], 4)
    assert max(expected["losses"]["worth_loss"]) > 0
    # Each wrote some of the answers, and both have them all.
    assert found["answers"] == results(launched("ddp"), "scorer_only", rank=1)["answers"] == expected["answers"]
    assert len(list((launched("ddp") / "scorer_only" / "answers").iterdir())) == 2


@pytest.mark.slow
def test_two_processes_learn_the_temporal_loss_alone_as_one_does(launched, alone):
    found, expected = (results(folder, "scorer_start") for folder in (launched("ddp"), alone))
    assert_losses_close(found["losses"], expected["losses"], 4)
    assert_weights_close((launched("ddp"), alone), "scorer_start/model/model.safetensors")


@pytest.mark.slow
def test_a_sharded_teacher_is_refused(launched):
    assert "FSDP or DeepSpeed would shard the model" in results(launched("fsdp2"), "refused")["sharded_teacher"]
    assert results(launched("ddp"), "refused")["sharded_teacher"] == "nothing was raised"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_sharded_run_saves_the_same_folder(launched, alone, engine):
    saved, reference = (path / "full" / "model" for path in (launched(engine), alone))
    names = {file.name for file in reference.iterdir()}
    assert {"README.md", "config.json", "modeling_stts.py", "model.safetensors", "processor_config.json"} <= names
    assert {file.name for file in saved.iterdir()} == names
    for name in names - {"model.safetensors", "training_args.bin"}:
        assert (saved / name).read_bytes() == (reference / name).read_bytes(), name


@pytest.mark.slow
def test_the_train_command_saves_and_merges_an_adapter_under_both_engines(launched):
    outputs = [launched(engine) / "command" / "output" for engine in ENGINES]
    assert_weights_close((outputs[0], outputs[1]), "adapter_model.safetensors")
    assert_weights_close((outputs[0], outputs[1]), "merged/model.safetensors")
    for part in (".", "merged"):
        names = [{file.name for file in (output / part).iterdir()} for output in outputs]
        assert names[0] == names[1]
        assert {"README.md", "modeling_stts.py", "processor_config.json"} <= names[0]
    merged, before = (load_tiny(folder).state_dict() for folder in (outputs[1] / "merged", TINY))
    changed = {name for name in before if (merged[name] - before[name]).abs().max() > TOLERANCE}
    assert any(".q_proj." in name for name in changed)
    assert any(".scorer." in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "scenario"), [("ddp", "resumed"), ("fsdp2", "resumed"), ("fsdp2", "resumed_from_shards")]
)
def test_resumed_runs_end_as_uninterrupted_ones(launched, engine, scenario):
    folder = launched(engine) / scenario
    found = results(launched(engine), scenario)
    assert len(found["losses"]["loss"]) == 6
    assert found["losses"] == found["whole"]
    assert_weights_close((folder / "half", folder / "whole"), "model.safetensors", tolerance=0)


@pytest.mark.slow
def test_losses_stay_float32_under_fsdp2_in_bf16(launched, alone):
    found = results(launched("fsdp2"), "bf16")
    assert set(found["dtypes"].values()) == {"torch.float32"}
    assert found["ranked"] == 4  # FSDP's casting of arguments lets the blocks out
    losses = zip(found["losses"]["loss"], results(alone, "full")["losses"]["loss"], strict=False)
    assert all(abs(loss - exact) < 0.02 for loss, exact in losses)  # bf16 has 8 bits; losses are about 7


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_would_hang_is_refused_in_every_process(launched, engine):
    for rank in (0, 1):
        found = results(launched(engine), "refused", rank)
        assert "1 of 2 processes have a video in their batch at step 1" in found["no_video"]
        assert "STTSDataCollator" in found["no_video"]
        assert "'dispatch_batches': False" in found["stream"]


def fake_trainer(processes: int, collator: Any) -> Any:
    accelerator = SimpleNamespace(state=SimpleNamespace())
    uncut = SimpleNamespace(split_batches=False, dispatch_batches=None)
    args = SimpleNamespace(world_size=processes, accelerator_config=uncut)
    collators = {"data_collator": collator, "eval_collator": None}
    return SimpleNamespace(args=args, accelerator=accelerator, model=None, train_dataset=None, **collators)


@pytest.mark.parametrize("processes", [1, 2])
def test_more_than_one_process_turns_on_always_video(processes):
    collator = STTSDataCollator(STTSProcessor.from_pretrained(TINY))
    prepare_for_processes(fake_trainer(processes, collator))
    assert collator.always_video is (processes > 1)


@pytest.mark.parametrize(
    ("engine", "always_video", "ratio", "kinds"),
    [
        ({"fsdp_plugin": object()}, True, 0.5, ()),
        ({"fsdp_plugin": object()}, False, 0.5, ("video",)),
        ({"fsdp_plugin": object()}, True, 1.0, ("image",)),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, True, 0.5, ("image",)),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, False, 0.5, ()),
        ({}, False, 0.5, ()),
    ],
    ids=["fsdp_with_video", "fsdp", "fsdp_text_only_control", "zero3", "zero2", "ddp_searching_unused_parameters"],
)
def test_what_batches_must_have_in_common(engine, always_video, ratio, kinds):
    trainer = fake_trainer(2, SimpleNamespace(always_video=always_video))
    vars(trainer.accelerator.state).update(engine)
    trainer.accelerator.ddp_handler = SimpleNamespace(find_unused_parameters=True)
    trainer.model = tiny_model(tiny_config(pruning_ratio=ratio))
    assert tuple(shared_inputs(trainer).values()) == kinds


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    options = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"} | options
    return FullyShardedDataParallelPlugin(**options)


LAYERS = {
    "molmo2": "Molmo2DecoderLayer",
    "qwen2_5_vl": "Qwen2_5_VLDecoderLayer",
    "qwen3_vl": "Qwen3VLTextDecoderLayer",
    "qwen3_vl_moe": "Qwen3VLMoeTextDecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer",
    "smolvlm": "LlamaDecoderLayer",
}
ALL = [*BACKBONES, *MIXTURES, *HYBRIDS, *HYBRID_MIXTURES]


@pytest.mark.parametrize("backbone", ALL, ids=lambda backbone: backbone.name)
def test_fsdp_shards_the_language_models_layers_where_none_are_named(backbone):
    chosen = plugin()
    wrap_language_model_alone(chosen, backbone.model())
    assert chosen.transformer_cls_names_to_wrap == [LAYERS[backbone.name]]


@pytest.mark.parametrize("engine", [*ENGINES, "deepspeed_zero3"])
def test_accelerate_reads_the_shipped_config(engine):
    """It refuses keys that it does not know."""
    config = load_config_from_file(f"{CONFIGS / engine}.yaml")
    assert config.distributed_type == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(engine, "DEEPSPEED")
    if engine == "fsdp2":
        assert "fsdp_transformer_layer_cls_to_wrap" not in config.fsdp_config  # the layers of any backbone are found


@pytest.mark.parametrize("backbone", ALL, ids=lambda backbone: backbone.name)
def test_fsdp_units_inside_the_vision_tower_are_refused(backbone):
    units = {
        "molmo2": "STTSAdapter",
        "qwen2_5_vl": "STTSQwen2_5_VLVisionBlock",
        "qwen3_vl": "Qwen3VLVisionPatchMerger",
        "qwen3_vl_moe": "STTSQwen3VLVisionBlock",
        "qwen3_5": "STTSQwen3VLVisionBlock",
        "qwen3_5_moe": "Qwen3VLVisionPatchMerger",
        "smolvlm": "STTSSmolVLMEncoderLayer",
    }
    names = [LAYERS[backbone.name], units[backbone.name]]
    with pytest.raises(ValueError, match=f"{names[0]} alone, not {', '.join(names)}: "):
        wrap_language_model_alone(plugin(transformer_cls_names_to_wrap=names), backbone.model())
    with pytest.raises(ValueError, match="not SIZE_BASED_WRAP"):
        wrap_language_model_alone(plugin(auto_wrap_policy=size_based_auto_wrap_policy), backbone.model())


@pytest.mark.slow
def test_nan_on_one_process_ends_all_and_names_its_row(launched):
    for rank in (0, 1):
        message = results(launched("ddp"), "not_finite", rank)["message"]
        assert "The loss of step 2 is not finite on process 1" in message
        assert "Rows of the batch: row-" in message
    last = last_checkpoint(launched("ddp") / "not_finite")
    assert last == str(launched("ddp") / "not_finite" / "checkpoint-1")
    assert all(tensor.isfinite().all() for tensor in load_file(f"{last}/model.safetensors").values())
