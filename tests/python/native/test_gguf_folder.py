"""config.json and tokenizer.json out of a GGUF file alone: the folder that it was made from."""

import json
import random
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import generate_merges

from support.gguf_by_package import tiny, write_by_package
from support.gguf_files import write_out
from support.gguf_models import PROMPT, TEXT, model_of, save, tokenizer_of
from support.native_tool import run, run_json

FAMILIES = ["Llama", "Mistral", "Qwen3", "Gemma3"]
SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<tool>",
    "<0x41>",
    "  ",
    "    ",
    "\n",
    "\t",
    "café",
    "☃",
    "\u2581",
    "e\u0301",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family: the folder of transformers, and the one made of its GGUF file."""
    made = {}
    for name in FAMILIES:
        place = tmp_path_factory.mktemp(name)
        save(model_of(name), name, place / "model")
        run("export", place / "model", place / "it.gguf", "--type", "f32")
        run("dequantize", place / "it.gguf", place / "out", "--to", "fp32")
        made[name] = (place / "model", place / "out")
    return made


def loaded(kind, folder, **options):
    return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_is_that_of_the_folder(folders, name):
    before, after = (loaded("AutoConfig", folder).to_dict() for folder in folders[name])
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    wanted = {"_name_or_path"}
    if name == "Mistral":  # llama.cpp's "llama" is both; its graph has no sliding window
        wanted |= {
            "model_type",
            "architectures",
            "sliding_window",
            "mlp_bias",
            "attention_bias",
            "pretraining_tp",
        }
    assert differ == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_the_same(folders, name):
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = (
            loaded("AutoModelForCausalLM", folder, dtype=torch.float32)(ids).logits
            for folder in folders[name]
        )
    if name == "Gemma3":  # one plus the weight of a norm is stored in float32
        torch.testing.assert_close(after, before, rtol=0, atol=2e-5)
    else:
        assert torch.equal(after, before)


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_thousand_texts_have_the_same_tokens(folders, name):
    before, after = (loaded("AutoTokenizer", folder) for folder in folders[name])
    assert after.chat_template == before.chat_template
    assert (after.bos_token, after.eos_token, after.unk_token) == (
        before.bos_token,
        before.eos_token,
        before.unk_token if name in ("Mistral", "Gemma3") else None,  # a byte-level BPE has no unknown token
    )
    generator = random.Random(name)
    pieces = name in ("Mistral", "Gemma3")
    # The models' added token of three U+2581 is three blanks to llama.cpp, so texts have at most two.
    special = [text for text in SPECIAL if not (pieces and text in ("\u2581", "    "))]
    texts = [PROMPT, "", " "]
    while len(texts) < 10_000:
        begin = generator.randrange(len(TEXT))
        parts = [TEXT[begin : begin + generator.randrange(20)], *generator.choices(special, k=2)]
        text = "".join(generator.sample(parts, 3))
        if not (pieces and "   " in text):
            texts.append(text)
    wanted, found = before(texts).input_ids, after(texts).input_ids
    assert wanted == found
    assert len({tuple(ids) for ids in wanted}) > 5_000


def test_merges_are_those_that_transformers_makes_of_scores(tmp_path):
    """Random tokens of few letters, so that each is cut in many ways; some have equal scores."""
    generator = random.Random(5)
    alphabet = ["a", "b", "\u2581", "é"]
    tokens = {"<unk>", *alphabet}
    while len(tokens) < 600:
        tokens.add("".join(generator.choices(alphabet, k=generator.randrange(2, 8))))
    vocab = {token: i for i, token in enumerate(sorted(tokens))}
    scores = {token: float(generator.randrange(-400, 0)) for token in vocab}
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(vocab))
    writer.add_token_types([gguf.TokenType.NORMAL] * 600)
    writer.add_token_scores([scores[token] for token in vocab])
    writer.add_bos_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((600, 32), dtype=np.float32))
    write_out(writer)
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out")
    model = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]
    assert model["vocab"] == vocab
    wanted = generate_merges(vocab, scores)
    assert [tuple(merge) for merge in model["merges"]] == wanted
    assert len(wanted) > 1000


HALF = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG_ROPE = HALF | {
    "rope_type": "longrope", "long_factor": [1.5, 2.25, 3.0, 4.5], "short_factor": [1.0, 1.25, 1.5, 2.0],
    "attention_factor": 1.125,
}  # fmt: skip
PHI = {"rope_parameters": HALF | {"rope_type": "default"}, "sliding_window": 12}


def phi_pairs(config):
    """As convert_hf_to_gguf.py writes them."""

    def change(writer):
        writer.add_rope_dimension_count(8)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        rope = config.rope_parameters
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
            for name in ("long", "short"):
                factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)

    return change


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "architecture", "settings"),
    [
        ("Qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("Qwen3Moe", "qwen3moe", MOE | {"head_dim": 32}),
        ("Phi3", "phi3", PHI),
        ("Phi3", "phi3", PHI | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    ],
)
def test_families_that_are_read_and_not_written(tmp_path, kind, architecture, settings):
    model = tiny(kind, **settings)
    change = phi_pairs(model.config) if kind == "Phi3" else lambda writer: None
    write_by_package(model, tmp_path / "it.gguf", architecture, change)
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", "fp32")
    found = loaded("AutoModelForCausalLM", tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    before, after = model.config.to_dict(), found.config.to_dict()
    free = {"_name_or_path", "architectures", "dtype", "bos_token_id", "transformers_version"}
    free |= {"partial_rotary_factor"}  # of rope_parameters, where it must be equal
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= free
    tokenizer = loaded("AutoTokenizer", tmp_path / "out")
    assert tokenizer(PROMPT).input_ids == tokenizer_of("Qwen3").encode(PROMPT).ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "</s>")


@pytest.mark.parametrize(
    ("kind", "architecture", "settings"),
    [
        ("Gemma", "gemma", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Gemma2", "gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Qwen2Moe", "qwen2moe", MOE | {"shared_expert_intermediate_size": 32}),
    ],
)
def test_families_without_a_config_have_every_tensor(tmp_path, kind, architecture, settings):
    model = tiny(kind, **settings)
    write_by_package(model, tmp_path / "it.gguf", architecture)
    (why,) = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", "fp32")["missing"]
    assert f"general.architecture '{architecture}'" in why
    model.config.save_pretrained(tmp_path / "out")
    found = loaded("AutoModelForCausalLM", tmp_path / "out", dtype=torch.float32)
    for name, values in model.state_dict().items():
        atol = 2e-6 if "norm" in name else 0  # Gemma's are stored as one plus the weight
        torch.testing.assert_close(found.state_dict()[name], values, rtol=0, atol=atol, msg=name)


def test_stacks_of_another_number_of_experts_are_refused(tmp_path):
    write_by_package(tiny("Qwen3Moe", head_dim=32, **MOE), tmp_path / "it.gguf", "qwen3moe", experts=5)
    message = run("dequantize", tmp_path / "it.gguf", tmp_path / "out", code=3).stderr
    assert "4 experts" in message
    assert "says 5" in message


def extra(method, *values):
    return lambda writer: getattr(writer, method)(*values)


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        (extra("add_float32", "qwen2.attention.scale", 0.5), "config.json", "attention.scale"),
        (extra("add_vocab_size", 399), "config.json", "vocab_size"),
        (extra("add_value_length", 8), "config.json", "value_length"),
        (extra("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE), "config.json", "longrope"),
        (extra("add_bos_token_id", 400), "config.json", "bos_token_id"),
        (extra("add_expert_count", 4), "config.json", "expert_count is of a model with experts"),
        (extra("add_eot_token_id", 400), "tokenizer.json", "eot_token_id is no token"),
        (extra("add_bool", "tokenizer.ggml.add_sep_token", True), "tokenizer.json", "add_sep_token"),
        (extra("add_string", "tokenizer.chat_template.tool_use", "x"), "tokenizer.json", "tool_use"),
        (extra("add_uint32", "tokenizer.ggml.fim_pre_token_id", 5), None, ""),  # nothing of transformers
        (extra("add_array", "tokenizer.ggml.scores", [1.0]), None, ""),  # of the other kind: not read
    ],
)
def test_what_is_not_understood_is_not_written_and_a_line_says_why(tmp_path, change, file, words):
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", change)
    report = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    if file is None:
        assert report["missing"] == []
        return
    assert file in report["missing"][0]
    assert words in report["missing"][0]
    assert not (tmp_path / "out" / file).exists()
    assert "not written: " + file in run("dequantize", tmp_path / "it.gguf", tmp_path / "again").stdout


def test_generation_ends_with_a_turn_too(tmp_path):
    model = tiny("Qwen2")
    for change, wanted in ((extra("add_eot_token_id", 7), [2, 7]), (extra("add_eot_token_id", 2), 2)):
        out = tmp_path / str(wanted)
        write_by_package(model, tmp_path / "it.gguf", "qwen2", change)
        run("dequantize", tmp_path / "it.gguf", out)
        assert loaded("AutoModelForCausalLM", out).generation_config.eos_token_id == wanted
        assert loaded("AutoTokenizer", out).eos_token == "</s>"


def test_biases_of_another_model_are_no_qwen2(tmp_path):
    leave = {f"blk.{layer}.attn_k.bias" for layer in (0, 1)}
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", leave=leave)
    (why,) = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out")["missing"]
    assert "biases" in why


@pytest.mark.parametrize(
    "name",
    ["output_norm.weight", "blk.1.attn_norm.weight", "blk.0.attn_v.weight", "blk.0.attn_v.bias"],
)
def test_a_tensor_that_transformers_would_make_up_is_missed_by_name(tmp_path, name):
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", leave={name})
    (why,) = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out")["missing"]
    assert "config.json" in why
    assert f"'{name}' is missing" in why or "biases" in why
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [
        ("output.bias", [400], "is one too many"),
        ("blk.1.attn_q_norm.weight", [16], "is one too many"),
        ("blk.1.ffn_up.weight", [128, 32], "is [128, 32], wanted [96, 64]"),
        ("blk.1.ffn_down.weight", [1, 64, 96], "is [1, 64, 96], wanted [64, 96]"),
    ],
)
def test_a_tensor_that_transformers_would_leave_out_is_named(tmp_path, name, shape, what):
    change = extra("add_tensor", name, np.zeros(shape, np.float32))
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", change, leave={name})
    (why,) = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out")["missing"]
    assert f"tensor '{name}' {what}" in why


def test_a_factor_without_a_kind_of_scaling_is_linear(tmp_path):
    """As llama.cpp reads it."""
    for factor, wanted in ((4.0, {"rope_type": "linear", "factor": 4.0}), (1.0, None)):
        write_by_package(
            tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", extra("add_rope_scaling_factor", factor)
        )
        run("dequantize", tmp_path / "it.gguf", tmp_path / f"out{factor}")
        config = json.loads((tmp_path / f"out{factor}" / "config.json").read_text())
        assert config["rope_scaling"] == wanted


def test_a_file_is_known_by_its_first_bytes(folders, tmp_path):
    blob = tmp_path / "sha256-0123"
    blob.write_bytes((folders["Qwen3"][1].parent / "it.gguf").read_bytes())
    assert run_json("inspect", blob)["architecture"] == "qwen3"
    run("dequantize", blob, tmp_path / "out")
    blob.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(100))
    assert "bytes behind the last tensor" in run("verify", blob, code=3).stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (extra("add_uint16", "split.count", 3), ["one of 3 parts", "llama-gguf-split"]),
        (extra("add_int32", "split.tensors.count", 9), ["split.tensors.count says 9"]),
    ],
)
def test_a_part_of_a_model_is_refused(tmp_path, change, words):
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", change)
    message = run("dequantize", tmp_path / "it.gguf", tmp_path / "out", code=3).stderr
    assert all(word in message for word in words)
    assert not (tmp_path / "out").exists()


def write_heads(path, *, blocks=1, heads=4, kv_heads=2, length=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(blocks)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if length:
        writer.add_key_length(length)
    for name, rows in (("attn_q", 64), ("attn_k", 32)):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((rows, 64), dtype=np.float32))
    write_out(writer)


def test_heads_and_layers_that_contradict_the_tensors_are_refused(tmp_path):
    path = tmp_path / "it.gguf"
    write_heads(path)
    run("dequantize", path, tmp_path / "right")
    for settings, words in (
        ({"blocks": 5}, ["1 layers", "block_count says 5"]),
        ({"kv_heads": 4}, ["attn_k", "8 rows a head", "16"]),
        ({"length": 32}, ["attn_q", "16 rows a head", "32"]),
        ({"heads": [4], "kv_heads": [2]}, ["attention.head_count", "array", "one number"]),
    ):
        write_heads(path, **settings)
        message = run("dequantize", path, tmp_path / "out", code=3).stderr
        assert all(word in message for word in words), message
