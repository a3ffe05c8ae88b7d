"""Marks for tests of what only newer versions can do. docs/versions.md says what that means to a user."""

import av
import pytest
import torch
import transformers
from packaging.version import Version

since_transformers_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="static caches, chunked prefill and a count of placeholders came with transformers 5.23",
)
since_torch_2_14 = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"),
    reason="PyTorch 2.9 compiles one graph more, and images not at all; it groups no products of experts on a CPU",
)
since_av_17_1 = pytest.mark.skipif(
    Version(av.__version__) < Version("17.1"), reason="tells how a picture with EXIF is turned since PyAV 17.1"
)
