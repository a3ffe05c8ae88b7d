"""Peak memory of converting a large checkpoint, measured from outside; the test run does it with a smaller one.

    python -m tests.stts_hf.checkpoints.convert_memory --form shards        # or unsharded, sharded; about 3.2 GB each

Makes a checkpoint of random weights in a temporary folder (`--folder` says where; needs twice its size), converts it in
a process of its own, and prints a JSON line: its size, the peak memory of that process (`RssAnon` of Linux, looked at
every 5 ms; pages of mapped files go again where memory is short), what of that were Python, PyTorch and transformers
alone, and the seconds it took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml  # type: ignore[import-untyped]
from safetensors.torch import save_file

from stts_hf.checkpoints.checks import empty_model
from stts_hf.modeling.configuration_stts import STTSConfig
from tests.fixture_files import checkpoint_fixtures
from tests.stts_hf.checkpoints.convert_files import write_base
from tests.stts_hf.checkpoints.original_weights import read_original
from tests.tiny import tiny_config

WIDTH, HIDDEN, HEAD = 2048, 8192, 128
HEADS, KEY_VALUE_HEADS = 16, 8
NUM_FILES = 4
MEASURED = """
import json, re, sys, threading, time
from stts_hf.checkpoints.convert import convert_checkpoint
now = lambda: int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
source, destination, base = sys.argv[1:]
seen, started = [now()], time.perf_counter()
def look():
    while True:
        seen.append(now())
        time.sleep(0.005)
threading.Thread(target=look, daemon=True).start()
result = convert_checkpoint(source, destination, base=base or None, max_shard_size="100MB")
print(json.dumps({"bytes": result.num_bytes, "peak": max(seen), "imports_alone": seen[0],
                  "seconds": round(time.perf_counter() - started, 1)}))
"""


def write_shards(folder: Path, layers: int) -> None:
    """A Molmo2 folder in several files."""
    write_base(folder, side=18)
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD,
    }
    settings = tiny_config(text_overrides=text).to_dict()
    settings["adapter_config"]["text_hidden_size"] = WIDTH
    weights = empty_model(STTSConfig.from_dict(settings)).state_dict()
    shapes = {name: weight.shape for name, weight in weights.items() if ".scorer." not in name}
    settings["model_type"] = "molmo2"
    settings["vision_config"] = {
        name: value
        for name, value in settings["vision_config"].items()
        if name in ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size", "head_dim")
        or name.endswith("_heads")
    }
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    weight_map: dict[str, str] = {}
    for index in range(NUM_FILES):
        file = f"model-{index + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        names = list(shapes)[index::NUM_FILES]
        weight_map |= dict.fromkeys(names, file)
        save_file({name: torch.randn(shapes[name]) for name in names}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_training_checkpoint(folder: Path, layers: int, sharded: bool) -> None:
    """The reference training checkpoint with a larger text model."""
    reference = checkpoint_fixtures()[0] / "unsharded"
    config = yaml.safe_load((reference / "config.yaml").read_text())
    config["model"]["llm"] |= {
        "d_model": WIDTH,
        "n_heads": HEADS,
        "n_kv_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD,
        "n_layers": layers,
        "mlp_hidden_size": 2 * HIDDEN,
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    weights = {
        name: tensor
        for name, tensor in read_original(reference).items()
        if name.startswith("vision_backbone") and "image_projector" not in name
    }
    vision_width = weights["vision_backbone.image_vit.patch_embedding.bias"].shape[0]
    shapes = {
        "vision_backbone.image_projector.w1.weight": (HIDDEN, vision_width),
        "vision_backbone.image_projector.w3.weight": (HIDDEN, vision_width),
        "vision_backbone.image_projector.w2.weight": (WIDTH, HIDDEN),
        "transformer.wte.embedding": (512, WIDTH),
        "transformer.wte.new_embedding": (128, WIDTH),
        "transformer.ln_f.weight": (WIDTH,),
    }
    for layer in range(layers):
        block = {
            "att_proj": (WIDTH + 2 * KEY_VALUE_HEADS * HEAD, WIDTH),
            "attn_out": (WIDTH, WIDTH),
            "ff_proj": (2 * HIDDEN, WIDTH),
            "ff_out": (WIDTH, HIDDEN),
            "attn_norm": (WIDTH,),
            "ff_norm": (WIDTH,),
            "q_norm": (HEAD,),
            "k_norm": (HEAD,),
        }
        shapes |= {f"transformer.blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    weights |= {name: torch.randn(shape) for name, shape in shapes.items()}
    if sharded:
        prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
        dcp.save(prefixed, checkpoint_id=folder / "model_and_optim", no_dist=True)
    else:
        torch.save(weights, folder / "model.pt")


def measure(folder: Path, form: str, layers: int) -> dict[str, float]:
    """Makes and converts a checkpoint in `folder`; returns `bytes`, `peak`, `imports_alone` and `seconds`."""
    base = ""
    if form == "shards":
        write_shards(folder / "source", layers)
    else:
        base = str(write_base(folder / "base"))
        write_training_checkpoint(folder / "source", layers, form == "sharded")
    command = [sys.executable, "-c", MEASURED, str(folder / "source"), str(folder / "new"), base]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak memory of a conversion.")
    parser.add_argument("--form", choices=("shards", "unsharded", "sharded"), default="shards")
    parser.add_argument("--layers", type=int, default=12, help="of the text model, about 0.27 GB each (default: 12)")
    parser.add_argument("--folder", help="where to make the temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        print(json.dumps(measure(Path(name), arguments.form, arguments.layers)))


if __name__ == "__main__":
    main()
