"""Bad sources: one clear error each, before anything is written."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file

from stts_hf.checkpoints.convert import convert_checkpoint
from stts_hf.checkpoints.doctor import examine
from tests.fixture_files import checkpoint_fixtures
from tests.stts_hf.checkpoints.convert_files import copy, write_base, write_molmo2, write_qwen3_vl

UNSHARDED = checkpoint_fixtures()[0] / "unsharded"
SHARDED = checkpoint_fixtures()[0] / "sharded"
SCORER = "model.vision_backbone.image_vit.scorer"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    write_molmo2(folder / "one_file", "original")
    write_molmo2(folder / "shards", "shards")
    write_base(folder / "base")
    write_qwen3_vl(folder / "qwen3_vl", "qwen3_vl_released")
    convert_checkpoint(folder / "one_file", folder / "stts")
    return folder


def refuse(source: Path, message: str, **options) -> None:
    """Converting must fail with `message` and leave nothing beside the source."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, source.parent / "destination", **options)
    assert sorted(os.listdir(source.parent)) == before


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_file_with_bytes_behind_its_end(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    with (source / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refuse(source, "too long")


def test_shards_of_another_checkpoint(folders, tmp_path):
    source = copy(folders / "shards", tmp_path / "source")
    first, second = sorted(source.glob("model-*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())
    refuse(source, "is of another checkpoint")


def test_a_chat_template_that_would_be_written_outside_the_folder(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "deep" / "er" / "source")
    template = (source / "chat_template.jinja").read_text()
    (source / "chat_template.jinja").unlink()
    templates = {"default": template, "../../escaped": template}
    edit_json(source / "processor_config.json", lambda settings: settings.update(chat_template=templates))
    refuse(source, "Invalid chat template name")
    assert not list(tmp_path.rglob("*escaped*"))


def test_an_unexpected_tensor_is_named(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    edit_weights(source, lambda weights: weights.update(router=torch.zeros(2)))
    refuse(source, "1 tensors are unexpected: router")


def test_half_of_an_embedding(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    edit_weights(source, lambda weights: weights.pop("model.transformer.wte.new_embedding"))
    refuse(source, r"embed_tokens\.weight \[320, 48\] instead of \[640, 48\]")


def test_fused_weights_of_another_shape(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    name = "model.transformer.blocks.0.self_attn.att_proj.weight"
    edit_weights(source, lambda weights: weights.update({name: weights[name][:-1].contiguous()}))
    refuse(source, "the weights are not those of the configuration")


def test_quantised_weights_are_not_made_another_dtype(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    edit_weights(source, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(torch.int8)}))
    refuse(source, "quantised", dtype="bfloat16")


def test_a_pickle_is_never_opened(folders, tmp_path):
    source = copy(folders / "one_file", tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    refuse(source, r"pytorch_model\.bin is a pickle")
    assert not (tmp_path / "ran").exists()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_a_truncated_training_checkpoint(folders, tmp_path, size):
    source = copy(UNSHARDED, tmp_path / "source")
    os.truncate(source / "model.pt", size)
    refuse(source, r"model\.pt was refused", base=folders / "base")


def test_a_training_checkpoint_needs_a_base(tmp_path):
    refuse(copy(UNSHARDED, tmp_path / "source"), "--base")


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl_moe", "llama"])
def test_the_config_of_another_model(folders, tmp_path, kind):
    source = copy(folders / "one_file", tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(model_type=kind))
    refuse(source, f"'{kind}' model, but must be of one of 'molmo2', 'qwen3_vl', 'qwen2_5_vl', 'stts', 'stts_qwen3_vl'")


@pytest.mark.parametrize(
    ("source", "base", "of_base", "needed"),
    [
        ("qwen3_vl", "one_file", "Molmo2Processor", "Qwen3VLProcessor"),
        ("one_file", "qwen3_vl", "Qwen3VLProcessor", "STTSProcessor"),
    ],
    ids=["molmo2s", "qwens"],
)
def test_the_processor_of_another_family(folders, tmp_path, source, base, of_base, needed):
    refuse(copy(folders / source, tmp_path / "source"), f"is '{of_base}'.*processor is a {needed}", base=folders / base)


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("video_preprocessor", "merge_size", "`merge_size` of the video_processor is 3, but the vision config has 2"),
        ("video_preprocessor", "temporal_patch_size", "`temporal_patch_size` of the video_processor is 3"),
        ("preprocessor", "patch_size", "`patch_size` of the image_processor is 3, but the vision config has 8"),
    ],
)
def test_a_processor_of_other_patches(folders, tmp_path, name, key, message):
    source = copy(folders / "qwen3_vl", tmp_path / "source")
    edit_json(source / f"{name}_config.json", lambda settings: settings.update({key: 3}))
    refuse(source, message)


def test_a_token_of_another_id(folders, tmp_path):
    source = copy(folders / "qwen3_vl", tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(video_token_id=7))
    refuse(source, r"<\|video_pad\|> is 1027 in the tokenizer but 7 in the config's `video_token_id`")


def test_a_tied_head_that_is_none(folders, tmp_path):
    source = copy(folders / "qwen3_vl", tmp_path / "source")
    edit_weights(source, lambda weights: weights["lm_head.weight"][-1].neg_())
    refuse(source, "`tie_word_embeddings` is True, but lm_head.weight is another tensor than model.language_model.emb")


BAD_TRAINING_SETTINGS = {
    "section": (("llm",), 3, "config.yaml cannot be used"),
    "theta": (("llm", "rope_theta"), None, "cannot be built"),
    "layers": (("vision_backbone", "vit_layers"), 3, "config.yaml cannot be used"),
    "layer_out_of_range": (("vision_backbone", "vit_layers"), [9], r"\[9\], but must be a list of the 9 layers"),
    "frames": (("mm_preprocessor", "video", "max_frames"), "x", "config.yaml cannot be used .*got 'x'"),
}


@pytest.mark.parametrize("name", BAD_TRAINING_SETTINGS)
def test_a_training_setting_of_a_wrong_kind_is_named(folders, tmp_path, name):
    path, value, message = BAD_TRAINING_SETTINGS[name]
    source = copy(UNSHARDED, tmp_path / "source")
    config = yaml.safe_load((source / "config.yaml").read_text())
    settings = config["model"]
    for key in path[:-1]:
        settings = settings[key]
    settings[path[-1]] = value
    (source / "config.yaml").write_text(yaml.safe_dump(config))
    refuse(source, message, base=folders / "base")


@pytest.mark.parametrize("weights", [{1: torch.zeros(2)}, {"model": {}}, [1]], ids=["numbers", "nested", "list"])
def test_a_training_checkpoint_of_something_else(folders, tmp_path, weights):
    source = copy(UNSHARDED, tmp_path / "source")
    torch.save(weights, source / "model.pt")
    refuse(source, "must hold a dict of names and tensors", base=folders / "base")


def test_a_tokenizer_with_other_ids(folders, tmp_path):
    tokens = ("<im_end>", "<im_start>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>")
    base = write_base(tmp_path / "base", side=18, tokens=(*tokens, "<frame_start>", "<frame_end>", "<|video|>"))
    refuse(copy(folders / "one_file", tmp_path / "source"), "<im_start> is 513 in the tokenizer but 512", base=base)


def test_a_tokenizer_of_another_size(folders, tmp_path):
    base = write_base(tmp_path / "base", vocab_size=700)
    refuse(copy(UNSHARDED, tmp_path / "source"), r"ids up to 709, but the model embeds 640", base=base)


def test_a_tokenizer_without_the_special_tokens(folders, tmp_path):
    base = write_base(tmp_path / "base", side=18)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<frame_end>"]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse(copy(folders / "one_file", tmp_path / "source"), "<frame_end>", base=base)


def test_a_processor_of_another_image_size(folders, tmp_path):
    base = write_base(tmp_path / "base", side=28)
    refuse(copy(folders / "one_file", tmp_path / "source"), r"`size` of the image_processor is .*28.*28", base=base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pruning_ratio": 1.5}, "pruning_ratio"),
        ({"selector": "magic"}, "selector"),
        ({"packing": "tight"}, "packing"),
        ({"dtype": "int4"}, "dtype"),
    ],
    ids=["ratio", "selector", "packing", "dtype"],
)
def test_settings_out_of_range(folders, tmp_path, options, message):
    refuse(copy(folders / "one_file", tmp_path / "source"), message, **options)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    (tmp_path / "source").mkdir()
    refuse(tmp_path / "source", "no checkpoint")


def test_a_repository_that_cannot_be_downloaded(tmp_path):
    with pytest.raises(ValueError, match="could not be downloaded"):
        convert_checkpoint("nobody/nothing", tmp_path / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("dtype", "number", "wider"), [("float16", 7e4, "bfloat16"), ("bfloat16", 3.4e38, "float32")])
def test_a_dtype_that_cannot_hold_the_weights(folders, tmp_path, dtype, number, wider):
    source = copy(folders / "one_file", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"][0, 0] = number
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"`lm_head.weight` holds numbers beyond.*--dtype {wider}"):
        convert_checkpoint(source, tmp_path / "new", dtype=dtype)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shard_size": "banana"}, "`max_shard_size` is 'banana'.*such as 5GB"),
        ({"seed": 2**64}, "`seed` is 18446744073709551616"),
        ({"seed": -1}, "`seed` is -1"),
        ({"revision": "main"}, "`revision` is 'main'.*is a folder.*leave --revision out"),
    ],
    ids=["shard-banana", "seed-huge", "seed-negative", "revision-of-a-folder"],
)
def test_options_that_cannot_be(folders, tmp_path, options, message):
    source = copy(folders / "one_file", tmp_path / "source")
    refuse(source, message, **options)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("text_config", "num_hidden_layers", 100_000_000),
        ("vision_config", "num_hidden_layers", 100_000_000),
        ("text_config", "vocab_size", 10**15),
        ("text_config", "intermediate_size", 10**15),
    ],
)
def test_sizes_far_beyond_the_weights_are_refused_before_such_a_model_is_built(folders, tmp_path, section, name, value):
    source = copy(folders / "stts", tmp_path / "source")
    edit_json(source / "config.json", lambda config: config[section].update({name: value}))
    refuse(source, rf"`{section}\.{name}` is {value}, which is far more than the weights have")
    [finding] = [finding for finding in examine(source)["weights"] if name in finding.what]
    assert finding.fatal
