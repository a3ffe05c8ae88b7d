"""Where the parts of a model stand, by its backbone and through what wraps it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from stts_hf.model_parts import PARTS, module_of, modules_of, parts_of
from tests.backbones import BACKBONES

every_backbone = pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.name)
TEXT = dict.fromkeys(
    ["model.language_model.layers.0.mlp.down_proj.weight", "model.language_model.embed_tokens", "lm_head.weight"],
    "language_model",
)
TEXT_QUERIES = r".*(language|text)_model.*\.q_proj"
QWEN = TEXT | {
    "model.visual.blocks.2.attn.qkv.weight": "vision_tower",
    "model.visual.patch_embed.proj.weight": "vision_tower",
    "model.visual.scorer.score_layer.bias": "scorer",
}
PART_OF = {
    "molmo2": {
        **TEXT,
        "model.vision_tower.layers.3.self_attn.q_proj.weight": "vision_tower",
        "model.vision_tower.scorer.token_pooler.q_proj.weight": "scorer",
        "model.multi_modal_projector.image_projector.down_proj.weight": "connector",
    },
    "qwen2_5_vl": QWEN | {"model.visual.merger.mlp.2.weight": "connector"},
    "qwen3_vl": QWEN | {"model.visual.deepstack_merger_list.1.linear_fc2.weight": "connector"},
    "smolvlm": {
        "model.text_model.layers.0.mlp.down_proj.weight": "language_model",
        "lm_head.weight": "language_model",
        "model.vision_model.encoder.layers.3.self_attn.q_proj.weight": "vision_tower",
        "model.vision_model.scorer.token_pooler.q_proj.weight": "scorer",
        "model.connector.modality_projection.proj.weight": "connector",
    },
}


@every_backbone
def test_the_part_of_a_parameter(backbone):
    model = backbone.model()
    assert {name.split(".")[0] for name, _ in model.model.named_parameters()} <= model.model.parts.keys()
    found = parts_of(model)
    for name, part in PART_OF[backbone.name].items():
        assert {found[full] for full in found if full.startswith(name)} == {part}, name
    assert Counter(found.values())["scorer"] == 14  # pooler and MLP: seven linear layers with bias
    assert set(found.values()) == set(PARTS)


def compile_tower(model: Any) -> Any:
    name = next(name for name, part in model.model.parts.items() if part == "vision_tower")
    setattr(model.model, name, torch.compile(model.model.get_submodule(name)))
    return model


def adapt(**options: Any) -> Callable[[Any], Any]:
    return lambda model: get_peft_model(model, LoraConfig(r=2, **options))


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "as_ddp_does": lambda model: nn.ModuleDict({"module": model}),
    "compiled": torch.compile,
    "compiled_tower": compile_tower,
    "adapted": adapt(target_modules="all-linear"),
    "scorer_saved_in_full": adapt(target_modules=TEXT_QUERIES, modules_to_save=["scorer"]),
}


@every_backbone
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_parameter_keeps_its_part(backbone, wrap):
    model = backbone.model()
    parts = parts_of(model)
    alone = {id(parameter): parts[name] for name, parameter in model.named_parameters()}
    wrapped = wrap(model)
    found = parts_of(wrapped)
    kept = {id(parameter): found[name] for name, parameter in wrapped.named_parameters() if id(parameter) in alone}
    assert kept == alone


@every_backbone
def test_what_an_adapter_adds_belongs_to_what_it_adapts(backbone):
    options = {
        "target_modules": rf"{TEXT_QUERIES}|.*token_pooler\.q_proj",
        "modules_to_save": ["lm_head"],
    }
    found = parts_of(adapt(**options)(backbone.model()))
    added = {name.split(".")[3]: part for name, part in found.items() if "lora_" in name and "scorer" not in name}
    assert set(added.values()) == {"language_model"}
    assert {part for name, part in found.items() if "lora_" in name and "scorer" in name} == {"scorer"}
    assert {part for name, part in found.items() if "lm_head" in name} == {"language_model"}


@every_backbone
def test_a_tower_that_is_trained_whole_keeps_its_scorer_and_connector_apart(backbone):
    wrapped = adapt(target_modules=TEXT_QUERIES, modules_to_save=[backbone.tower])(backbone.model())
    found = parts_of(wrapped)
    trained = Counter(found[name] for name, parameter in wrapped.named_parameters() if parameter.requires_grad)
    assert trained["scorer"] == 14


@every_backbone
def test_modules_of_a_part(backbone):
    model = backbone.model()
    assert list(modules_of(model, "scorer")) == [f"model.{backbone.tower}.scorer"]
    assert module_of(model, "vision_tower") is model.get_submodule(f"model.{backbone.tower}")
    name = next(name for name, part in model.model.parts.items() if part == "language_model")
    assert module_of(model.model, "language_model") is model.model.get_submodule(name)


def test_other_models_have_no_parts():
    with pytest.raises(ValueError, match="`model` is a Linear; it must be an STTS model, alone or inside a PEFT model"):
        parts_of(nn.Linear(2, 2))
