"""Gemma 3n and 4: layers that leave keys and values for later ones, and per-layer inputs, as regions."""

import logging

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig

import monograph as mg
from monograph.hf.transformers.activation_checkpointing import enable_checkpointing
from monograph.packing import PackedCollator
from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget, make_regions, region_layers
from monograph.training.regions.call import described, differentiated, put_together, taken_apart

LAYERS = 6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "sliding_window": 8,
    "pad_token_id": 0,
}


def gemma4(checkpointed=False):
    config = Gemma4TextConfig(**SIZES, global_head_dim=16, num_kv_shared_layers=3)
    return packed(config, checkpointed, "all-linear")


def packed(config, checkpointed, targets):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    mg.nn.replace_linears(model, "nf4", block_size=32, skip=("lm_head", "altup"))
    if checkpointed:
        enable_checkpointing(model, {"use_reentrant": False})
    torch.manual_seed(1)
    wanted = targets if targets == "all-linear" else targets.split("|")
    return mg.add_lora(model, LoraConfig(r=2, target_modules=wanted, init_lora_weights=False)).train()


def gemma3n(checkpointed=False):
    """Its layers clamp the coefficients of AltUp in place: here to less than they are."""
    config = Gemma3nTextConfig(
        **SIZES,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        altup_coef_clip=0.05,
        activation_sparsity_pattern=[0.0] * LAYERS,
    )
    return packed(config, checkpointed, "q_proj|down_proj")


def batch(*lengths):
    drawn = torch.Generator().manual_seed(sum(lengths))
    documents = [{"input_ids": torch.randint(3, 64, (n,), generator=drawn).tolist()} for n in lengths]
    return PackedCollator(pad_to_multiple_of=16, max_documents=4)(documents)


def gradients(model, given):
    inputs = {name: value for name, value in given.items() if name not in ("labels", "input_ids")}
    loss = model(input_ids=given["input_ids"], labels=given["input_ids"], **inputs).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gemma_3n_has_the_bits_of_plain_layers(checkpointed):
    forget()
    model, plain = make_regions(gemma3n(checkpointed)), gemma3n(checkpointed)
    coefficients = {n: p.clone() for n, p in plain.named_parameters() if "prediction_coefs" in n}
    for given in (batch(9, 5, 14), batch(20, 24)):
        for one in (model, plain):
            one.zero_grad()
        loss, found = gradients(model, given)
        wanted_loss, wanted = gradients(plain, given)
        assert torch.equal(loss, wanted_loss)
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(own[name], parameter), name
    assert not any(torch.equal(own[name], before) for name, before in coefficients.items())
    assert not any(layer.region_refused for layer in region_layers(model).values())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_gradient_has_the_bits_of_plain_layers(checkpointed):
    """Those of the layer that stores keys and values come through the layers that read them."""
    forget()
    model, plain = make_regions(gemma4(checkpointed)), gemma4(checkpointed)
    assert len(region_layers(model)) == LAYERS
    for given in (batch(9, 5, 14), batch(20, 24)):  # of other lengths, by the same traces
        for one in (model, plain):
            one.zero_grad()
        loss, found = gradients(model, given)
        wanted_loss, wanted = gradients(plain, given)
        assert torch.equal(loss, wanted_loss)
        assert len(found) > 2 * LAYERS
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
    # Layers with keys of their own, those that store them and those that read them, of two types each.
    assert TRACES.signatures == 5
    assert not any(layer.region_refused for layer in region_layers(model).values())


def test_a_step_is_one_graph_of_regions(caplog):
    forget()
    torch._dynamo.reset()
    steps = {mode: TrainStep(gemma4(), mode=mode) for mode in ("graph", "eager")}
    with caplog.at_level(logging.WARNING, logger="monograph"):
        for given in (batch(9, 5, 14), batch(20, 24)):
            graph, eager = (step([given], 1e-3) for step in steps.values())
            assert torch.equal(graph.loss, eager.loss)
    assert torch.equal(steps["graph"].state.flat, steps["eager"].state.flat)
    assert len(region_layers(steps["graph"].model)) == LAYERS
    (line,) = [record.message for record in caplog.records]  # nothing is refused
    assert "5 kinds of layers are traced before the first step" in line


@pytest.mark.slow
def test_a_step_says_before_tracing_that_it_takes_long(caplog):
    """Six kinds of layers: each type with keys of its own, storing them and reading them."""
    forget()
    torch._dynamo.reset()
    step = TrainStep(gemma3n())
    said = []
    with caplog.at_level(logging.WARNING, logger="monograph"):
        step([batch(9, 5, 14)], 1e-3)
        said = [record.message for record in caplog.records]
        step([batch(20, 24)], 1e-3)
    assert [record.message for record in caplog.records] == said
    (line,) = said
    assert "6 kinds of layers are traced before the first step" in line


def test_generation_has_the_tokens_of_sdpa():
    """Of prompts of one length and padded ones: layers with shared keys see the last token alone."""
    model = make_regions(gemma4().float()).eval()
    ids = batch(20, 9)["input_ids"][:, :14].reshape(2, 7)
    padded = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for mask in (torch.ones_like(ids), padded):
        found = []
        for attention in ("monograph", "sdpa"):
            model.get_base_model().set_attn_implementation(attention)
            found.append(model.generate(input_ids=ids, attention_mask=mask, **options))
        assert torch.equal(*found)


def test_a_call_says_which_of_its_tensors_are_differentiated():
    hidden, keys, cos = (torch.zeros(2, requires_grad=wanted) for wanted in (True, True, False))
    tensors = []
    structure = taken_apart(((hidden, cos), {"shared": {"full": (keys, cos)}}), tensors, True)
    text = described(structure)
    assert text == "((b'*', b'*'), {'shared': {'full': (b'+', b'*')}})"
    assert differentiated(text) == (1,)
    (first, _), given = put_together(text, tensors)
    assert first is hidden
    assert given["shared"]["full"][0] is keys
