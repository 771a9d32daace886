"""`monograph export --to gguf`: read back with PyPI's gguf, against torch and gguf's own encoders.

llama.cpp itself, with the same greedy tokens, is test_export_llama_cpp.py.
"""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.gguf_models import VOCABULARY, model_of, save
from support.llama_cpp_model import tensors
from support.native_tool import run, run_json

TYPES = {name.lower(): kind for name, kind in gguf.GGMLQuantizationType.__members__.items()}
FAMILIES = ["Llama", "Mistral", "Qwen3", "Gemma3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model and the folder of each family."""
    made = {}
    for name in FAMILIES:
        model = model_of(name)
        folder = tmp_path_factory.mktemp("models") / name
        made[name] = (model, folder, save(model, name, folder))
    return made


def fields(reader):
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def wanted_type(name, values, kind):
    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if kind in ("q4_0", "mxfp4") and name in ("token_embd.weight", "output.weight"):
        return gguf.GGMLQuantizationType.Q8_0
    return TYPES[kind]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_the_bytes_of_the_reference(tmp_path, folders, name, kind):
    model, folder, _ = folders[name]
    out = tmp_path / "model.gguf"
    report = run_json("export", folder, out, "--to", "gguf", "--type", kind, "--jobs", 2)
    wanted = tensors(model)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    if name == "Llama":
        factors = found.pop("rope_freqs.weight")
        inverse = model.model.rotary_emb.inv_freq.numpy()
        plain = 1 / 10000.0 ** (np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(plain / factors.data, inverse, rtol=1e-6)
        assert len(set(factors.data.tolist())) > 3  # short, between, long
    assert sorted(found) == sorted(wanted)
    for key, values in wanted.items():
        assert found[key].tensor_type == wanted_type(key, values, kind), key
        assert [int(size) for size in found[key].shape] == list(reversed(values.shape)), key
        reference = gguf.quants.quantize(values, found[key].tensor_type)
        assert found[key].data.tobytes() == reference.tobytes(), key
    assert report["type"] == kind
    assert report["bytes"] == out.stat().st_size
    assert sum(row["tensors"] for row in report["types"].values()) == len(gguf.GGUFReader(out).tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_metadata_and_tokens_are_those_of_the_folder(tmp_path, folders, name):
    model, folder, tokenizer = folders[name]
    out = tmp_path / "a model.gguf"
    run("export", folder, out)
    found, config = fields(gguf.GGUFReader(out)), model.config
    architecture = {"Mistral": "llama", "Llama": "llama", "Qwen3": "qwen3", "Gemma3": "gemma3"}[name]
    head = 16 if name == "Llama" else 32
    own = {
        "block_count": config.num_hidden_layers, "context_length": 128, "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "vocab_size": VOCABULARY, "rope.freq_base": 1e6 if name == "Gemma3" else 1e4,
        "attention.layer_norm_rms_epsilon": float(np.float32(config.rms_norm_eps)),
    }  # fmt: skip
    own |= {
        "Llama": {},
        "Mistral": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        "Qwen3": {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
        "Gemma3": {"attention.sliding_window": 8},
    }[name]  # fmt: skip
    assert found["general.architecture"] == architecture
    assert found["general.name"] == "a model"
    assert found["general.file_type"] == 0
    prefix = architecture + "."
    assert {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)} == own
    words, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(words) == len(kinds) == VOCABULARY
    assert len(set(words)) == VOCABULARY
    byte_level = name in ("Llama", "Qwen3")
    for token, number in tokenizer.get_vocab().items():
        assert words[number] == (token if byte_level else token.replace("\u2581" * 3, "   ")), token
    used = tokenizer.get_vocab_size()
    assert all(kind == gguf.TokenType.UNUSED for kind in kinds[used:])
    assert kinds[1] == kinds[2] == gguf.TokenType.CONTROL
    assert kinds[used - 1] == gguf.TokenType.USER_DEFINED
    assert found["tokenizer.ggml.bos_token_id"] == 1
    assert found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.ggml.add_bos_token"] is (name != "Qwen3")
    assert found["tokenizer.ggml.add_eos_token"] is False
    assert found["tokenizer.chat_template"].startswith("{{ bos_token }}")
    stored = json.loads((folder / "tokenizer.json").read_text())["model"]
    if byte_level:
        assert found["tokenizer.ggml.model"] == "gpt2"
        assert found["tokenizer.ggml.pre"] == {"Llama": "llama-bpe", "Qwen3": "qwen2"}[name]
        assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in stored["merges"]]
        return
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is (name == "Mistral")
    assert sum(kind == gguf.TokenType.BYTE for kind in kinds) == 256
    made = list(dict.fromkeys(left + right for left, right in stored["merges"]))
    scores = [found["tokenizer.ggml.scores"][stored["vocab"][token]] for token in made]
    assert scores == [-1.0 - i for i in range(len(made))]


def test_packed_weights_are_decoded_and_mxfp4_keeps_its_values(tmp_path, folders):
    _, folder, _ = folders["Llama"]
    for packed, kind in (("nf4", "f32"), ("mxfp4", "mxfp4")):
        run("quantize", folder, tmp_path / packed, "--to", packed)
        run("dequantize", tmp_path / packed, tmp_path / f"{packed}-plain", "--to", "fp32")
        run("export", tmp_path / packed, tmp_path / f"{packed}.gguf", "--type", kind)
        run("export", tmp_path / f"{packed}-plain", tmp_path / f"{packed}-plain.gguf", "--type", "f32")
        found = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{packed}.gguf").tensors}
        wanted = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{packed}-plain.gguf").tensors}
        assert sorted(found) == sorted(wanted)
        compared = 0
        for key, tensor in wanted.items():
            if kind == "mxfp4" and found[key].tensor_type != TYPES["mxfp4"]:
                continue
            values = gguf.quants.dequantize(found[key].data, found[key].tensor_type)
            assert np.array_equal(values, tensor.data), key
            compared += 1
        assert compared >= 14


def test_rows_that_are_no_whole_blocks_become_f16(tmp_path):
    model = model_of("Qwen3", intermediate_size=80)
    save(model, "Qwen3", tmp_path / "model")
    report = run_json("export", tmp_path / "model", tmp_path / "model.gguf", "--type", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert {name for name, kind in kinds.items() if kind == "F16"} == {
        "blk.0.ffn_down.weight", "blk.1.ffn_down.weight",
    }  # fmt: skip
    assert report["notes"] == [
        "in f16, because their rows are no multiple of 32: 2 tensors, the first blk.0.ffn_down.weight"
    ]


def test_the_default_type_is_that_of_the_embedding(tmp_path):
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        save(model_of("Llama", dtype), "Llama", tmp_path / name, dtype)
        assert run_json("export", tmp_path / name, tmp_path / f"{name}.gguf", "--dry-run")["type"] == name
    assert not list(tmp_path.glob("*.gguf"))


def test_an_existing_file_is_replaced_with_force_alone(tmp_path, folders):
    _, folder, _ = folders["Llama"]
    out = tmp_path / "model.gguf"
    out.write_text("mine")
    assert "--force" in run("export", folder, out, code=3).stderr
    assert out.read_text() == "mine"
    run("export", folder, out, "--force")
    assert len(gguf.GGUFReader(out).tensors) > 10
    assert ".gguf" in run("export", folder, tmp_path / "model.bin", code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def edited(folder, tmp_path, file, change):
    """A copy of the folder with `change` made to one of its JSON files."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    value = json.loads((copy / file).read_text())
    change(value)
    (copy / file).write_text(json.dumps(value))
    return copy


def settings(**values):
    return lambda config: config.update(values)


def without_a_merge(tokenizer):
    tokenizer["model"]["merges"].pop(3)


def first_merge_last(tokenizer):
    merges = tokenizer["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    twice = next(i for i in range(len(made) - 1) if made[i] == made[i + 1])
    merges.append(merges.pop(twice))


def other_words(tokenizer):
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"


def whole_words(tokenizer):
    tokenizer["model"]["ignore_merges"] = True


def no_end(config):
    config["eos_token"] = None


ROPE = {"rope_theta": 10000.0, "factor": 2.0}
REFUSED = {
    "experts": ("Qwen3", "config.json", settings(model_type="olmoe"), "knows gemma3_text, gpt_oss, llama"),
    "unknown": ("Llama", "config.json", settings(model_type="phi3"), "phi3"),
    "rope": ("Llama", "config.json", settings(rope_parameters=ROPE | {"rope_type": "dynamic"}), "dynamic"),
    "activation": ("Llama", "config.json", settings(hidden_act="gelu"), "gelu"),
    "layers": ("Llama", "config.json", settings(num_hidden_layers=3), "blk.2.attn_norm.weight"),
    "fewer layers": ("Llama", "config.json", settings(num_hidden_layers=1), "model.layers.1."),
    "shape": ("Llama", "config.json", settings(head_dim=8), "config.json says 32 x 64"),
    "gemma scale": ("Gemma3", "config.json", settings(query_pre_attn_scalar=64), "llama.cpp takes 32"),
    "gemma layers": ("Gemma3", "config.json", settings(layer_types=["full_attention"] * 7), "every sixth"),
    "gemma cap": ("Gemma3", "config.json", settings(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "vocabulary": ("Llama", "config.json", settings(vocab_size=300), "config.json says 300 x 64"),
    "unigram": ("Llama", "tokenizer.json", lambda t: t["model"].update(type="Unigram"), "Unigram"),
    "words": ("Llama", "tokenizer.json", other_words, "regular expression"),
    "whole words": ("Qwen3", "tokenizer.json", whole_words, "with ignore_merges"),
    "merge": ("Mistral", "tokenizer.json", without_a_merge, "no merge makes"),
    "order": ("Mistral", "tokenizer.json", first_merge_last, "stand apart"),
    "normalizer": ("Mistral", "tokenizer.json", settings(normalizer={"type": "NFKC"}), "NFKC"),
    "strip": ("Llama", "tokenizer.json", lambda t: t["added_tokens"][-1].update(rstrip=True), "rstrip"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_do_otherwise_is_refused_by_name(tmp_path, folders, case):
    name, file, change, words = REFUSED[case]
    copy = edited(folders[name][1], tmp_path, file, change)
    error = run("export", copy, tmp_path / "model.gguf", code=3).stderr
    assert words in error, error
    assert not list(tmp_path.glob("*.gguf"))


def test_a_tokenizer_without_an_end_is_refused(tmp_path, folders):
    copy = edited(folders["Llama"][1], tmp_path, "tokenizer_config.json", no_end)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert "eos_token" in run("export", copy, tmp_path / "model.gguf", code=3).stderr


def test_numbers_that_the_type_cannot_hold_are_refused(tmp_path, folders):
    copy = edited(folders["Llama"][1], tmp_path, "config.json", lambda config: None)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    error = run("export", copy, tmp_path / "model.gguf", "--type", "f16", code=3).stderr
    assert "model.layers.1.mlp.up_proj.weight" in error
    assert "row 3, column 5" in error
    run("export", copy, tmp_path / "model.gguf", "--type", "q4_0")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    for kind in ("f32", "q8_0", "mxfp4"):
        assert "nan" in run("export", copy, tmp_path / "no.gguf", "--type", kind, code=3).stderr
    assert not (tmp_path / "no.gguf").exists()
