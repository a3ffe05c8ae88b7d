"""Writing safetensors files a few rows at a time; the `safetensors` library writes files from whole tensors only.

Files are byte for byte those of the library.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BLOCK_BYTES = 32 * 2**20
CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, rows: Callable[[str], Iterable[torch.Tensor]]
) -> Iterator[int]:
    """Writes one file, and yields the bytes of tensor data after each block written, for progress.

    Args:
        shapes: of every tensor, all of which are of `dtype`.
        rows: `rows(name)` yields the tensor in blocks of rows.

    Raises `OSError` where the disk is full, `ValueError` where `dtype` cannot hold a number. The file is on the disk,
    not only in its cache, when the iterator ends.
    """
    ordered = sorted(shapes, key=lambda name: name.encode())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            written = 0
            for block in rows(name):
                data = _cast(name, block, dtype).contiguous().flatten().view(torch.uint8).numpy()
                file.write(data.data)
                written += data.nbytes
                yield data.nbytes
            if written != math.prod(shapes[name]) * dtype.itemsize:
                raise ValueError(f"`{name}` came with {written} bytes, which do not make shape {shapes[name]}.")
        file.flush()
        os.fsync(file.fileno())


def _cast(name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = block.to(dtype)
    if dtype != block.dtype and not cast.isfinite().all() and bool((block.isfinite() & ~cast.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise ValueError(
            f"`{name}` holds numbers beyond {torch.finfo(dtype).max:g}, which {kind} would turn into infinity: pass "
            f"--dtype {wider}."
        )
    return cast


def row_blocks(rows: int, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of consecutive blocks of at most `block_bytes`, at least one row each."""
    step = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
