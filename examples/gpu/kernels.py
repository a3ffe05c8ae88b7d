"""
Part (a), first half: attention over packed frames, every kernel that is here, against float32 on the CPU.

    python -m examples.gpu.kernels --device cuda --size full FOLDER
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from stts_hf.modeling import attention_stts
from stts_hf.modeling.attention_stts import AttentionSpans, packed_attention

from .checks import Check, compute_exactly, describe, relative_error, run_checks
from .options import parse

FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
# Patches of each frame that stay, of so many; a frame that lost everything, and one that lost nothing.
LENGTHS = {"tiny": ([3, 0, 9, 5], 9), "full": ([729, 0, 9, 400, 0, 63, 252, 729], 729)}
HEADS = {"tiny": (2, 8), "full": (16, 72)}  # and their width: So400M's
# Of one attention; a frame that leaks or a bias that lacks gives 0.1 and more.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (3e-3, 5e-3), torch.bfloat16: (2e-2, 4e-2)}
BACKENDS = ("frame_by_frame", "padded", "torch_varlen")


@contextlib.contextmanager
def only(backend: str) -> Iterator[None]:
    with mock.patch.object(attention_stts, "choose_backend", return_value=backend):
        yield


def attend(
    backend: str, implementation: str, device: torch.device, dtype: torch.dtype, size: str, biased: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of kept queries over all keys, as in layer `l + 1`, or of kept patches alone."""
    lengths, longest = LENGTHS[size]
    whole = [longest] * len(lengths) if biased else lengths
    heads, width = HEADS[size]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(of), heads, width, generator=generator).to(device, dtype).requires_grad_()
        for of in (lengths, whole, whole)
    )
    bias = (-2 * torch.rand(sum(whole), generator=generator)).to(device).requires_grad_() if biased else None
    queries, keys = (AttentionSpans.of_lengths(list(of), device).cu_seqlens_q for of in (lengths, whole))
    spans = AttentionSpans(queries, keys, longest)
    with only(backend):
        output = packed_attention(query, key, value, spans, width**-0.5, key_bias=bias, implementation=implementation)
    weights = torch.randn(output.shape, generator=generator).to(output)
    leaves = [query, key, value] if bias is None else [query, key, value, bias]
    return output, list(torch.autograd.grad((output * weights).sum(), leaves))


def errors(
    backend: str, implementation: str, device: torch.device, dtype: torch.dtype, size: str, biased: bool
) -> tuple[float, float]:
    """Of the output, and the largest of the gradients."""
    expected, of_expected = attend("frame_by_frame", "sdpa", torch.device("cpu"), torch.float32, size, biased)
    found, of_found = attend(backend, implementation, device, dtype, size, biased)
    return relative_error(found, expected), max(map(relative_error, of_found, of_expected))


def lacking(backend: str, implementation: str, device: torch.device) -> str:
    """Why a kernel cannot run here."""
    if backend not in ("torch_varlen", "flash"):
        return ""
    if device.type != "cuda":
        return "needs a CUDA device"
    if backend == "torch_varlen" and attention_stts.varlen_attn is None:
        return f"torch {torch.__version__} has no varlen_attn with a scale"
    if backend == "flash" and importlib.util.find_spec(FLASH[implementation]) is None:
        return f"{FLASH[implementation]} is not installed"
    return ""


def checks(device: torch.device, size: str) -> Iterator[Check]:
    for backend, implementation in (*((name, "sdpa") for name in BACKENDS), *(("flash", name) for name in FLASH)):
        lacks = lacking(backend, implementation, device)
        for dtype in TOLERANCES:
            if dtype == torch.float32 and backend in ("torch_varlen", "flash"):
                continue  # they take half precision alone
            if dtype == torch.float32 and backend == "frame_by_frame" and device.type == "cpu":
                continue  # the reference itself
            for biased in (True, False):
                name = f"{implementation if backend == 'flash' else backend}, {'biased layer' if biased else 'plain'}"
                run = partial(errors, backend, implementation, device, dtype, size, biased)
                yield Check(name, dtype, run, TOLERANCES[dtype], lacks)


def main() -> None:
    arguments = parse(__doc__)
    compute_exactly()
    about = describe("Attention kernels", arguments.device)
    run_checks(checks(arguments.device, arguments.size), arguments.device, arguments.folder, about)


if __name__ == "__main__":
    main()
