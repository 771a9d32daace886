"""Takeovers on a device without kernels of ours, on a stand-in for one (shadow_device.py): what transformers
and TRL chose stays, packed bytes are read by our portable form, and packed rows are refused by name.

In a process of its own, as the device stays.
"""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import monograph as mg
from monograph.hf.transformers.elementwise import take_over as take_elementwise
from monograph.hf.transformers.fused_head import FusedHead, take_head
from monograph.hf.transformers.recurrent_layers import take_over as take_recurrent
from monograph.hf.trl import head as trl_head
from monograph.nn import QuantLinear, replace_linears
from monograph.packing.stateful_layers import KeepsDocumentsApart, guard_packed
from support import shadow_device
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


PARTS = (
    recurrent_layers_there_are_transformers_own,
    recurrent_layers_that_come_there_later_too,
    norms_activations_positions_and_heads_there_are_transformers_own,
    those_that_come_there_later_call_transformers_code,
    packed_bytes_are_read_by_the_portable_form,
    with_a_kernel_for_the_device_they_are_taken_over,
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
