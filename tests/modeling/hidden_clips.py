"""Hidden states of several videos, as the naive reference and the optimised code take them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.tiny import pooling_windows, window_grid

WIDTH = 16


@dataclass
class Clips:
    """Hidden states (T, N, D) of several videos, their windows (T * n, S), and what the optimised code takes."""

    hidden_states: list[torch.Tensor]
    tables: list[torch.Tensor]
    grids: list[tuple[int, int, int]]
    patch_grids: list[tuple[int, int]]

    @property
    def valid(self) -> torch.Tensor | None:
        valid = torch.cat(self.tables) >= 0
        return None if valid.all() else valid

    def blocks(self) -> torch.Tensor:
        """(G, S, D), padding slots zero."""
        blocks = [
            states.flatten(0, 1)[table.clamp_min(0)] * (table >= 0)[..., None]
            for states, table in zip(self.hidden_states, self.tables, strict=True)
        ]
        return torch.cat(blocks)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """(G,) as one (T, n) per video."""
        parts = values.split([math.prod(grid) for grid in self.grids])
        return [part.view(grid[0], -1) for part, grid in zip(parts, self.grids, strict=True)]


def make_clips(videos: Sequence[tuple[int, tuple[int, int]]], window: tuple[int, int], seed: int = 0) -> Clips:
    """`videos` holds (frames, patch grid) of each."""
    generator = torch.Generator().manual_seed(seed)
    clips = Clips([], [], [], [])
    for frames, grid in videos:
        states = torch.randn(frames, grid[0] * grid[1], WIDTH, generator=generator)
        clips.hidden_states.append(states.requires_grad_())
        clips.tables.append(pooling_windows(frames, grid, window))
        clips.grids.append((frames, *window_grid(grid, window)))
        clips.patch_grids.append(grid)
    return clips


# At least three blocks to a row: of two, both are extremes, whose bias has hardly any gradient.
GEOMETRIES = {
    "one-video": ([(4, (6, 9))], (3, 3)),
    "different-lengths": ([(2, (6, 9)), (5, (6, 9)), (1, (6, 9))], (3, 3)),
    "different-grids": ([(3, (4, 9)), (2, (6, 9)), (4, (2, 12))], (2, 3)),
    "borders": ([(3, (8, 8)), (2, (4, 7))], (3, 3)),
}


def random_scores(clips: Clips, seed: int = 3) -> torch.Tensor:
    count = sum(math.prod(grid) for grid in clips.grids)
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).requires_grad_()
