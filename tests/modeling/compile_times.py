"""How long `compile_parts` takes at the first training step of a tiny model, and how long the next step takes.

    python -m tests.modeling.compile_times --part decoder --layers 4 [--whole]

Real code is generated (inductor), so this takes minutes on a CPU; a test of its own would cost more than it tells.
"""

import argparse
import tempfile
import time

import torch
from torch._inductor.utils import fresh_cache

from tests.tiny import Part, Video, build_inputs, tiny_config, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(4), 9]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["vision", "decoder"], required=True)
    parser.add_argument("--layers", type=int, default=8, help="layers of that part (at least 6 of the tower)")
    parser.add_argument("--whole", action="store_true", help="one graph in place of one per kind of layer")
    arguments = parser.parse_args()
    vision, layers = arguments.part == "vision", arguments.layers
    config = tiny_config(
        feature_layers=(layers - 1, 1) if vision else (5, 1),
        num_hidden_layers=layers if vision else 6,
        text_overrides={"num_hidden_layers": 2 if vision else layers},
    )
    expected, model = tiny_model(config).train(), tiny_model(config).train()
    model.compile_parts(vision=vision, decoder=not vision, regional=not arguments.whole)
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
        for step in range(3):
            inputs = build_inputs(ROWS, config, seed=step, labels=True) | {"use_cache": False, "pruned_length": 70}
            start = time.perf_counter()
            loss = model(**inputs).loss
            between = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            torch.testing.assert_close(loss, expected(**inputs).loss, atol=1e-4, rtol=0)
            print(f"step {step}: forward {between - start:.2f} s, backward {end - between:.2f} s", flush=True)


if __name__ == "__main__":
    main()
