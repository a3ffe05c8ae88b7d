"""Positions on their way through vLLM's embeddings, which may be bfloat16. Needs no vLLM."""

import pytest
import torch

from stts_hf.serving.digits import NUM_DIGITS, from_digits, to_digits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_positions_survive_the_dtype_of_embeddings(dtype):
    """Two digits were exact only up to 65,791 in bfloat16."""
    positions = torch.tensor([0, 255, 256, 65_535, 65_791, 65_792, 65_793, 131_071, 1_048_575, 2**24 - 1])
    digits = to_digits(positions).to(dtype)
    assert digits.shape == (len(positions), NUM_DIGITS)
    assert from_digits(digits).tolist() == positions.tolist()
