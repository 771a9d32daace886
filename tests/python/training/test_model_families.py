"""Families beyond Llama's: loss and gradients are those of transformers, packed rows are right or refused."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.packing import PackedCollator
from monograph.training import TrainStep, verify_packing

pytestmark = pytest.mark.slow
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
FAMILIES = {
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "first_k_dense_replace": 1, "n_shared_experts": 1},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
                "logits_scaling": 4.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
                         "layer_types": ["mamba", "attention"], **MAMBA},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 16,
                    "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
}  # fmt: skip
# Layers with a state of their own that our operators do not have: packed rows are refused by name.
NO_PACKED_ROWS = ("granitemoehybrid",)


def made(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | FAMILIES[kind])
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    targets = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and "attn" in name and "lm_head" not in name
    ]
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def documents():
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, 120, (n,), generator=generator)} for n in (9, 14, 6)]


def one_row():
    ids = torch.cat([document["input_ids"] for document in documents()])[None]
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_has_the_loss_and_the_gradient_of_transformers(kind):
    plain = made(kind)
    out = plain(**one_row()).loss
    out.backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in grads))
    model = mg.optimize(made(kind))
    for mode in ("eager", "graph"):
        found = TrainStep(model, mode=mode, max_grad_norm=1e9)([one_row()], 0.0)
        assert float(found.loss) == pytest.approx(float(out), rel=2e-5), mode
        assert float(found.grad_norm) == pytest.approx(float(norm), rel=1e-3), mode


@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_of_a_packed_row_are_what_they_are_alone_or_refused(kind):
    model = mg.optimize(made(kind), attention=True).eval()
    packed = PackedCollator(pad_to_multiple_of=32, max_documents=8)(documents())
    if kind in NO_PACKED_ROWS:
        with pytest.raises(ValueError, match="packed rows"), torch.no_grad():
            model(**packed)
        return
    verify_packing(model)
    with torch.no_grad():
        row = model(**{name: value for name, value in packed.items() if name != "labels"}).logits[0]
        start = 0
        for document in documents():
            ids = document["input_ids"][None]
            alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
            torch.testing.assert_close(row[start : start + ids.shape[1]], alone, rtol=1e-4, atol=1e-4)
            start += ids.shape[1]
