"""Attention padded to whole frames, where no kernel takes variable lengths, against softmax written out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stts_hf.modeling.attention_stts import AttentionSpans, padded_frames
from tests.modeling.test_attention import (
    FLOAT32_TOLERANCE,
    HEADS,
    LENGTHS,
    SCALING,
    gradients,
    make_inputs,
    naive_attention,
    spans_of,
    without_bias,
)


def padded(inputs, lengths, slack: int = 0, dropout: float = 0.0) -> torch.Tensor:
    spans = spans_of(lengths, slack=slack)
    return padded_frames(inputs["query"], inputs["key"], inputs["value"], spans, SCALING, dropout)


def bias_free(lengths):
    return without_bias(make_inputs(lengths))


@pytest.mark.parametrize("name", LENGTHS)
def test_output_and_gradients_are_the_naive_ones(name):
    lengths = LENGTHS[name]
    inputs = bias_free(lengths)
    output, expected = padded(inputs, lengths), naive_attention(inputs, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)
    actual, expected_gradients = gradients(output, inputs), gradients(expected, inputs)
    for key in inputs:
        torch.testing.assert_close(actual[key], expected_gradients[key], rtol=0, atol=FLOAT32_TOLERANCE, msg=key)


def test_more_room_than_the_longest_frame_needs_changes_nothing():
    lengths = ([2, 6, 4], [6, 6, 6])
    inputs = bias_free(lengths)
    torch.testing.assert_close(padded(inputs, lengths, slack=5), padded(inputs, lengths), rtol=0, atol=1e-6)


def test_no_frame_depends_on_another():
    lengths = ([3, 4, 2], [5, 6, 4])
    inputs = {name: tensor.detach() for name, tensor in bias_free(lengths).items()}
    before = padded(inputs, lengths)
    for name in ("key", "value"):
        inputs[name][5:11] = torch.nan  # frame 1
    after = padded(inputs, lengths)
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
    assert [call[1].data_ptr() == inputs["key"].data_ptr() for call in seen] == [True]
    assert [call[0].data_ptr() == inputs["query"].data_ptr() for call in seen] == [False]
    # Without room for queries: the kernels' own copies of a mask are as large as what they get.
    assert [None if call[3] is None else call[3].shape for call in seen] == [None]


def test_padded_frames_never_read_the_lengths():
    """Fake tensors have no values: whatever would force a host-device sync raises."""
    lengths = LENGTHS["padding-slots-behind"]
    inputs = bias_free(lengths)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        whole = spans_of(lengths)
        query, key, value, ends_q, ends_k = (
            mode.from_tensor(tensor) for tensor in (*inputs.values(), whole.cu_seqlens_q, whole.cu_seqlens_k)
        )
        output = padded_frames(query, key, value, AttentionSpans(ends_q, ends_k, whole.max_seqlen), SCALING, 0.0)
    assert output.shape == (sum(lengths[0]), HEADS, 8)
