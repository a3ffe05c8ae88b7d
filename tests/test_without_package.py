"""The tiny checkpoint of each backbone, loaded, asked and saved by its remote code in a process without the package."""

import inspect
import json

import pytest
import transformers
from packaging.version import Version

from stts_hf import STTSProcessor
from tests.checkpoints import TINIES, TINY, digests
from tests.clips import write_clip

FROM_FILE = {
    "molmo2": True,
    "qwen3_vl": False,
    "qwen2_5_vl": False,
}  # native processors read files with torchcodec alone
PRESETS = ["molmo2-4b", "molmo2-8b", "molmo2-o-7b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"]
PRESETS += ["qwen3-5-0.8b", "qwen3-5-9b", "qwen3-5-35b-a3b"]
# SmolVLM2 needs transformers 5.23.
SMOLVLM2 = ["smolvlm2-256m", "smolvlm2-2.2b"] if Version(transformers.__version__) >= Version("5.23") else []


def answer(folder, clip, auto_class, saved=None, **options):
    """What a checkpoint answers about a file, or about frames where there is none; `saved` gets a copy of it."""
    import torch
    import transformers

    model = getattr(transformers, auto_class).from_pretrained(folder, **options).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder, **options)
    content = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    frames = torch.randint(0, 256, (6, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    metadata = {"fps": 2.0, "frames_indices": list(range(6)), "total_num_frames": 6}
    video = {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
    inputs = processor(text=[prompt], **({"videos": [clip]} if clip else video), return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, pruning_ratio=0.5)
    if saved:
        model.save_pretrained(saved)
        processor.save_pretrained(saved)
    return {
        "class": type(model).__name__,
        "prompt": inputs["input_ids"].tolist(),
        "tokens": tokens.tolist(),
        "keep_mask": model(**inputs, pruning_ratio=0.5).keep_mask[0].tolist(),
    }


REMOTELY = """
import json
import transformers
checkpoints, presets, clip, output = json.loads(sys.argv[1])
remote = {"trust_remote_code": True}
found = {}
for name, (folder, from_file) in checkpoints.items():
    ask = [clip if from_file else None, "AutoModelForImageTextToText"]
    once, twice = f"{output}/{name}-once", f"{output}/{name}-twice"
    found[name] = [answer(folder, ask[0], auto, **remote) for auto in ("AutoModel", "AutoModelForMultimodalLM")]
    found[name] += [answer(folder, *ask, saved=once, **remote), answer(once, *ask, saved=twice, **remote)]
pipe = transformers.pipeline("image-text-to-text", model=checkpoints["molmo2"][0], device="cpu", **remote)
content = [{"type": "video", "video": clip}, {"type": "text", "text": "What moves?"}]
said = pipe(text=[{"role": "user", "content": content}], max_new_tokens=4, do_sample=False, return_full_text=False)
configs = [type(transformers.AutoConfig.from_pretrained(folder, **remote)).__name__ for folder in presets]
print(json.dumps([found, said[0]["generated_text"], configs]))
"""


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(write_clip(tmp_path_factory.mktemp("clip") / "clip.mp4", 20, fps=20))


@pytest.mark.slow
def test_remote_code_answers_saves_and_loads_as_the_package_does(hub_configs, clip, run_without_package, tmp_path):
    checkpoints = {name: (str(folder), FROM_FILE[name]) for name, folder in TINIES.items()}
    presets = [str(hub_configs / f"stts-{preset}") for preset in PRESETS + SMOLVLM2]
    arguments = json.dumps([checkpoints, presets, clip, str(tmp_path)])
    printed = run_without_package(inspect.getsource(answer) + REMOTELY, arguments)
    found, said, configs = json.loads(printed.splitlines()[-1])
    for name, (folder, from_file) in checkpoints.items():
        expected = answer(folder, clip if from_file else None, "AutoModelForImageTextToText")
        assert found[name] == [expected] * 4, name
        masks = expected["keep_mask"]
        blocks = len(masks) * len(masks[0])
        assert all(masks[0])
        assert sum(map(sum, masks)) == blocks - blocks // 2
        once, twice = (tmp_path / f"{name}-{copy}" for copy in ("once", "twice"))
        assert digests(once, "*") == digests(twice, "*")
        assert digests(once, "*.py") == digests(TINIES[name], "*.py")
        assert not any(file.is_symlink() for file in once.iterdir())
    tokens = answer(str(TINY), clip, "AutoModelForImageTextToText")
    [prompt], [tokens] = tokens["prompt"], tokens["tokens"]
    assert said == STTSProcessor.from_pretrained(TINY).decode(tokens[len(prompt) :], skip_special_tokens=True)
    expected = ["STTSConfig"] * 3 + ["STTSQwen3VLConfig"] * 3 + ["STTSQwen3VLMoeConfig"]
    assert configs == expected + ["STTSQwen3_5Config"] * 2 + ["STTSQwen3_5MoeConfig"] + ["STTSSmolVLMConfig"] * len(
        SMOLVLM2
    )
