"""Qwen3.5 with its vision tower: loaded whole, trained on packed text, merged under its own names."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import monograph as mg
from monograph.packing import PackedCollator
from monograph.training import TrainStep
from support.native_tool import run
from support.recurrent_models import DELTA, SMALL

TARGETS = r".*language_model.*\.(in_proj_qkv|in_proj_z|out_proj|q_proj)"


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
    }
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config=SMALL | DELTA | kinds | {"head_dim": 16, "rope_parameters": rope},
        vision_config=vision | {"patch_size": 4, "num_position_embeddings": 16},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    for parameter in model.parameters():  # a head of 0.02 could learn next to nothing
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def documents():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 59, (n,), generator=generator).tolist()} for n in (9, 70, 12)]


def test_it_loads_trains_and_merges_under_its_own_names(folder, tmp_path):
    model = mg.from_pretrained(folder, mg.MonographConfig("nf4", block_size=32))
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    model = mg.add_lora(model, LoraConfig(r=4, target_modules=TARGETS))
    packed = PackedCollator(max_documents=4)(documents())
    steps = TrainStep(model, mode="graph")
    losses = [steps([packed], 1e-2).loss.item() for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    model.save_pretrained(tmp_path / "adapter")
    merge = ("merge", folder, "--adapter", tmp_path / "adapter", "--base", "original", "--out")
    run(*merge, tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layer = "model.language_model.layers.0.linear_attn"
    names = ("in_proj_qkv", "in_proj_z", "out_proj")
    assert changed == {f"{layer}.{name}.weight" for name in names} | {
        "model.language_model.layers.1.self_attn.q_proj.weight"
    }
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_documents_and_embeddings_of_images(folder):
    """A document alone has the values of a packed one, also with embeddings and 3-D positions given."""
    model = mg.from_pretrained(folder, dtype=torch.float32).eval()
    found = documents()
    packed = PackedCollator(max_documents=4)(found)
    given = {name: packed[name] for name in ("cu_seqlens", "use_cache")}
    place = packed["position_ids"]
    positions = torch.stack((place, place // 2, place // 3))  # rising slower in height and width
    embeddings = torch.randn(1, place.shape[1], 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(inputs_embeds=embeddings, position_ids=positions, **given).logits[0]
        begin = 0
        for document in found:
            here = slice(begin, begin + len(document["input_ids"]))
            begin = here.stop
            alone = model(
                inputs_embeds=embeddings[:, here], position_ids=positions[..., here], use_cache=False
            ).logits[0]
            assert torch.allclose(logits[here], alone, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="of three dimensions without cu_seqlens"):
            model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
