"""Original training checkpoints: read from either form, in native names, with the settings they were trained with."""

import copy
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, Molmo2VisionConfig

from stts_hf.checkpoints.original import (
    SPECIAL_TOKENS,
    convert_original_config,
    load_original_config,
)
from stts_hf.checkpoints.original_weights import open_original, open_sharded
from stts_hf.modeling.configuration_stts import STTSConfig
from tests.fixture_files import checkpoint_fixtures, checkpoint_forms, pooling_table, read_safetensors
from tests.stts_hf.checkpoints.original_weights import native_weights, read_original

FORMS = checkpoint_forms()
TOKEN_IDS = {token: 100 + index for index, token in enumerate(SPECIAL_TOKENS.values())}


@pytest.fixture(params=FORMS, ids=lambda path: f"{path.parent.name}-{path.name}")
def form(request) -> Path:
    return request.param


@pytest.fixture
def config() -> dict:
    """The model section of one reference config, free to be changed."""
    return copy.deepcopy(load_original_config(FORMS[0]))


def special_token_ids(metadata: dict[str, str]) -> dict[str, int]:
    return {key.removeprefix("id:"): int(value) for key, value in metadata.items() if key.startswith("id:")}


def stock_config(config: dict) -> Molmo2Config:
    """What stock Molmo2 has of the converted settings."""
    config = {name: value for name, value in config.items() if hasattr(Molmo2Config, name)}
    vision = Molmo2VisionConfig().to_dict()
    config["vision_config"] = {name: value for name, value in config["vision_config"].items() if name in vision}
    return Molmo2Config(**config)


def test_stock_molmo2_gives_the_authors_logits(form):
    expected, metadata = read_safetensors(form.parent / "expected.safetensors")
    config = convert_original_config(load_original_config(form), special_token_ids(metadata))
    weights = native_weights(read_original(form))
    weights = {name: weight for name, weight in weights.items() if ".scorer." not in name}
    model = Molmo2ForConditionalGeneration(stock_config(config)).eval()
    model.load_state_dict(weights, strict=True)

    vision = model.config.vision_config
    grid = tuple(side // vision.patch_size for side in vision.image_size)
    window = tuple(config["vision_config"]["pooling_size"])
    num_frames = len(expected["pixel_patches"])
    with torch.no_grad():
        logits = model(
            input_ids=expected["input_ids"][None],
            mm_token_type_ids=expected["mm_token_type_ids"][None],
            pixel_values_videos=expected["pixel_patches"],
            video_token_pooling=pooling_table(num_frames, grid, window),
            video_grids=torch.tensor([[num_frames, grid[0] // window[0], grid[1] // window[1]]]),
        ).logits[0]
    # Float32 rounding of logits around 1.
    torch.testing.assert_close(logits, expected["logits_dense"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", checkpoint_fixtures(), ids=lambda path: path.name)
def test_all_forms_hold_the_same_weights(folder):
    first, *others = (open_original(form) for form in FORMS if form.parent == folder)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(tensor.read(), first[name].read()) for name, tensor in other.items())


def test_pruning_settings_carry_over(form):
    original = load_original_config(form)
    vit = original["vision_backbone"]["vit"]
    config = STTSConfig(**convert_original_config(original, TOKEN_IDS))
    vision = config.vision_config
    assert (vision.pruning_ratio, vision.pruning_layer) == (vit["topk"], vit["prune_at"])
    assert (vision.selector, vision.score_rescaling) == ("scorer", "row")
    assert (vision.packing, vision.refill_single_frame_bins) == ("first_fit_descending", True)
    assert config.temporal_loss_weight == vit["sim_reg_loss_coefficient"]


def test_negative_feature_layers_count_from_the_untrimmed_tower(config):
    config["vision_backbone"]["vit"]["image_num_layers"] = 27
    config["vision_backbone"]["vit_layers"] = [-3, -9]
    converted = convert_original_config(config, TOKEN_IDS)
    assert converted["adapter_config"]["vision_feature_layer"] == [24, 18]
    assert converted["vision_config"]["num_hidden_layers"] == 25


def test_scaled_rope_of_some_layers(config):
    config["llm"] |= {"rope_type": "yarn", "rope_factor": 8.0, "rope_beta_fast": 32, "full_attention_layers": [1]}
    text = convert_original_config(config, TOKEN_IDS)["text_config"]
    theta = config["llm"]["rope_theta"]
    assert text["rope_parameters"] == {"rope_type": "yarn", "rope_theta": theta, "factor": 8.0, "beta_fast": 32}
    assert text["rope_scaling_layers"] == [1]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        pytest.param("llm", "block_type", "moe", id="mixture-of-experts"),
        pytest.param("vit", "prune_method", "heuristic", id="heuristic-selector"),
        pytest.param("vit", "prune_from_frame", 8, id="another-budget"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(config, section, key, value):
    (config["llm"] if section == "llm" else config["vision_backbone"]["vit"])[key] = value
    with pytest.raises(ValueError, match=key):
        convert_original_config(config, TOKEN_IDS)


def test_missing_setting_is_named(config):
    del config["llm"]["d_model"]
    with pytest.raises(ValueError, match="d_model"):
        convert_original_config(config, TOKEN_IDS)


@pytest.mark.parametrize("own_head", [True, False])
def test_a_head_of_its_own_is_not_the_embedding(tmp_path, own_head):
    weights = {"transformer.wte.embedding": torch.zeros(2, 2)}
    if own_head:
        weights |= {"transformer.ff_out.weight": torch.ones(2, 2)}
    for order in (list(weights), list(weights)[::-1]):
        torch.save({name: weights[name] for name in order}, tmp_path / "model.pt")
        assert bool(open_original(tmp_path)["lm_head.weight"].read().all()) == own_head


def read_weight(folder: Path) -> torch.Tensor:
    """The one tensor of a model that `write_sharded` wrote."""
    return open_sharded(folder)["weight"].read()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_an_unsharded_checkpoint_is_not_run(tmp_path):
    torch.save({"weight": Payload(tmp_path / "ran")}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="refused"):
        open_original(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_code_in_sharded_metadata_is_not_run(tmp_path):
    (tmp_path / "model_and_optim").mkdir()
    with (tmp_path / "model_and_optim" / ".metadata").open("wb") as file:
        pickle.dump(Metadata({"model.weight": Payload(tmp_path / "ran")}), file)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="mkdir"):
        open_original(tmp_path)
    assert not (tmp_path / "ran").exists()


class ByName:
    """Pickled as early releases of Python 3.11 do with members of enums, here of any owner."""

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_enums_of_early_python_3_11_are_read(tmp_path):
    write_sharded(tmp_path, {(0,): torch.ones(2)}, size=(2,))
    with (tmp_path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = ByName(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    with (tmp_path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    assert torch.equal(read_weight(tmp_path), torch.ones(2))


@pytest.mark.parametrize(("owner", "name"), [("text", "upper"), (OrderedDict, "fromkeys")], ids=["value", "class"])
def test_attributes_of_anything_else_are_refused(tmp_path, owner, name):
    (tmp_path / "model_and_optim").mkdir()
    with (tmp_path / "model_and_optim" / ".metadata").open("wb") as file:
        pickle.dump(Metadata({"model.weight": ByName(owner, name)}), file)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="which no checkpoint metadata needs"):
        open_original(tmp_path)


def test_code_in_a_shard_is_not_run(tmp_path):
    write_sharded(tmp_path, {(0,): Payload(tmp_path / "ran")}, size=(2,))
    with pytest.raises(ValueError, match="plain tensor"):
        read_weight(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_chunks_of_several_files_are_joined(tmp_path):
    whole = torch.arange(15.0).reshape(5, 3)
    write_sharded(tmp_path, {(0, 0): whole[:2], (2, 0): whole[2:]}, size=(5, 3))
    assert torch.equal(read_weight(tmp_path), whole)


def test_missing_chunk_is_noticed(tmp_path):
    write_sharded(tmp_path, {(0, 0): torch.ones(2, 3)}, size=(5, 3))
    with pytest.raises(ValueError, match="but not all of"):
        read_weight(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda path: path.unlink(), "is missing", id="file-gone"),
        pytest.param(lambda path: os.truncate(path, 100), "ends before", id="file-cut-off"),
    ],
)
def test_damaged_shard_is_named(tmp_path, damage, message):
    write_sharded(tmp_path, {(0,): torch.ones(2)}, size=(2,))
    damage(tmp_path / "__0_0.distcp")
    with pytest.raises(ValueError, match=message):
        read_weight(tmp_path)


def test_cut_off_metadata_is_refused(tmp_path):
    shutil.copytree(next(form for form in FORMS if form.name == "sharded"), tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "model_and_optim" / ".metadata", 1000)
    with pytest.raises(ValueError, match="refused"):
        open_original(tmp_path)


def test_shard_outside_the_folder_is_refused(tmp_path):
    write_sharded(tmp_path / "inside", {(0,): torch.ones(2)}, size=(2,), file_prefix="../")
    with pytest.raises(ValueError, match="outside"):
        read_weight(tmp_path / "inside")


def write_sharded(folder: Path, chunks: dict[tuple, Any], size: tuple, file_prefix: str = "") -> None:
    """A checkpoint as torch writes it: `model.weight` with one chunk a file at the given offsets, and an optimizer."""
    folder.mkdir(exist_ok=True)
    storage = {}
    for index, (offsets, chunk) in enumerate(chunks.items()):
        path = folder / f"{file_prefix}__{index}_0.distcp"
        torch.save(chunk.clone() if isinstance(chunk, torch.Tensor) else chunk, path)
        info = _StorageInfo(f"{file_prefix}{path.name}", 0, path.stat().st_size)
        storage[MetadataIndex("model.weight", offsets, index)] = info
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(size)) for offsets in chunks],
    )
    entries: dict[str, Any] = {
        "model.weight": tensor,
        "optim.state.weight": tensor,
        "optim.step": BytesStorageMetadata(),
    }
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(entries, storage_data=storage), file)
