"""Attention without a variable-length kernel, padded and as one operator, against softmax written out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stts_hf.modeling.frame_attention_stts import (
    FrameAttention,
    attend_within_frames,
    frame_attention,
    frame_by_frame,
    padded_frames,
)
from stts_hf.modeling.layout_stts import cumulative_lengths
from tests.modeling.test_attention import (
    FLOAT32_TOLERANCE,
    HEADS,
    LENGTHS,
    SCALING,
    gradients,
    make_inputs,
    naive_attention,
    without_bias,
)


def bounds_of(lengths) -> list[torch.Tensor]:
    return [cumulative_lengths(torch.tensor(side)) for side in lengths]


def padded(inputs, lengths, eager: bool = False, slack: int = 0, dropout: float = 0.0) -> torch.Tensor:
    longest = [max(side) + slack for side in lengths]
    return padded_frames(*inputs.values(), *bounds_of(lengths), *longest, SCALING, dropout, eager)


def operator(inputs, lengths, eager: bool = False) -> torch.Tensor:
    return frame_attention(*inputs.values(), *bounds_of(lengths), SCALING, eager)[0]


def fused(inputs, lengths, eager: bool = False) -> torch.Tensor:
    return FrameAttention.apply(*inputs.values(), *bounds_of(lengths), SCALING)


def bias_free(lengths):
    return without_bias(make_inputs(lengths))


@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize("attend", [padded, operator, fused])
@pytest.mark.parametrize("name", LENGTHS)
def test_output_and_gradients_are_the_naive_ones(name, attend, eager):
    lengths = LENGTHS[name]
    inputs = bias_free(lengths)
    output, expected = attend(inputs, lengths, eager), naive_attention(inputs, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)
    actual, expected_gradients = gradients(output, inputs), gradients(expected, inputs)
    for key in inputs:
        torch.testing.assert_close(actual[key], expected_gradients[key], rtol=0, atol=FLOAT32_TOLERANCE, msg=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [([40, 0, 64], [81, 81, 81]), ([5, 0, 7], [5, 0, 7])], ids=["kept", "empty"])
@pytest.mark.parametrize("attend", [operator, fused])
def test_half_precision_is_that_of_sdpa(attend, lengths, dtype):
    """As autograd does it frame by frame: the same kernels in the same order."""
    inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in bias_free(lengths).items()}
    output, expected = attend(inputs, lengths), frame_by_frame(*inputs.values(), *bounds_of(lengths), SCALING)
    assert torch.equal(output, expected)
    actual, expected_gradients = gradients(output, inputs), gradients(expected, inputs)
    for key in inputs:
        assert torch.equal(actual[key], expected_gradients[key])


@pytest.mark.parametrize("attend", [operator, fused])
def test_states_of_any_stride_give_the_same(attend):
    """The kernel takes the last dimension to be dense, and does not look."""
    lengths = ([5, 3, 7], [5, 3, 7])
    inputs = bias_free(lengths)
    strided = {name: tensor.detach().mT.contiguous().mT.requires_grad_() for name, tensor in inputs.items()}
    assert strided["query"].stride(-1) != 1
    output, expected = attend(strided, lengths), attend(inputs, lengths)
    assert torch.equal(output, expected)
    strange = torch.randn(output.mT.shape, generator=torch.Generator().manual_seed(0)).mT  # a gradient of such strides
    actual = torch.autograd.grad(output, list(strided.values()), strange)
    for gradient, other in zip(actual, torch.autograd.grad(expected, list(inputs.values()), strange), strict=True):
        assert torch.equal(gradient, other)


def test_autocast_casts_as_for_sdpa():
    lengths = ([5, 3], [5, 3])
    query, key, value = (tensor.detach() for tensor in bias_free(lengths).values())
    bounds = (*bounds_of(lengths), 5, 5, SCALING)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend_within_frames(query, key.bfloat16(), value.bfloat16(), *bounds)
        assert torch.equal(mixed, frame_by_frame(query, key, value, *bounds[:2], SCALING))
    assert mixed.dtype == torch.bfloat16


def test_more_room_than_the_longest_frame_needs_changes_nothing():
    lengths = ([2, 6, 4], [6, 6, 6])
    inputs = bias_free(lengths)
    torch.testing.assert_close(padded(inputs, lengths, slack=5), padded(inputs, lengths), rtol=0, atol=1e-6)


@pytest.mark.parametrize("attend", [padded, operator, fused])
def test_no_frame_depends_on_another(attend):
    lengths = ([3, 4, 2], [5, 6, 4])
    inputs = {name: tensor.detach() for name, tensor in bias_free(lengths).items()}
    before = attend(inputs, lengths)
    for name in ("key", "value"):
        inputs[name][5:11] = torch.nan  # frame 1
    after = attend(inputs, lengths)
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[7:], after[7:])
    assert after[3:7].isnan().all()


def test_dropout_drops():
    lengths = ([4], [4])
    inputs = bias_free(lengths)
    torch.manual_seed(0)
    assert not torch.allclose(padded(inputs, lengths, dropout=0.5), padded(inputs, lengths))


def test_whole_frames_are_neither_copied_nor_masked(monkeypatch):
    seen = []

    def kernel(query, key, value, mask, dropout, scale):
        seen.append((query, key, value, mask))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    inputs = {name: tensor.detach() for name, tensor in bias_free(([2, 6, 4], [6, 6, 6])).items()}
    padded(inputs, ([2, 6, 4], [6, 6, 6]))
    padded(inputs, ([4, 4, 4], [6, 6, 6]))
    padded(inputs, ([4, 4, 4], [3, 6, 9]))
    assert [call[1].data_ptr() == inputs["key"].data_ptr() for call in seen] == [True, True, False]
    assert [call[0].data_ptr() == inputs["query"].data_ptr() for call in seen] == [False, True, True]
    # Without room for queries: the kernels' own copies of a mask are as large as what they get.
    assert [None if call[3] is None else call[3].shape for call in seen] == [None, None, (3, 1, 1, 9)]


def test_padded_frames_never_read_the_lengths():
    """Fake tensors have no values: whatever would wait for a device raises."""
    lengths = LENGTHS["padding-slots-behind"]
    inputs = bias_free(lengths)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (*inputs.values(), *bounds_of(lengths))]
        output = padded_frames(*fakes, max(lengths[0]), max(lengths[1]), SCALING)
    assert output.shape == (sum(lengths[0]), HEADS, 8)


def test_the_operator_keeps_its_promises_to_the_compiler():
    lengths = LENGTHS["kept-queries"]
    torch.library.opcheck(frame_attention, (*bias_free(lengths).values(), *bounds_of(lengths), SCALING, False))
