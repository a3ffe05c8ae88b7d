"""Time and memory of the token pooler, beside one that makes keys and values.

python -m tests.modeling.pooler_times
"""

import argparse
import copy
import statistics
import time

import torch
from torch import nn

from stts_hf.modeling.scoring_stts import TokenPooler

# Width, heads, frames and blocks of a frame: So400M and the benchmarks' smaller towers.
SHAPES = [(1152, 16, 8, 81), (288, 4, 64, 36), (144, 2, 64, 81)]
WINDOW = 9


def with_keys_and_values(pooler: TokenPooler) -> TokenPooler:
    """The same weights in plain linear layers, which are called as they are."""
    plain = copy.deepcopy(pooler)
    for name in ("k_proj", "v_proj"):
        layer = plain.get_submodule(name)
        other = nn.Linear(layer.in_features, layer.out_features)
        other.load_state_dict(layer.state_dict())
        plain.register_module(name, other)
    return plain


def saved_bytes(pooler: TokenPooler, patches: torch.Tensor) -> int:
    """What autograd keeps for the backward pass besides the patches and the weights."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (patches, *pooler.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pooler(patches)
    del output
    return sum(kept.values())


def seconds(pooler: TokenPooler, patches: torch.Tensor, backward: bool) -> float:
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        pooled = pooler(patches)
        if backward:
            pooled.sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    for width, heads, frames, blocks in SHAPES:
        ours = TokenPooler(width, heads)
        plain = with_keys_and_values(ours)
        patches = torch.randn(frames * blocks, WINDOW, width, requires_grad=True)
        torch.testing.assert_close(ours(patches), plain(patches), atol=1e-5, rtol=0)
        print(f"width {width}, {frames} frames, float32:")
        for backward in (False, True):
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(repeats + 1):  # in turns, the first for warming up
                for is_ours in (True, False):
                    times[is_ours].append(seconds(ours if is_ours else plain, patches, backward))
            one, other = (1000 * statistics.median(times[is_ours][1:]) for is_ours in (True, False))
            what = "forward and backward" if backward else "forward"
            print(f"  {what}: {one:.1f} ms, with keys and values {other:.1f} ms ({other / one:.2f}x)")
        kept = [saved_bytes(pooler, patches) / len(patches) for pooler in (ours, plain)]
        print(f"  kept for the backward pass: {kept[0]:.0f} bytes per block, with keys and values {kept[1]:.0f}")


if __name__ == "__main__":
    main()
