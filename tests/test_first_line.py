"""The one line to begin with: stock weights, and the pruning fields as arguments of `from_pretrained`."""

from stts_hf import STTSForConditionalGeneration


def test_pruning_fields_are_arguments_of_from_pretrained(hub_configs):
    model = STTSForConditionalGeneration.from_pretrained(
        hub_configs / "stts-tiny", selector="cosine", pruning_ratio=0.25
    )
    vision_config = model.model.vision_tower.config
    assert (vision_config.selector, vision_config.pruning_ratio) == ("cosine", 0.25)
