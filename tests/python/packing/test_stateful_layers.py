"""Packed rows on models whose layers carry state along a row: refused, never silently leaking.

Those that our operators compute are in test_recurrent_layers.py.
"""

import pytest
import torch
import torch._dynamo
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import monograph as mg
import monograph.hf.transformers.attention
from monograph.packing import PackedCollator, PaddedCollator
from monograph.packing.stateful_layers import _Guard, refuse_packed, stateful_layers
from monograph.recipe.config.keys import Recipe
from monograph.recipe.run import load_model
from monograph.training import TrainStep

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_MAMBA = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


def build(name):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL))
    if name == "mamba":
        return MambaForCausalLM(MambaConfig(**TINY_MAMBA, state_size=4))
    if name == "mamba2":
        config = Mamba2Config(**TINY_MAMBA, num_heads=4, head_dim=16, state_size=4, n_groups=1, chunk_size=8)
        return Mamba2ForCausalLM(config)
    if name == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))
    if name == "falcon_h1":
        mixer = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4}
        return FalconH1ForCausalLM(FalconH1Config(**SMALL, **mixer, mamba_n_groups=1, mamba_chunk_size=8))
    if name == "recurrent_gemma":
        options = SMALL | {"num_hidden_layers": 3}
        return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**options, attention_window_size=8))
    if name == "kimi_linear":
        mla = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
        kinds = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2}
        config = KimiLinearConfig(**SMALL, **mla, **kinds, linear_head_dim=8, linear_num_heads=2)
        return KimiLinearForCausalLM(config)
    config = Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[0, 1],
    )
    return Qwen3NextForCausalLM(config)


REFUSED = ["mamba", "mamba2", "recurrent_gemma", "kimi_linear"]
STATEFUL = [*REFUSED, "lfm2", "qwen3_next"]
DOCUMENTS = [{"input_ids": list(range(3, 12))}, {"input_ids": list(range(12, 19))}]


def test_only_stateful_layers_are_found():
    assert stateful_layers(build("llama")) == []
    refuse_packed(build("llama"), "sample_packing")
    for name in STATEFUL:
        with pytest.raises(ValueError, match="carry state along the row"):
            refuse_packed(build(name), "sample_packing")


@pytest.mark.parametrize("name", REFUSED)
def test_packed_rows_are_refused_and_padded_ones_run(name):
    model = mg.optimize(build(name).eval())
    packed = PackedCollator(pad_to_multiple_of=16, max_documents=4)(DOCUMENTS)
    with pytest.raises(ValueError, match=r"packed rows \(cu_seqlens\) with layers that carry state"):
        model(**packed)
    positions = {"input_ids": packed["input_ids"], "position_ids": packed["position_ids"], "use_cache": False}
    if name in ("kimi_linear", "recurrent_gemma"):  # Mamba takes no positions
        with pytest.raises(ValueError, match=r"packed rows \(restarting position_ids\)"):
            model(**positions)
    with torch.no_grad():
        assert model(**PaddedCollator()(DOCUMENTS), use_cache=False).loss.isfinite()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_our_attention_refuses_them_without_optimize(name):
    """attn_implementation="monograph" alone: the attention layers know the kinds of the others."""
    model = build(name).eval()
    model.set_attn_implementation("monograph")
    packed = PackedCollator(pad_to_multiple_of=16, max_documents=4)(DOCUMENTS)
    cu = {"cu_seqlens": packed["cu_seqlens"]} if name == "lfm2" else {}
    with pytest.raises(ValueError, match=r"carry state along the row: (conv|linear_attention)"):
        model(packed["input_ids"], position_ids=packed["position_ids"], **cu, use_cache=False)


def test_a_layer_of_attention_and_state_refuses_them_without_optimize():
    """Falcon-H1 names no kind with state: each of its layers is `hybrid`."""
    model = build("falcon_h1").eval()
    model.set_attn_implementation("monograph")
    packed = PackedCollator(pad_to_multiple_of=16, max_documents=4)(DOCUMENTS)
    with pytest.raises(ValueError, match=r"packed rows \(cu_seq_lens_q\) with layers that carry state"):
        model(packed["input_ids"], cu_seq_lens_q=packed["cu_seq_lens_q"], use_cache=False)
    with torch.no_grad():
        assert model(**PaddedCollator()(DOCUMENTS), use_cache=False).loss.isfinite()


def test_a_train_step_refuses_them_inside_its_graph():
    packed = PackedCollator(pad_to_multiple_of=16, max_documents=4)(DOCUMENTS)
    for mode in ("eager", "graph"):
        torch._dynamo.reset()
        step = TrainStep(build("lfm2"), mode=mode, backend="aot_eager")
        with pytest.raises(Exception, match="carry state along the row"):
            step([packed], learning_rate=1e-3)


def test_three_dimensional_positions_of_one_document_are_no_packed_row():
    """Height and width fall behind an image; the first of the three says where a document starts."""
    guard = _Guard(["conv"])
    place = torch.arange(8)
    one = torch.stack((place, place % 3, place % 4))[:, None]
    guard(torch.nn.Identity(), (), {"position_ids": one})
    with pytest.raises(ValueError, match="restarting position_ids"):
        guard(torch.nn.Identity(), (), {"position_ids": one % 4})


def test_a_recipe_with_sample_packing_refuses_them(monkeypatch):
    monkeypatch.setattr(load_model, "load_base", lambda recipe, folder: build("lfm2"))
    recipe = Recipe(base_model="tiny", sample_packing=True)
    with pytest.raises(
        ValueError, match=r"packed rows \(sample_packing: true\) with layers that carry state"
    ):
        load_model.load_model(recipe, "unused")
