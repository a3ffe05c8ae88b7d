"""Whole numbers in tensors of any floating dtype: as their bytes, which bfloat16 holds exactly."""

import torch

NUM_DIGITS = 4


def to_digits(numbers: torch.Tensor) -> torch.Tensor:
    """Bytes (..., NUM_DIGITS) uint8 of int32 numbers (...)."""
    return numbers.int()[..., None].view(torch.uint8)


def from_digits(digits: torch.Tensor) -> torch.Tensor:
    """Numbers (...) int32 of their bytes (..., NUM_DIGITS), in any dtype."""
    return digits.to(torch.uint8).contiguous().view(torch.int32)[..., 0]
