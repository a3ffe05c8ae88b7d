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
FIRST_ID = 3  # of placeholders: the tests shrink the vocabulary from its end
PLACEHOLDERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class ModelTester:
    """
    The object that transformers' tests call so. stock: whether the native model is meant, which drops nothing.

    seq_length is that of the caller's rows, encoder_seq_length of what is left, which the language model sees.
    """

    is_training = True
    batch_size = len(ROWS)

    def __init__(self, backbone: Backbone, stock: bool = False):
        self.backbone = backbone
        # Molmo2's features are those of layers by number, and its placeholders lie beyond the vocabulary.
        model = backbone.model() if backbone.name == "molmo2" else backbone.model(hidden_size=WIDTH)
        self.classes = classes_of(backbone, stock)
        config = (backbone.stock(model) if stock else model).config.to_dict()
        self.text_config = config["text_config"]
        self.text_config["num_hidden_layers"] = NUM_LAYERS
        self.text_config.pop("layer_types", None)
        self.moved: dict[
            int, int
        ] = {}  # placeholders to ids at the vocabulary's beginning, and the text that has those away
        if backbone.name != "molmo2":
            for number, name in enumerate(PLACEHOLDERS, FIRST_ID):
                self.moved |= {config[name]: number, number: config[name]}
                config[name] = number
        self.config = config
        self.inputs = backbone.batch(ROWS, "left")
        for name in ("input_ids", "labels"):
            self.inputs[name] = self.inputs[name].clone().apply_(lambda token: self.moved.get(token, token))
        self.num_hidden_layers, self.hidden_size = NUM_LAYERS, self.text_config["hidden_size"]
        self.num_attention_heads = self.text_config["num_attention_heads"]
        self.num_vision_layers = self.get_config().vision_config.num_hidden_layers
        self.seq_length = self.inputs["input_ids"].shape[1]
        self.kept_indices = self.read_kept_indices()
        self.encoder_seq_length = self.kept_indices.shape[1]

    def read_kept_indices(self) -> torch.Tensor:
        """Places (B, L') of what is left: how many are, no weight says."""
        with torch.no_grad():
            found = self.classes[1](self.get_config()).eval()(**prompt(self.inputs))
        everything = torch.arange(self.seq_length).expand(self.batch_size, -1)
        return getattr(found, "kept_indices", everything)

    def get_config(self) -> Any:
        """Of no model, so that nothing is decided in it, such as the kernel of attention."""
        config_class: Any = self.classes[0].config_class
        return config_class.from_dict(copy.deepcopy(self.config))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, Inputs]:
        return self.get_config(), copy.deepcopy(prompt(self.inputs))

    def pictures(self) -> Inputs:
        """Inputs of `get_image_features`."""
        inputs = self.backbone.batch(PICTURES, "left")
        return {name: value for name, value in inputs.items() if "pixel" in name or name.startswith("image")}


def classes_of(backbone: Backbone, stock: bool = False) -> tuple[type[PreTrainedModel], ...]:
    """The model without a head and the one with it."""
    model = backbone.model()
    if stock:
        model = backbone.stock(model)
    return type(model.model), type(model)
