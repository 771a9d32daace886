"""Packed rows of models with recurrent layers whose attention is transformers' own: documents stay apart."""

import pytest
import torch

import monograph as mg
from monograph.packing import PackedCollator
from support.recurrent_models import build

LENGTHS = (5, 20, 7)


def rows():
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (n,), generator=drawn).tolist() for n in LENGTHS]


def batches():
    documents = rows()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    ids = torch.tensor([[token for document in documents for token in document]])
    collated = PackedCollator(pad_to_multiple_of=40, max_documents=4)([{"input_ids": d} for d in documents])
    return {
        "positions": {"input_ids": ids, "position_ids": positions, "use_cache": False},
        "collator": {name: value for name, value in collated.items() if name != "labels"},
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "lfm2"])
def test_documents_of_a_packed_row_are_what_they_are_alone(family, attention, tmp_path):
    build(family, 2).save_pretrained(tmp_path)
    model = mg.from_pretrained(tmp_path, attn_implementation=attention, dtype=torch.float32)
    assert model.config._attn_implementation == attention
    alone = [model(torch.tensor([d]), use_cache=False).logits[0] for d in rows()]
    for name, batch in batches().items():
        embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        packed = model(inputs_embeds=embedded, **batch).logits[0]
        torch.testing.assert_close(packed[: sum(LENGTHS)], torch.cat(alone), rtol=1e-4, atol=1e-4, msg=name)
        (gradient,) = torch.autograd.grad(packed[5:25].sum(), [embedded])
        moved = gradient[0].abs().amax(1) > 0
        assert moved[5:25].all(), name
        assert not moved[:5].any(), name
        assert not moved[25:].any(), name


def test_what_sdpa_does_not_see_is_still_refused(tmp_path):
    build("qwen3_5", 2).save_pretrained(tmp_path)
    model = mg.from_pretrained(tmp_path, attn_implementation="sdpa", dtype=torch.float32)
    batch = batches()["collator"]
    with pytest.raises(ValueError, match=r"packed rows .cu_seqlens. with attention 'sdpa'"):
        model(**{name: value for name, value in batch.items() if name != "position_ids"})
