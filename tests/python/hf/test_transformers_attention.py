"""attn_implementation="monograph" in real transformers models: packed, padded, cached, refused, one graph."""

import itertools

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from monograph.hf.transformers.attention import attention_mask
from monograph.nn import replace_linears
from monograph.packing import PackedCollator, PaddedCollator

pytestmark = pytest.mark.slow
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


LAYERS = ["sliding_attention", "full_attention"]


def build(name, implementation="monograph"):
    torch.manual_seed(0)
    options = SMALL | {"attn_implementation": implementation}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**options)).eval()
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**options)).eval()
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**options, sliding_window=7)).eval()
    if name == "gemma3":
        config = Gemma3TextConfig(
            **options, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
        )
        return Gemma3ForCausalLM(config).eval()
    config = GptOssConfig(
        **options,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        layer_types=LAYERS,
    )
    return GptOssForCausalLM(config).eval()


FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt_oss"]
LENGTHS = [9, 1, 17, 5]


def boundaries(cu):
    """The keywords of the collator."""
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}


def packed_batch(lengths=LENGTHS, slots=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, 128, (1, total), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    cu = torch.nn.functional.pad(offsets, (0, slots + 1 - offsets.numel()), value=total)
    labels = ids.clone()
    labels[0, offsets[:-1].long()] = -100
    return ids, positions, cu, labels


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_equal_documents_alone(name):
    """The collator's offsets reach the op; no document sees another."""
    model = build(name)
    ids, positions, cu, _ = packed_batch()
    with torch.no_grad():
        together = model(ids, position_ids=positions, **boundaries(cu), use_cache=False).logits
        start = 0
        for n in LENGTHS:
            alone = model(ids[:, start : start + n], use_cache=False).logits
            torch.testing.assert_close(together[:, start : start + n], alone, rtol=1e-4, atol=1e-4)
            start += n


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_loss_is_the_mean_over_documents(name):
    model = build(name)
    ids, positions, cu, labels = packed_batch()
    with torch.no_grad():
        packed = model(ids, position_ids=positions, **boundaries(cu), labels=labels, use_cache=False).loss
        total, count, start = 0.0, 0, 0
        for n in LENGTHS:
            if n > 1:
                piece = ids[:, start : start + n]
                total += model(piece, labels=piece, use_cache=False).loss.item() * (n - 1)
                count += n - 1
            start += n
    # fp32 sums over 28 targets of two layers: a few ulp of the loss
    assert abs(packed.item() - total / count) <= 1e-5 * abs(total / count)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_restarting_positions_alone_are_enough(name):
    """Without the collator's keywords transformers puts the boundaries into its mask function."""
    model = build(name)
    ids, positions, cu, _ = packed_batch()
    with torch.no_grad():
        want = model(ids, position_ids=positions, **boundaries(cu), use_cache=False).logits
        got = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_restarting_positions_in_a_batch_of_rows():
    """A packed row of its own in each row of the batch: found here too, never silently wrong."""
    model, reference = build("llama"), build("llama", "eager")
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    with torch.no_grad():
        want = reference(ids, position_ids=positions, use_cache=False).logits
        got = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_honoured(name, side):
    """Against eager attention; and the padded tokens really matter: without the mask the result differs."""
    model, reference = build(name), build(name, "eager")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 128, (3, 20), generator=generator)
    mask = torch.ones(3, 20, dtype=torch.long)
    for row, pad in enumerate((0, 6, 13)):
        if side == "left":
            mask[row, :pad] = 0
        else:
            mask[row, 20 - pad :] = 0
    with torch.no_grad():
        want = reference(ids, attention_mask=mask, use_cache=False).logits
        got = model(ids, attention_mask=mask, use_cache=False).logits
        ignored = model(ids, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    if side == "left":
        assert not torch.allclose(ignored[real], want[real], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_with_a_cache_equals_eager(name):
    model, reference = build(name), build(name, "eager")
    ids = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_what_is_not_supported_is_refused_by_name():
    model = build("llama")
    ids, positions, cu, _ = packed_batch()
    with pytest.raises(ValueError, match="packed documents in a batch of 2 rows"):
        model(ids.repeat(2, 1), position_ids=positions, **boundaries(cu))
    with pytest.raises(ValueError, match="4-D attention mask"):
        model(ids, attention_mask=torch.zeros(1, 1, 32, 32))
    holes = torch.ones_like(ids)
    holes[0, 5] = 0
    with pytest.raises(ValueError, match="has holes"):
        model(ids, attention_mask=holes)
    with pytest.raises(ValueError, match="output_attentions needs"):
        model(ids, output_attentions=True)
    model.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match="attention_chunk_size is 8"):
        model(ids)
    del model.config.attention_chunk_size
    with pytest.raises(ValueError, match="mask overlays"):
        attention_mask(1, 4, 4, use_vmap=True)
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1"):
        model.train()(ids)


@pytest.mark.parametrize(
    ("trains", "backend"),
    [
        (False, "aot_eager"),
        (True, "aot_eager"),
        pytest.param(False, "inductor", marks=pytest.mark.skip("the graph with a gradient proves it")),
        pytest.param(True, "inductor", marks=pytest.mark.long),
    ],
)
def test_a_mask_with_holes_is_refused_inside_a_graph(trains, backend):
    """One graph for all masks; masks of 0 and 1 in any dtype as eager attention takes them."""
    model, reference = build("llama").train(trains), build("llama", "eager")
    ids = torch.randint(0, 128, (2, 6), generator=torch.Generator().manual_seed(6))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    def run(mask):
        with torch.set_grad_enabled(trains):
            loss = compiled(ids, attention_mask=torch.tensor(mask), labels=ids, use_cache=False).loss
        if trains:
            loss.backward()
        return loss

    whole = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]
    for mask in (whole, [[0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]], [[0] * 6, [1] * 6]):
        run(mask)
    for holes in ([1, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 1]):
        with pytest.raises(RuntimeError, match="attention_mask has holes"):
            run([whole[0], holes])
    run(whole)
    assert counters["stats"]["unique_graphs"] == 1
    if not trains:
        real = torch.tensor(whole).bool()
        for dtype in (torch.bool, torch.float32, torch.int64):
            mask = torch.tensor(whole).to(dtype)
            got, want = (m(ids, attention_mask=mask, use_cache=False).logits for m in (model, reference))
            torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_one_graph_over_twenty_packings(name):
    """QuantLinear, this attention and non-reentrant checkpointing: forward and backward, counted."""
    model = replace_linears(build(name)).train()
    model.get_input_embeddings().weight.requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(4)
    for step in range(20):
        cuts = torch.randperm(31, generator=generator)[:3].add(1).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, 32], strict=True)]
        ids, positions, cu, labels = packed_batch(lengths, seed=step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss = compiled(
                ids,
                position_ids=positions,
                cu_seq_lens_q=cu,
                cu_seq_lens_k=cu,
                labels=labels,
                use_cache=False,
            ).loss
            loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_whole_step_is_one_graph():
    """Forward, autograd.grad and an update in tensor operations, with checkpointing: 1 graph."""
    model = replace_linears(build("llama")).train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(ids, positions, cu, labels):
        loss = model(ids, position_ids=positions, **boundaries(cu), labels=labels, use_cache=False).loss
        (gradient,) = torch.autograd.grad(loss, [embedding])
        with torch.no_grad():
            embedding.sub_(1e-2 * gradient)
        return loss.detach()

    torch._dynamo.reset()
    counters.clear()
    losses = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for i in range(6):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                losses.append(compiled(*packed_batch(LENGTHS if i % 2 else [20, 12])).item())
    assert counters["stats"]["unique_graphs"] == 1
    assert losses[-1] < losses[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_collators_batch_goes_straight_in(name):
    """Boundaries computed once per batch by the collator, for every model; padding is inert."""
    model = build(name)
    ids, *_ = packed_batch()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    documents = [{"input_ids": ids[0, a:b].tolist()} for a, b in itertools.pairwise(starts)]
    packed = PackedCollator(pad_to_multiple_of=40, max_documents=8)(documents)
    padded = PaddedCollator()(documents)
    assert packed["input_ids"].shape == (1, 40)
    with torch.no_grad():
        together = model(**packed).loss
        separate = model(**padded, use_cache=False).loss
    assert abs(together.item() - separate.item()) <= 1e-5 * separate.item()


def test_three_dimensional_rotary_positions_pass_untouched():
    """Positions [3, 1, T] of a vision model beside the collator's offsets."""
    torch.manual_seed(0)
    options = {name: value for name, value in SMALL.items() if name != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLTextConfig(**options, rope_parameters=rope, attn_implementation="monograph")
    model = Qwen2_5_VLTextModel(config).eval()
    ids, positions, cu, _ = packed_batch()
    positions = torch.stack([positions[0], positions[0] // 2, positions[0] % 3])[:, None]
    with torch.no_grad():
        together = model(ids, position_ids=positions, cu_seqlens=cu, use_cache=False).last_hidden_state
        start = 0
        for n in LENGTHS:
            part = slice(start, start + n)
            alone = model(ids[:, part], position_ids=positions[..., part], use_cache=False).last_hidden_state
            torch.testing.assert_close(together[:, part], alone, rtol=1e-5, atol=1e-5)
            start += n
