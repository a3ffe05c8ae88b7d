"""The preset folders: laid out like Hub repositories, loadable as they lie, and of the sizes their names promise."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoProcessor
from transformers.utils.chat_template_utils import render_jinja_template

from stts_hf.checkpoints.checks import check_processor
from stts_hf.checkpoints.doctor import examine, needed_modules
from stts_hf.checkpoints.families import OWN, family_of_checkpoint
from stts_hf.inference.requests import ask_about
from tests.checkpoints import needs_num2words

PRESETS = ["stts-molmo2-4b", "stts-molmo2-8b", "stts-molmo2-o-7b", "stts-tiny"]
MOLMO2 = PRESETS[:3]
QWEN3_VL = ["stts-qwen3-vl-2b", "stts-qwen3-vl-4b", "stts-qwen3-vl-8b", "stts-qwen3-vl-30b-a3b", "stts-qwen3-vl-tiny"]
QWEN3_5 = ["stts-qwen3-5-0.8b", "stts-qwen3-5-2b", "stts-qwen3-5-4b", "stts-qwen3-5-9b", "stts-qwen3-5-35b-a3b"]
SMOLVLM2 = ["stts-smolvlm2-256m", "stts-smolvlm2-500m", "stts-smolvlm2-2.2b"]
ALL = [
    *PRESETS,
    *QWEN3_VL,
    *QWEN3_5,
    *SMOLVLM2,
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
    assert not preset.endswith("tiny") or sum(file.stat().st_size for file in folder.iterdir()) < 6e6
    auto_map = read_json(folder / "config.json")["auto_map"]
    assert {file.stem for file in files} == needed_modules(folder, auto_map).keys()


@pytest.mark.parametrize(
    "preset", [pytest.param(some, marks=needs_num2words if "smolvlm" in some else ()) for some in ALL]
)
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
        # As released, but for multi-token prediction: 852,985,920, 2,213,241,664, 4,539,265,536 and 9,409,813,744.
        ("stts-qwen3-5-0.8b", 3.2, 0.752e9),
        ("stts-qwen3-5-2b", 8.2, 1.882e9),
        ("stts-qwen3-5-4b", 16.9, 4.206e9),
        ("stts-qwen3-5-9b", 35.1, 7.937e9),
        ("stts-qwen3-5-35b-a3b", 130.8, 34.152e9),  # 35,107,181,936 and a layer of that: 35,951,822,704 as released
        # 256,484,928 as in SmolVLM-256M; as released 507,482,304 and 2,246,784,880.
        ("stts-smolvlm2-256m", 1.0, 0.1346e9),
        ("stts-smolvlm2-500m", 1.9, 0.3619e9),
        ("stts-smolvlm2-2.2b", 8.4, 1.7116e9),
    ],
)
def test_parameters_are_those_of_the_released_model_and_the_scorer(hub_configs, preset, gibibytes, text):
    with torch.device("meta"):
        family = family_of_checkpoint(hub_configs / preset)
        model = family.model(family.config.from_pretrained(hub_configs / preset))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    scorer = sum(count for name, count in counts.items() if ".scorer." in name)
    assert round(4 * (sum(counts.values()) - scorer) / 2**30, 1) == gibibytes
    assert sum(p.numel() for p in model.get_decoder().parameters()) == pytest.approx(text, rel=0.002)
    # The pooler's four projections, then 2 D -> M -> M -> 1 (DESIGN item 2 and 3).
    d = model.config.vision_config.hidden_size
    m = {768: 3072, 1024: 4096, 1152: 4304}[d]
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


@pytest.mark.parametrize(
    "presets", [PRESETS, QWEN3_VL, QWEN3_5, SMOLVLM2], ids=["molmo2", "qwen3_vl", "qwen3_5", "smolvlm2"]
)
def test_all_presets_of_a_backbone_share_one_chat_template(hub_configs, presets):
    templates = [(hub_configs / preset / "chat_template.jinja").read_text() for preset in presets]
    # Of Qwen3.5, 0.8B and 2B think where they are asked to, 4B and 9B where they are not asked not to.
    assert len({template.replace("thinking is not false", "thinking is true") for template in templates}) == 1


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
@pytest.mark.parametrize("preset", ["stts-qwen3-vl-4b", "stts-qwen3-5-4b", "stts-smolvlm2-500m"])
def test_chat_template_drops_nothing_silently(hub_configs, preset, part):
    with pytest.raises(TemplateError, match="must be a text, an image or a video, got"):
        render(hub_configs / preset, [user(part, text("Why?"))])


OPEN, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
SYSTEM = {"role": "system", "content": " Be brief.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nRound.\n</think>\n\nA ball."}
ASKED = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"


# Written by hand from the conversation format of the released Qwen3.5 models.
@pytest.mark.parametrize(
    ("size", "messages", "options", "expected"),
    [
        ("4b", [user(VIDEO, text("What?\n"))], {}, ASKED + OPEN),
        ("9b", [user(VIDEO, text("What?"))], {"enable_thinking": False}, ASKED + EMPTY),
        ("2b", [user(VIDEO, text("What?"))], {}, ASKED + EMPTY),
        ("0.8b", [user(VIDEO, text("What?"))], {"enable_thinking": True}, ASKED + OPEN),
        ("4b", [SYSTEM, user(VIDEO, text("What?"))], {}, f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}{OPEN}"),
        (
            "4b",
            [user(VIDEO, text("What?")), THOUGHT, user(text("Why?"))],  # thoughts about earlier questions are left out
            {},
            f"{ASKED}A ball.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{OPEN}",
        ),
        (
            "4b",
            [user(VIDEO, text("What?")), THOUGHT],
            {"add_generation_prompt": False},
            ASKED + "<think>\nRound.\n</think>\n\nA ball.<|im_end|>\n",
        ),
        (
            "4b",
            [user(VIDEO, text("What?")), ANSWER | {"reasoning_content": "Round."}],
            {"add_generation_prompt": False},
            ASKED + "<think>\nRound.\n</think>\n\nA ball.<|im_end|>\n",
        ),
        (
            "4b",
            [user(VIDEO, text("What?")), ANSWER],
            {"add_generation_prompt": False},
            f"{ASKED}{EMPTY}A ball.<|im_end|>\n",
        ),
    ],
    ids=["thinks", "off", "silent", "on", "system", "second_turn", "thought", "reasoning_content", "no_thought"],
)
def test_chat_template_of_qwen3_5(hub_configs, size, messages, options, expected):
    options = {"add_generation_prompt": True} | options
    assert render(hub_configs / f"stts-qwen3-5-{size}", messages, **options) == expected


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([SYSTEM], {}, "must hold one of the user"),
        ([user(text("a"))], {"tools": [{"name": "f"}]}, "knows no tools"),
        ([user(text("a")), SYSTEM], {}, "must be of the user or assistant, .* got system"),
        ([user(text("a")), {"role": "tool", "content": "b"}], {}, "got tool"),
        ([{"role": "system", "content": [VIDEO]}, user(text("a"))], {}, "must be text, got a part of the type video"),
    ],
    ids=["no_user", "tools", "late_system", "tool", "video_of_system"],
)
def test_chat_template_of_qwen3_5_refuses(hub_configs, messages, options, error):
    with pytest.raises(TemplateError, match=error):
        render(hub_configs / "stts-qwen3-5-4b", messages, **options)


# Written by hand from the conversation format of the released SmolVLM2 models.
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("What?", " What?"),
        ([VIDEO, text("What? ")], " <video>What? "),
        ([{"type": "image"}, text("What?")], "<image>What?"),
    ],
    ids=["string", "video", "image"],
)
def test_chat_template_of_smolvlm2(hub_configs, content, expected):
    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": content}]
    rendered = render(hub_configs / "stts-smolvlm2-500m", messages, add_generation_prompt=True)
    assert rendered == f"<|im_start|>System: Hm.<end_of_utterance>\nUser:{expected}<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize(
    ("options", "error"),
    [({"role": "tool"}, "got tool"), ({"tools": [{"name": "f"}]}, "knows no tools")],
    ids=["role", "tools"],
)
def test_chat_template_of_smolvlm2_refuses(hub_configs, options, error):
    message = {"role": options.pop("role", "user"), "content": "a"}
    with pytest.raises(TemplateError, match=error):
        render(hub_configs / "stts-smolvlm2-500m", [message], **options)


@pytest.mark.parametrize("preset", ALL)
def test_the_lines_of_a_card_load_everything_with_the_folders_code(hub_configs, preset):
    calls = re.findall(r"from_pretrained\(folder[^)]*\)", (hub_configs / preset / "README.md").read_text())
    assert len(calls) >= 2
    assert all("trust_remote_code=True" in call for call in calls)


@pytest.mark.parametrize("size", ["2b", "4b"])
def test_qwen3_5_is_asked_as_it_is_trained_behind_an_empty_thought(hub_configs, size):
    processor = AutoProcessor.from_pretrained(hub_configs / "stts-qwen3-5-tiny")
    processor.chat_template = (hub_configs / f"stts-qwen3-5-{size}" / "chat_template.jinja").read_text()
    asked = ask_about(processor, "clip.mp4", "What?")
    trained = processor.apply_chat_template([user(VIDEO, text("What?")), ANSWER], tokenize=False)
    assert asked.tail.endswith(EMPTY)
    assert trained.startswith(asked.head + asked.tail)
