"""Calls that a recurrent layer or the attention beside it could not follow: right, or refused by name."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import monograph as mg
from monograph.hf.transformers.recurrent_layers import take_over
from monograph.packing import PackedCollator
from monograph.packing.stateful_layers import KeepsDocumentsApart, stateful_layers
from support.recurrent_models import DELTA, FAMILIES, SMALL, build

CU = torch.tensor([0, 9, 22, 22], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(9), torch.arange(13)])[None]


def tokens(n=22):
    return torch.randint(3, 64, (1, n), generator=torch.Generator().manual_seed(2))


def taken(family, attention):
    model = build(family).eval()
    model.set_attn_implementation(attention)
    take_over(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
@torch.no_grad()
def test_offsets_that_the_attention_does_not_read(family, name):
    """sdpa sees documents by position_ids alone: without them they would mix there."""
    model, ids = taken(family, "sdpa"), tokens()
    offsets = {name: CU[:3]}
    ones = torch.ones_like(ids)
    for wrong in (
        {},
        {"position_ids": torch.arange(22)[None]},
        {"position_ids": POSITIONS, "attention_mask": ones},
    ):
        with pytest.raises(ValueError, match=f"packed rows .{name}.*'sdpa'.*wanted position_ids"):
            model(ids, use_cache=False, **offsets, **wrong)
    packed = model(ids, use_cache=False, position_ids=POSITIONS, **offsets).logits
    alone = model(ids[:, 9:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 9:], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_collators_padding_is_no_hindrance_to_sdpa():
    model = taken("qwen3_5", "sdpa")
    rows = [{"input_ids": tokens(n)[0].tolist()} for n in (9, 13)]
    batch = PackedCollator(pad_to_multiple_of=32, max_documents=4)(rows)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    packed = model(**inputs).logits
    alone = model(torch.tensor([rows[1]["input_ids"]]), use_cache=False).logits
    torch.testing.assert_close(packed[:, 9:22], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["auto", "monograph"])
def test_other_recurrent_models_refuse_packed_rows_once_loaded(how, tmp_path):
    config = GraniteMoeHybridConfig(
        **SMALL,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        shared_intermediate_size=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    packing = mg.MonographConfig("nf4", block_size=32)
    if how == "auto":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=packing)
    else:
        model = mg.from_pretrained(tmp_path, packing)
    with pytest.raises(ValueError, match=r"packed rows \(restarting position_ids\).*carry state"):
        model(tokens(), position_ids=POSITIONS, use_cache=False)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
@torch.no_grad()
def test_a_masked_token_does_not_enter_the_cache(family):
    model = taken(family, "sdpa")
    cache = model(tokens(6), use_cache=True).past_key_values
    mask = torch.tensor([[1] * 6 + [0]])
    with pytest.raises(ValueError, match="newest token is masked, with a cache"):
        model(tokens(1), past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("more", [{"linear_key_head_dim": 264}, {"linear_conv_kernel_dim": 9}])
@torch.no_grad()
def test_layers_beyond_the_operators_stay_as_they_are(more):
    """Taken over they would fail at their first call."""
    options = {name: value for name, value in DELTA.items() if name not in more} | more
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SMALL,
        **options,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    expected = model(tokens()).logits
    mg.optimize(model, elementwise=False, attention=False, head=False)
    assert not any(isinstance(module, KeepsDocumentsApart) for module in model.modules())
    assert stateful_layers(model)
    assert torch.equal(model(tokens()).logits, expected)
    with pytest.raises(ValueError, match="carry state"):
        model(tokens(), cu_seqlens=CU[:3], use_cache=False)


def test_a_wrapped_convolution_is_named():
    config = LoraConfig(r=2, target_modules=["out_proj"], modules_to_save=["conv1d"])
    model = mg.add_lora(build("qwen3_5"), config)
    with pytest.raises(ValueError, match=r"ModulesToSaveWrapper.*leave it out of target_modules"):
        model(tokens())
