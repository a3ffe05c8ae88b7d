"""Bad sources: one clear error each, before anything is written."""

import os
import pickle
from pathlib import Path
from shutil import copytree

import pytest
import yaml  # type: ignore[import-untyped]

from stts_hf.checkpoints.convert import convert_checkpoint
from tests.fixture_files import checkpoint_fixtures
from tests.stts_hf.checkpoints.convert_files import write_base, write_molmo2, write_qwen3_vl
from tests.stts_hf.checkpoints.test_broken_folders import edit_weights
from tests.stts_hf.checkpoints.test_convert_original import Payload
from tests.stts_hf.checkpoints.test_doctor import edit

UNSHARDED = checkpoint_fixtures()[0] / "unsharded"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    write_molmo2(folder / "one_file", "original")
    write_molmo2(folder / "shards", "shards")
    write_base(folder / "base")
    write_qwen3_vl(folder / "qwen3_vl", "qwen3_vl_released")
    return folder


def refuse(source: Path, message: str, **options) -> None:
    """Converting must fail with `message` and leave nothing beside the source."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, source.parent / "destination", **options)
    assert sorted(os.listdir(source.parent)) == before


def test_shards_of_another_checkpoint(folders, tmp_path):
    source = copytree(folders / "shards", tmp_path / "source")
    first, second = sorted(source.glob("model-*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())
    refuse(source, "and a file beside it both hold")


def test_a_chat_template_that_would_be_written_outside_the_folder(folders, tmp_path):
    source = copytree(folders / "one_file", tmp_path / "deep" / "er" / "source")
    template = (source / "chat_template.jinja").read_text()
    (source / "chat_template.jinja").unlink()
    templates = {"default": template, "../../escaped": template}
    edit("processor_config.json", lambda settings: settings.update(chat_template=templates))(source)
    refuse(source, "Invalid chat template name")
    assert not list(tmp_path.rglob("*escaped*"))


def test_a_pickle_is_never_opened(folders, tmp_path):
    source = copytree(folders / "one_file", tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    refuse(source, r"pytorch_model\.bin is a pickle")
    assert not (tmp_path / "ran").exists()


def test_the_processor_of_another_family(folders, tmp_path):
    source = copytree(folders / "qwen3_vl", tmp_path / "source")
    refuse(source, "is 'Molmo2Processor'.*processor is a Qwen3VLProcessor", base=folders / "one_file")


def test_a_tied_head_that_is_none(folders, tmp_path):
    source = copytree(folders / "qwen3_vl", tmp_path / "source")
    edit_weights(lambda weights: weights["lm_head.weight"][-1].neg_())(source)
    refuse(source, "`tie_word_embeddings` is True, but lm_head.weight is another tensor than model.language_model.emb")


BAD_TRAINING_SETTINGS = {
    "section": (("llm",), 3, "config.yaml cannot be used"),
    "layer_out_of_range": (("vision_backbone", "vit_layers"), [9], r"\[9\], but must be a list of the 9 layers"),
    "frames": (("mm_preprocessor", "video", "max_frames"), "x", "config.yaml cannot be used .*got 'x'"),
}


@pytest.mark.parametrize("name", BAD_TRAINING_SETTINGS)
def test_a_training_setting_of_a_wrong_kind_is_named(folders, tmp_path, name):
    path, value, message = BAD_TRAINING_SETTINGS[name]
    source = copytree(UNSHARDED, tmp_path / "source")
    config = yaml.safe_load((source / "config.yaml").read_text())
    settings = config["model"]
    for key in path[:-1]:
        settings = settings[key]
    settings[path[-1]] = value
    (source / "config.yaml").write_text(yaml.safe_dump(config))
    refuse(source, message, base=folders / "base")


def test_a_tokenizer_with_other_ids(folders, tmp_path):
    tokens = ("<im_end>", "<im_start>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>")
    base = write_base(tmp_path / "base", side=18, tokens=(*tokens, "<frame_start>", "<frame_end>", "<|video|>"))
    refuse(copytree(folders / "one_file", tmp_path / "source"), "<im_start> is 513 in the tokenizer but 512", base=base)


def test_a_repository_that_cannot_be_downloaded(tmp_path):
    with pytest.raises(ValueError, match="could not be downloaded"):
        convert_checkpoint("nobody/nothing", tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_cannot_hold_the_weights(folders, tmp_path):
    source = copytree(folders / "one_file", tmp_path / "source")
    edit_weights(lambda weights: weights["lm_head.weight"][0, 0].fill_(7e4))(source)
    refuse(source, r"`lm_head.weight` holds numbers beyond.*--dtype bfloat16", dtype="float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "`dtype` is 'int4'"),
        ({"max_shard_size": "banana"}, "`max_shard_size` is 'banana'.*such as 5GB"),
        ({"seed": 2**64}, "`seed` is 18446744073709551616"),
        ({"revision": "main"}, "`revision` is 'main'.*is a folder.*leave --revision out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(folders, tmp_path, options, message):
    refuse(copytree(folders / "one_file", tmp_path / "source"), message, **options)
