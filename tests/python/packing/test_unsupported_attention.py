"""Packed rows on models whose attention ours cannot replace: refused, never silently mixed."""

import pytest
import torch
import torch._dynamo
import transformers

import monograph as mg
from monograph.packing import PackedCollator, PaddedCollator
from monograph.recipe.config.keys import Recipe
from monograph.recipe.run import load_model
from monograph.training import TrainStep

TINY = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
CONFIGS = {
    "FalconForCausalLM": transformers.FalconConfig(**TINY, **LAYERS),
    "BloomForCausalLM": transformers.BloomConfig(**TINY, n_layer=1, n_head=2),
    "MptForCausalLM": transformers.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2),
    "XGLMForCausalLM": transformers.XGLMConfig(
        vocab_size=64, d_model=32, num_layers=1, attention_heads=2, ffn_dim=32
    ),
    "OpenAIGPTLMHeadModel": transformers.OpenAIGPTConfig(**GPT),
    "StableLmForCausalLM": transformers.StableLmConfig(
        **TINY, **LAYERS, num_key_value_heads=2, intermediate_size=32
    ),
    "LlamaForCausalLM": transformers.LlamaConfig(**TINY, **LAYERS, intermediate_size=32),
}
UNREPLACED = list(CONFIGS)[:5]
DOCUMENTS = [{"input_ids": list(range(3, 12))}, {"input_ids": list(range(12, 19))}]


def build(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(CONFIGS[name]).eval()


def packed():
    return PackedCollator(pad_to_multiple_of=16, max_documents=4)(DOCUMENTS)


@pytest.mark.filterwarnings("ignore:monograph.optimize fused no layer")
@pytest.mark.parametrize("name", UNREPLACED)
def test_attention_that_reads_no_borders_refuses_packed_rows(name):
    model = mg.optimize(build(name))
    found = rf"packed rows \(cu_seqlens\) on {name}, whose attention is '(sdpa|eager)'"
    with pytest.raises(ValueError, match=found):
        model(**packed())
    with torch.no_grad():
        assert model(**PaddedCollator()(DOCUMENTS), use_cache=False).loss.isfinite()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_train_step_refuses_them(mode):
    torch._dynamo.reset()
    step = TrainStep(build("FalconForCausalLM"), mode=mode, backend="aot_eager")
    with pytest.raises(Exception, match=r"on FalconModel, whose attention is 'sdpa'"):
        step([packed()], learning_rate=1e-3)


@pytest.mark.parametrize("batch", ["padded", "packed by positions"])
def test_inside_a_graph_positions_tell(batch):
    torch._dynamo.reset()
    model = mg.optimize(build("FalconForCausalLM"))
    ids = torch.arange(3, 19)[None]
    place = torch.arange(16)[None]
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert run(input_ids=ids, position_ids=place, use_cache=False).logits.isfinite().all()
        if batch != "padded":
            with pytest.raises(RuntimeError, match="restarting position_ids"):
                run(input_ids=ids, position_ids=place % 9, use_cache=False)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("LlamaForCausalLM", None), ("LlamaForCausalLM", False), ("StableLmForCausalLM", None)],
)
def test_other_models_keep_documents_apart(name, attention):
    """Ours, sdpa by position_ids, and ours on a class that does not declare the interface but has it."""
    model = build(name)
    with torch.no_grad():
        alone = [model(torch.tensor([d["input_ids"]]), use_cache=False).logits for d in DOCUMENTS]
        mg.optimize(model, attention=attention)
        together = model(**packed()).logits[:, :16]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def test_a_recipe_with_sample_packing_refuses_them(monkeypatch):
    monkeypatch.setattr(load_model, "load_base", lambda recipe, folder: build("FalconForCausalLM"))
    recipe = Recipe(base_model="tiny", sample_packing=True, lora_target_modules=["query_key_value"])
    with pytest.raises(ValueError, match=r"packed rows \(sample_packing: true\) on FalconForCausalLM"):
        load_model.load_model(recipe, "unused")
