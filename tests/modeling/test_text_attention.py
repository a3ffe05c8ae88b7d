"""Attention backends of the text model: those that can express the vision block agree, others are refused."""

import pytest
import torch

from tests.modeling.reference import CLOSE, assert_gradients_equal, gradients, logits_of_row, pack
from tests.tiny import Image, Part, Video, build_inputs, image_inputs, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]
GREEDY = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}


def model_with(implementation: str):
    model = tiny_model()
    # Set directly: `set_attn_implementation` would look for the package.
    model.config.text_config._attn_implementation = implementation
    model.model.language_model.config._attn_implementation = implementation
    return model


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed_row"])
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@torch.no_grad()
def test_backends_agree_with_sdpa(implementation, packed):
    if packed:
        inputs = build_inputs([[3, Video(2), 3, Video(2), 4]])
        length, first = inputs["input_ids"].shape[1], 3 + 24
        inputs["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
        del inputs["attention_mask"]
    else:
        inputs = build_inputs(ROWS)
    expected = model_with("sdpa")(**inputs)
    with torch.compiler.set_stance("force_eager"):  # the mask is what is tested; compiling would take half a minute
        outputs = model_with(implementation)(**inputs)
    for row in range(len(inputs["input_ids"])):
        torch.testing.assert_close(logits_of_row(outputs, inputs, row), logits_of_row(expected, inputs, row), **CLOSE)


@torch.no_grad()
def test_flex_attention_agrees_with_sdpa_in_a_cache():
    """Prefill of a padded batch with filler, then two more tokens at once on top of it."""
    inputs = build_inputs(ROWS)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=-1)
    step = {"input_ids": torch.tensor([[5, 7], [6, 8]]), "mm_token_type_ids": torch.zeros(2, 2, dtype=torch.long)}
    logits = []
    for implementation in ("sdpa", "flex_attention"):
        model = model_with(implementation)
        with torch.compiler.set_stance("force_eager"):
            first = model(**inputs, pruned_length=60, use_cache=True)
            logits.append(model(**step, attention_mask=mask, past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.parametrize(
    "rows",
    [
        [[3, Video(2), 4], [2, Video(3), 5], [6]],
        [[2, Image(), 4], [3, Image((1, 1)), 5], [6]],
        [[5], [9]],
    ],
    ids=["videos", "images", "texts"],
)
@torch.no_grad()  # PyTorch's flex attention has no backward pass on a CPU
def test_flex_attention_agrees_with_sdpa_on_packed_rows(rows: list[list[Part]]):
    packed = pack(build_inputs(rows, labels=True), rows)
    with torch.compiler.set_stance("force_eager"):
        expected, outputs = (model_with(name).train()(**packed) for name in ("sdpa", "flex_attention"))
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(outputs.loss, expected.loss, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed_row"])
def test_compiled_flex_attention_trains_as_sdpa_does(packed):
    rows: list[list[Part]] = [[3, Video(2), 4], [2, Video(3), 5]]
    inputs = build_inputs(rows, labels=True)
    inputs = pack(inputs, rows) if packed else inputs
    inputs = {name: value if name == "video_grids" else value.cuda() for name, value in inputs.items()}
    losses, found = [], []
    for implementation in ("sdpa", "flex_attention"):
        model = model_with(implementation).train().cuda()
        loss = model(**inputs, use_cache=False).loss
        losses.append(loss.detach())
        found.append(gradients(model, loss))
    # TF32 or not, the kernels sum in another order.
    torch.testing.assert_close(*losses, atol=1e-3, rtol=0)
    assert_gradients_equal(found[1], found[0], tolerance=1e-2)


def test_eager_generates_what_sdpa_generates():
    inputs = build_inputs(ROWS)
    assert torch.equal(
        model_with("eager").generate(**inputs, **GREEDY), model_with("sdpa").generate(**inputs, **GREEDY)
    )


@pytest.mark.parametrize("through", ["forward", "generate"])
@pytest.mark.parametrize("kind", ["video", "image", "video_without_types"])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_a_backend_that_would_be_causal_among_vision_tokens_is_refused(implementation, kind, through):
    model = model_with(implementation)
    inputs = image_inputs() if kind == "image" else build_inputs(ROWS)
    if kind == "video_without_types":
        del inputs["mm_token_type_ids"]
    call = model if through == "forward" else model.generate
    with pytest.raises(ValueError, match=rf"`attn_implementation` is '{implementation}' .* Use 'sdpa' or 'flex_att"):
        call(**inputs)


def test_text_alone_may_use_any_backend(monkeypatch):
    """The check lets it through; a stand-in takes the place of the kernel, which needs a GPU."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def stand_in(module, query, key, value, attention_mask, **kwargs):
        calls.append(attention_mask)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", stand_in)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    outputs, expected = model_with("flash_attention_2")(**inputs), model_with("sdpa")(**inputs)
    assert calls == [None, None]
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
