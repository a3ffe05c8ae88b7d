"""What transformers' common tests ask of a model: its classes, a small config, and inputs with a video in each row."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.backbones import Backbone, Clip, Inputs, Picture, Rows, prompt

# Rows are alike, because the tests cut a batch's tensors into equal parts.
ROWS: Rows = [[3, Clip(4), 5], [3, Clip(4), 5]]
PICTURES: Rows = [[3, Picture(), 5], [3, Picture(), 5]]
WIDTH = 48  # of the tower: that of the language model, which the tests take for the same
NUM_LAYERS = 2  # of the language model: the tests ask for so few
LONGEST = 512  # position: the tests compare angles of far ones, which float32 rounds
NOT_VISION = ("bos", "eos", "pad")  # tokens
FIRST_ID, FREE = 3, 50  # of placeholders: the tests shrink the vocabulary from its end


class ModelTester:
    """
    The object that transformers' tests call so.

    seq_length is that of the caller's rows, encoder_seq_length of what is left, which the language model sees.
    """

    is_training = True
    batch_size = len(ROWS)

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        model = backbone.model() if backbone.name == "molmo2" else backbone.model(hidden_size=WIDTH)
        self.classes = classes_of(backbone)
        config = model.config.to_dict()
        self.text_config = config["text_config"]
        self.text_config |= {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": LONGEST}
        self.text_config.pop("layer_types", None)
        # Placeholders get low ids, and the text that has those another one.
        self.moved: dict[int, int] = {}
        names = [name for name in config if name.endswith(("_token_id", "_patch_id")) and name[:3] not in NOT_VISION]
        for number, name in enumerate(names, FIRST_ID):
            self.moved |= {config[name]: number, number: number + FREE}
            config[name] = number
        self.config = config
        self.inputs = self.make_inputs(self.batch_size)
        self.num_hidden_layers, self.hidden_size = NUM_LAYERS, self.text_config["hidden_size"]
        self.num_attention_heads = self.text_config["num_attention_heads"]
        self.num_vision_layers = self.get_config().vision_config.num_hidden_layers
        self.seq_length = self.inputs["input_ids"].shape[1]
        with torch.no_grad():  # how many are left, no weight says
            found = self.classes[1](self.get_config()).eval()(**prompt(self.inputs))
        self.kept_indices: torch.Tensor = found.kept_indices  # (B, L')
        self.encoder_seq_length = self.kept_indices.shape[1]

    def make_inputs(self, batch_size: int) -> Inputs:
        inputs = self.backbone.batch(ROWS[:batch_size], "left")
        for name in ("input_ids", "labels"):
            inputs[name] = inputs[name].clone().apply_(lambda token: self.moved.get(token, token))
        return inputs

    def get_config(self) -> Any:
        """Of no model, so that nothing is decided in it, such as the kernel of attention."""
        config_class: Any = self.classes[0].config_class
        return config_class.from_dict(copy.deepcopy(self.config))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, Inputs]:
        return self.get_config(), copy.deepcopy(prompt(self.inputs))


def classes_of(backbone: Backbone) -> tuple[type[PreTrainedModel], ...]:
    """The model without a head and the one with it."""
    model = backbone.model()
    return type(model.model), type(model)
