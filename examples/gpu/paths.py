"""
Part (a), second half: whole models by every path, forward and gradients, against float32 on the CPU.

    python -m examples.gpu.paths qwen3_5 --device cuda --size full FOLDER

Which blocks go is the same in every path, so that rounding drops no others: half of all, and one frame whole.
"""

import contextlib
import copy
import ctypes
import functools
import importlib.util
import inspect
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stts_hf.benchmark.geometries import GEOMETRIES, workload_inputs
from stts_hf.benchmark.meters import peak_memory
from stts_hf.benchmark.models import build_models, stock_inputs, stock_twin
from stts_hf.benchmark.presets import Workload
from stts_hf.errors import in_halves
from stts_hf.model_parts import LANGUAGE_MODEL, SCORER, VISION_TOWER, module_of, modules_of
from stts_hf.modeling import attention_stts, tower_stts
from stts_hf.modeling.recurrent_stts import RecurrentBackbone

from .backbones import CONFIGS, reference_size
from .checks import Check, compute_exactly, describe, relative_error, run_checks
from .options import parse

CPU = torch.device("cpu")
TINY = Workload("training", "tiny", 4, (0.5,), batch=2, text_tokens=16, timestamp_tokens=2)
FRAMES = {"tiny": 4, "full": 8}  # of the tower
EMPTY = 2  # the frame that loses every block
NEW_TOKENS = 8
M_MMAP_THRESHOLD = -3  # of glibc
# Operations that read a size from values. Values in CPU memory are checked there alone.
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "masked_scatter_backward", "repeat_interleave"}
CHECKS_ON_CPU = {"check_finite", "check_video_inputs", "place_patches"}  # the last computes on the host
# Largest relative errors of whole models; a wrong mask, position or frame gives 0.3 and more.
TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.float16: (2e-2, 5e-2), torch.bfloat16: (1e-1, 2e-1)}
# Functions of recurrent layers that transformers replaces by kernels.
KERNELS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
CACHES = ("dynamic", "static", "offloaded", "offloaded_static")


@dataclass
class Reference:
    """A model in float32 on the CPU, its inputs with labels, and what it computes."""

    name: str
    model: Any
    inputs: dict[str, Any]
    ranking: torch.Tensor

    @functools.cached_property
    def computed(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with without_kernels(self.model):
            return compute(self.model, self.inputs)

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        with without_kernels(self.model):
            return generate(self.model, self.inputs)

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        """The model again, and its inputs. Molmo2's grids stay on the host, as the processor leaves them."""
        inputs = {
            name: value if name == "video_grids" else value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.inputs.items()
        }
        return copy.deepcopy(self.model).to(device, dtype), inputs


def workload_of(name: str, size: str) -> Workload:
    geometry = reference_size(name, size)
    tubelet = getattr(GEOMETRIES[geometry].config().vision_config, "temporal_patch_size", 1)
    return TINY._replace(geometry=geometry, frames=FRAMES[size] * tubelet)


def make_reference(name: str, workload: Workload) -> Reference:
    """Weights large enough that attention is far from uniform."""
    model: Any = build_models(workload.geometry, torch.float32, CPU)[0].train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                inputs_of_one = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
                parameter.normal_(0, inputs_of_one**-0.5, generator=generator)
        if isinstance(model.model, RecurrentBackbone):
            hold_states(model)
    use_all_experts(model)
    model.config.vision_config.pruning_ratio = workload.ratios[0]
    inputs = workload_inputs(workload, model.config, CPU)
    if not getattr(model.model, "run_per_frame", True):
        inputs = in_one_run(inputs)
    grids = model.model.plan_videos(inputs).grids
    ranking = [torch.rand(frames, rows * columns, generator=generator) for frames, rows, columns in grids]
    for of_video in ranking:
        of_video[EMPTY] = -1
    return Reference(name, model, inputs, torch.cat([of_video.flatten() for of_video in ranking]))


def hold_states(model: Any) -> None:
    """States hold what they read. Branches are a quarter as large: else half precision loses long gradients."""
    for name, parameter in module_of(model, LANGUAGE_MODEL).named_parameters():
        if name.endswith("A_log"):
            parameter.sub_(3)
        if any(last in name for last in ("o_proj", "out_proj", "down_proj")):
            parameter.mul_(0.25)


def use_all_experts(model: Any) -> None:
    """Every expert serves every token, so that rounding sends none to another one."""
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = module.num_experts


def in_one_run(inputs: dict[str, Any]) -> dict[str, Any]:
    """Without the text between the frames of a video, whose placeholders make one run in some backbones."""
    is_block = inputs["mm_token_type_ids"][0] == 2
    first, last = is_block.nonzero()[[0, -1], 0].tolist()
    is_block[:first] = is_block[last + 1 :] = True
    texts = ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
    return inputs | {name: inputs[name][:, is_block] for name in texts}


@contextlib.contextmanager
def without_kernels(model: Any) -> Iterator[None]:
    """Runs recurrent layers in plain PyTorch: transformers would call a GPU's kernels for tensors of a CPU too."""

    def in_pytorch(kernel: Callable[..., Any]) -> Callable[..., Any]:
        function = inspect.unwrap(kernel)
        names = inspect.signature(function).parameters
        return lambda *args, **given: function(*args, **{name: given[name] for name in given if name in names})

    with contextlib.ExitStack() as stack:
        if isinstance(model.model, RecurrentBackbone):
            native = sys.modules[type(module_of(model, LANGUAGE_MODEL)).__module__]
            for name in KERNELS:
                stack.enter_context(mock.patch.object(native, name, in_pytorch(getattr(native, name))))
        yield


@contextlib.contextmanager
def dropping(reference: Reference, device: torch.device) -> Iterator[None]:
    """Blocks go by the reference's ranking; scores still bias layer `l + 1`, so that gradients reach the scorer."""
    ranking, select = reference.ranking.to(device), tower_stts.select_blocks
    with mock.patch.object(tower_stts, "select_blocks", lambda _, grids, kept: select(ranking, grids, kept)):
        yield


def compute(model: Any, inputs: dict[str, Any], loss: str = "loss") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradients of all weights."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs, use_cache=False)
    output[loss].backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), gradients


def whole(tensor: Any) -> torch.Tensor:
    """A tensor that FSDP may have sharded."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def generate(model: Any, inputs: dict[str, Any], cache: str | None = None) -> torch.Tensor:
    """New tokens, greedy; in float32 they are the same on every device."""
    prompt = {name: value for name, value in inputs.items() if name != "labels"}
    options = {} if cache in (None, "dynamic") else {"cache_implementation": cache}
    model.eval()
    output = model.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **options)
    new: torch.Tensor = output[:, inputs["input_ids"].shape[1] :]
    return new.cpu()


def no_change(model: Any) -> None:
    pass


def train_errors(
    reference: Reference,
    device: torch.device,
    dtype: torch.dtype,
    change: Callable[[Any], Any] = no_change,
    with_gradients: bool = True,
    arrange: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[float, float | None]:
    """Of logits, and of all gradients together, of a model that `change` has changed in place, on arranged inputs."""
    with dropping(reference, CPU):
        logits, gradients = reference.computed
    model, inputs = reference.on(device, dtype)
    change(model)
    with dropping(reference, device):
        if not with_gradients:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                return relative_error(model(**inputs, use_cache=False).logits, logits), None
        found, of_found = compute(model, arrange(inputs))
    if gradients.keys() != of_found.keys():
        raise AssertionError(f"other weights have gradients: {sorted(gradients.keys() ^ of_found.keys())[:3]}")
    return relative_error(found.view_as(logits), logits), relative_error_of_all(of_found, gradients)


def relative_error_of_all(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all expected tensors together."""
    pairs = [torch.cat([of[name].flatten().cpu().float() for name in expected]) for of in (found, expected)]
    return relative_error(*pairs)


def stock_errors(reference: Reference, device: torch.device) -> tuple[float, float]:
    """Of logits and gradients at ratio 0, beside the stock model on the same device. Other tokens count as infinite."""
    model, inputs = reference.on(device, torch.float32)
    nn.init.zeros_(module_of(model, SCORER).score_layer.weight)  # as before any training
    inputs["pruning_ratio"], stock = 0.0, stock_twin(model)
    use_all_experts(stock)
    of_stock = stock_inputs(stock, {name: value for name, value in inputs.items() if name != "pruning_ratio"})
    expected, gradients = compute(stock, of_stock)
    found, of_found = compute(model, inputs, "task_loss")
    if not torch.equal(generate(model, inputs), generate(stock, of_stock)):
        return float("inf"), float("inf")
    return relative_error(found, expected), relative_error_of_all(of_found, gradients)


def with_attention(text: str, vision: str, model: Any) -> None:
    model.config.text_config._attn_implementation = text
    model.config.vision_config._attn_implementation = vision


def with_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def layers_of(part: nn.Module) -> nn.ModuleList:
    return next(child for child in part.modules() if isinstance(child, nn.ModuleList))


def with_compiled_layers(backend: str, model: Any) -> None:
    """As docs/behaviour.md says it."""
    for part in (VISION_TOWER, LANGUAGE_MODEL):
        for module in modules_of(model, part).values():
            for layer in layers_of(module):
                layer.compile(fullgraph=True, backend=backend)


def sharded_errors(reference: Reference, device: torch.device) -> tuple[float, float | None]:
    """FSDP2 with one process: the language model's layers and the rest are sharded, gathered and reduced."""
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any) -> None:
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        for module in modules_of(model, LANGUAGE_MODEL).values():
            for layer in layers_of(module):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = f"file://{Path(folder, 'store')}"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            return train_errors(reference, device, torch.float32, shard)
        finally:
            torch.distributed.destroy_process_group()


class NoStream(contextlib.nullcontext[None]):
    def wait_stream(self, stream: object) -> None:
        pass


def cache_errors(reference: Reference, device: torch.device, cache: str) -> tuple[float, None]:
    """The share of new tokens that are others."""
    with dropping(reference, CPU):
        expected = reference.tokens
    model, inputs = reference.on(device, torch.float32)
    # A CPU has no streams: one that does nothing stands in, so that all else of an offloaded cache runs.
    with dropping(reference, device), contextlib.ExitStack() as stack:
        if device.type != "cuda":
            stack.enter_context(mock.patch("torch.Stream", NoStream))
            stack.enter_context(mock.patch("torch.cuda.default_stream", return_value=NoStream()))
        found = generate(model, inputs, cache)
    return (found != expected).float().mean().item(), None


class Waiting(TorchDispatchMode):
    """On a CPU: raises at an operation that would make the host wait for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket).removeprefix("aten.")
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if (name in WAITING or by_mask) and not CHECKS_ON_CPU & {frame.name for frame in traceback.extract_stack()}:
            raise AssertionError(f"{name} would wait for a device")
        return function(*args, **(kwargs or {}))


def run_without_sync(step: Callable[[], object], device: torch.device) -> None:
    """Raises where the host waits for the device in a second `step`; the first may, while libraries load."""
    if device.type != "cuda":
        with mock.patch.object(attention_stts, "choose_backend", return_value="padded"), Waiting():
            step()
        return
    step()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def errors_without_sync(
    reference: Reference, device: torch.device, dtype: torch.dtype, what: str
) -> tuple[float, None]:
    """Of what docs/behaviour.md says to force no sync: the tower alone, a prefill, or a training step."""
    model, inputs = reference.on(device, dtype)
    inputs = {name: value.cpu() if "video_grid" in name else value for name, value in inputs.items()}
    plan = model.model.make_plan(inputs)
    length = inputs["input_ids"].shape[1] - plan.num_blocks[0] + plan.num_kept[0]

    def step() -> None:
        if what == "tower":
            model.model.get_video_features(
                **{name: inputs[name] for name in model.model.video_inputs if name in inputs}
            )
        elif what == "prefill":
            prompt = {name: value for name, value in inputs.items() if name != "labels"}
            with torch.no_grad():
                model(**prompt, use_cache=True, pruned_length=length)
        else:
            model(**inputs, use_cache=False, pruned_length=length).loss.backward()

    with dropping(reference, device):
        run_without_sync(step, device)
    return 0.0, None


@contextlib.contextmanager
def limited(device: torch.device, more: int) -> Iterator[None]:
    """Lets allocations fail beyond so many bytes more than there are."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        device = torch.device("cuda", torch.cuda.current_device())  # a device with an index
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def shortage_errors(device: torch.device) -> tuple[float, None]:
    """A batch for which memory runs out is halved, as `predict` does it, and its rows are those of the whole batch."""
    if device.type == "cpu":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)  # what is freed goes back to the system
    frames = 32 if device.type == "cuda" else 2  # CUDA's allocator takes pieces of 20 MiB
    workload = TINY._replace(geometry="narrow-tower", mode="inference", frames=frames, batch=4)
    model: Any = build_models(workload.geometry, torch.float32, device)[0].eval()
    inputs = workload_inputs(workload, model.config, device)
    calls: list[int] = []

    @torch.no_grad()
    def answer(rows: Sequence[int]) -> Sequence[torch.Tensor]:
        calls.append(len(rows))
        some = {}
        for name, value in inputs.items():
            per_row = len(value) // workload.batch
            some[name] = torch.cat([value[row * per_row : (row + 1) * per_row] for row in rows])
        patches = inputs["pixel_values_videos"].shape[1] * workload.frames
        table, starts = some["video_token_pooling"], torch.tensor(rows, device=device)
        own = (starts - torch.arange(len(rows), device=device)) * patches
        own = own.repeat_interleave(len(table) // len(rows))[:, None]
        some["video_token_pooling"] = torch.where(table < 0, table, table - own)
        return list(model(**some, logits_to_keep=1).logits)

    everything = range(workload.batch)
    answer(everything)  # else the peak has what is allocated once, such as cuBLAS's workspace
    expected, most = peak_memory(partial(answer, everything), device)
    _, least = peak_memory(partial(answer, everything[:1]), device)
    calls.clear()
    with limited(device, (most + least) // 2):
        found = in_halves(answer, everything)
    if len(calls) == 1:
        raise AssertionError(f"no memory ran out: {most / 2**20:.0f} MiB of all rows, {least / 2**20:.0f} of one")
    failed = [one for one in found if isinstance(one, MemoryError)]
    if failed:
        raise failed[0]
    return relative_error(torch.stack(found), torch.stack(list(expected))), None  # type: ignore[arg-type]


def in_one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """The rows of a batch without padding as samples of a single row."""
    batch, length = inputs.pop("attention_mask").shape
    rows = {name: inputs[name].view(1, -1) for name in ("input_ids", "mm_token_type_ids", "labels")}
    return inputs | rows | {"position_ids": torch.arange(length, device=rows["labels"].device).repeat(1, batch)}


def checks(device: torch.device, name: str, size: str) -> Iterator[Check]:
    if name == "molmo2":  # first, since on a CPU memory that was freed is there without being asked for
        yield Check("out of memory, halved", torch.float32, partial(shortage_errors, device), (1e-4, 0.0))
    reference = make_reference(name, workload_of(name, size))
    single, half, backbone = torch.float32, torch.bfloat16, reference.model.model
    yield Check("stock at k = 0", single, partial(stock_errors, reference, device), (1e-5, 1e-4))
    yield from trained(reference, device)
    for cache in CACHES:
        run: Any = partial(cache_errors, reference, device, cache)
        yield Check(f"generate, {cache} cache", single, run, (0.0, 0.0))
    dtype = half if isinstance(backbone, RecurrentBackbone) else single  # which their kernels want
    run = partial(train_errors, reference, device, dtype, arrange=in_one_row)
    yield Check("a packed row", dtype, run, TOLERANCES[dtype], backbone.refuses_packed_rows or "")
    for what in ("tower", "prefill", "training") if name == "molmo2" else ("tower",):
        for dtype in (half, single):
            run = partial(errors_without_sync, reference, device, dtype, what)
            yield Check(f"no sync, {what}", dtype, run, (0.0, 0.0))


def trained(reference: Reference, device: torch.device) -> Iterator[Check]:
    """Forward and gradients."""
    on_cuda, single, half = device.type == "cuda", torch.float32, (torch.float16, torch.bfloat16)
    compiler = "inductor" if on_cuda else "aot_eager"  # without kernels, the graphs alone
    slow = reference.model.model.refuses_packed_rows and "stock does not compile without flash-linear-attention"
    ways: list[tuple[str, Callable[[Any], Any], tuple[torch.dtype, ...], str]] = [
        ("sdpa", no_change, (single, *half) if on_cuda else half, ""),
        ("eager", partial(with_attention, "eager", "eager"), (single,), ""),
        ("gradient checkpointing", with_checkpointing, (single, torch.bfloat16), ""),
        (
            f"layers compiled, {compiler}",
            partial(with_compiled_layers, compiler),
            (single, half[1])[: 1 + on_cuda],
            slow or "",
        ),
    ]
    of_flash = "" if on_cuda else "needs a CUDA device"
    if not of_flash and importlib.util.find_spec("flash_attn") is None:
        of_flash = "flash_attn is not installed"
    # A mask with bidirectional vision tokens is none of flash attention's.
    text = "flash_attention_2" if reference.model.model.vision_is_causal else "sdpa"
    ways.append(("flash_attention_2", partial(with_attention, text, "flash_attention_2"), half, of_flash))
    of_flex = "" if on_cuda else "needs a CUDA device: PyTorch has no backward pass of it on a CPU"
    flex = partial(with_attention, "flex_attention", "sdpa")
    ways.append(("flex_attention", flex, (single, torch.bfloat16), of_flex))
    for name, change, dtypes, lacks in ways:
        for dtype in dtypes:
            run = partial(train_errors, reference, device, dtype, change)
            yield Check(name, dtype, run, TOLERANCES[dtype], lacks)
    if not on_cuda:
        run = partial(train_errors, reference, device, single, flex, with_gradients=False)
        yield Check("flex_attention, not compiled", single, run, TOLERANCES[single])
    yield Check("FSDP2, one process", single, partial(sharded_errors, reference, device), TOLERANCES[single])


def main() -> None:
    name = sys.argv.pop(1)
    if name not in CONFIGS:
        raise SystemExit(f"{name!r} is none of {', '.join(CONFIGS)}")
    arguments = parse(__doc__)
    compute_exactly()
    chosen = (
        check
        for check in checks(arguments.device, name, arguments.size)
        if not arguments.only or any(word in check.name for word in arguments.only)
    )
    run_checks(chosen, arguments.device, arguments.folder, describe(f"{name} by every path", arguments.device))


if __name__ == "__main__":
    main()
