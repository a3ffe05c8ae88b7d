"""Between pixels and logits nothing is read back from the device, so the host never waits for it.

Without a GPU, fake CUDA tensors stand in: they have shapes and devices but no values, so what would read one raises.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stts_hf.modeling import attention_stts
from stts_hf.modeling.attention_stts import AttentionSpans, padded_frames
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.modeling.plan_stts import PruningPlan
from stts_hf.modeling.pruning_stts import Call
from stts_hf.modeling.sequence_stts import Tokens
from tests.backbones import DAILY, Backbone, Clip, Inputs, Rows
from tests.tiny import Part, Video, build_inputs, tiny_config, tiny_model

ONE: list[list[Part]] = [[3, Video(4), 5]]
TWO: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]


def has_fake_cuda() -> bool:
    """Older PyTorch asks the driver even where a fake tensor goes to a fake device."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.zeros(1).to("cuda").is_cuda
    except RuntimeError:
        return False


fake_cuda = pytest.mark.skipif(not has_fake_cuda(), reason="this PyTorch has fake CUDA tensors only beside a driver")

# What looks at values to know a size, and so waits for a device.
WAITING = {
    "aten._local_scalar_dense",
    "aten.item",
    "aten.nonzero",
    "aten.masked_select",
    "aten.masked_scatter_backward",
    "aten.unique_consecutive",
    "aten._unique2",
    "aten.repeat_interleave",
}


@pytest.fixture(scope="module", params=DAILY, ids=lambda backbone: backbone.name)
def backbone(request) -> Backbone:
    return request.param


class Recorder(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(str(function.overloadpacket))
        if function is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.seen.add("aten.nonzero")
        return function(*args, **(kwargs or {}))


def stand_in(monkeypatch) -> None:
    monkeypatch.setattr(attention_stts, "varlen_attn", kernel_stand_in)
    monkeypatch.setattr(attention_stts, "has_flash", lambda index: True)


def kernel_stand_in(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, window_size):
    """
    `varlen_attn` asks the driver what the device can do, which a fake one cannot answer. Plain products are the only
    attention that takes a mask on a fake device, whatever kernels the caller allows.
    """
    assert query.shape[-1] % 8 == 0
    with sdpa_kernel(SDPBackend.MATH):
        return padded_frames(query, key, value, AttentionSpans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q), scale, 0.0)


def flex_stand_in(module, query, key, value, attention_mask, **kwargs):
    """The kernel is compiled for a device that is there; the mask before it is what might wait."""
    assert isinstance(attention_mask, BlockMask)
    return query.transpose(1, 2), None


def to_device(model, inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """In place for the model; grids stay on the host, where the processor leaves them."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cuda")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(fake(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    return {name: value if "video_grid" in name else fake(value) for name, value in inputs.items()}


def call(rows, monkeypatch, dtype=torch.bfloat16, text="sdpa", train=False, config: Any = None, packed=False, **kw):
    stand_in(monkeypatch)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flex_attention", flex_stand_in)
    model = tiny_model(tiny_config(**(config or {}))).train(train)
    model.config.text_config._attn_implementation = text
    inputs = build_inputs(rows, model.config, labels=train)
    if packed:
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None] % 30
    with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
        outputs = model(**to_device(model, inputs, dtype), **kw)
    assert outputs.logits.is_cuda
    return outputs


@fake_cuda
@pytest.mark.parametrize(("dtype", "text"), [(torch.bfloat16, "sdpa"), (torch.float32, "flex_attention")])
def test_a_prefill(monkeypatch, dtype, text):
    outputs = call(ONE, monkeypatch, dtype, text, use_cache=True, pruned_length=38)
    assert outputs.logits.shape[1] == 3 + 4 * 3 + 18 + 5


@fake_cuda
@pytest.mark.parametrize(("text", "pruning_ratio"), [("sdpa", 0.0), ("flex_attention", 0.5), ("sdpa", 1.0)])
def test_several_rows_in_training(monkeypatch, text, pruning_ratio):
    """`pruned_length` says how long the rows will be, so nobody has to look."""
    call(TWO, monkeypatch, text=text, train=True, pruned_length=70, pruning_ratio=pruning_ratio)


@fake_cuda
@pytest.mark.parametrize(
    "config",
    [{"image_size": [14, 20]}, {"head_dim": 7}, {"selector": "cosine"}],
    ids=["borders", "head_dim_7", "cosine"],
)
def test_other_towers(monkeypatch, config):
    call(ONE, monkeypatch, train=True, config=config, pruned_length=38)


@fake_cuda
def test_packed_rows(monkeypatch):
    call(ONE, monkeypatch, train=True, packed=True, pruned_length=38)


ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), Clip(2), 9]]


def with_real_host(tower, monkeypatch) -> None:
    """What is made of host numbers on a CPU forces no sync there, but a fake CPU cannot make it."""
    if real := getattr(tower, "place_patches", None):

        def place(grids):
            with unset_fake_temporarily():
                return real(grids)

        monkeypatch.setattr(tower, "place_patches", place)


def count_by_hand(monkeypatch, number: int) -> list[torch.Tensor]:
    """Later frames keep `number` blocks each, which nobody reads. Returns a list that fills with calls' scores."""
    seen: list[torch.Tensor] = []

    def count(plan: PruningPlan, scores: torch.Tensor, is_learned: bool) -> None:
        seen.append(scores)
        object.__setattr__(plan, "above", [number * (frames - 1) for frames, _, _ in plan.grids])

    monkeypatch.setattr(PruningPlan, "count", count)
    return seen


@fake_cuda
@pytest.mark.parametrize("config", [{}, {"selector": "cosine"}], ids=str)
def test_a_threshold_reads_its_counts_and_nothing_else(backbone, monkeypatch, config):
    """A budget alone, like a ratio, reads nothing."""
    stand_in(monkeypatch)
    model = backbone.model(**config).train()
    with_real_host(model.model.get_submodule(backbone.tower), monkeypatch)
    inputs = vision_of(model, backbone.batch(ROWS, "left"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = to_device(model, inputs, torch.bfloat16)
        model.model.get_video_features(**inputs, video_token_budget=12, with_temporal_loss=True)
        with pytest.raises(DataDependentOutputException):
            model.model.get_video_features(**inputs, score_threshold=0.5)
        seen = count_by_hand(monkeypatch, 2)
        video = model.model.get_video_features(**inputs, score_threshold=0.5, with_temporal_loss=True)
    assert len(seen) == 1
    assert [len(features) for features in video.pooler_output] == [
        mask.shape[1] + 2 * (len(mask) - 1) for mask in video.keep_mask
    ]


def test_the_counts_of_all_videos_are_read_at_once(backbone, monkeypatch):
    model, real, read = backbone.model(), torch.Tensor.tolist, []
    plan = model.model.make_plan(vision_of(model, backbone.batch(ROWS, "left")), KeepRule(threshold=0.5))
    scores = torch.rand(sum(plan.num_blocks))

    def tolist(tensor: torch.Tensor) -> Any:
        read.append(tuple(tensor.shape))
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with Recorder() as recorder:
        plan.count(scores, is_learned=True)
    assert read == [(len(plan.grids) + 1,)]
    assert "aten.sum" in recorder.seen
    assert not recorder.seen & WAITING


def vision_of(model, inputs: Inputs) -> Inputs:
    return {name: inputs[name] for name in model.model.video_inputs if name in inputs}


@fake_cuda
@pytest.mark.parametrize("config", [{}, {"selector": "cosine"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_tower_of_every_backbone(backbone, monkeypatch, dtype, config):
    stand_in(monkeypatch)
    model = backbone.model(**config).train()
    with_real_host(model.model.get_submodule(backbone.tower), monkeypatch)
    inputs = vision_of(model, backbone.batch(ROWS, "left"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        video = model.model.get_video_features(**to_device(model, inputs, dtype), with_temporal_loss=True)
    assert all(features.is_cuda for features in video.pooler_output)


@fake_cuda
@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
def test_dropping_tokens_of_every_backbone(backbone, monkeypatch, pruning_ratio):
    """What is ours of a call; native forwards of some backbones wait. Positions that are given need not be counted."""
    stand_in(monkeypatch)
    model, inputs = backbone.model().train(), backbone.batch(ROWS, "left")
    with_real_host(model.model.get_submodule(backbone.tower), monkeypatch)
    counts = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    axes = model.model.num_axes
    inputs["position_ids"] = counts.expand(axes, -1, -1) if axes else counts
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = to_device(model, inputs, torch.bfloat16)
        vision = vision_of(model, inputs)
        tokens = Tokens(**{name: value for name, value in inputs.items() if name not in (*vision, "labels")})
        pruned = model.model.prune(Call(tokens, vision, None, KeepRule(pruning_ratio), 70, False, True))
    assert pruned.tokens.input_ids.shape == (2, 70)
    assert pruned.tokens.input_ids.is_cuda


def test_nothing_in_the_backward_pass_of_a_tower_waits(backbone, monkeypatch):
    monkeypatch.setattr(attention_stts, "choose_backend", lambda *_: "padded")
    model = backbone.model().train()
    video = model.model.get_video_features(**vision_of(model, backbone.batch(ROWS, "left")), with_temporal_loss=True)
    with Recorder() as recorder:
        (torch.cat(video.pooler_output).sum() + video.temporal_loss).backward()
    assert "aten.mm" in recorder.seen
    assert not recorder.seen & WAITING


def operations_of_backward(model, **options) -> set[str]:
    loss = model(**build_inputs(TWO, model.config, labels=True), **options).loss
    with Recorder() as recorder:
        loss.backward()
    return recorder.seen


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
def test_nothing_in_the_backward_pass_waits(monkeypatch, pruning_ratio):
    # As on devices other than a CPU, where frames are not told apart by reading their lengths.
    monkeypatch.setattr(attention_stts, "choose_backend", lambda *_: "padded")
    model = tiny_model().train()
    seen = operations_of_backward(model, pruned_length=70, pruning_ratio=pruning_ratio)
    assert "aten.mm" in seen
    assert not seen & WAITING


def test_a_backward_pass_that_does_wait_is_noticed(monkeypatch):
    """As stock Molmo2 merges its features."""
    model = tiny_model().train()
    merged = torch.zeros(2, 70, model.config.text_config.hidden_size)
    monkeypatch.setattr(
        model.model,
        "embed_pruned",
        lambda inputs: merged.masked_scatter(inputs.features[0][0][..., None], inputs.features[0][1]),
    )
    assert operations_of_backward(model, pruned_length=70) & WAITING


@fake_cuda
@pytest.mark.parametrize("rows", [ONE, TWO], ids=["one-row", "two-rows"])
def test_what_does_wait_is_noticed(monkeypatch, rows):
    """
    Without a length, how many tokens each row has is read once, before the ViT runs. A stand-in for CUDA, where a text
    that does not fit its videos would otherwise end the process's context by a device-side assertion.
    """
    with pytest.raises(DataDependentOutputException):
        call(rows, monkeypatch)


@fake_cuda
def test_grids_on_the_device_are_noticed(monkeypatch):
    stand_in(monkeypatch)
    model = tiny_model()
    inputs = build_inputs(ONE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = to_device(model, inputs, torch.bfloat16)
        inputs["video_grids"] = inputs["video_grids"].to("cuda")
        with pytest.raises(DataDependentOutputException):
            model(**inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [ONE, TWO], ids=["one_row", "two_rows"])
def test_on_cuda(rows):
    model = tiny_model().bfloat16().train()
    model.cuda()
    inputs = {
        name: value if name == "video_grids" else value.cuda()
        for name, value in build_inputs(rows, labels=True).items()
    }
    model(**inputs, pruned_length=70).loss.backward()  # the first call may wait while libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs, pruned_length=70).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
