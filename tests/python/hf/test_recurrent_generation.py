"""generate() with recurrent layers on our operators: the tokens of transformers' own code, in float32."""

import pytest
import torch

from monograph.hf.transformers.recurrent_layers import take_over
from support.recurrent_models import FAMILIES, build

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def pair(family):
    theirs, ours = build(family, 3).eval(), build(family, 3).eval()
    ours.set_attn_implementation("monograph")
    take_over(ours)
    return theirs, ours


def prompts(*lengths):
    """Padded on the left to the longest; token 0 is padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, 64, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    """One row longer than a chunk, one shorter than the convolution, and rows padded on the left.

    LFM2 with a bias is compared row by row: transformers' convolution sees the bias in padding.
    """
    theirs, ours = pair(family)
    for lengths in ((70,), (2,), (9, 9), (9, 4, 1)):
        batch = prompts(*lengths)
        got = ours.generate(**batch, **OPTIONS)[:, -12:]
        if family == "lfm2" and len(set(lengths)) > 1:
            want = torch.cat(
                [theirs.generate(row[row != 0][None], **OPTIONS)[:, -12:] for row in batch["input_ids"]]
            )
        else:
            want = theirs.generate(**batch, **OPTIONS)[:, -12:]
        assert torch.equal(got, want), lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_continues_a_row(family):
    """In pieces of several tokens and of one; the state is float32, the logits are those of the whole row."""
    _, ours = pair(family)
    ids = prompts(40)["input_ids"]
    with torch.no_grad():
        whole = ours(ids, use_cache=False).logits
        cache, parts = None, []
        for piece in ids.split([20, 1, 17, 1, 1], dim=1):
            result = ours(piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            parts.append(result.logits)
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-4, atol=2e-4)
    states = [s for layer in cache.layers for s in getattr(layer, "recurrent_states", {}).values()]
    assert all(s.dtype == torch.float32 for s in states if s is not None)


def test_padding_on_the_right_with_a_cache_is_refused():
    _, ours = pair("qwen3_5")
    batch = {name: value.flip(1) for name, value in prompts(9, 4).items()}
    with pytest.raises(ValueError, match="newest token is masked, with a cache: wanted padding on the left"):
        ours(**batch, use_cache=True)
