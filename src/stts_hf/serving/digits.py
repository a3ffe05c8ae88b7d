"""Whole numbers in tensors of any floating dtype: as digits that bfloat16 holds exactly."""

import torch

BASE = 256  # bfloat16 holds every whole number up to here
NUM_DIGITS = 3  # numbers below 16,777,216


def to_digits(numbers: torch.Tensor) -> torch.Tensor:
    """Digits (..., NUM_DIGITS) of whole numbers (...) from 0 to 16,777,215, the highest digit first."""
    return torch.stack([numbers // BASE**power % BASE for power in reversed(range(NUM_DIGITS))], dim=-1)


def from_digits(digits: torch.Tensor) -> torch.Tensor:
    """Whole numbers (...) int64 of their digits (..., NUM_DIGITS), in any dtype."""
    powers = [BASE**power for power in reversed(range(NUM_DIGITS))]
    return (digits.long() * torch.tensor(powers, device=digits.device)).sum(-1)
