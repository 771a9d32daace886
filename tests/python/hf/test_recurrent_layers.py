"""Recurrent layers of transformers on our operators: documents stay apart, values are transformers' own."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.hf.transformers.recurrent_layers import take_over
from monograph.nn.replace_linears import replace_linears
from monograph.packing import PackedCollator, PaddedCollator
from monograph.packing.stateful_layers import KeepsDocumentsApart, stateful_layers
from monograph.training import verify_packing
from support.recurrent_models import FAMILIES, build

LENGTHS = (9, 1, 70, 12)
families = pytest.mark.parametrize("family", FAMILIES)


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 64, (n,), generator=generator).tolist()} for n in lengths]


def ours(family, **options):
    model = build(family, **options).train()
    model.set_attn_implementation("monograph")
    assert take_over(model) > 0
    return model


def logits_and_gradients(model, batch, rows):
    """Of the summed loss of `rows`, by everything that is trained."""
    model.zero_grad()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    logits = logits.flatten(0, 1)[rows]
    labels = batch["input_ids"].flatten()[rows]
    torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def packed_layer(family, dtype):
    """The first layer with state, over packed weights: dense products of torch depend on the other rows."""
    model = replace_linears(ours(family, dtype=dtype), block_size=32)
    return next(module for module in model.modules() if isinstance(module, KeepsDocumentsApart))


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_alone_has_the_bits_of_a_packed_one(family, dtype):
    """The output and the gradient of the input; gradients of parameters are sums over the row."""
    layer = packed_layer(family, dtype)
    cu = torch.tensor([3, 12, 12, 13, 83, 95, 95], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 99, 32, generator=generator).to(dtype) for _ in range(2))

    def run(rows, cu):
        leaf = x[:, rows].clone().requires_grad_()
        y = layer(leaf, cu_seqlens=cu)
        return y[0], torch.autograd.grad(y, leaf, dy[:, rows])[0][0]

    y, dx = run(slice(None), cu)
    for begin, end in pairwise(cu.tolist()):
        if begin < end:
            rows = slice(begin, end)
            alone = run(rows, torch.tensor([0, end - begin], dtype=torch.int32))
            assert torch.equal(alone[0], y[rows])
            assert torch.equal(alone[1], dx[rows])
    assert not dx[95:].any()


@families
def test_models_keep_documents_apart(family):
    verify_packing(ours(family))
    untouched = build(family)
    untouched.set_attn_implementation("monograph")
    with pytest.raises(ValueError, match=r"carry state|can't keep packed"):
        verify_packing(untouched)


@families
def test_the_values_of_transformers_in_fp32(family):
    """A batch of whole rows, one padded on the right, one on the left: logits and all gradients."""
    theirs = build(family).train()
    mine = ours(family)
    mine.load_state_dict(theirs.state_dict())
    rows = documents((20, 20))
    plain = {k: v for k, v in PaddedCollator()(rows).items() if k in ("input_ids", "attention_mask")}
    right = {k: v for k, v in PaddedCollator()(documents((20, 7))).items() if k in plain}
    left = {k: v.flip(1) for k, v in right.items()}
    for batch in (plain, right, left):
        real = batch["attention_mask"].flatten().nonzero()[:, 0]
        batch = batch | {"use_cache": False}
        got, gradients = logits_and_gradients(mine, batch, real)
        want, expected = logits_and_gradients(theirs, batch, real)
        if family == "lfm2" and batch["attention_mask"][:, 0].min() == 0:
            continue  # transformers' convolution sees the bias of the projection in padding
        assert torch.allclose(got, want, rtol=1e-4, atol=2e-4)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() <= 2e-4 * gradient.norm() + 1e-5, name


@families
def test_position_ids_alone_are_followed(family):
    """They become cu_seqlens; without a cache, as transformers' own attention wants it."""
    model = ours(family)
    packed = PackedCollator()(documents())
    with torch.no_grad():
        given = {"input_ids": packed["input_ids"], "position_ids": packed["position_ids"]}
        got = model(**given, use_cache=False).logits
        assert torch.equal(got, model(**packed).logits)
    with pytest.raises(ValueError, match=r"packed rows \(restarting position_ids\) with a cache"):
        model(**given, use_cache=True)
    both = {name: value.expand(2, -1) for name, value in given.items()}
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        model(**both, use_cache=False)


@families
def test_what_cannot_be_followed_is_refused(family):
    model = ours(family)
    packed = PackedCollator()(documents())
    two = packed | {"input_ids": packed["input_ids"].expand(2, -1)}
    two = {k: v for k, v in two.items() if k in ("input_ids", "cu_seqlens", "use_cache")}
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        model(**two)
    with pytest.raises(ValueError, match=r"with a cache, wanted use_cache=False"):
        model(input_ids=packed["input_ids"], cu_seqlens=packed["cu_seqlens"], use_cache=True)
    with pytest.raises(ValueError, match="seq_idx"):
        model(input_ids=packed["input_ids"], seq_idx=torch.zeros(1, 92), use_cache=False)
    mask = torch.ones_like(packed["input_ids"])
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="holes"):
        model(input_ids=packed["input_ids"], attention_mask=mask, use_cache=False)


def test_flash_keywords_alone_are_followed():
    model = ours("qwen3_next")
    packed = PackedCollator()(documents())
    flash = {k: v for k, v in packed.items() if k not in ("cu_seqlens", "labels", "num_items_in_batch")}
    with torch.no_grad():
        assert torch.equal(model(**flash).logits, model(**packed).logits)


def test_no_nan_of_a_document_reaches_another():
    model = ours("qwen3_5")
    packed = PackedCollator(pad_to_multiple_of=32, max_documents=6)(documents())
    embeddings = model.get_input_embeddings()(packed.pop("input_ids")).detach()
    packed.pop("labels")
    spoilt = embeddings.clone()
    spoilt[0, 30] = float("nan")  # in the third
    with torch.no_grad():
        want = model(inputs_embeds=embeddings, **packed).logits[0]
        got = model(inputs_embeds=spoilt, **packed).logits[0]
    assert torch.equal(got[:10], want[:10])
    assert torch.equal(got[80:], want[80:])
    assert got[30:80].isnan().all()


@families
def test_optimize_and_from_pretrained_change_the_class(family, tmp_path):
    model = build(family)
    kinds = {type(module).__name__ for module in model.modules()}
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    with pytest.warns(UserWarning, match="no LoRA layers"):
        # Both would give other last bits than a model that is only loaded.
        mg.optimize(model, elementwise=False, head=False)
    assert stateful_layers(model) == []
    assert {type(module).__name__ for module in model.modules()} == kinds
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == saved  # nothing of ours is in it
    loaded = mg.from_pretrained(tmp_path, dtype=torch.float32)
    packed = PackedCollator(max_documents=4)(documents())
    with torch.no_grad():
        want = model(**packed).logits
        assert torch.equal(loaded(**packed).logits, want)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(loaded))):
            assert torch.equal(twin(**packed).logits, want)
    config = mg.MonographConfig("nf4", skip_modules=["lm_head", "embed_tokens"])
    packing = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, attn_implementation="monograph"
    )
    assert any(isinstance(module, KeepsDocumentsApart) for module in packing.modules())
    assert stateful_layers(packing) == []


def test_an_adapter_on_the_convolution_is_refused():
    """transformers reads its weight and does not call it: the adapter would have no effect."""
    from peft import LoraConfig, get_peft_model

    with pytest.warns(UserWarning, match="groups > 1"):
        model = get_peft_model(build("lfm2"), LoraConfig(target_modules=["conv.conv"], r=32))
    take_over(model)
    with pytest.raises(ValueError, match=r"wanted nn\.Conv1d: leave it out of target_modules"):
        model(**PaddedCollator()(documents((5, 6))), use_cache=False)
