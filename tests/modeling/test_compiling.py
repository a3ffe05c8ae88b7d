"""Compiled layers: the same numbers, no graph break, and one compilation per shape whatever the videos show.

Graphs are counted, not generated: the backend runs what the compiler captured. `fullgraph=True` turns any break into an
error.
"""

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from stts_hf.modeling.budget_stts import KeepRule
from tests.backbones import BACKBONES, Clip, prompt
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.tiny import Part, Video, build_inputs, image_inputs, tiny_config, tiny_model
from tests.version_marks import since_torch_2_14

pytestmark = pytest.mark.slow  # a minute of compilation
ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]
# Of towers over frames of one size and over flat sequences, with and without windows.
MOLMO2, QWEN3, QWEN2_5 = BACKBONES[:3]
ONE_GRAPH = [("compile", QWEN2_5), ("export", MOLMO2)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # an argument of `compile`, but not before PyTorch 2.14
        yield
    torch.compiler.reset()


def compile_layers(model, **options) -> None:
    """As docs/behaviour.md says it."""
    for name, part in model.model.parts.items():
        if part in ("vision_tower", "language_model"):
            modules = model.model.get_submodule(name).modules()
            for layer in next(module for module in modules if isinstance(module, torch.nn.ModuleList)):
                layer.compile(fullgraph=True, **options)


def compiled(model, backend: str = "eager") -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    compile_layers(model, backend=counter)
    return counter


def train_step(model, seed: int, rows=ROWS, **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = build_inputs(rows, model.config, seed=seed, labels=True)
    loss = model(**inputs, use_cache=False, pruned_length=70, **options).loss
    return loss.detach(), gradients(model, loss)


@since_torch_2_14
@pytest.mark.parametrize(
    ("overrides", "backend"),
    [({}, "aot_eager"), pytest.param({"image_size": [14, 20]}, "eager")],
    ids=["", "borders"],
)
def test_training_compiles_once_and_changes_nothing(overrides, backend):
    config = tiny_config(**overrides)
    reference, model = tiny_model(config).train(), tiny_model(config).train()
    counter = compiled(model, backend)
    counts = []
    for seed in range(3):
        loss, grads = train_step(model, seed)
        expected_loss, expected = train_step(reference, seed)
        torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0)
        assert_gradients_equal(grads, expected, tolerance=5e-5)
        counts.append(counter.frame_count)
    assert counts == [4] * 3  # layers before, at and after the drop, and a layer of the language model


def test_bins_compile_layer_by_layer():
    config = tiny_config(packing="first_fit_descending", refill_single_frame_bins=True)
    reference, model = tiny_model(config).train(), tiny_model(config).train()
    counter = compiled(model)
    counts = []
    for seed in range(3):
        (loss, grads), (expected_loss, expected) = train_step(model, seed), train_step(reference, seed)
        torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0)
        assert_gradients_equal(grads, expected, tolerance=5e-5)
        counts.append(counter.frame_count)
    assert 0 < counts[1] == counts[2]  # once more where the number of patches changes, and then no more


@pytest.mark.parametrize("backbone", [MOLMO2, QWEN3], ids=lambda backbone: backbone.name, indirect=True)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_beside_gradient_checkpointing(backbone, use_reentrant):
    reference, model = backbone.model().train(), backbone.model().train()
    for each in (reference, model):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    counter = compiled(model)
    inputs, counts = backbone.batch([[3, Clip(4), 5], [2, Clip(2), 9]], "left"), []
    for seed in range(2):
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"] + seed
        ours, theirs = (
            gradients(each, each(**inputs, use_cache=False, pruned_length=70).loss) for each in (model, reference)
        )
        assert_gradients_equal(ours, theirs, tolerance=5e-5)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_cuda():
    """With inductor, and the kernels of variable length in the graph."""
    reference, model = (tiny_model().train().to("cuda", torch.bfloat16) for _ in range(2))
    compile_layers(model)
    inputs = build_inputs(ROWS, model.config, labels=True)
    inputs = {name: value if name == "video_grids" else value.cuda() for name, value in inputs.items()}
    losses = []
    for each in (reference, model):
        # With nothing dropped: rounding at other places may lift another block over the threshold.
        losses.append(each(**inputs, use_cache=False, pruned_length=70, pruning_ratio=0.0).loss.detach())
        each(**inputs, use_cache=False, pruned_length=64).loss.backward()
    torch.testing.assert_close(*losses, atol=3e-2, rtol=0)  # bfloat16
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@torch.no_grad()
def test_a_prefill_compiles_once_per_frames_and_ratio():
    """Tower and language model as one graph each, into a cache; new videos reuse it, and so do old shapes."""
    reference, model = tiny_model(), tiny_model()
    counter = CompileCounterWithBackend("eager")
    for part in (model.model.vision_tower, model.model.language_model):
        part.compile(fullgraph=True, dynamic=False, backend=counter)
    seen = {}
    for seed, (frames, ratio) in enumerate([(4, 0.5), (4, 0.5), (3, 0.5), (4, 0.3), (4, 0.5), (4, 0.3), (3, 0.5)]):
        inputs = build_inputs([[3, Video(frames), 5]], seed=seed)
        before = counter.frame_count
        logits = model(**inputs, pruning_ratio=ratio, use_cache=True).logits
        torch.testing.assert_close(logits, reference(**inputs, pruning_ratio=ratio).logits, atol=2e-5, rtol=0)
        assert counter.frame_count - before == (0 if (frames, ratio) in seen else 2)
        seen[frames, ratio] = True


@since_torch_2_14
@torch.no_grad()
def test_batches_of_many_shapes_stop_compiling():
    """Sizes that change are compiled once more as unknown ones, and then no more; images take the same layers."""
    model = tiny_model()
    counter = compiled(model)
    counts = []
    for frames in (2, 3, 4, 5, 6, 7):
        model(**build_inputs([[3, Video(frames), 5]]), use_cache=False)
        model(**image_inputs([(1, frames)]), use_cache=False)
        counts.append(counter.frame_count)
    assert counts[2] == counts[-1]


@since_torch_2_14
@pytest.mark.parametrize("backbone", [MOLMO2, QWEN3], ids=lambda backbone: backbone.name, indirect=True)
@torch.no_grad()
def test_counts_that_follow_the_video_stop_compiling(backbone):
    """Each video keeps another number of blocks: no graph break in a layer, and no new compilation per video."""
    reference, model = backbone.model(), backbone.model()
    counter = compiled(model)
    inputs, counts, kept = backbone.batch([[3, Clip(5), 5]], "left"), [], set()
    scores = torch.cat([*reference(**inputs, pruning_ratio=0.0).token_scores])[1:].flatten().sort().values
    for number in (4, 8, 12, 16, 20, 24):
        threshold = float(scores[-number - 1 : -number + 1].mean())
        found, expected = (some(**inputs, score_threshold=threshold, use_cache=False) for some in (model, reference))
        torch.testing.assert_close(found.logits, expected.logits, atol=3e-5, rtol=0)
        counts.append(counter.frame_count)
        kept.add(int(found.keep_mask[0].sum()))
    assert len(kept) == 6
    assert counts[2] == counts[-1]


@since_torch_2_14
@pytest.mark.parametrize("backbone", BACKBONES[:1], ids=lambda backbone: backbone.name, indirect=True)
@torch.no_grad()
def test_a_whole_tower_breaks_where_the_counts_are_read_and_nowhere_else(backbone):
    """Native code of Qwen's towers has breaks of its own where a graph may have any."""
    model, inputs = backbone.model(), prompt(backbone.batch([[3, Clip(4), 5], [2, Clip(3), 9]], "left"))
    vision = {name: inputs[name] for name in model.model.video_inputs if name in inputs}
    plan, pixels = model.model.make_plan(vision, KeepRule(threshold=0.05)), inputs["pixel_values_videos"]

    def encode(pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return model.model.encode_videos(pixel_values, plan).pooler_output

    counter = CompileCounterWithBackend("eager")
    graph, counts = torch.compile(encode, backend=counter), []
    counters.clear()
    for seed in range(5):
        pixels = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed))
        for found, expected in zip(graph(pixels), encode(pixels), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        counts.append(counter.frame_count)
    [reason] = counters["graph_break"]
    assert "_local_scalar_dense" in reason
    assert counts[2] == counts[-1]


@pytest.mark.parametrize("backbone", [QWEN3], ids=lambda backbone: backbone.name, indirect=True)
@torch.no_grad()
def test_generate_goes_on_with_compiled_layers(backbone):
    inputs = prompt(backbone.batch([[3, Clip(4), 5]], "left"))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = backbone.model()
    expected = model.generate(**inputs, **options)
    compiled(model)
    assert torch.equal(model.generate(**inputs, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("way", "backbone"), ONE_GRAPH, ids=lambda given: getattr(given, "name", given), indirect=["backbone"]
)
def test_the_tower_of_every_backbone_is_one_graph(backbone, way):
    if backbone.name != "molmo2" and Version(torch.__version__) < Version("2.14"):
        pytest.skip("with PyTorch 2.9 the functions of transformers that read grids break the graph")
    model, inputs = backbone.model(), prompt(backbone.batch([[3, Clip(4), 5], [2, Clip(3), 9]], "left"))
    vision = {name: inputs[name] for name in model.model.video_inputs if name in inputs}
    plan, pixels = model.model.make_plan(vision, KeepRule(0.5)), inputs["pixel_values_videos"]

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.model

        def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output = self.model.encode_videos(pixel_values, plan)
            return *output.pooler_output, *output.keep_mask

    encoder = Encoder().eval()
    if way == "export":
        graph: Any = torch.export.export(encoder, (pixels,), strict=False).module()
    else:
        graph = torch.compile(encoder, fullgraph=True, dynamic=False, backend="eager")
    for seed in range(2):  # other pixels keep other blocks
        pixels = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(graph(pixels), encoder(pixels), atol=1e-5, rtol=0)
