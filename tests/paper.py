"""Figures of the paper that tests hold code to."""

import pytest

# Pruning ratio, frames of each video, and how many of their 81 blocks a frame are kept (the tables of token counts).
KEPT_BLOCKS = [
    pytest.param(0.3, [64, 64], 7258, id="128-frames-30"),
    pytest.param(0.4, [64, 64], 6222, id="128-frames-40"),
    pytest.param(0.5, [64, 64], 5184, id="128-frames-50"),
    pytest.param(0.3, [256], 14516, id="256-frames-30"),
    pytest.param(0.4, [256], 12442, id="256-frames-40"),
    pytest.param(0.5, [256], 10368, id="256-frames-50"),
]
