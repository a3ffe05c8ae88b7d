"""The preset folders: laid out like Hub repositories, loadable as they lie, and of the sizes their names promise."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from stts_hf.checkpoints.checks import check_processor
from stts_hf.checkpoints.doctor import examine, needed_modules
from stts_hf.checkpoints.families import OWN, family_of_checkpoint
from tests.checkpoints import needs_num2words

PRESETS = ["stts-molmo2-4b", "stts-molmo2-8b", "stts-molmo2-o-7b", "stts-tiny"]
MOLMO2 = PRESETS[:3]
QWEN3_VL = ["stts-qwen3-vl-2b", "stts-qwen3-vl-4b", "stts-qwen3-vl-8b", "stts-qwen3-vl-30b-a3b", "stts-qwen3-vl-tiny"]
ALL = [
    *PRESETS,
    *QWEN3_VL,
    "stts-qwen2-5-vl-tiny",
    "stts-qwen3-vl-moe-tiny",
    "stts-qwen3-5-tiny",
    "stts-qwen3-5-moe-tiny",
    "stts-smolvlm-tiny",
]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("preset", ALL)
def test_code_is_linked_relatively_and_every_link_resolves_to_the_one_copy(hub_configs, preset):
    folder = hub_configs / preset
    files = sorted(folder.glob("*.py"))
    assert files
    for file in files:
        assert file.is_symlink(), file
        assert not file.readlink().is_absolute(), file
        assert file.resolve(strict=True).parent == hub_configs.parent / "modeling"
    assert not preset.endswith("tiny") or sum(file.stat().st_size for file in folder.iterdir()) < 10 * 2**20
    auto_map = read_json(folder / "config.json")["auto_map"]
    assert {file.stem for file in files} == needed_modules(folder, auto_map).keys()


@pytest.mark.parametrize("preset", [*ALL[:-1], pytest.param(ALL[-1], marks=needs_num2words)])
def test_the_doctor_misses_nothing_but_weights_and_tokenizer(hub_configs, preset):
    found = {name: [str(finding) for finding in findings] for name, findings in examine(hub_configs / preset).items()}
    missing = {name for name, findings in found.items() if findings}
    assert missing == (set() if preset.endswith("tiny") else {"weights", "tokenizer"})
    for name in missing:
        (finding,) = found[name]
        assert "holds neither" in finding or "tokenizer.json is missing" in finding


@pytest.mark.parametrize("preset", ALL)
def test_processor_cuts_frames_as_the_vision_config_expects(hub_configs, preset):
    family = family_of_checkpoint(hub_configs / preset)
    config = family.config.from_pretrained(hub_configs / preset)
    names = ("image_processor", "video_processor")
    parts = {name: getattr(family, name).from_pretrained(hub_configs / preset) for name in names}
    assert not list(check_processor(SimpleNamespace(**parts), config, family))
    if preset in MOLMO2:
        assert (parts["video_processor"].num_frames, parts["video_processor"].max_fps) == (64, 2)


# The released weights are float32 and 18.1, 32.3 and 28.9 GiB large; every wrong width or depth changes these counts.
@pytest.mark.parametrize(
    ("preset", "gibibytes", "text"),
    [
        ("stts-molmo2-4b", 18.1, 4.02e9),
        ("stts-molmo2-8b", 32.3, 7.57e9),
        ("stts-molmo2-o-7b", 28.9, 6.89e9),
        # As released 2.13, 4.44 and 8.77 billion; the text models are Qwen3-1.7B, 4B and 8B.
        ("stts-qwen3-vl-2b", 7.9, 1.72e9),
        ("stts-qwen3-vl-4b", 16.5, 4.02e9),
        ("stts-qwen3-vl-8b", 32.7, 7.57e9),
        ("stts-qwen3-vl-30b-a3b", 115.7, 30.22e9),  # as released 31.1 billion; the text model is Qwen3-30B-A3B
    ],
)
def test_parameters_are_those_of_the_released_model_and_the_scorer(hub_configs, preset, gibibytes, text):
    with torch.device("meta"):
        family = family_of_checkpoint(hub_configs / preset)
        model = family.model(family.config.from_pretrained(hub_configs / preset))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    scorer = sum(count for name, count in counts.items() if ".scorer." in name)
    assert round(4 * (sum(counts.values()) - scorer) / 2**30, 1) == gibibytes
    assert sum(p.numel() for p in model.model.language_model.parameters()) == pytest.approx(text, rel=0.002)
    # The pooler's four projections, then 2 D -> M -> M -> 1 (DESIGN item 2 and 3).
    d, m = (1024, 4096) if preset in ("stts-qwen3-vl-2b", "stts-qwen3-vl-4b") else (1152, 4304)
    assert scorer == 4 * (d**2 + d) + (2 * d * m + m) + (m**2 + m) + (m + 1)


@pytest.mark.parametrize("preset", ALL)
def test_cards_have_the_metadata_the_hub_reads(hub_configs, preset):
    card = (hub_configs / preset / "README.md").read_text()
    metadata = card.split("---\n")[1]
    for line in ("library_name: transformers", "pipeline_tag: video-text-to-text", "license: apache-2.0"):
        assert line in metadata
    model_type = read_json(hub_configs / preset / "config.json")["model_type"]
    assert all(tag in metadata for tag in OWN[model_type].tags)


def render(folder: Path, messages: list[dict], **kwargs) -> str:
    template = (folder / "chat_template.jinja").read_text()
    rendered = render_jinja_template(conversations=[messages], chat_template=template, **kwargs)
    return rendered[0][0]


def user(*content) -> dict:
    return {"role": "user", "content": list(content)}


def text(words: str, **extra) -> dict:
    return {"type": "text", "text": words, **extra}


VIDEO, IMAGE = {"type": "video", "video": "clip.mp4"}, {"type": "image", "image": "a.png"}
ANSWER = {"role": "assistant", "content": "A ball."}


# Written by hand from the released models' conversation format.
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(text("Why?"))], "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        ([user(text("Why?"), VIDEO)], "<|video|><|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        ([user(IMAGE, text("Why?"))], "<|image|><|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (
            [user(IMAGE, IMAGE, text("Why?"))],
            "Image 1<|image|>Image 2<|image|><|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "subtitle", "content": "0.0 - 1.0 Hello."}, user(VIDEO, text("Why?"))],
            "<|video|>0.0 - 1.0 Hello.<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user(VIDEO, text("What?")), ANSWER, user(text("Why?"))],
            "<|video|><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nA ball.<|im_end|>\n"
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user(text("a", style="vqa2"), text("b", style="video_count"))],
            "<|im_start|>user\nvqa2: a b<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["text", "video", "image", "images", "subtitle", "second_turn", "styles"],
)
def test_chat_template(hub_configs, messages, expected):
    assert render(hub_configs / "stts-tiny", messages, add_generation_prompt=True) == expected


def test_chat_template_refuses_two_user_turns_in_a_row(hub_configs):
    with pytest.raises(TemplateError, match="must alternate"):
        render(hub_configs / "stts-tiny", [user(text("a")), user(text("b"))])


@pytest.mark.parametrize("presets", [PRESETS, QWEN3_VL], ids=["molmo2", "qwen3_vl"])
def test_all_presets_of_a_backbone_share_one_chat_template(hub_configs, presets):
    assert len({(hub_configs / preset / "chat_template.jinja").read_text() for preset in presets}) == 1


# Written by hand from the conversation format of the released Qwen3-VL models.
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(text("Why?"))], "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (
            [{"role": "system", "content": "Be brief."}, user(IMAGE, VIDEO, text("Why?"))],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
            "<|vision_start|><|video_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user(VIDEO, text("What?")), ANSWER, user(text("Why?"))],
            "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
            "A ball.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user({"video": "clip.mp4"}, {"image": "a.png"}, {"text": "Why?"})],
            "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>Why?"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user({"type": "text", "text": "Why?", "image": None, "video": None})],  # as Arrow fills rows up
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["text", "system", "second_turn", "without_type", "filled_up"],
)
def test_chat_template_of_qwen3_vl(hub_configs, messages, expected):
    assert render(hub_configs / "stts-qwen3-vl-4b", messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize("part", [{"type": "audio", "audio": "a.wav"}, {"words": "Why?"}], ids=["audio", "unknown"])
def test_chat_template_of_qwen3_vl_drops_nothing_silently(hub_configs, part):
    with pytest.raises(TemplateError, match="must be a text, an image or a video, got"):
        render(hub_configs / "stts-qwen3-vl-4b", [user(part, text("Why?"))])


@pytest.mark.parametrize("preset", ALL)
def test_the_lines_of_a_card_load_everything_with_the_folders_code(hub_configs, preset):
    calls = re.findall(r"from_pretrained\(folder[^)]*\)", (hub_configs / preset / "README.md").read_text())
    assert len(calls) >= 2
    assert all("trust_remote_code=True" in call for call in calls)
