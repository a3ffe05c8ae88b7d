"""`STTSVisionConfig` and `STTSConfig`: what they refuse, and that they come back as they were saved."""

import json
import re
from typing import Any

import pytest
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers.models.molmo2.configuration_molmo2 import Molmo2Config, Molmo2VisionConfig
from transformers.utils import logging

from stts_hf.modeling import configuration_stts
from stts_hf.modeling.configuration_stts import STTSConfig, STTSVisionConfig
from tests.tiny import Video, build_inputs, tiny_config, tiny_model

NAN = float("nan")

# field, value, what the message says of the remedy
WRONG_VALUES = [
    pytest.param("pruning_ratio", 1.01, "in [0, 1]", id="ratio-above-1"),
    pytest.param("pruning_ratio", -1e-9, "in [0, 1]", id="ratio-below-0"),
    pytest.param("pruning_ratio", NAN, "in [0, 1]", id="ratio-nan"),
    pytest.param("pruning_ratio", True, "float", id="ratio-bool"),
    pytest.param("selector", "learned", "'scorer', 'cosine', 'random'", id="selector"),
    pytest.param("selector_seed", -1, "from 0", id="seed-negative"),
    pytest.param("score_rescaling", "column", "'row', 'frame', 'none'", id="rescaling"),
    pytest.param("packing", "padded", "'varlen', 'first_fit_descending'", id="packing"),
    pytest.param("pooling_size", [3.0, 3.0], "", id="window-of-floats"),
]
UNFIT_VALUES = [
    pytest.param("pruning_layer", 24, "layer after it drops blocks", id="layer-is-the-last"),
    pytest.param("pruning_layer", -1, "from 0 to 23", id="layer-negative"),
    pytest.param("num_hidden_layers", 4, "from 0 to 2", id="too-few-layers"),
    pytest.param("refill_single_frame_bins", True, "'first_fit_descending'", id="refill-without-bins"),
    pytest.param("pooling_size", [28, 3], "patch grid [27, 27]", id="window-higher-than-grid"),
    pytest.param("pooling_size", [3, 0], "each from 1", id="window-of-no-width"),
    pytest.param("pooling_size", [3], "[height, width]", id="window-of-one-side"),
]


@pytest.mark.parametrize(("field", "value", "remedy"), WRONG_VALUES)
def test_what_a_field_cannot_have_is_refused_whenever_it_is_set(field, value, remedy):
    config = STTSVisionConfig()
    before = getattr(config, field)
    for attempt in (lambda: STTSVisionConfig(**{field: value}), lambda: setattr(config, field, value)):
        with pytest.raises(StrictDataclassFieldValidationError) as error:
            attempt()
        assert field in str(error.value)
        assert remedy in str(error.value)
    assert getattr(config, field) == before


@pytest.mark.parametrize("layers", [[2, 0], [1], [-4, -5]], ids=str)
def test_a_pruning_layer_behind_all_that_the_connector_reads(layers):
    """The scorer would get no gradient of the task."""
    with pytest.raises(StrictDataclassClassValidationError, match=r"`pruning_layer` is 2, but must be below [12]"):
        tiny_config(feature_layers=layers)
    model = tiny_model(tiny_config(feature_layers=layers, selector="cosine"))  # has nothing to train
    assert model(**build_inputs([[2, Video(2), 3]])).logits is not None
    model = tiny_model()
    model.config.vision_config.pruning_layer = 4  # the last that fits
    assert model(**build_inputs([[2, Video(2), 3]])).logits is not None
    model.config.adapter_config.vision_feature_layer = [4, 1]
    with pytest.raises(ValueError, match="`pruning_layer` is 4, but must be below 4"):
        model(**build_inputs([[2, Video(2), 3]]))


@pytest.mark.parametrize(("field", "value", "remedy"), UNFIT_VALUES)
def test_what_does_not_fit_the_other_fields_is_neither_made_nor_saved(field, value, remedy, tmp_path):
    with pytest.raises(StrictDataclassClassValidationError, match=rf"(?s){field}.*{re.escape(remedy)}"):
        STTSVisionConfig(**{field: value})
    config = STTSConfig()
    setattr(config.vision_config, field, value)
    for unfit in (config, config.vision_config):
        with pytest.raises(StrictDataclassClassValidationError):
            unfit.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(("field", "value"), [("pruning_layer", 40), ("pruning_ratio", 2), ("packing", "padded")])
def test_a_file_with_a_wrong_value_is_not_loaded(field, value, tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    contents["vision_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(contents))
    with pytest.raises(StrictDataclassError, match=field):
        STTSConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("image_size", "pooling_size", "expected"),
    [
        pytest.param([378, 378], [3, 3], (9, 9), id="divisible"),
        pytest.param([112, 112], [3, 3], (3, 3), id="borders"),
        pytest.param([56, 84], [2, 3], (2, 2), id="not-square"),
    ],
)
def test_block_grid_counts_windows_over_the_border(image_size, pooling_size, expected):
    assert STTSVisionConfig(image_size=image_size, pooling_size=pooling_size).block_grid == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("temporal_loss_weight", -0.5, id="weight-negative"),
        pytest.param("temporal_loss_weight", NAN, id="weight-nan"),
        pytest.param("temporal_loss_weight", float("inf"), id="weight-infinite"),
        pytest.param("pruned_position_ids", "gaps", id="position-rule"),
    ],
)
def test_an_invalid_model_setting_is_refused_and_the_old_one_stays(field, value):
    with pytest.raises(StrictDataclassError, match=field):
        STTSConfig(**{field: value})
    config = tiny_config()
    before = getattr(config, field)
    with pytest.raises(StrictDataclassError, match=field):
        setattr(config, field, value)
    assert getattr(config, field) == before


def test_the_vision_config_of_stock_molmo2_is_refused(tmp_path):
    with pytest.raises(StrictDataclassClassValidationError, match="'molmo2_vision', but must be 'stts_vision'"):
        STTSConfig(vision_config=Molmo2VisionConfig())
    config = tiny_config()
    setattr(config, "vision_config", Molmo2VisionConfig())  # noqa: B010 (of another type)
    with pytest.raises(StrictDataclassClassValidationError, match="'molmo2_vision', but must be 'stts_vision'"):
        config.save_pretrained(tmp_path)


def test_a_feature_layer_that_does_not_exist_is_refused():
    with pytest.raises(StrictDataclassError, match="vision_feature_layer"):
        tiny_config(feature_layers=[6, 1])


def test_the_config_of_stock_molmo2_can_be_taken_over():
    stock = Molmo2Config(vision_config={"hidden_size": 64}).to_dict()
    config = STTSConfig(**{key: stock[key] for key in ("vision_config", "adapter_config", "text_config")})
    assert config.vision_config.model_type == "stts_vision"
    assert (config.vision_config.hidden_size, config.vision_config.pruning_ratio) == (64, 0.5)


@pytest.fixture
def changed_config() -> STTSConfig:
    """Every field of ours away from its default."""
    return tiny_config(
        pruning_ratio=1,
        pruning_layer=1,
        selector="random",
        selector_seed=7,
        score_rescaling="frame",
        score_bias=False,
        packing="first_fit_descending",
        refill_single_frame_bins=True,
        pooling_size=[2, 3],
        model_overrides={
            "temporal_loss_weight": 0.5,
            "detach_temporal_target": False,
            "scorer_target": "answers",
            "worth_unit": 0.01,
            "pruned_position_ids": "compact",
        },
    )


def test_a_saved_config_comes_back(changed_config, tmp_path):
    changed_config.save_pretrained(tmp_path)
    loaded = STTSConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == changed_config.to_dict()
    loaded.save_pretrained(tmp_path)
    assert STTSConfig.from_pretrained(tmp_path) == loaded


def test_only_documented_fields_are_saved(changed_config, tmp_path):
    changed_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    native = Molmo2Config().to_dict()
    assert set(saved) - set(native) - {"auto_map"} == {
        "temporal_loss_weight",
        "detach_temporal_target",
        "scorer_target",
        "worth_unit",
        "pruned_position_ids",
    }
    assert set(saved["vision_config"]) - set(native["vision_config"]) == {
        "pruning_ratio",
        "score_threshold",
        "min_pruning_ratio",
        "max_pruning_ratio",
        "video_token_budget",
        "pruning_layer",
        "selector",
        "selector_seed",
        "score_rescaling",
        "score_bias",
        "packing",
        "refill_single_frame_bins",
        "pooling_size",
    }


SETTINGS: dict[str, Any] = {"pruning_ratio": 0.25, "selector": "cosine", "pruning_layer": 1, "pooling_size": [2, 2]}


def vision_settings(config: STTSConfig) -> dict:
    return {name: getattr(config.vision_config, name) for name in SETTINGS}


@pytest.mark.parametrize(
    "vision_config",
    [None, {"num_hidden_layers": 3}, STTSVisionConfig(num_hidden_layers=9)],
    ids=["none", "dict", "own"],
)
def test_settings_of_the_vision_config_are_arguments(vision_config):
    layers = getattr(vision_config, "num_hidden_layers", 3 if vision_config else 25)
    features = {"vision_feature_layer": [2, 1]}
    config = STTSConfig(vision_config=vision_config, adapter_config=features, **SETTINGS)
    assert vision_settings(config) == SETTINGS
    assert config.vision_config.num_hidden_layers == layers
    assert not set(SETTINGS) & set(vars(config))
    assert vision_config != config.vision_config  # the caller's own stays as it is


@pytest.mark.parametrize("key", ["vision_config", "vit_config"])
def test_settings_are_arguments_of_from_pretrained_of_a_molmo2_folder(key, tmp_path):
    stock = Molmo2Config(vision_config={"num_hidden_layers": 26}, adapter_config={"vision_feature_layer": [4, 1]})
    contents = stock.to_dict()
    contents[key] = contents.pop("vision_config")
    (tmp_path / "config.json").write_text(json.dumps(contents, default=str))
    config = STTSConfig.from_pretrained(tmp_path, temporal_loss_weight=0.5, **SETTINGS)
    assert vision_settings(config) == SETTINGS
    assert config.temporal_loss_weight == 0.5
    assert config.vision_config.num_hidden_layers == (26 if key == "vision_config" else 5)  # trimmed as in Molmo2


def test_settings_are_arguments_of_from_pretrained_of_an_stts_folder(changed_config, tmp_path):
    changed_config.save_pretrained(tmp_path)
    config, rest = STTSConfig.from_pretrained(tmp_path, selector="cosine", nonsense=1, return_unused_kwargs=True)
    assert rest == {"nonsense": 1}
    assert (config.vision_config.selector, config.vision_config.selector_seed) == ("cosine", 7)


@pytest.mark.parametrize(
    ("settings", "warns"), [({}, True), ({"selector": "cosine"}, False), ({"pruning_ratio": 0}, False)]
)
def test_a_molmo2_folder_warns_of_the_scorer_only_where_it_ranks(settings, warns, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logging.get_logger(configuration_stts.__name__), "warning", said.append)
    Molmo2Config().save_pretrained(tmp_path)
    STTSConfig.from_pretrained(tmp_path, **settings)
    assert any("untrained" in message for message in said) is warns
