"""`stts-hf train`: from a configuration file to a folder that loads, how a run is resumed, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer

from stts_hf import STTSConfig
from stts_hf.cli.main import main
from stts_hf.training.build import load_model
from stts_hf.training.build import prepare as prepare_run
from stts_hf.training.checkpointing import last_checkpoint
from stts_hf.training.config import check_unchanged, load_config
from stts_hf.training.termination import Termination
from tests.checkpoints import BLOCKS, TINY, load_tiny, logits_of, prepare, weights_of
from tests.training_files import row, train, write_config, write_rows

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def whole(data, undecided, tmp_path_factory) -> SimpleNamespace:
    """A run of one step with pruning settings, evaluation and a card of its own."""
    folder = tmp_path_factory.mktemp("whole")
    more = (
        "pruning_ratio: 0.3\ntemporal_loss_weight: 0.5\nfreeze: [vision_tower]\n"
        "card_base_model: allenai/Molmo2-4B\ncard_datasets: [someone/clips]\ncard_text: Trained on moving numbers.\n"
        f"eval_data: {data}\n"
    )
    output = folder / "out"
    config = write_config(folder, data, output, model=undecided, more=more)
    assert train(config, "--save_steps=1") == 0
    return SimpleNamespace(config=config, output=output)


def logs(output: Path) -> list[dict]:
    return json.loads((output / "trainer_state.json").read_text())["log_history"]


def test_the_folder_is_a_checkpoint_with_the_settings_of_the_file(whole, data, undecided):
    assert main(["doctor", str(whole.output)]) == 0
    assert torch.isfinite(logits_of(load_tiny(whole.output), prepare(data.parent / "clip_0.mp4", whole.output))).all()
    config = STTSConfig.from_pretrained(whole.output)
    assert (config.vision_config.pruning_ratio, config.temporal_loss_weight) == (0.3, 0.5)
    processor = json.loads((whole.output / "processor_config.json").read_text())["video_processor"]
    assert (processor["num_frames"], processor["pruning_ratio"]) == (2, 0.3)
    kept = yaml.safe_load((whole.output / "train_config.yaml").read_text())
    assert (kept["pruning_ratio"], kept["temporal_loss_weight"], kept["save_steps"]) == (0.3, 0.5, 1)
    card = ModelCard.load(whole.output / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("allenai/Molmo2-4B", ["someone/clips"])
    assert card.data.pipeline_tag == "video-text-to-text"
    for words in ("Trained on moving numbers.", "- steps: 1 of 2 rows", "- train: 3 samples", "| eval_loss |"):
        assert words in card.text
    assert re.search(r"^- scorer: .* trained at 0.001$", card.text, re.MULTILINE)
    assert str(undecided) not in card.text


def test_losses_are_logged(whole):
    first = next(entry for entry in logs(whole.output) if "temporal_loss" in entry)
    assert first["loss"] == pytest.approx(first["task_loss"] + 0.5 * first["temporal_loss"], rel=1e-4)
    assert first["kept_share"] == pytest.approx(1 - int(0.3 * 2 * BLOCKS) / (2 * BLOCKS))  # of 2 frames
    assert any("eval_loss" in entry for entry in logs(whole.output))
    assert list((whole.output / "runs").rglob("events.out.tfevents.*"))


def test_earlier_run_is_not_mixed_with_a_new_one(whole, capsys):
    assert train(whole.config) == 2
    assert "holds checkpoint-1 of an earlier run. Pass --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_goes_on_where_the_run_stopped(whole, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(whole.output, output)
    overrides = [f"--output_dir={output}", "--max_steps=2"]
    assert train(whole.config, "--resume", *overrides, "--eval_data=null") == 0
    assert [entry["step"] for entry in logs(output) if "loss" in entry] == [1, 2]
    before, after = weights_of(whole.output), weights_of(output)
    assert any(not torch.equal(before[name], after[name]) for name in before)


CHANGED = {
    "--learning_rates={scorer: 7e-3}": "'scorer': 0.007} and was ",
    "--pack_to=300": "`pack_to` is 300 and was None",
}


@pytest.mark.parametrize(("assignment", "message"), CHANGED.items(), ids=CHANGED)
def test_resume_with_other_settings_is_refused_by_key(assignment, message, whole, capsys):
    kept = (whole.output / "train_config.yaml").read_text()
    assert train(whole.config, "--resume", assignment) == 2
    assert message in capsys.readouterr().err
    assert (whole.output / "train_config.yaml").read_text() == kept


def test_what_a_resumed_run_may_change(whole):
    overrides = ["--save_steps=5", "--max_steps=9", "--eval_strategy=no", "--eval_data=null"]
    overrides += ["--card_name=Ours", "--torch_compile", "--learning_rates={scorer: 1e-3, language_model: 1e-5}"]
    overrides += ["--pruning_ratio=0.30"]
    check_unchanged(load_config(whole.config, overrides), whole.output / "train_config.yaml")


@pytest.fixture
def uploads(monkeypatch) -> list[dict[str, str]]:
    """Every upload as file to text, what is no text left out; the Hub is not asked."""
    found: list[dict[str, str]] = []

    def upload(api, *, folder_path, allow_patterns, **where):
        assert where["repo_id"] == "someone/ours"
        files = [file for file in Path(folder_path).rglob("*") if file.is_file()]
        names = list(
            filter_repo_objects([str(file.relative_to(folder_path)) for file in files], allow_patterns=allow_patterns)
        )
        found.append({name: (Path(folder_path) / name).read_text(errors="replace") for name in names})

    monkeypatch.setattr(HfApi, "upload_folder", upload)

    def name(trainer) -> None:
        trainer.hub_model_id, trainer.push_in_progress = "someone/ours", None

    monkeypatch.setattr(Trainer, "init_hf_repo", name)
    return found


def test_a_terminated_run_exits_with_143(data, tmp_path, capsys, monkeypatch):
    def told(self, args, state, control, **kwargs) -> None:
        self.requested = True

    monkeypatch.setattr(Termination, "on_step_begin", told)
    assert train(write_config(tmp_path, data, tmp_path / "out")) == 143
    assert last_checkpoint(tmp_path / "out") is not None
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_cards_of_an_adapter_and_its_merged_model_are_pushed_as_the_file_has_them(data, tmp_path, uploads):
    more = (
        "card_name: Ours\ncard_base_model: someone/base\ncard_license: cc0-1.0\ncard_text: Our words.\n"
        "card_datasets: [someone/clips]\nuse_peft: true\nlora_r: 4\nmerge_adapter: true\n"
    )
    config = write_config(tmp_path, data, tmp_path / "out", more=more)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "id_rsa").write_text("mine")
    assert train(config, "--push_to_hub=true") == 0
    [pushed] = uploads
    for name in ("README.md", "merged/README.md"):
        card: Any = ModelCard(pushed[name])
        assert (card.data.base_model, card.data.license) == ("someone/base", "cc0-1.0")
        assert card.data.datasets == ["someone/clips"]
        assert "# Ours" in card.text
        assert "Our words." in card.text
        assert pushed[name] == (tmp_path / "out" / name).read_text()
    assert "PeftModel.from_pretrained(model, adapter)" in pushed["README.md"]
    assert {"adapter_config.json", "train_config.yaml"} <= pushed.keys()
    assert not {"id_rsa", "training_args.bin", "trainer_state.json"} & pushed.keys()
    assert not [name for name in pushed if name.startswith("checkpoint-")]


def test_the_same_seed_draws_the_same_weights(data, tmp_path):
    pytest.importorskip("peft")
    run = prepare_run(load_config(write_config(tmp_path, data, tmp_path / "out", more="use_peft: true\nlora_r: 4\n")))
    found = []
    for before in (1, 2):
        torch.manual_seed(before)
        found.append({name: tensor for name, tensor in load_model(run).state_dict().items() if "lora_A" in name})
    assert found[0]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.slow
def test_rows_are_packed_and_bad_ones_skipped(data, tmp_path, capsys):
    rows = write_rows(data.parent, [row(0), row(1), row(2), row(3, videos=["gone.mp4"])], f"{tmp_path.name}.jsonl")
    config = write_config(tmp_path, rows, tmp_path / "out")
    packing = ["--pack_to=500", "--on_error=skip", "--pad_to=500"]
    assert train(config, *packing) == 0
    printed = capsys.readouterr().out
    assert "3 samples in 1 rows of up to 500 tokens" in printed
    assert "1 rows of train (on_error: skip)" in printed
    entry = next(entry for entry in logs(tmp_path / "out") if "loss" in entry)
    assert entry["kept_share"] == pytest.approx(0.5, abs=0.01)


def test_video_that_cannot_be_decoded_ends_the_run_by_its_id(data, tmp_path, capsys):
    (data.parent / "damaged.mp4").write_bytes(b"no video" * 50)
    rows = write_rows(data.parent, [row(0), row(1, videos=["damaged.mp4"])], f"{tmp_path.name}.jsonl")
    config = write_config(tmp_path, rows, tmp_path / "out")
    assert train(config, "--dataloader_num_workers=1") == 2
    error = capsys.readouterr().err
    assert "Row 'row-1': " in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_adapter_is_saved_reloaded_and_merged(data, tmp_path):
    peft = pytest.importorskip("peft")
    more = (
        "use_peft: true\nuse_dora: true\nlora_r: 4\nlora_alpha: 8\nmerge_adapter: true\n"
        "pruning_ratio: 0.25\ncard_base_model: someone/base\n"
    )
    config = write_config(tmp_path, data, tmp_path / "out", more=more)
    rates = ["--learning_rates={adapter: 1e-2, scorer: 1e-2}"]
    assert train(config, *rates) == 0
    output = tmp_path / "out"
    assert not (output / "model.safetensors").exists()
    inputs = prepare(data.parent / "clip_0.mp4", output / "merged")
    base = load_tiny()
    plain = logits_of(base, inputs)
    adapted = peft.PeftModel.from_pretrained(base, output).eval()
    weights = {name: parameter for name, parameter in adapted.named_parameters() if "original_module" not in name}
    assert any("lora_magnitude_vector" in name for name in weights)
    assert any(".scorer.modules_to_save." in name for name in weights)
    changed = logits_of(adapted, inputs)
    assert (changed - plain).abs().max() > 1e-2
    # W x + s B (A x) against (W + s B A) x: float32 rounding of another order, on logits of order 1 to 10.
    torch.testing.assert_close(logits_of(load_tiny(output / "merged"), inputs), changed, rtol=0, atol=1e-4)
    assert STTSConfig.from_pretrained(output / "merged").vision_config.pruning_ratio == 0.25
    card = ModelCard.load(output / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "video-text-to-text")
    assert (card.data.base_model, "dora" in card.data.tags) == ("someone/base", True)
    assert "model.config.vision_config.pruning_ratio = 0.25" in card.text
    assert "PeftModel.from_pretrained(model, adapter)" in card.text


@pytest.mark.slow
def test_what_is_trained_beside_a_model_in_half_precision_is_float32(data, undecided, tmp_path, capsys):
    more = "use_peft: true\nlora_r: 4\nmerge_adapter: true\n"
    config = write_config(tmp_path, data, tmp_path / "out", model=undecided, more=more)
    assert train(config, "--dtype=bfloat16") == 2
    assert "`bf16: true` (or `fp16`) is needed" in capsys.readouterr().err
    assert train(config, "--dtype=bfloat16", "--bf16") == 0
    adapter = weights_of(tmp_path / "out")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    scorer = [tensor for name, tensor in adapter.items() if "scorer" in name]
    assert len(scorer) == 14
    # A step of 1e-3 away from bfloat16's grid, where a bfloat16 weight would stay on it.
    assert all(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in scorer)
    assert {tensor.dtype for tensor in weights_of(tmp_path / "out" / "merged").values()} == {torch.bfloat16}


def test_dry_run_shows_the_plan_and_writes_nothing(data, tmp_path, capsys):
    """Options of the command may stand anywhere; a configuration for GPUs needs none here."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = write_config(tmp_path, data, tmp_path / "out", model=folder, more="freeze: [vision_tower]\n")
    assert main(["train", "--dry-run", str(config), "--pack_to=120", "--use_cpu=false", "--bf16=true"]) == 0
    plan = {line.split(":")[0]: line.partition(":")[2].strip() for line in capsys.readouterr().out.splitlines()}
    assert plan["scorer"].endswith("parameters, trained at 0.001")
    assert plan["vision_tower"].endswith("frozen")
    assert plan["train"].startswith("3 samples in 2 rows of up to 120 tokens after pruning (1.50 a row")
    assert plan["steps"] == "1 of 2 rows (2 a process x 1 x 1 accumulated), 1 epochs"
    adapter = ["--use_peft", "--lora_target_modules=q_proj", "--learning_rates={adapter: 2e-4}", "--resume"]
    assert train(config, *adapter, "--dry-run", "--freeze=null") == 0
    assert re.search(r"^adapter: .* trained at 0.0002$", capsys.readouterr().out, re.MULTILINE)
    assert not (tmp_path / "out").exists()
    assert main(["train", "--resume", str(config)]) == 2
    assert "CONFIG is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["train", str(config), "--help"])
    assert exit.value.code == 0
    assert "--lora_r" in capsys.readouterr().out


REFUSED = {
    "--use_peft --lora_modules_to_save=skorer": "`lora_modules_to_save` names 'skorer'",
    "--freeze language_model vision_tower connector scorer": "which leaves nothing to train",
    "--train_data=nowhere.jsonl": "`train_data` cannot be loaded: There is no data file",
    "--model_name_or_path=/nowhere/model": "`model_name_or_path` '/nowhere/model'",
    "--per_device_train_batch_size=4 --dataloader_drop_last=true": "`dataloader_drop_last` leaves nothing of 3 rows",
    "--output_dir=/dev/null/out": "'/dev/null/out' cannot be written",
    "--push_to_hub=true": "`push_to_hub` cannot be done: the Hub is switched off",
}


@pytest.mark.parametrize(("words", "message"), REFUSED.items(), ids=REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(words, message, data, tmp_path, capsys):
    assert train(write_config(tmp_path, data, tmp_path / "out"), *words.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "train_config.yaml").exists()
