"""`stts-hf run VIDEO "question"`: answers a question about a video and shows what was dropped, and what that saved."""

import argparse
import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stts_hf.cli.devices import choose_device
from stts_hf.cli.errors import CommandError, one_line

HELP = "answer a question about a video, and draw which video tokens were dropped"
SELECTORS = ("scorer", "cosine", "random")
TINY = Path("hub_configs") / "stts-tiny"
SHEET_FRAME_WIDTH = 480


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("video", metavar="VIDEO", help="path of a video file")
    parser.add_argument("question", metavar="QUESTION", help="what to ask about it")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH_OR_REPO",
        help="folder or Hub repository of an STTS checkpoint; its own code runs (trust_remote_code). "
        "Default: stts-tiny of a source checkout, a model for tests",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--pruning-ratio", type=float, metavar="K", help="share of video tokens to drop, 0 to 1")
    parser.add_argument("--selector", choices=SELECTORS, help="what ranks the tokens; default: the checkpoint's")
    parser.add_argument("--num-frames", type=int, metavar="N", help="most frames to look at; default: the checkpoint's")
    parser.add_argument(
        "--test-time-scaling", action="store_true", help="look at 1 / (1 - K) times as many frames for the same tokens"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument("--output", type=Path, default=Path("contact_sheet.png"), help="where to write the picture")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed passes per variant; 0: no timing")


def execute(arguments: argparse.Namespace) -> None:
    """Runs the command; raises `CommandError` for what the user got wrong."""
    check_arguments(arguments)
    checkpoint = find_checkpoint(arguments.checkpoint)
    with stage("Loading PyTorch and transformers"):
        import torch

    device = choose_device(arguments.device)
    config, processor = load_processor(checkpoint, arguments)
    ratio = config.vision_config.pruning_ratio if arguments.pruning_ratio is None else arguments.pruning_ratio

    # Before the weights, which may take minutes: a file that cannot be read says so now.
    with stage(f"Decoding {arguments.video}"):
        inputs, metadata = prepare(processor, arguments, ratio)
    with stage(f"Loading {checkpoint} on {device}"):
        model = load_model(checkpoint, config, device, arguments)
        inputs = inputs.to(device, dtype=model.dtype)

    with stage(f"Prompt with {ratio:.0%} of the video tokens dropped"), torch.no_grad():
        outputs = model(**inputs, pruning_ratio=ratio, logits_to_keep=1)
    with stage("Answering"):
        answer = generate(model, processor, inputs, ratio, arguments.max_new_tokens)
    times = measure(model, inputs, ratio, arguments.repeats) if arguments.repeats else {}

    grid = tuple(inputs["video_grids"][0, 1:].tolist())
    keep_mask, timestamps = outputs.keep_mask[0].cpu(), list(metadata.timestamps)
    with stage(f"Drawing {arguments.output}"):
        draw(arguments, keep_mask, grid, timestamps, outputs.token_scores[0].float().cpu())

    report(arguments, answer, metadata, keep_mask, inputs["input_ids"].shape[1], times)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses, before anything slow happens, what can be refused by then."""
    video = Path(arguments.video)
    if not video.is_file():
        problem = "is a folder" if video.is_dir() else "does not exist"
        raise CommandError(f"VIDEO {arguments.video} {problem}; pass the path of a video file")
    ratio = arguments.pruning_ratio
    if ratio is not None and not 0 <= ratio <= 1:  # NaN fails too
        raise CommandError(f"--pruning-ratio is {ratio}, but must be from 0 (drop nothing) to 1 (drop all)")
    if arguments.test_time_scaling and ratio == 1:
        raise CommandError("--test-time-scaling needs a --pruning-ratio below 1: at 1 no number of frames is enough")
    for name, least in (("num_frames", 1), ("max_new_tokens", 1), ("repeats", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise CommandError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
    if not arguments.question.strip():
        raise CommandError("QUESTION is empty; ask something about the video")
    if arguments.output.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise CommandError(f"--output {arguments.output} must end in .png, .jpg or .webp")
    folder = arguments.output.resolve().parent
    if not folder.is_dir():
        raise CommandError(f"--output {arguments.output} lies in a folder that does not exist; create {folder} first")
    if arguments.output.is_dir() or (arguments.output.exists() and not os.access(arguments.output, os.W_OK)):
        raise CommandError(
            f"--output {arguments.output} is there already and cannot be written over; name another file"
        )
    if not os.access(folder, os.W_OK):
        raise CommandError(f"--output {arguments.output} cannot be written: no permission in {folder}")


def find_checkpoint(checkpoint: str | None) -> str:
    """Returns the checkpoint asked for, or the tiny one where the command runs from a source checkout."""
    if checkpoint is not None:
        looks_like_a_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        path = Path(checkpoint).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise CommandError(f"--checkpoint {checkpoint} holds no config.json, so it is not a checkpoint")
            if not any(path.glob("*.safetensors")):
                raise CommandError(f"--checkpoint {checkpoint} holds no weights (*.safetensors)")
            return str(path)
        if looks_like_a_path or path.exists():
            raise CommandError(f"--checkpoint {checkpoint} is not a folder; pass a checkpoint's folder or user/name")
        return checkpoint
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / TINY / "config.json").is_file():
            folder = root / TINY
            note("No --checkpoint: using stts-tiny, which knows nothing about videos but drops what stands still")
            return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    raise CommandError(
        f"--checkpoint is needed: the folder or Hub name of an STTS checkpoint. (Only a source checkout has {TINY}.)"
    )


def load_processor(checkpoint: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Returns configuration and processor, by the checkpoint's own code."""
    from transformers import AutoConfig, AutoProcessor

    with loading(checkpoint):
        config = AutoConfig.from_pretrained(checkpoint, **remote_code(arguments))
        if not hasattr(config, "vision_config") or not hasattr(config.vision_config, "pruning_ratio"):
            raise CommandError(
                f"--checkpoint {checkpoint} is a {config.model_type!r} model, but must be an STTS checkpoint"
            )
        if arguments.selector is not None:
            config.vision_config.selector = arguments.selector
        return config, AutoProcessor.from_pretrained(checkpoint, **remote_code(arguments))


def load_model(checkpoint: str, config: Any, device: Any, arguments: argparse.Namespace) -> Any:
    """Returns the model, by the checkpoint's own code."""
    from transformers import AutoModelForMultimodalLM

    with loading(checkpoint):
        model = AutoModelForMultimodalLM.from_pretrained(
            checkpoint, config=config, dtype=arguments.dtype, **remote_code(arguments)
        )
    return model.to(device).eval()


def remote_code(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"trust_remote_code": True, "revision": arguments.revision or "main"}


@contextlib.contextmanager
def loading(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(f"--checkpoint {checkpoint} cannot be loaded: {one_line(error)}") from error


def prepare(processor: Any, arguments: argparse.Namespace, ratio: float) -> tuple[Any, Any]:
    """Returns the model's inputs and the metadata of the frames that were sampled."""
    content = [{"type": "video", "video": arguments.video}, {"type": "text", "text": arguments.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    options: dict[str, Any] = {"return_metadata": True}
    if arguments.num_frames is not None:
        options["num_frames"] = arguments.num_frames
    if arguments.test_time_scaling:
        options.update(test_time_scaling=True, pruning_ratio=ratio)
    try:
        inputs = processor(text=[prompt], videos=[arguments.video], return_tensors="pt", **options)
    except (ValueError, OSError) as error:
        raise CommandError(one_line(error)) from error
    return inputs, inputs.pop("video_metadata")[0]


def generate(model: Any, processor: Any, inputs: Any, ratio: float, max_new_tokens: int) -> str:
    """Returns the greedy answer, and shows its tokens being counted."""
    from tqdm import tqdm
    from transformers.generation.streamers import BaseStreamer

    class Counter(BaseStreamer):
        def __init__(self):
            self.bar = tqdm(total=max_new_tokens, unit="token", leave=False, file=sys.stderr)
            self.prompt_seen = False

        def put(self, value):
            # The first call brings the prompt.
            self.bar.update(1 if self.prompt_seen else 0)
            self.prompt_seen = True

        def end(self):
            self.bar.close()

    output = model.generate(
        **inputs, pruning_ratio=ratio, max_new_tokens=max_new_tokens, do_sample=False, streamer=Counter()
    )
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def measure(model: Any, inputs: Any, ratio: float, repeats: int) -> dict[str, Any]:
    """Returns the prompt's times with stock Molmo2, with nothing dropped and with `ratio` dropped."""
    from tqdm import tqdm

    from stts_hf.benchmark.stock import stock_twin
    from stts_hf.cli.timing import time_prefills

    variants = {
        "stock Molmo2": (stock_twin(model), dict(inputs)),
        "STTS, none dropped": (model, {**inputs, "pruning_ratio": 0.0}),
    }
    if ratio > 0:
        variants[f"STTS, {ratio:.0%} dropped"] = (model, {**inputs, "pruning_ratio": ratio})
    passes = len(variants) * (repeats + 1)
    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        tqdm(total=passes, desc="  Timing", unit="pass", leave=False, file=sys.stderr) as bar,
    ):
        return time_prefills(variants, repeats, on_pass=bar.update)


def draw(arguments: argparse.Namespace, keep_mask: Any, grid: Any, timestamps: list[float], scores: Any) -> None:
    """Decodes the sampled frames once more, small and not squashed, and writes the contact sheet."""
    import numpy as np
    from PIL import Image

    from stts_hf.modeling.video_decoding_stts import decode_video
    from stts_hf.visualize.contact_sheet import contact_sheet

    def shrink(frame: np.ndarray) -> np.ndarray:
        image = Image.fromarray(frame)
        image.thumbnail((SHEET_FRAME_WIDTH, SHEET_FRAME_WIDTH))
        return np.asarray(image)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged files were warned of the first time
        frames, _ = decode_video(arguments.video, lambda _: timestamps, shrink)
    sheet = contact_sheet(np.stack(frames), keep_mask, grid, timestamps, scores, title=arguments.question)
    try:
        sheet.save(arguments.output)
    except OSError as error:
        raise CommandError(f"--output {arguments.output} cannot be written: {one_line(error, 120)}") from error


def report(
    arguments: argparse.Namespace, answer: str, metadata: Any, keep_mask: Any, prompt_length: int, times: dict[str, Any]
) -> None:
    """Prints the result on stdout."""
    frames, total = len(keep_mask), keep_mask.numel()
    kept = int(keep_mask.sum())
    first, last = metadata.timestamps[0], metadata.timestamps[-1]
    lines = [
        ("question", arguments.question),
        ("answer", answer or "(empty)"),
        ("frames", f"{frames} sampled from {first:.1f} s to {last:.1f} s of a video of {metadata.duration:.1f} s"),
        ("video tokens", f"{kept} of {total} kept ({1 - kept / total:.1%} dropped)"),
        ("prompt", f"{prompt_length - total + kept} of {prompt_length} tokens reach the language model"),
    ]
    for label, value in lines:
        print(f"{label + ':':<14}{value}")
    if times:
        print()
        print(f"{'median, ms':<22}{'vision tower':>20}{'LLM prefill':>20}{'pixels to logits':>20}")
        stock = next(iter(times.values()))
        for name, measured in times.items():
            cells = (
                f"{value:.1f} ({base / value:.2f}x)" if value > 0 else "-"
                for value, base in zip(vars(measured).values(), vars(stock).values(), strict=True)
            )
            print(f"{name:<22}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\ncontact sheet: {arguments.output}")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Says on stderr what is being done, and how long it took."""
    note(f"{name} ...")
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    if math.floor(seconds):
        note(f"  done in {seconds:.1f} s")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
