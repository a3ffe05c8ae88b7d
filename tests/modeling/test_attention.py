"""Attention over packed frames against softmax written out, forward and gradients."""

import math
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import modeling_flash_attention_utils

from stts_hf.modeling import attention_stts
from stts_hf.modeling.attention_stts import (
    AttentionSpans,
    choose_backend,
    fold_bias_into_keys,
    frame_by_frame,
    has_flash,
    packed_attention,
)

HEADS, HEAD_DIM = 2, 8
SCALING = HEAD_DIM**-0.5
FLOAT32_TOLERANCE = 2e-6  # outputs and gradients of order one, sums of at most ten terms

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Queries and keys of each frame.
LENGTHS = {
    "whole-frames": ([5, 3, 7], [5, 3, 7]),
    "kept-queries": ([2, 6, 4], [6, 6, 6]),
    "empty-frames": ([3, 0, 2, 0], [3, 0, 2, 0]),
    "frame-without-queries": ([0, 4, 1], [6, 6, 6]),
    "padding-slots-behind": ([2, 4, 3], [6, 6, 0]),
    "one-frame": ([4], [9]),
}


@pytest.fixture(params=LENGTHS, ids=str)
def lengths(request) -> tuple[list[int], list[int]]:
    return LENGTHS[request.param]


def make_inputs(
    lengths: tuple[list[int], list[int]], seed: int = 0, head_dim: int = HEAD_DIM
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = map(sum, lengths)
    shapes = {"query": num_queries, "key": num_keys, "value": num_keys}
    inputs = {name: torch.randn(count, HEADS, head_dim, generator=generator) for name, count in shapes.items()}
    inputs["key_bias"] = -2 * torch.rand(num_keys, generator=generator)
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def attend(inputs: dict[str, Any], lengths: tuple[Sequence[int], Sequence[int]], implementation="sdpa"):
    spans = spans_of(lengths, inputs["query"].device)
    return packed_attention(**inputs, spans=spans, scaling=SCALING, implementation=implementation)


def spans_of(lengths: tuple[Sequence[int], Sequence[int]], device: Any = "cpu", slack: int = 0) -> AttentionSpans:
    queries, keys = (AttentionSpans.of_lengths(list(side), device).cu_seqlens_k for side in lengths)
    return AttentionSpans(queries, keys, max(*lengths[0], *lengths[1]) + slack)


def naive_attention(inputs: dict[str, torch.Tensor], lengths: tuple[Sequence[int], Sequence[int]]) -> torch.Tensor:
    """One masked softmax over everything, in float64; queries without any key give zero."""
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    frames = [torch.repeat_interleave(torch.arange(len(side)), torch.tensor(side)) for side in lengths]
    same_frame = (frames[0][:, None] == frames[1][None]).to(query.device)  # (P_q, P_k)
    logits = torch.einsum("qhd,khd->hqk", query, key) * SCALING
    if "key_bias" in inputs:
        logits = logits + inputs["key_bias"].double()
    exponentials = torch.where(same_frame, (logits - logits.detach().amax()).exp(), 0)
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("hqk,khd->qhd", weights, value)


def without_bias(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in inputs.items() if name != "key_bias"}


def gradients(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return dict(zip(inputs, torch.autograd.grad((output * weights).sum(), list(inputs.values())), strict=True))


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
def test_packed_attention_is_the_naive_one(lengths, biased):
    inputs = make_inputs(lengths)
    inputs = inputs if biased else without_bias(inputs)
    output, expected = attend(inputs, lengths), naive_attention(inputs, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
def test_gradients_of_packed_attention_are_the_naive_ones(lengths, biased):
    inputs = make_inputs(lengths)
    inputs = inputs if biased else without_bias(inputs)
    actual = gradients(attend(inputs, lengths), inputs)
    expected = gradients(naive_attention(inputs, lengths), inputs)
    for name in inputs:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=FLOAT32_TOLERANCE, msg=name)


def test_a_border_that_is_off_by_one_changes_the_result():
    lengths = ([5, 3, 7], [5, 3, 7])
    inputs = make_inputs(lengths)
    expected = naive_attention(inputs, lengths)
    shifted = attend(inputs, ([5, 3, 7], [6, 2, 7])).double()
    assert (shifted - expected).abs().amax() > 1e4 * FLOAT32_TOLERANCE
    # The last frame's border did not move.
    torch.testing.assert_close(shifted[8:], expected[8:], rtol=0, atol=FLOAT32_TOLERANCE)


def test_a_bias_on_the_wrong_key_changes_the_result():
    lengths = ([4], [6])
    inputs = make_inputs(lengths)
    expected = naive_attention(inputs, lengths)
    inputs["key_bias"] = inputs["key_bias"].roll(1)
    assert (attend(inputs, lengths) - expected).abs().max() > 1e4 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("head_dim", [8, 7, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_folded_bias_is_exact_to_float32_rounding(dtype, head_dim):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, HEADS, head_dim, generator=generator).to(dtype) for _ in range(3))
    bias = -2 * torch.rand(20, generator=generator)
    scaling = head_dim**-0.5
    folded_query, folded_key, folded_value = fold_bias_into_keys(query, key, value, bias, scaling)

    def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scaling

    added = logits(folded_query, folded_key) - logits(query, key)
    # bias / scaling is rounded to float32 once, the parts carry all of it; one bf16 part alone would miss by 2^-9.
    torch.testing.assert_close(added, bias.double().expand_as(added), rtol=0, atol=2 * 2.0**-23)
    assert folded_query.shape[-1] == folded_key.shape[-1] == folded_value.shape[-1]
    assert folded_key.shape[-1] % 8 == 0
    assert folded_key.dtype == folded_query.dtype == dtype


def test_a_head_of_72_has_room_for_the_bias_up_to_80():
    states = torch.zeros(1, 1, 72, dtype=torch.bfloat16)
    assert fold_bias_into_keys(states, states, states, torch.zeros(1), 1.0)[1].shape[-1] == 80


def test_bfloat16_is_as_good_as_its_rounding():
    lengths = ([2, 6, 4], [6, 6, 6])
    inputs = {name: tensor.detach() for name, tensor in make_inputs(lengths).items()}
    inputs |= {name: inputs[name].bfloat16() for name in ("query", "key", "value")}
    output = attend(inputs, lengths)
    assert output.dtype == torch.bfloat16
    # Weights and output are rounded to 8 bits.
    torch.testing.assert_close(output.double(), naive_attention(inputs, lengths), rtol=0, atol=2.0**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_flash_attention_on_a_cpu_is_refused(dtype):
    lengths = ([3], [3])
    inputs = {name: tensor.detach().to(dtype) for name, tensor in make_inputs(lengths).items()}
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        attend(inputs, lengths, "flash_attention_2")


def naive_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale):
    assert not causal
    lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    unscaled = scale / SCALING  # `naive_attention` scales by itself
    return naive_attention({"query": q * unscaled, "key": k, "value": v}, lengths).to(q.dtype)


# What the packages' functions take: FlashAttention-3 knows no dropout, FlashAttention-4 no deterministic passes either.
def flash_attention_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, block_table=None,
):  # fmt: skip
    assert dropout_p == 0.0
    return naive_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)


def flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    return naive_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)


def flash_attention_4(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
):  # fmt: skip
    return naive_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale), None  # and the log-sum-exp


@pytest.mark.parametrize("kernel", [flash_attention_2, flash_attention_3, flash_attention_4], ids=lambda f: f.__name__)
def test_each_flash_kernel_is_called_as_it_wants(kernel, lengths, monkeypatch):
    imported = []

    def import_kernel(implementation, *args, **kwargs):
        imported.append(implementation)
        return None, kernel, None, None, None

    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", import_kernel)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    # Stands in for a GPU: elsewhere the kernels are refused.
    monkeypatch.setattr("stts_hf.modeling.attention_stts.choose_backend", lambda *_: "flash")
    inputs = make_inputs(lengths)
    output, expected = attend(inputs, lengths, kernel.__name__), naive_attention(inputs, lengths)
    assert imported == [kernel.__name__]
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)
    expected_gradients = gradients(expected, inputs)
    for name, gradient in gradients(output, inputs).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=FLOAT32_TOLERANCE, msg=name)


def test_a_flash_kernel_of_the_hub_is_no_other_backend():
    with pytest.raises(ValueError, match="kernels-community/flash-attn2"):
        choose_backend("kernels-community/flash-attn2", torch.zeros(1, 1, 8))


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", None])
def test_a_cpu_goes_frame_by_frame_except_in_a_graph(implementation, monkeypatch):
    query = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    assert choose_backend(implementation, query) == "frame_by_frame"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_backend(implementation, query) == "padded"


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "padded"), ((8, 0), "torch_varlen"), ((9, 0), "torch_varlen")]
)
def test_varlen_kernels_are_for_ampere_and_newer(monkeypatch, capability, expected):
    monkeypatch.setattr(attention_stts, "varlen_attn", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    has_flash.cache_clear()
    try:
        with FakeTensorMode():
            query = torch.empty(3, 2, 72, dtype=torch.bfloat16, device="cuda")
            assert choose_backend("sdpa", query) == expected
            assert choose_backend("sdpa", query, dropout=0.1) == "padded"
    finally:
        has_flash.cache_clear()


def test_a_pytorch_without_the_kernel_says_what_it_costs(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(attention_stts, "varlen_attn", None)
    monkeypatch.setattr(attention_stts, "has_flash", lambda index: True)
    monkeypatch.setattr(attention_stts.logger, "warning_once", said.append)
    with FakeTensorMode():
        assert choose_backend("sdpa", torch.empty(3, 2, 72, dtype=torch.float32, device="cuda")) == "padded"
        assert not said
        assert choose_backend("sdpa", torch.empty(3, 2, 72, dtype=torch.bfloat16, device="cuda")) == "padded"
    assert re.search("padded to full length.* Upgrade PyTorch, or install flash-attn", said[0])


def varlen_stand_in(query, key, value, *bounds, scale, window_size=(-1, -1)):
    """Torch 2.14 on Hopper takes cuDNN for calls without a window, which before 9.25 fails on empty frames."""
    assert min(window_size) >= max(bounds[2:])  # there is one, and it hides nothing
    return frame_by_frame(query, key, value, AttentionSpans(*bounds[:3]), scale, 0.0)


def on_hopper(monkeypatch) -> None:
    monkeypatch.setattr(attention_stts, "varlen_attn", varlen_stand_in)
    monkeypatch.setattr(attention_stts, "choose_backend", lambda *_: "torch_varlen")


def test_empty_frames_get_a_kernel_that_takes_them(monkeypatch, lengths):
    """A stand-in for CUDA: no kernel of variable length runs on a CPU."""
    on_hopper(monkeypatch)
    inputs = make_inputs(lengths)
    output, expected = attend(inputs, lengths), naive_attention(inputs, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)


def test_calls_that_overlap_in_threads_leave_the_flags_of_the_process(monkeypatch):
    """A stand-in for CUDA, as above. The first call ends while the second one runs."""
    on_hopper(monkeypatch)
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def kernel(query, *arguments, **options):
        if len(query) == 3:
            first_is_in.set()
            assert second_is_in.wait(10)
        else:
            second_is_in.set()
            assert first_is_out.wait(10)
        return query

    def call(length: int) -> None:
        lengths = ([length], [2 * length])  # of one length, they would be one batch
        attend({name: tensor.detach() for name, tensor in make_inputs(lengths).items()}, lengths)

    monkeypatch.setattr(attention_stts, "varlen_attn", kernel)
    flags = ("flash", "mem_efficient", "math", "cudnn")
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in flags]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, 3)
        assert first_is_in.wait(10)
        second = pool.submit(call, 4)
        first.result(10)
        first_is_out.set()
        second.result(10)
    assert [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in flags] == before


def test_nothing_is_copied_that_kernels_take_as_it_is(monkeypatch):
    seen = []

    def kernel(query, key, value, *bounds, scale, window_size):
        seen.append((query, key, value))
        return query

    monkeypatch.setattr(attention_stts, "varlen_attn", kernel)
    monkeypatch.setattr(attention_stts, "choose_backend", lambda *_: "torch_varlen")
    inputs = {name: tensor.detach() for name, tensor in without_bias(make_inputs(([3], [4]))).items()}
    attend(inputs, ([3], [4]))
    assert all(one is other for one, other in zip(seen[0], inputs.values(), strict=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("head_dim", [8, 72])  # So400M's, which the bias makes 80
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
@pytest.mark.parametrize(
    ("implementation", "package"),
    [("sdpa", None), ("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")],
)
def test_cuda_kernels_agree_with_the_naive_one(implementation, package, biased, head_dim):
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    # Frames that lost everything, and behind them padding slots that no key belongs to.
    lengths = ([40, 0, 64, 3, 5], [81, 81, 81, 81, 0])
    cpu = make_inputs(lengths, head_dim=head_dim)
    cpu = cpu if biased else without_bias(cpu)
    inputs = {
        name: tensor.detach().cuda().to(torch.float32 if name == "key_bias" else torch.bfloat16).requires_grad_()
        for name, tensor in cpu.items()
    }
    if has_flash(inputs["query"].device.index):
        assert choose_backend(implementation, inputs["query"]) == ("torch_varlen" if package is None else "flash")
    output, expected = attend(inputs, lengths, implementation), naive_attention(inputs, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=2.0**-7, atol=2.0**-6)  # one bit of bf16
    expected_gradients = gradients(expected, inputs)
    for name, gradient in gradients(output, inputs).items():
        reference = expected_gradients[name].double()
        # Gradients are rounded to bf16 several times over; those of the bias are sums over all queries of a frame.
        atol = 2.0**-5 * max(1.0, reference.abs().max().item())
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])], ids=["cpu", "cuda"]
)
def test_a_bias_that_bfloat16_cannot_hold_counts(device):
    # Two keys alike but for their bias: in one bf16 part the difference of 0.25 would be one of 0.71.
    state = torch.zeros(2, 1, HEAD_DIM, device=device, dtype=torch.bfloat16)
    value = torch.tensor([1.0, -1.0], device=device, dtype=torch.bfloat16)[:, None, None].expand(state.shape)
    bias = torch.tensor([-100.0, -100.25], device=device)
    output = attend({"query": state[:1], "key": state, "value": value, "key_bias": bias}, ([1], [2]))
    assert output[0, 0, 0].item() == pytest.approx(math.tanh(0.125), rel=0.02)  # weights are rounded to 8 bits
