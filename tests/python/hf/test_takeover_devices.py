"""Takeovers on a device without kernels of ours, on a stand-in for one (shadow_device.py): what transformers
and TRL chose stays, packed bytes are read by our portable form, and packed rows are refused by name.

In a process of its own, as the device stays.
"""

import importlib.util
import subprocess
import sys
import tempfile

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import monograph as mg
from monograph.hf.peft.lora_experts import take_over_experts
from monograph.hf.transformers.elementwise import take_over as take_elementwise
from monograph.hf.transformers.fused_head import FusedHead, take_head
from monograph.hf.transformers.recurrent_layers import take_over as take_recurrent
from monograph.hf.trl import head as trl_head
from monograph.nn import QuantLinear, replace_linears
from monograph.ops import experts_torch, gated_delta_rule_fla, providers
from monograph.ops.providers import may_take_over
from monograph.packing.stateful_layers import KeepsDocumentsApart, guard_packed
from support import fla_stand_in, shadow_device, tiny_experts
from support.attention_models import after_optimize
from support.provider_rows import give_row
from support.recurrent_models import build

WHERE = "shadow"
CU = torch.tensor([0, 9, 22], dtype=torch.int32)
FAMILIES = ("qwen3_5", "olmo_hybrid", "lfm2")  # the experts of Qwen3-Next are beyond the stand-in


def called(model, *args, **kwargs):
    """The result and the names of our operators that were called for it."""
    names, run = [], shadow_device.run

    def recorded(func, *rest):
        names.append(func._schema.name)
        return run(func, *rest)

    shadow_device.run = recorded
    try:
        with torch.no_grad():
            result = model(*args, **kwargs)
    finally:
        shadow_device.run = run
    return result, {name.removeprefix("monograph::") for name in names if name.startswith("monograph::")}


def tokens():
    return torch.randint(3, 64, (1, 22), generator=torch.Generator().manual_seed(2))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes)).eval()


def recurrent_layers_there_are_transformers_own():
    for family in FAMILIES:
        model = build(family).eval()
        want = model(tokens(), use_cache=False).logits
        model.to(WHERE)
        assert take_recurrent(model) == 0, family
        guard_packed(model)
        got, ours = called(model, tokens().to(WHERE), use_cache=False)
        assert ours == set(), family
        torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-4, atol=1e-4)
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            with pytest.raises(ValueError, match=rf"packed rows \({name}\) with layers that carry state"):
                model(tokens().to(WHERE), use_cache=False, **{name: CU.to(WHERE)})


def recurrent_layers_that_come_there_later_too():
    for family in FAMILIES:
        model = build(family).eval()
        want = model(tokens(), use_cache=False).logits
        model.set_attn_implementation("monograph")
        assert take_recurrent(model) == 1, family
        guard_packed(model)
        model.to(WHERE).set_attn_implementation("sdpa")
        assert any(isinstance(module, KeepsDocumentsApart) for module in model.modules())
        got, ours = called(model, tokens().to(WHERE), use_cache=False)
        assert ours == set(), family
        torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("monograph")
        with pytest.raises(ValueError, match=r"packed rows \(cu_seqlens\) with \w+ on shadow, where our"):
            model(tokens().to(WHERE), use_cache=False, cu_seqlens=CU.to(WHERE))


def norms_activations_positions_and_heads_there_are_transformers_own():
    model = llama()
    want = model(tokens()).logits
    model.to(WHERE)
    assert not any(take_elementwise(model))
    assert not take_head(model)
    got, ours = called(model, tokens().to(WHERE))
    assert ours == set()
    torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-4, atol=1e-4)


def those_that_come_there_later_call_transformers_code():
    model = llama()
    want = model(tokens()).logits
    assert all(take_elementwise(model)[:5])  # a Llama has no routers
    assert take_head(model)
    assert isinstance(model.lm_head, FusedHead)
    got, ours = called(model.to(WHERE), tokens().to(WHERE))
    assert ours == set()
    torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-4, atol=1e-4)


def packed_bytes_are_read_by_the_portable_form():
    model = replace_linears(llama(), "nf4")
    want = model(tokens()).logits
    got, ours = called(mg.optimize(model.to(WHERE)), tokens().to(WHERE))
    assert ours == {"linear"}
    torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-3, atol=1e-3)
    packed = QuantLinear.from_linear(torch.nn.Linear(64, 64), "nf4")
    heads = {"packed": packed, "dense": torch.nn.Linear(64, 64)}
    assert {name: trl_head._ours(head.to(WHERE)) for name, head in heads.items()} == {
        "packed": True,
        "dense": False,
    }


def with_a_kernel_for_the_device_they_are_taken_over():
    library = torch.library.Library("monograph", "IMPL")
    library.impl("rms_norm", lambda *_: None, "PrivateUse1")
    taken = take_elementwise(llama().to(WHERE))
    assert (taken.norms, taken.mlps, taken.attentions) == (3, 0, 0)
    assert take_recurrent(build("qwen3_5").to(WHERE)) == 0  # of its three operators none has a kernel


def loaded(model, *config):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return mg.from_pretrained(folder, *config, device_map=WHERE, dtype=torch.float32).eval()


def from_pretrained_takes_recurrent_layers_by_a_library_and_leaves_them_without():
    """The norm between has nobody: the layer's own module computes it. Packed rows keep documents apart."""
    built = build("qwen3_5").eval()
    apart = [built(part, use_cache=False).logits for part in tokens().split([9, 13], dim=1)]
    model = loaded(built)
    assert not any(isinstance(module, KeepsDocumentsApart) for module in model.modules())
    with pytest.MonkeyPatch.context() as patch:
        for operator in ("gated_delta_rule", "causal_conv1d"):
            give_row(patch, operator, WHERE, "fla", "portable")
        if importlib.util.find_spec("fla") is None:
            assert not may_take_over(WHERE, "gated_delta_rule", "causal_conv1d")
        calls = fla_stand_in.install(patch, WHERE)
        patch.setattr(gated_delta_rule_fla, "DTYPES", (torch.float32,))  # the model's
        patch.setattr(providers, "why_missing", lambda name, asked=False: None)
        model = loaded(built)
        assert sum(isinstance(module, KeepsDocumentsApart) for module in model.modules()) == 1
        places = torch.cat([torch.arange(9), torch.arange(13)])[None].to(WHERE)
        packed = {"position_ids": places, "cu_seqlens": CU.to(WHERE)}
        got, ours = called(model, tokens().to(WHERE), use_cache=False, **packed)
    assert ours == {"gated_delta_rule", "causal_conv1d"}
    assert calls == ["conv", "chunk"]
    torch.testing.assert_close(got.logits.cpu(), torch.cat(apart, dim=1), rtol=1e-4, atol=1e-4)


def from_pretrained_takes_packed_experts_by_grouped_mm():
    made = tiny_experts.model("qwen3", torch.float32).eval()
    with pytest.MonkeyPatch.context() as patch:
        give_row(patch, "experts", WHERE, "torch", "portable")
        called_torch = []
        real = experts_torch.experts
        patch.setattr(experts_torch, "experts", lambda *a: called_torch.append(1) or real(*a))
        model = loaded(made, mg.MonographConfig("nf4"))
        got, ours = called(model, tokens().to(WHERE), use_cache=False)
        assert "experts" in ours
        assert called_torch
        give_row(patch, "experts", WHERE, "portable")
        want, _ = called(model, tokens().to(WHERE), use_cache=False)
        assert len(called_torch) == 1
    torch.testing.assert_close(got.logits.cpu(), want.logits.cpu(), rtol=1e-4, atol=1e-4)


def each_operator_of_a_layer_must_have_somebody():
    """Of the two of a delta layer one is not enough; LFM2's has the convolution alone."""
    alone = {"gated_delta_rule": (), "causal_conv1d": ("lfm2",)}
    for operator, taken in alone.items():
        with pytest.MonkeyPatch.context() as patch:
            give_row(patch, operator, WHERE, "fla", "portable")
            patch.setattr(providers, "why_missing", lambda name, asked=False: None)
            for family in FAMILIES:
                assert take_recurrent(build(family).to(WHERE)) == (family in taken), (operator, family)


def dense_experts_with_lora_are_ours_where_torch_multiplies_them():
    made = tiny_experts.model("qwen3", torch.float32).eval()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(made, lora)
    want = model(tokens(), use_cache=False).logits
    model.to(WHERE)
    with pytest.MonkeyPatch.context() as patch:
        assert take_over_experts(model) == []
        give_row(patch, "experts", WHERE, "torch", "portable")
        assert len(take_over_experts(model)) == len(names)
        got, ours = called(model, tokens().to(WHERE), use_cache=False)
        assert ours == {"experts"}
        torch.testing.assert_close(got.logits.cpu(), want, rtol=1e-4, atol=1e-4)


def attention_is_ours_where_flash_attention_can_do_it():
    """By torch's or flash-attn's; the latter has soft-caps. Neither has float32."""
    for provider, capped_too in (("torch", False), ("flash-attn", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(providers, "why_missing", lambda name, asked=False: None)
            give_row(patch, "varlen_attention", WHERE, provider)
            assert after_optimize(llama().to(WHERE)) == "sdpa"
            assert after_optimize(llama().bfloat16().to(WHERE)) == "monograph"
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
            capped = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).bfloat16().to(WHERE)
            if capped_too:
                assert after_optimize(capped, attention=True) == "monograph"
            else:
                with pytest.raises(ValueError, match=r"attention=True on shadow: .* softcap is 50\.0"):
                    after_optimize(capped, attention=True)
    assert after_optimize(llama().bfloat16().to(WHERE)) == "sdpa"


PARTS = (
    recurrent_layers_there_are_transformers_own,
    recurrent_layers_that_come_there_later_too,
    norms_activations_positions_and_heads_there_are_transformers_own,
    those_that_come_there_later_call_transformers_code,
    packed_bytes_are_read_by_the_portable_form,
    with_a_kernel_for_the_device_they_are_taken_over,
    from_pretrained_takes_recurrent_layers_by_a_library_and_leaves_them_without,
    from_pretrained_takes_packed_experts_by_grouped_mm,
    each_operator_of_a_layer_must_have_somebody,
    dense_experts_with_lora_are_ours_where_torch_multiplies_them,
    attention_is_ours_where_flash_attention_can_do_it,
)


def test_takeovers_on_a_stand_in_for_an_accelerator():
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.split() == [part.__name__ for part in PARTS]


if __name__ == "__main__":
    shadow_device.install()
    with shadow_device.shadow():
        for part in PARTS:
            if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
                torch.manual_seed(0)
                part()
                print(part.__name__, flush=True)
