"""What a cache holds after turns that are padded, cropped, ended by errors or told of what is gone."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from stts_hf.modeling.cache_stts import CacheRecord
from tests.backbones import Backbone, Clip, Inputs, Rows, longer, prompt, without_vision

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
ROWS: Rows = [[3, Clip(4), 5], [2, Clip(2), 9]]


def build(backbone: Backbone, rows: Rows = ROWS) -> Inputs:
    return prompt(backbone.batch(rows, "left"))


def padded_row(backbone: Backbone) -> Inputs:
    """A row with a video and three columns of padding on its left."""
    inputs = build(backbone, [ROWS[0]])
    padding = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0}
    return inputs | {n: torch.nn.functional.pad(inputs[n], (3, 0), value=v) for n, v in padding.items()}


def second_turn(model: Any, inputs: Inputs, **settings: Any) -> tuple[Inputs, Any]:
    """The whole conversation of a second turn, and the cache of the first."""
    first = model.generate(**inputs, **GREEDY, **settings, return_dict_in_generate=True)
    return longer(inputs, first.sequences), first.past_key_values


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 2.0},
    "ngrams": {"no_repeat_ngram_size": 1},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("rows", ["padded_row", "batch"])
def test_a_second_turn_sees_the_whole_conversation(backbone, any_model, rows, settings):
    """Processors of logits read the ids of what is cached, too."""
    inputs, cache = second_turn(any_model, padded_row(backbone) if rows == "padded_row" else build(backbone))
    expected = any_model.generate(**inputs, **GREEDY, **settings)
    found = any_model.generate(**without_vision(inputs), **GREEDY, **settings, past_key_values=cache)
    assert torch.equal(found, expected)


def test_a_crop_of_hidden_columns_keeps_the_positions(backbone, any_model):
    inputs = build(backbone)
    cache = any_model(**inputs).past_key_values
    text = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    hidden = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    hidden[0, -2:] = 0
    any_model(input_ids=text, attention_mask=hidden, past_key_values=cache)
    cache.crop(-2)
    rest = {"input_ids": text[:, 2:], "attention_mask": torch.ones_like(hidden) * (hidden.cumsum(-1) > 0)}
    whole = inputs | {
        "input_ids": torch.cat([inputs["input_ids"], text], dim=-1),
        "attention_mask": rest["attention_mask"],
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 4)),
    }
    found = any_model(**rest, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, any_model(**whole).logits[:, -1], atol=1e-5, rtol=0)


class Interrupted(Exception):
    pass


class FailingStreamer:
    def __init__(self):
        self.puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            raise Interrupted

    def end(self) -> None:
        pass


def test_a_cache_that_an_error_left_half_filled_is_refused(backbone, any_model):
    cache = DynamicCache()
    with pytest.raises(Interrupted):
        any_model.generate(**build(backbone, [ROWS[0]]), **GREEDY, past_key_values=cache, streamer=FailingStreamer())
    with pytest.raises(ValueError, match="cannot be used again: an error ended the call that filled it"):
        any_model.generate(input_ids=torch.arange(1, 60)[None], **GREEDY, past_key_values=cache)


def test_a_cache_that_was_reset_begins_anew(backbone, any_model):
    cache = any_model(**build(backbone, [ROWS[0]])).past_key_values
    assert CacheRecord.of(cache) is not None
    cache.crop(-int(cache.get_seq_length()))
    assert CacheRecord.of(cache) is None


@pytest.mark.parametrize("through", ["forward", "generate"])
def test_grids_without_pixels_say_nothing(backbone, any_model, through):
    inputs, cache = second_turn(any_model, build(backbone, [ROWS[0]]))
    grids = {name: inputs[name] for name in any_model.model.video_inputs[1:]}
    if through == "generate":
        expected = any_model.generate(**inputs, **GREEDY)
        again = without_vision(inputs) | grids
        assert torch.equal(any_model.generate(**again, **GREEDY, past_key_values=cache), expected)
    else:
        note = CacheRecord.of(cache)
        assert note is not None
        text = without_vision(inputs) | {"input_ids": inputs["input_ids"][:, note.seen :]}
        assert any_model(**text, **grids, past_key_values=cache).logits.isfinite().all()


def test_labels_beside_a_cache_and_positions(backbone, any_model):
    cache = any_model(input_ids=torch.arange(1, 7)[None], use_cache=True).past_key_values
    ids = torch.tensor([[7, 8, 9]])
    outputs = any_model(
        input_ids=ids,
        labels=ids,
        position_ids=torch.arange(6, 9)[None],
        attention_mask=torch.ones(1, 9, dtype=torch.int64),
        past_key_values=cache,
    )
    logits = any_model(input_ids=torch.arange(1, 10)[None]).logits[:, 6:8]
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    torch.testing.assert_close(outputs.loss, expected, atol=1e-5, rtol=0)


def test_rows_that_are_said_to_hold_one_sample_do(backbone, any_model):
    if any_model.model.num_axes:
        pytest.skip("positions beside a video that do not count its tokens are refused")
    inputs = build(backbone, [ROWS[0]])
    length = inputs["input_ids"].shape[1]
    positions = torch.arange(length)[None] % (length - 3)  # they start over
    del inputs["attention_mask"]
    apart = any_model(**inputs, position_ids=positions).logits
    together = any_model(**inputs, position_ids=positions, packed_rows=False).logits
    assert not torch.allclose(apart, together, atol=1e-2)


def test_no_cache_beside_a_cache_is_refused(backbone, any_model):
    with pytest.raises(ValueError, match="`use_cache=False` came with `past_key_values`"):
        any_model.generate(**build(backbone, [ROWS[0]]), **GREEDY, past_key_values=DynamicCache(), use_cache=False)


def test_an_assistant_beside_a_cache_with_a_video_is_refused(backbone, any_model):
    inputs, cache = second_turn(any_model, build(backbone, [ROWS[0]]))
    with pytest.raises(ValueError, match="`assistant_model` came with `past_key_values`"):
        any_model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, assistant_model=any_model)


def test_lookup_beside_a_cache_and_padding_is_refused(backbone, any_model):
    inputs, cache = second_turn(any_model, padded_row(backbone))
    with pytest.raises(ValueError, match=r"`prompt_lookup_num_tokens` came .* hides padding"):
        any_model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, prompt_lookup_num_tokens=3)
