"""`hub_configs/stts-qwen*-tiny`: complete, small, usable without the package, and what their script makes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from stts_hf.checkpoints.doctor import needed_modules
from tests.make_qwen_vl_tiny import FAMILIES, build_config, build_processor


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(hub_configs, family):
    return hub_configs / f"stts-{family.replace('_', '-')}-tiny"


# Frames, since native processors read files with torchcodec alone.
ANSWER = """
import json
import torch, transformers
folder = sys.argv[1]
processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
content = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
frames = torch.randint(0, 256, (6, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
metadata = [{"fps": 2.0, "frames_indices": list(range(6)), "total_num_frames": 6}]
inputs = processor(
    text=[prompt], videos=[frames], video_metadata=metadata, do_sample_frames=False, return_tensors="pt"
)
answers = {}
for name in ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True).eval()
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False, pruning_ratio=0.5)
    answers[name] = [type(model).__name__, output[0].tolist()]
kept = model(**inputs, pruning_ratio=0.5).keep_mask[0]
grid = inputs["video_grid_thw"].tolist()
print(json.dumps({"prompt": inputs["input_ids"][0].tolist(), "answers": answers, "kept": kept.tolist(), "grid": grid}))
if len(sys.argv) > 2:
    model.save_pretrained(sys.argv[2])
    processor.save_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)], indirect=True)
def test_it_answers_through_every_auto_class_without_the_package_and_so_does_what_it_saves(
    folder, family, run_without_package, tmp_path
):
    saved = tmp_path / "saved"

    first = run_without_package(ANSWER, str(folder), str(saved)).splitlines()[-1]
    printed = json.loads(first)
    prompt, answers = printed["prompt"], printed["answers"]
    assert {name for name, _ in answers.values()} == {FAMILIES[family].model.__name__}
    sequences = [tokens for _, tokens in answers.values()]
    assert sequences[0] == sequences[1] == sequences[2]
    assert sequences[0][: len(prompt)] == prompt
    # Six frames, which are three tubelets; the first keeps all of its blocks.
    kept, (grid,) = printed["kept"], printed["grid"]
    blocks = grid[1] * grid[2] // 4
    assert (len(kept), len(kept[0])) == (grid[0], blocks) == (3, blocks)
    assert all(kept[0])
    assert sum(map(sum, kept)) == 3 * blocks - 3 * blocks // 2
    assert {file.name for file in saved.glob("*.py")} == {file.name for file in folder.glob("*.py")}
    assert not any(file.is_symlink() for file in saved.iterdir())
    assert run_without_package(ANSWER, str(saved)).splitlines()[-1] == first


def test_code_is_linked_relatively_and_is_all_that_its_auto_map_leads_to(folder):
    assert all(file.is_symlink() and not file.readlink().is_absolute() for file in folder.glob("*.py"))
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {file.stem for file in folder.glob("*.py")} == needed_modules(folder, auto_map).keys()


def test_it_is_small(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5 * 2**20


def settings(config: dict) -> dict:
    """Without what saving and loading add."""
    added = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version")
    return {n: settings(v) if isinstance(v, dict) else v for n, v in config.items() if n not in added}


def test_settings_and_tokenizer_are_what_the_script_makes(folder, family):
    processor = build_processor((folder / "chat_template.jinja").read_text(), family)
    loaded = AutoProcessor.from_pretrained(folder)
    assert loaded.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert loaded.video_processor.to_dict() == processor.video_processor.to_dict()
    made = build_config(processor.tokenizer, family).to_dict()
    config = FAMILIES[family].model.from_pretrained(folder).config.to_dict()
    assert settings(config) == settings(made)


def test_weights_are_all_there_and_none_is_zero(folder, family):
    weights = load_file(folder / "model.safetensors")
    model, info = FAMILIES[family].model.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(weights) == len(model.state_dict()) - 1  # tied
    matrices = {name: weight for name, weight in weights.items() if weight.dim() > 1}
    assert all(torch.isfinite(weight).all() and weight.any() for weight in matrices.values())
