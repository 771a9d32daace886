"""`generate` after mg.optimize: equal prompts go through the model once, and the tokens are the same."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import monograph as mg
from monograph.hf.generation import generate, prefill
from monograph.nn import replace_linears

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}


def model_of(kind):
    torch.manual_seed(0)
    if kind == "mistral":  # every layer has a window
        model = MistralForCausalLM(MistralConfig(sliding_window=6, **SIZES))
    else:  # full and sliding layers, a soft-cap is left out
        model = Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=6, head_dim=16, **SIZES))
    model = model.to(torch.bfloat16)
    replace_linears(model, "nf4")
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return mg.optimize(model).eval()


def prompts():
    """Three prompts of two lengths, the rows of each beside each other and apart."""
    torch.manual_seed(1)
    rows = torch.randint(2, 90, (3, 11))
    mask = torch.ones_like(rows)
    rows[1, :4], mask[1, :4] = 0, 0
    order = torch.tensor([0, 0, 1, 2, 1, 2, 0])
    return rows[order], mask[order]


def drawn(model, ids, mask, **options):
    torch.manual_seed(2)
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **sampling | options)


def alone(model, *arguments, **options):
    """The same by transformers' own way through the prompts."""
    base = model.get_base_model()
    kept = {name: base.__dict__.pop(name) for name in ("generate", "_prefill")}
    try:
        return drawn(model, *arguments, **options)
    finally:
        base.__dict__.update(kept)


def rows_seen(model, run):
    seen = []
    embeddings = model.get_base_model().get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, asked: seen.append(tuple(asked[0].shape)))
    result = run()
    hook.remove()
    return result, seen


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_equal_prompts_are_computed_once_and_give_the_same_tokens(kind):
    model, (ids, mask) = model_of(kind), prompts()
    got, seen = rows_seen(model, lambda: drawn(model, ids, mask))
    want, seen_alone = rows_seen(model, lambda: alone(model, ids, mask))
    assert torch.equal(got, want)
    assert len({tuple(row) for row in got[:, 11:].tolist()}) > 3  # completions of a prompt are not alike
    assert seen[0] == (3, 11)
    assert seen_alone[0] == (7, 11)
    assert set(seen[1:]) == {(7, 1)}


def test_several_completions_by_number_share_their_prompt():
    model, (ids, mask) = model_of("mistral"), prompts()
    few = (ids[:3:2], mask[:3:2])
    got, seen = rows_seen(model, lambda: drawn(model, *few, num_return_sequences=3))
    assert torch.equal(got, alone(model, *few, num_return_sequences=3))
    assert seen[:2] == [(2, 11), (6, 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_more_than_tokens_is_left_to_transformers(options):
    model, (ids, mask) = model_of("mistral"), prompts()
    options = {"max_new_tokens": 3, **options}
    got, seen = rows_seen(model, lambda: drawn(model, ids, mask, **options))
    want = alone(model, ids, mask, **options)
    tokens = [found.sequences if hasattr(found, "sequences") else found for found in (got, want)]
    assert torch.equal(*tokens)
    assert seen[0][0] == 7


def test_an_adapter_that_changed_is_read_anew():
    model, (ids, mask) = model_of("mistral"), prompts()
    before = drawn(model, ids, mask)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(-2)  # no version counter moves
    after = drawn(model, ids, mask)
    assert not torch.equal(before, after)
    assert torch.equal(after, alone(model, ids, mask))


def test_copies_and_pickles_generate_with_their_own_weights():
    model, (ids, mask) = model_of("mistral"), prompts()
    want = drawn(model, ids, mask)
    copied = copy.deepcopy(model)
    base = copied.get_base_model()
    assert (base.generate.__func__, base.generate.__self__) == (generate, base)
    assert (base._prefill.__func__, base._prefill.__self__) == (prefill, base)
    for other in (copied, pickle.loads(pickle.dumps(model))):
        assert torch.equal(drawn(other, ids, mask), want)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-2)
        assert not torch.equal(drawn(other, ids, mask), want)
    assert torch.equal(drawn(model, ids, mask), want)
