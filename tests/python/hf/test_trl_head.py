"""TRL's head on our operator: its own outputs and gradients, field by field, and what is left to TRL."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

import monograph as mg
from monograph.hf.trl import head as trl_head
from monograph.training import loss
from support.trl_heads import FIELDS, batch, both, tiny


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_items", [None, 11])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_field_is_that_of_trl(shifted, num_items, temperature):
    inputs = batch()
    if shifted:
        inputs["shift_labels"] = nn.functional.pad(inputs.pop("labels"), (0, 1), value=-100)[:, 1:]
    if num_items:
        inputs["num_items_in_batch"] = num_items
    trl_model, ours = (model(**inputs, fused_lm_head=True) for model in both(temperature=temperature))
    assert type(ours) is type(trl_model)
    for name in ("loss", *FIELDS, "label_mask"):
        torch.testing.assert_close(getattr(ours, name), getattr(trl_model, name), rtol=1e-5, atol=1e-5)
    assert ours.aux_loss is None


@pytest.mark.parametrize("what", ["loss", "log_probs", "entropy"])
def test_gradients_are_those_of_trl(what):
    weights = torch.rand(3, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for model in both():
        value = getattr(model(**batch(), fused_lm_head=True), what)
        (value if what == "loss" else (value * weights).sum()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert set(found[0]) == set(found[1])
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )


def test_only_what_was_asked_for_and_no_labels_at_all():
    trl_model, ours = both(outputs=("log_probs",))
    inputs = batch()
    inputs["labels"].fill_(-100)
    for model in (trl_model, ours):
        output = model(**inputs, fused_lm_head=True)
        assert output.entropy is None
        assert output.loss == 0
        output.loss.backward()


def test_generation_and_plain_calls_are_the_models_own():
    trl_model, ours = both()
    ids = batch()["input_ids"]
    assert torch.equal(ours(input_ids=ids).logits, trl_model(input_ids=ids).logits)
    assert torch.equal(ours(**batch()).loss, trl_model(**batch()).loss)
    prompt = ids[:1, :4]
    assert torch.equal(
        ours.generate(prompt, max_new_tokens=4, do_sample=False),
        trl_model.generate(prompt, max_new_tokens=4, do_sample=False),
    )


def test_left_to_trl():
    assert not trl_head.take_over(tiny())  # no head of TRL's
    model = tiny()
    add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    assert not trl_head.take_over(model)
    capped = tiny()
    capped.config.final_logit_softcapping = 30.0
    add_fused_lm_head(capped, temperature=0.5)
    assert not trl_head.take_over(capped)
    model = tiny()
    add_fused_lm_head(model)
    before = model.forward
    mg.optimize(model, head=False)
    assert model.forward == before


def test_a_head_that_must_be_called_takes_the_path_of_trl():
    trl_model, ours = both()
    for model in (trl_model, ours):
        model.lm_head.register_forward_hook(lambda *_: None)
    assert loss.readable_head(ours.lm_head) is None
    got, want = (model(**batch(), fused_lm_head=True) for model in (ours, trl_model))
    assert torch.equal(got.log_probs, want.log_probs)


def test_trained_tokens_of_a_tied_head_are_refused_by_name():
    model = tiny(tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5])
    wrapped = get_peft_model(model, config)
    add_fused_lm_head(model)
    assert trl_head.take_over(model)
    with pytest.raises(ValueError, match=r"TrainableTokensWrapper of PEFT \(trainable_token_indices"):
        wrapped(**batch(), fused_lm_head=True)
    assert wrapped(**batch()).loss > 0  # without TRL's head it is the model's own


def test_one_graph():
    torch._dynamo.reset()
    _, model = both()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 17, 12):
        inputs = batch(length=length)
        got = compiled(**inputs, fused_lm_head=True)
        want = model(**inputs, fused_lm_head=True)
        torch.testing.assert_close(got.loss, want.loss)
        got.loss.backward()
