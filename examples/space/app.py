"""A Space that answers questions about videos with an STTS checkpoint. README.md says how it is put up."""

try:
    import spaces  # before PyTorch: on ZeroGPU it stands between the two
except ImportError:
    spaces = None

from pathlib import Path

from stts_hf.demo.held_clips import Limits
from stts_hf.demo.serving import build, serve
from stts_hf.inference.assistant import load

CHECKPOINT = str(Path(__file__).parent / "stts-tiny")  # or "user/name"
SELECTOR = None  # "cosine" for a stock checkpoint
SECONDS = 60  # of a GPU, for one answer

# A GPU of ZeroGPU is lent for one call, and what is held on it is lost afterwards.
lent = spaces is not None and spaces.config.Config.zero_gpu
page = build(
    load(CHECKPOINT, selector=SELECTOR),
    limits=Limits(upload_mb=100, seconds=300, clips=0 if lent else 4),
    about=Path(CHECKPOINT).name,
    on_gpu=spaces.GPU(duration=SECONDS) if lent else None,
)

if __name__ == "__main__":
    serve(page)
