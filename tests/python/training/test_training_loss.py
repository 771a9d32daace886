"""forward_loss against model(**batch).loss: models, PEFT, heads of every kind, packed rows, one graph."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.packing import PackedCollator
from monograph.training import causal_lm_loss, forward_loss, verify_head
from monograph.training.loss import logits_map

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "eos_token_id": 1,
}
MODELS = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {},
    "gemma3_text": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
}


def tiny(kind, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_lora(model, **options):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    return get_peft_model(model, lora)


def batch_of(lengths=(23, 17), seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 300, (n,), generator=generator) for n in lengths]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    labels[0, :5] = -100
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_like_the_model(model, batch, loss_bound, gradient_bound):
    want = model(**batch).loss
    want_grads = gradients(model, want)
    got = forward_loss(model, batch)
    grads = gradients(model, got)
    assert abs(got - want) <= loss_bound
    assert grads.keys() == want_grads.keys()
    assert grads
    for name, grad in grads.items():
        difference = (grad.double() - want_grads[name].double()).norm()
        assert difference <= gradient_bound * want_grads[name].double().norm(), name


@pytest.mark.parametrize("kind", MODELS)
def test_equals_the_loss_of_the_model(kind):
    """fp32: sums in another order over 64 products and 300 exponentials, losses of about 6."""
    model = with_lora(tiny(kind))
    verify_head(model)
    assert_like_the_model(model, batch_of(), 6 * 2**-20, 2**-16)
    assert model.training


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_equals_the_loss_of_the_model_in_bf16(kind):
    """A logit, below 4 here, is rounded by both, after sums in another order: half a unit of 2^-6 each way.

    Gemma's is divided, capped and multiplied in bf16 by the model: three roundings more.
    """
    model = with_lora(tiny(kind, torch.bfloat16))
    verify_head(model)
    assert_like_the_model(model, batch_of(), 4 * 2**-7, 2**-5)


def test_one_graph_over_lengths_with_checkpointing():
    torch._dynamo.reset()
    model = with_lora(tiny("llama"))
    model.gradient_checkpointing_enable()
    model.disable_input_require_grads()  # its hook would break the graph; adapters need it not
    graphs = []

    def counted(module, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(module)
        return aot_eager(module, inputs)

    step = torch.compile(forward_loss, fullgraph=True, backend=counted)
    for length in (16, 24, 40):
        batch = batch_of((length, length - 3))
        for tensor in batch.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        num_items = torch.tensor(31)
        loss = step(model, batch, num_items)
        grads = {k: g.clone() for k, g in gradients(model, loss).items()}
        want = forward_loss(model, batch, num_items)
        assert torch.equal(loss, want)
        for name, grad in gradients(model, want).items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-7)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_packed_rows_are_their_documents(kind):
    import monograph.hf.transformers.attention  # noqa: F401

    model = tiny(kind)
    model.set_attn_implementation("monograph")
    generator = torch.Generator().manual_seed(3)
    documents = [{"input_ids": torch.randint(2, 300, (n,), generator=generator)} for n in (9, 14, 5)]
    packed = PackedCollator(pad_to_multiple_of=32, max_documents=8)(documents)
    got = forward_loss(model, packed)
    total = 0.0
    for document in documents:
        ids = document["input_ids"][None]
        total += forward_loss(model, {"input_ids": ids, "labels": ids}, torch.tensor(1))
    torch.testing.assert_close(got, total / (8 + 13 + 4), rtol=1e-5, atol=0)
    torch.testing.assert_close(got, model(**packed).loss, rtol=1e-5, atol=0)


def test_heads_of_every_kind():
    """Trained by modules_to_save, packed, with a hook, with an adapter: all give the loss of the model."""
    saved = with_lora(tiny("llama"), modules_to_save=["lm_head"])
    assert_like_the_model(saved, batch_of(), 6 * 2**-20, 2**-16)
    assert any("lm_head" in name for name, p in saved.named_parameters() if p.grad is not None)
    with saved.disable_adapter():
        torch.testing.assert_close(forward_loss(saved, batch_of()), saved(**batch_of()).loss)

    packed = tiny("llama")
    packed.lm_head = mg.nn.QuantLinear.from_linear(packed.lm_head, "nf4", double_quant=True)
    assert_like_the_model(with_lora(packed), batch_of(), 6 * 2**-20, 2**-16)

    hooked = tiny("llama")
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert_like_the_model(with_lora(hooked), batch_of(), 6 * 2**-20, 2**-16)

    hooked = tiny("llama")
    hooked.lm_head = mg.nn.QuantLinear.from_linear(hooked.lm_head, "nf4", double_quant=True)
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert_like_the_model(with_lora(hooked), batch_of(), 6 * 2**-20, 2**-16)

    adapted = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    assert_like_the_model(adapted, batch_of(), 6 * 2**-20, 2**-16)


def test_the_divisor():
    model, batch = tiny("llama"), batch_of()
    mean = forward_loss(model, batch)
    targets = int((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(forward_loss(model, batch, torch.tensor(2 * targets)), mean / 2)
    torch.testing.assert_close(forward_loss(model, {**batch, "num_items_in_batch": 2 * targets}), mean / 2)
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    shifted = {key: value for key, value in batch.items() if key != "labels"} | {"shift_labels": labels}
    assert torch.equal(forward_loss(model, shifted), mean)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert forward_loss(model, nothing) == 0
    hidden = torch.randn(2, 7, 64)
    assert causal_lm_loss(hidden, model.lm_head, batch["labels"][:, :7]).dim() == 0


def test_what_a_config_does_to_logits():
    for kind, want in {
        "llama": (0.0, 1.0),
        "gemma2": (5.0, 1.0),
        "granite": (0.0, 0.125),
        "cohere": (0.0, 0.25),
    }.items():
        config = transformers.AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
        assert logits_map(config) == want
    assert logits_map(transformers.AutoConfig.for_model("gemma3")) == (0.0, 1.0)


def test_refusals():
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = output.logits * 1.1
            return output

    config = tiny("llama").config
    with pytest.raises(ValueError, match="the logits of Louder are not those of its head"):
        verify_head(Louder(config))
    with pytest.raises(ValueError, match="LlamaModel has no head over a body"):
        forward_loss(transformers.LlamaModel(config), batch_of())
    routed = tiny("llama")
    routed.config = copy.deepcopy(config)
    routed.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits is True"):
        forward_loss(routed, batch_of())
    from peft import PromptTuningConfig

    prompt = get_peft_model(tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="which changes the input; wanted LoRA or kin"):
        forward_loss(prompt, batch_of())
