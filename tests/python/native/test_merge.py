"""`monograph merge` on real adapters of PEFT, against PEFT itself in float64.

The reference is merge_and_unload of the same model and adapter converted to float64 (every value is exact
there); ours must be that result, rounded once to the stored type, except where it lies within 1e-11 of its
size of the middle of two stored values: the order of summation may differ in the last bits of float64.
"""

import copy
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.gguf_files import write_out
from support.merge_reference import adapter_on, base_model, check_against_float64
from support.native_tool import run, run_json

pytestmark = pytest.mark.slow
TOKENS = torch.arange(24).reshape(2, 12) * 13 % 320


def as_float64(tensors):
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


CASES = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"v_proj": 4, r"layers\.1.*gate_proj": 3},
        "alpha_pattern": {"q_proj": 3, "^model.layers.0.*up_proj": 7},
        "use_rslora": True,
    },
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora_embedding": {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [300, 2, 5]}},
    "lora_bias": {"lora_bias": True, "bias_in_base": True},
    "biases": {"bias": "lora_only", "bias_in_base": True},
}


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_merges_are_the_rounded_float64_result_and_no_worse_than_peft(tmp_path, case, adapter_dtype):
    settings = dict(CASES[case])
    bias = settings.pop("bias_in_base", False)
    model = base_model(torch.bfloat16, attention_bias=bias, mlp_bias=bias)
    model.save_pretrained(tmp_path / "base")
    peft_model = adapter_on(model, tmp_path / "adapter", adapter_dtype, **settings)
    report = run_json(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out", "--warn-below", "0",
    )  # fmt: skip
    exact = copy.deepcopy(peft_model).double().merge_and_unload()
    ties = check_against_float64(tmp_path / "out", exact)
    assert ties <= 2
    assert report["whole"]["cosine"] > 0.5
    # Never further from the exact value than PEFT's own merge, element by element.
    # (PEFT keeps replaced modules in the adapter's type; a saved bf16 model rounds them too.)
    peft = as_float64(peft_model.merge_and_unload().to(torch.bfloat16).state_dict())
    wanted = as_float64(exact.state_dict())
    for name, tensor in as_float64(load_file(tmp_path / "out" / "model.safetensors")).items():
        ours, peft_error = np.abs(tensor - wanted[name]), np.abs(peft[name] - wanted[name])
        assert (ours <= peft_error * (1 + 1e-9) + 1e-300).all(), name


@pytest.mark.parametrize("to", ["same", "bf16", "fp16", "fp32"])
def test_the_output_type_is_the_only_rounding(tmp_path, to):
    model = base_model(torch.float32)
    model.save_pretrained(tmp_path / "base")
    peft_model = adapter_on(model, tmp_path / "adapter", torch.float32)
    run(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out", "--to", to, "--warn-below", "0",
    )  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    types = {"same": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert {tensor.dtype for tensor in tensors.values()} == {types[to]}
    assert check_against_float64(tmp_path / "out", peft_model.double().merge_and_unload()) <= 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(types[to]).removeprefix("torch.")


def test_several_adapters_add_up_with_their_weights(tmp_path):
    model = base_model(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    for seed, name in enumerate(["one", "two"]):
        adapter_on(copy.deepcopy(model), tmp_path / name, torch.float32, seed=seed)
    run(
        "merge", tmp_path / "base", "--adapter", f"{tmp_path}/one:0.7", "--adapter", f"{tmp_path}/two:-0.25",
        "--base", "original", "--out", tmp_path / "out", "--warn-below", "0",
    )  # fmt: skip
    peft_model = PeftModel.from_pretrained(model.double(), tmp_path / "one", adapter_name="one")
    peft_model.load_adapter(tmp_path / "two", adapter_name="two")
    peft_model = peft_model.double()
    for layer in peft_model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("one", 0.7)
            layer.set_scale("two", -0.25)
    peft_model.base_model.set_adapter(["one", "two"])
    assert check_against_float64(tmp_path / "out", peft_model.merge_and_unload()) <= 2


def logits_of(model):
    with torch.inference_mode():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    "case",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [26, 13]},
    ],
    ids=["lora_embedding", "lora_head", "saved_head", "saved_embedding", "tokens"],
)
def test_tied_heads_give_the_model_that_was_trained(tmp_path, case):
    """The unmerged model is the reference: merge_and_unload changes the shared tensor for both sides."""
    model = base_model(torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    assert "lm_head.weight" not in load_file(tmp_path / "base" / "model.safetensors")
    peft_model = adapter_on(model, tmp_path / "adapter", torch.float32, **case)
    run(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out", "--warn-below", "0",
    )  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert merged.config.tie_word_embeddings == ("trainable_token_indices" in case)
    wanted = logits_of(peft_model)
    # fp32 sums over 64 to 96 terms in another grouping: a few units of 2^-24 of the largest logit.
    torch.testing.assert_close(logits_of(merged), wanted, rtol=0, atol=float(wanted.abs().max()) * 2e-6)


def test_the_merged_folder_loads_and_generates_as_peft_does(tmp_path):
    model = base_model(torch.float32)
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    peft_model = adapter_on(model, tmp_path / "adapter", torch.float32, target_modules="all-linear")
    run(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out", "--max-shard-size", "100KB",
    )  # fmt: skip
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md",
            "model.safetensors.index.json"} <= files  # fmt: skip
    assert not any("adapter" in name or name.startswith(".") for name in files)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    peft_merged = peft_model.merge_and_unload()
    wanted = logits_of(peft_merged)
    torch.testing.assert_close(logits_of(merged), wanted, rtol=0, atol=float(wanted.abs().max()) * 2e-6)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    tokens = TOKENS[:1]
    assert torch.equal(merged.generate(tokens, **options), peft_merged.generate(tokens, **options))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model:" in card
    assert "kept" in card


def test_the_base_must_be_the_one_the_adapter_records(tmp_path):
    model = base_model(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapter_on(model, tmp_path / "adapter", torch.float32)
    arguments = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original", "--out"]
    first = run_json(*arguments, tmp_path / "first", "--warn-below", "0")
    record = {"schema_version": 1, "base": {"sha256": first["base"]["sha256"], "weights": "original"}}
    (tmp_path / "adapter" / "monograph.json").write_text(json.dumps(record))
    run(*arguments, tmp_path / "second")
    record["base"]["sha256"] = "0" * 64
    (tmp_path / "adapter" / "monograph.json").write_text(json.dumps(record))
    refused = run(*arguments, tmp_path / "third", code=3)
    assert "was trained on the base with hash 000" in refused.stderr
    assert not (tmp_path / "third").exists()
    forced = run(*arguments, tmp_path / "third", "--force")
    assert "was trained on the base" in forced.stderr
    record["base"] = {"weights": "dequantized"}
    (tmp_path / "adapter" / "monograph.json").write_text(json.dumps(record))
    assert "--base says original" in run(*arguments, tmp_path / "fourth", code=3).stderr
    # The output records it, in every file.
    header = json.loads(
        (tmp_path / "first" / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}"
    )
    assert header["__metadata__"]["monograph.base_sha256"] == first["base"]["sha256"]


def test_the_hash_can_be_computed_in_python(tmp_path):
    import hashlib

    from safetensors import safe_open

    model = base_model(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    adapter_on(model, tmp_path / "adapter", torch.float32)
    report = run_json(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out", "--warn-below", "0",
    )  # fmt: skip
    lines = {}
    for path in (tmp_path / "base").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor, part = file.get_tensor(name), file.get_slice(name)
                digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                lines[name] = f"{json.dumps(name)} {part.get_dtype()} {list(part.get_shape())} {digest}\n"
    text = "".join(lines[name] for name in sorted(lines))
    assert report["base"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert run_json("inspect", tmp_path / "base", "--hash")["sha256"] == report["base"]["sha256"]
    assert report["base"]["sha256"] in run("inspect", tmp_path / "base", "--hash", "--no-tensors").stdout


def test_thresholds_dry_run_and_refusals(tmp_path):
    model = base_model(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapter_on(model, tmp_path / "adapter", torch.float32)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    small = {name: tensor * (1e-2 if "lora_B" in name else 1) for name, tensor in weights.items()}
    save_file(small, tmp_path / "adapter" / "adapter_model.safetensors")
    arguments = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original", "--out"]
    out = tmp_path / "out"
    assert "would be written" in run(*arguments, out, "--dry-run").stdout
    plan = run_json(*arguments, out, "--dry-run")
    names = [name.rpartition(".lora_A")[0] for name in weights if ".lora_A" in name]
    assert (plan["schema_version"], plan["dry_run"], plan["changed"]) == (1, True, len(names))
    assert plan["weights"] == len(load_file(tmp_path / "base" / "model.safetensors"))
    assert not out.exists()
    failed = run(*arguments, out, "--fail-above", "0.001", "--warn-above", "0.002", code=1)
    assert "was not written" in failed.stderr
    assert "have an error along the adapter above 0.00 of its change in bf16" in failed.stderr
    failed = run(*arguments, out, "--fail-below", "1.5", "--warn-below", "1.5", code=1)
    assert "keep less than 150 % of the adapter's change in bf16" in failed.stderr
    assert not out.exists()
    run(*arguments, out, "--to", "fp32", "--fail-below", "0.999", "--fail-above", "0.001")
    assert "exists; choose another name" in run(*arguments, out, code=3).stderr
    assert "exists; choose another name" in run(*arguments, out, "--dry-run", code=3).stderr
    assert "overlaps" in run(*arguments, tmp_path / "base", "--force", "--dry-run", code=3).stderr
    run(*arguments, out, "--force")
    assert "overlaps" in run(*arguments, tmp_path / "base" / "x", code=3).stderr
    run("merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--out", out, code=2)
    run(*arguments, tmp_path / "y", "--adapter", f"{tmp_path}/adapter:heavy", code=2)
    assert "--as" in run(*arguments, tmp_path / "y", "--as", "nf4", code=2).stderr
    assert run(*arguments, "", code=2).stderr.count("\n") == 1
    assert "--max-shard-size" in run(*arguments, tmp_path / "y", "--max-shard-size", "0", code=2).stderr
    run(*arguments, tmp_path / "y", "--adapter", tmp_path / "nothing", code=5)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_qalora": True}))
    assert "use_qalora" in run(*arguments, tmp_path / "y", code=3).stderr
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter", "out"}


def huge_model(folder, dtype, value, name):
    model = base_model(dtype)
    model.state_dict()[name][3, 5] = value
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("dtype", "to", "name", "value"),
    [
        (torch.bfloat16, "fp16", "q_proj", 65280),
        (torch.float16, "same", "q_proj", 65280),
        (torch.float16, "nf4", "q_proj", 65280),
        (torch.bfloat16, "fp16", "v_proj", 1e5),
    ],
    ids=["changed", "fp16_base", "packed_of_fp16", "cast"],
)
def test_a_value_beyond_fp16_is_an_error(tmp_path, dtype, to, name, value):
    weight = f"model.layers.0.self_attn.{name}.weight"
    model = huge_model(tmp_path / "base", dtype, value, weight)
    adapter_on(model, tmp_path / "adapter", torch.float32)
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = f"base_model.model.{weight}".replace("weight", "lora_{}.weight")
    if name == "q_proj":  # 65280 + 2 * 8 * 16 = 65536 in fp64
        state[prefix.format("A")][:, 5] = 4
        state[prefix.format("B")][3] = 4
        save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    arguments = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original"]
    text = run(*arguments, "--to", to, "--out", tmp_path / "out", code=3).stderr
    assert f"'{weight}': row 3, column 5 is " in text
    assert "fp16 ends at 65504" in text
    assert not (tmp_path / "out").exists()
    run(*arguments, "--to", "fp32", "--out", tmp_path / "wide")


def test_a_change_that_cannot_be_measured_is_below_every_threshold(tmp_path):
    model = huge_model(tmp_path / "base", torch.bfloat16, float("nan"), "lm_head.weight")
    model.lm_head.weight.data[3, 5] = 1
    adapter_on(model, tmp_path / "adapter", torch.float32, modules_to_save=["lm_head"])
    arguments = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original"]
    report = run_json(*arguments, "--out", tmp_path / "out", "--warn-below", "-1")
    assert report["below_threshold"] == 1
    (row,) = [row for row in report["weights"] if row["name"] == "lm_head.weight"]
    assert (row["cosine"], row["base_norm"], report["whole"]["kept"]) == (None, None, None)
    failed = run(*arguments, "--out", tmp_path / "other", "--fail-below", "-1", code=1)
    assert "1 weights are below --fail-below or above --fail-above" in failed.stderr
    assert failed.stdout.splitlines()[2].startswith("lm_head.weight")
    assert not (tmp_path / "other").exists()
    for option in ("--fail-below", "--warn-below", "--fail-above", "--warn-above"):
        for value in ("nan", "inf", "-inf"):
            assert option in run(*arguments, "--out", tmp_path / "other", option, value, code=2).stderr


def test_gguf_knows_every_tensor_and_reads_them_back(tmp_path):
    """llama.cpp's converter is in no package; its table of names and its file format are. 4-bit bases fail
    there with `Can not map tensor '...weight.absmax'`: a merged folder has plain tensors only."""
    gguf = pytest.importorskip("gguf")
    model = base_model(torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapter_on(model, tmp_path / "adapter", torch.float32, target_modules="all-linear")
    run(
        "merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original",
        "--out", tmp_path / "out",
    )  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    mapped = {}
    for name, tensor in tensors.items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        mapped[short] = tensor.numpy()
        writer.add_tensor(short, mapped[short])
    write_out(writer)
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert read.keys() == mapped.keys()
    for name, values in mapped.items():
        assert np.array_equal(read[name].reshape(values.shape), values), name
