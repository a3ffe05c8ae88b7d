"""Only what the assistant says is learned, and the end of each of its turns."""

import copy

import pytest

from stts_hf.data.encoding import IGNORED, encode, render
from stts_hf.data.rows import RowError, Sample, read_row
from tests.stts_hf.training.samples import assistant, image_row, text_row, user, video_row

# ChatML as most models write it: every turn is closed, media stand where they were said.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THREE_TURNS = [
    user("What moves?", "video"),
    assistant("A red ball."),
    user("And here?", "image"),
    assistant("A blue box,\nI think."),
    user("Thank you."),
    assistant("Yes."),
]


def learned(processor, encoded):
    """Runs of learned tokens as texts."""
    runs: list[list[int]] = []
    last = None
    for place, label in enumerate(encoded.labels.tolist()):
        if label != IGNORED:
            if last != place - 1:
                runs.append([])
            runs[-1].append(label)
            last = place
    return [processor.tokenizer.decode(run) for run in runs]


def with_template(processor, template):
    changed = copy.copy(processor)
    changed.chat_template = template
    return changed


@pytest.fixture
def conversation(media):
    row = {"id": "r", "messages": THREE_TURNS, "videos": ["two.mp4"], "images": ["wide.png"]}
    return read_row(row | {"media_root": str(media)})


@pytest.mark.parametrize("template", [None, CHATML], ids=["molmo2", "chatml"])
def test_all_turns_of_the_assistant_and_nothing_else(processor, conversation, template):
    if template is not None:
        processor = with_template(processor, template)
    encoded = encode(processor, conversation)
    expected = ["A red ball.<|im_end|>", "A blue box,\nI think.<|im_end|>", "Yes.<|im_end|>"]
    assert learned(processor, encoded) == expected
    real = encoded.labels != IGNORED
    assert (encoded.labels[real] == encoded.input_ids[real]).all()


def test_a_text_holds_as_many_videos_as_the_model_takes(any_processor, media):
    videos = [str(media / "two.mp4"), str(media / "three.mp4")]
    sample = read_row({"id": "r", "messages": [user("Which?", "video", "video"), assistant("One.")], "videos": videos})
    if hasattr(any_processor, "max_videos"):
        with pytest.raises(
            RowError, match="Row 'r': videos: a text of this model holds at most 1 video, this one has 2"
        ):
            encode(any_processor, sample)
    else:
        assert len(encode(any_processor, sample).grids) == 2


def test_what_comes_before_an_answer_is_the_prompt_that_generate_gets(processor, media):
    """Token for token, with the video: learning and answering must not differ."""
    sample = read_row(video_row("r", media / "two.mp4"))
    encoded = encode(processor, sample)
    prompt = processor.apply_chat_template(sample.messages[:1], tokenize=False, add_generation_prompt=True)
    asked = processor(text=[prompt], videos=sample.videos)["input_ids"][0]
    first = int((encoded.labels != IGNORED).nonzero()[0])
    assert encoded.input_ids[:first].tolist() == asked


def test_a_token_across_the_border_is_not_learned(processor):
    """An answer that begins with a line break may be merged with the one before it; half of that token is prompt."""
    encoded = encode(processor, read_row(text_row("r", "\n\nYes.")))
    assert "".join(learned(processor, encoded)).lstrip("\n") == "Yes.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("part['text'] }}", "part['text'][:5] }}"), "words of answers"),
        (CHATML.replace("<|im_end|>\n{% endfor", "<END>{% endfor"), "no eos_token"),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if message['role'] == 'user' else '' }}"), "no eos_token"),
    ],
    ids=["other_words", "no_end_of_turn", "only_questions_end"],
)
def test_templates_that_hide_the_turns_are_refused(processor, conversation, template, said):
    changed = with_template(processor, template)
    messages = [message for message in conversation.messages if message["role"] != "subtitle"]
    with pytest.raises(ValueError, match=f"chat_template.*{said}"):
        render(changed, messages)
    with pytest.raises(RowError, match="Row 'r': chat_template"):
        encode(changed, conversation)


def test_roles_that_the_template_refuses_are_named(processor):
    sample = Sample("r", [user("a"), user("b"), assistant("c")], [], [])
    with pytest.raises(RowError, match="Row 'r': chat_template refuses messages of the roles user, user"):
        encode(processor, sample)


def test_answers_are_found_beside_words_of_the_template(processor, media):
    """In texts, and as answers of their own: what is learned is the same whatever the words are."""
    for answer in ("a", "assistant", "user", "\n", "Yes. Yes."):
        turns = [user("Is it an assistant?", "image"), assistant("a"), user("a"), assistant(f"{answer}.")]
        encoded = encode(processor, Sample("r", turns, [], [str(media / "wide.png")]))
        assert learned(processor, encoded)[0] == "a<|im_end|>"
        assert "".join(learned(processor, encoded)[1:]).endswith(f"{answer.strip()}.<|im_end|>")
    trimming = with_template(processor, CHATML.replace("part['text'] }}", "part['text'] | trim }}"))
    turns = [user("a"), assistant(" a\n"), user("c"), assistant("\nb ")]
    assert learned(trimming, encode(trimming, Sample("r", turns, [], []))) == ["a<|im_end|>", "b<|im_end|>"]
    styled = {"type": "text", "text": "b", "style": "demo"}
    turns = [user("a"), assistant("a"), user("c"), {"role": "assistant", "content": [styled, styled]}, user("Thanks.")]
    assert learned(processor, encode(processor, Sample("r", turns, [], []))) == ["a<|im_end|>", "b b<|im_end|>"]


def test_a_template_that_counts_turns_is_taken(processor, conversation):
    """Its rendering of the first turns does not begin that of all."""
    counting = CHATML.replace("{{ message['role'] }}\n", "{{ message['role'] }} of {{ messages | length }}\n")
    encoded = encode(with_template(processor, counting), conversation)
    assert learned(processor, encoded)[0] == "A red ball.<|im_end|>"


@pytest.mark.parametrize("token", ["<im_patch>", "<|video|>", "<|im_end|>"])
def test_control_tokens_in_a_text_are_refused(processor, token):
    with pytest.raises(RowError, match=rf"Row 'r': messages\[1\] holds '{token}'".replace("|", r"\|")):
        encode(processor, read_row(text_row("r", f"It is {token}.")))


def test_subtitles_and_images_are_not_learned(processor, media):
    rows = [
        video_row("r", media / "two.mp4") | {"subtitles": [{"start": 0, "end": 1, "text": "Hello"}]},
        image_row("r", media / "wide.png", media / "turned.jpg"),
    ]
    encoded = [encode(processor, read_row(row)) for row in rows]
    assert [learned(processor, one) for one in encoded] == [["A red ball.<|im_end|>"], ["Red<|im_end|>"]]
    assert "0.0 - 1.0 Hello<|im_start|>" in processor.tokenizer.decode(encoded[0].input_ids)
