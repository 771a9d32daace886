"""README.md, coming_from.md and memory.md of docs/start: the code runs as printed, numbers are counted."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig

import monograph as mg
from support.native_tool import ROOT
from support.trl_runs import TEXTS, make_folder, tokenizer

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "start" / "coming_from.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    dense = make_folder(tmp_path_factory.mktemp("model")).parent / "dense"
    tokenizer().save_pretrained(dense)
    return dense


def run(name, **names):
    exec(compile(BLOCKS[name], f"docs/start/coming_from.md: {name}", "exec"), names)
    return names


def test_every_block_of_ours_is_run():
    ours = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "mg." in block]
    assert sorted(ours) == sorted(BLOCKS.values())
    assert BLOCKS.keys() == {"bitsandbytes", "trl", "unsloth"}


def test_bitsandbytes(folder):
    model = run("bitsandbytes", folder=folder)["model"]
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, mg.nn.QuantLinear)
    assert layer.weight.quant_state.nested


def test_trl(folder, tmp_path):
    import trl
    from datasets import Dataset

    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, max_length=16, report_to=[], use_cpu=True, save_strategy="no"
    )
    names = run(
        "trl", folder=folder, args=args, dataset=Dataset.from_dict({"text": TEXTS}), tokenizer=tokenizer()
    )
    losses = [entry["train_loss"] for entry in names["trainer"].state.log_history if "train_loss" in entry]
    assert len(losses) == 1
    assert losses[0] > 0


def test_the_script_of_the_readme(folder, tmp_path, monkeypatch):
    (script,) = re.findall(r"<!-- run: readme -->\n```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my-llama").symlink_to(folder)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(script, "README.md", "exec"), names)
    assert any("train_loss" in entry for entry in names["trainer"].state.log_history)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_unsloth(folder):
    model = run("unsloth", folder=folder)["model"]
    assert model.is_gradient_checkpointing
    ids = torch.arange(8)[None]
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_page_of_memory_has_the_bytes_that_are_counted():
    """Llama 3.1 8B by one and two of its 32 layers: the others are alike."""
    from monograph.hf.transformers.meta_model import meta_model

    def base(name, double, layers):
        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            tie_word_embeddings=False,
        )
        quantization = None if name == "none" else mg.MonographConfig(name, double_quant=double)
        model = meta_model(config, quantization)
        return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])

    def whole(name, double=False):
        one, two = base(name, double, 1), base(name, double, 2)
        return f"{(one + 31 * (two - one)) / 1e9:.2f}"

    text = (ROOT / "docs" / "start" / "memory.md").read_text()
    table = text.partition("<!-- base -->")[2].partition("<!-- end -->")[0]
    shown = re.findall(r"\| ([\d.]+) \|\n", table)
    counted = [whole("none"), whole("mxfp8"), whole("fp8-block"), whole("nvfp4"), whole("mxfp4")]
    assert shown == [*counted, whole("nf4", double=True)]
    assert whole("nf4") == shown[3]
