"""Tokens that a base does not have: trained, resumed, merged and loaded back, against PEFT in float64."""

import json
import os
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from monograph.cli.merge import native_arguments
from monograph.nn import QuantLinear
from monograph.recipe import check_keys
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.new_tokens import grow_vocabulary
from monograph.recipe.run.generate import Generator, Sampling
from monograph.recipe.run.load_model import load_base, load_model
from monograph.recipe.train import train
from monograph.training import forward_loss
from support.native_tool import run
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

NEW = [400, 401, 402]
TOKENS = {"tokens": ["<call>", "<done>"], "special_tokens": {"additional_special_tokens": ["<think>"]}}
BOTH = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
# tied, adapter, keys; what is trained of embedding and head.
CASES = {
    "whole tables": (False, "qlora", BOTH),
    "rows": (False, "lora", {"peft_trainable_token_indices": {"embed_tokens": NEW, "lm_head": [7, *NEW]}}),
    "tied rows": (True, "qlora", {"peft_trainable_token_indices": NEW}),
    "tied tables apart": (True, "lora", BOTH),
    "tied tables as one": (True, "lora", BOTH | {"peft_ensure_weight_tying": True}),
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Folders with a model whose head is its own, and one whose head is the embedding."""
    made = {}
    for tied in (False, True):
        root = made[tied] = tmp_path_factory.mktemp("tied" if tied else "own")
        make_tokenizer(root / "model")
        make_model(root / "model", num_hidden_layers=1, tie_word_embeddings=tied)
        rows = [{"instruction": f"What is {n}? <call>", "output": f"<think>{n} dog<done>"} for n in range(20)]
        write_jsonl(root / "train.jsonl", rows)
    return made


def recipe_of(root, out, **keys):
    base = {"torch_compile": False, "max_steps": 3, "save_steps": 2, "output_dir": str(out)}
    return check_keys(small_recipe(root, "instruction", **(base | TOKENS | keys))).recipe


def adapter_bytes(folder):
    with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as file:
        return file.read()


def unmerged(root, out, dtype):
    """transformers' base with new rows of its own making, and PEFT's adapter on it."""
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base.resize_token_embeddings(403, mean_resizing=False)
        return PeftModel.from_pretrained(base, out).to(dtype)


def logits(model, ids):
    with torch.inference_mode():
        return model.eval()(input_ids=ids).logits.double()


@pytest.mark.parametrize("case", CASES)
def test_new_tokens_are_trained_resumed_merged_and_loaded(worlds, tmp_path, case):
    tied, adapter, keys = CASES[case]
    root = worlds[tied]
    whole = recipe_of(root, tmp_path / "whole", adapter=adapter, **keys)
    train(whole)
    again = recipe_of(
        root,
        tmp_path / "again",
        adapter=adapter,
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"),
        **keys,
    )
    train(again)
    assert adapter_bytes(again.output_dir) == adapter_bytes(whole.output_dir)
    saved = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    tables = {name for name in saved if "embed_tokens" in name or "lm_head" in name}
    assert len(tables) == (1 if case == "tied rows" else 2)  # no copies of the base
    mean = load_file(root / "model" / "model.safetensors")["model.embed_tokens.weight"].double().mean(0)
    trained = saved[next(name for name in tables if "embed_tokens" in name)].double()[-3:]
    assert (trained - mean).abs().amax(1).min() > 1e-3

    run(*native_arguments(whole, ["--warn-below", "0"]))
    merged = tmp_path / "whole-merged"
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == 403
    found = load_file(merged / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = unmerged(root, whole.output_dir, torch.float64)
        ids = torch.tensor([[5, 400, 9, 402, 7, 401, 400, 3]])
        wanted_logits = logits(reference, ids)
        exact = reference.merge_and_unload().state_dict()
    for name, tensor in found.items():
        if adapter == "qlora" and "layers" in name:
            continue  # on the dequantised base: tests of merge
        if case == "tied tables apart" and name in ("model.embed_tokens.weight", "lm_head.weight"):
            continue  # PEFT gives both the values of one; the logits tell
        # Rounded once: half a unit in the last of the 8 bits of bf16.
        assert (tensor.double() - exact[name]).abs().le(2.0**-8 * exact[name].abs()).all(), name
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
    assert loaded.config.tie_word_embeddings == (case == "tied rows")
    if adapter == "lora":
        # Every weight is off by up to 2^-8 of itself: some such units of the largest logit.
        difference = (logits(loaded, ids) - wanted_logits).abs().max()
        assert difference < 2.0**-6 * wanted_logits.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.convert_tokens_to_ids(["<call>", "<done>", "<think>"]) == NEW
    assert tokenizer.encode("<call>a<think>", add_special_tokens=False)[::2] == [400, 402]

    packed = str(tmp_path / "packed")
    run(*native_arguments(whole, ["--to", "nf4", "--out", packed, "--warn-below", "0", "--warn-above", "9"]))
    kept = load_file(f"{packed}/model.safetensors")
    assert torch.equal(kept["model.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert "model.layers.0.mlp.up_proj.weight.absmax" in kept

    answers = Generator(whole, whole.output_dir)
    assert answers.model.get_input_embeddings().weight.shape[0] == 403
    answers.answer(answers.tokens("What is 3? <call>"), Sampling(max_new_tokens=2), lambda text: None)


@pytest.mark.parametrize("case", ["whole tables", "rows", "tied rows"])
def test_the_loss_of_new_tokens_is_that_of_the_model(worlds, tmp_path, case):
    tied, _, keys = CASES[case]
    read = recipe_of(worlds[tied], tmp_path, adapter="lora", bf16=False, sample_packing=False, **keys)
    model = load_model(read, read.base_model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.tensor([[5, 400, 9, 402, 7, 401, 400, 3]])
    batch = {"input_ids": ids, "labels": ids}
    trained = [p for p in model.parameters() if p.requires_grad]
    got, want = forward_loss(model, batch), model(**batch).loss
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    gradients = [torch.autograd.grad(loss, trained) for loss in (got, want)]
    for ours, torchs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["whole tables", "rows", "tied rows"])
def test_the_default_step_has_the_bits_of_eager(worlds, tmp_path, case):
    tied, adapter, keys = CASES[case]
    for name, mode in (("eager", {"torch_compile": False}), ("graph", {"torch_compile": None})):
        train(recipe_of(worlds[tied], tmp_path / name, adapter=adapter, **keys | mode))
    assert adapter_bytes(tmp_path / "graph") == adapter_bytes(tmp_path / "eager")


def test_new_rows_are_the_mean_whatever_the_threads(worlds, tmp_path):
    read = recipe_of(worlds[False], tmp_path, **BOTH)
    threads, seen = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        model = load_base(read, read.base_model)
        seen.append((model.get_input_embeddings().weight, model.get_output_embeddings().weight))
    torch.set_num_threads(threads)
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)
        mean = one[:400].double().mean(0)
        assert (one[400:].double() - mean).abs().le(2.0**-8 * mean.abs()).all()


def test_tokens_that_nothing_would_train_are_refused(worlds, tmp_path):
    root = worlds[False]
    with pytest.raises(ValueError, match=r"tokens: '<call>' is not a token of the model") as error:
        load_tokenizer(recipe_of(root, tmp_path), str(root / "model"))
    wanted = "peft_trainable_token_indices: {embed_tokens: [400, 401, 402], lm_head: [400, 401, 402]}"
    assert wanted in str(error.value)
    for keys in ({"peft_trainable_token_indices": NEW}, {"lora_modules_to_save": ["embed_tokens"]}):
        read = recipe_of(root, tmp_path, **keys)
        with pytest.raises(ValueError, match="rows 400 to 402 of lm_head are new, and the adapter does not"):
            load_model(read, read.base_model)
    read = recipe_of(worlds[True], tmp_path, peft_trainable_token_indices=[400, 402])
    with pytest.raises(ValueError, match=r"of model.embed_tokens are new.*indices: \[400, 401, 402\], or"):
        load_model(read, read.base_model)


def test_a_packed_head_does_not_grow(worlds, tmp_path):
    read = recipe_of(worlds[False], tmp_path, **BOTH)
    model = AutoModelForCausalLM.from_pretrained(read.base_model)
    model.lm_head = QuantLinear.from_linear(model.lm_head, "nf4")
    with pytest.raises(ValueError, match=r"grow from 400 to 403 rows, and the head of .* is packed \(nf4\)"):
        grow_vocabulary(model, read, read.base_model)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (
            {"embed_tokens": NEW},
            "for weight 'lm_head.weight': has 400 rows, and the adapter has a vocabulary",
        ),
        ({"embed_tokens": [401, 402]}, "token 401 is not one of its 400 rows, and row 400 is not trained"),
    ],
)
def test_rows_that_no_adapter_has_are_not_merged(worlds, tmp_path, rows, part):
    base = AutoModelForCausalLM.from_pretrained(worlds[False] / "model")
    base.resize_token_embeddings(403, mean_resizing=False)
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=rows)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    arguments = ["merge", worlds[False] / "model", "--adapter", tmp_path / "adapter", "--base", "original"]
    assert part in run(*arguments, "--out", tmp_path / "out", code=3).stderr
