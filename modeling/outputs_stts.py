"""What a call returns beside what native models return: what was kept, and the losses."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .generation_stts import STTSGeneration
from .pruning_stts import PruningOutput
from .sequence_stts import KeptSequence, Tokens, check_shape, find_samples, shorten_targets, token_order
from .settings_stts import CALL_ARGUMENTS


@dataclass
class PruningCausalLMOutputWithPast(PruningOutput, CausalLMOutputWithPast):
    """
    Logits and the rest on the pruned sequence.

    Attributes:
        loss: `task_loss + temporal_loss_weight * temporal_loss`. With `num_items_in_batch`, this call's share of a
            step's loss: `task_loss` is a sum over that number, and each row's temporal loss counts by its label tokens.
        aux_loss: with `output_router_logits`, the unweighted loss of routers over the tokens that are left; `loss` has
            it times `router_aux_loss_coef`, as in native models.
        router_logits: of each layer of experts (B * L', experts).
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class PruningHead(STTSGeneration):
    """
    Mixin for a model with a head: logits and losses on the pruned sequence, and `generate`.

    native: the stock class with a head. backbone: class of `model`. router_loss: of a mixture of experts, by router
    logits, number of experts, experts of a token, and mask.
    """

    native: ClassVar[type[PreTrainedModel]]
    backbone: ClassVar[Any]
    router_loss: ClassVar[Callable[..., Any] | None] = None
    config: Any
    lm_head: nn.Linear
    named_arguments: ClassVar[frozenset[str]]  # of `forward`; the others are the loss's
    accepts_loss_kwargs = True  # `Trainer` passes `num_items_in_batch`, which native models do not use

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "native" in vars(cls):  # a backbone's, and not a subclass of one
            cls.forward = with_native_arguments(cls.native, cls.forward)  # type: ignore[method-assign]
            cls.register_for_auto_class("AutoModel")
            keep_weight_names(cls.native, cls)
            keep_weight_names(cls.backbone.native, cls.backbone)
            if cls.router_loss is not None:  # transformers looks for a decorator in the text of a class's module
                ours: Any
                for ours in (cls, cls.backbone, cls.backbone.tower):
                    ours._can_set_experts_implementation_cached_value = True  # noqa: SLF001
        cls.named_arguments = frozenset(inspect.signature(cls.forward).parameters)

    def __init__(self, config: Any):
        super(self.native, self).__init__(config)  # the native `__init__` would build the stock model
        self.model = self.backbone(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.vocab_size = config.text_config.vocab_size
        self.model_tags = ["stts", config.native.model_type, "video", "token-pruning", "custom_code"]  # of the card
        self.post_init()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Loading sets the types of sub configs; so a new model is saved like a loaded one."""
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                module.config.dtype = module.dtype
        super().save_pretrained(save_directory, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        *,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """
        As the native forward, on the pruned sequence, without the placeholders of dropped blocks. Raises
        `ValueError` where inputs do not fit.

        Args:
            labels: (B, L) like the caller's sequence, as are `shift_labels` in their place.
            logits_to_keep: counts in the pruned sequence.
            pruning_ratio: `k` in [0, 1] in place of the config's, for this call.
            pruned_length: the length `L'` that every row gets, shorter ones by filler where the batch is padded, so
                that all steps of a training have one shape.
            packed_rows: whether rows hold several samples; None looks where `position_ids` start over, which forces a
                host-device sync.
            kwargs: of the native forward.
        """
        names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
        tokens = Tokens(**{name: kwargs.get(name) for name in names})
        targets = {
            name: check_shape(name, target, *tokens.shape)
            for name, target in (("labels", labels), ("shift_labels", shift_labels))
            if target is not None
        }
        with_temporal_loss = bool(targets) or self.training
        outputs = self.model(**(kwargs | {"return_dict": True}), with_temporal_loss=with_temporal_loss)
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        kept_indices = outputs.kept_indices
        if kept_indices is None and kwargs.get("past_key_values") is None:
            kept_indices = KeptSequence.whole(*tokens.shape, tokens.device).kept_indices
        logits = self.lm_head(outputs.last_hidden_state[:, columns])
        found = {"logits": logits, "kept_indices": None if kept_indices is None else kept_indices[:, columns]}
        found["aux_loss"] = router_loss = self.balance_routers(outputs, tokens)
        if targets:
            inner, num_items = self.model, kwargs.get("num_items_in_batch")
            unread = {*self.named_arguments, *inner.video_inputs, *inner.image_inputs, *inner.unread_inputs}
            options = {name: value for name, value in kwargs.items() if name not in unread}
            samples = self.find_samples(tokens, kwargs.get("packed_rows"))
            shortened = {"labels": None} | shorten_targets(targets, outputs.kept_indices, samples) | options
            vocab_size = self.config.text_config.vocab_size
            loss = found["task_loss"] = self.loss_function(logits=logits, vocab_size=vocab_size, **shortened)
            if outputs.temporal_loss is not None:
                of_videos = outputs.temporal_loss if outputs.row_losses is None else outputs.row_losses
                temporal_loss = share_of_step(outputs.temporal_loss, of_videos, targets, num_items)
                loss = loss + self.config.temporal_loss_weight * temporal_loss.to(loss.device)
            if router_loss is not None:
                router_loss = share_of_step(router_loss, router_loss, targets, num_items)
                loss = loss + self.config.text_config.router_aux_loss_coef * router_loss.to(loss.device)
            found["loss"] = loss
        fields = PruningCausalLMOutputWithPast.__dataclass_fields__
        return PruningCausalLMOutputWithPast(**{name: found.get(name, outputs.get(name)) for name in fields})

    def balance_routers(self, outputs: Any, tokens: Tokens) -> torch.Tensor | None:
        """The loss of routers as in the native model, over the tokens that are left; None where nobody asks for it."""
        if self.router_loss is None or outputs.router_logits is None:
            return None
        text, kept_indices, mask = self.config.text_config, outputs.kept_indices, tokens.new_padding_mask
        if kept_indices is not None:
            mask = KeptSequence(kept_indices, tokens.shape[1]).take_mask(mask)
        loss: torch.Tensor = self.router_loss(outputs.router_logits, text.num_experts, text.num_experts_per_tok, mask)
        return loss

    def find_samples(self, tokens: Tokens, packed_rows: bool | None) -> torch.Tensor | None:
        """The sample (B, L) of each token by the caller's positions; None where a row holds one sample."""
        order = token_order(tokens.position_ids, self.model.num_axes)
        if order is None or order.dim() != 2 or packed_rows is False:
            return None
        return find_samples(order.expand(tokens.shape), tokens.new_padding_mask)


def share_of_step(
    loss: torch.Tensor, of_rows: torch.Tensor, targets: dict[str, torch.Tensor], num_items: torch.Tensor | int | None
) -> torch.Tensor:
    """
    A call's loss, or with a step's number of label tokens what the call adds to the step's: each row's loss (B,) by
    the row's share of them, so that it does not matter how the step's rows are spread over calls. Where rows are
    unknown (`RowPlan`) or do not have losses, the call's loss by the call's share.
    """
    if num_items is None:
        return loss
    labels = targets["shift_labels"] if "shift_labels" in targets else targets["labels"][:, 1:]
    share = (labels != -100).sum(-1).to(of_rows.device) / torch.as_tensor(num_items, device=of_rows.device)  # (B,)
    return (of_rows * share).sum()


def keep_weight_names(native: type[PreTrainedModel], ours: type[PreTrainedModel]) -> None:
    """
    Registers for our class, or its `model_type`, how weights of the native class are renamed on loading. Without it
    they would load random, with a warning at most.
    """
    types = native.config_class.model_type, ours.config_class.model_type  # type: ignore[union-attr]
    for native_name, name in ((native.__name__, ours.__name__), types):
        renamed = get_checkpoint_conversion_mapping(native_name)
        if renamed is not None:
            register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


def with_native_arguments(native: type[PreTrainedModel], forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    `forward` in the arguments of a native model's, in their order, and ours. `generate` and `Trainer` read from the
    signature which arguments a model takes.
    """
    parameters = list(inspect.signature(native.forward).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    added = [name for name in (*CALL_ARGUMENTS, "mm_token_type_ids") if name not in names]
    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names) - 1:
            raise TypeError(f"`forward` takes {len(names) - 1} positional arguments, but got {len(args)}.")
        return forward(self, **{names[place]: value for place, value in enumerate(args, 1)}, **kwargs)

    call.__signature__ = inspect.Signature([*parameters[:-1], *ours, parameters[-1]])  # type: ignore[attr-defined]
    return call
