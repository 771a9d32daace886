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

from support.gguf_files import write_out
from support.gguf_models import COMMON, PROMPT, TEXT, model_of, save, tokenizer_of
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


def add_tokenizer(writer):
    """The tokenizer as convert_hf_to_gguf.py writes it, by the gguf package."""
    tokenizer = json.loads(tokenizer_of("Qwen3").to_str())
    tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    size = COMMON["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([types.get(i, gguf.TokenType.UNUSED) for i in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


def write_by_package(model, path, architecture, change=lambda writer: None, leave=(), experts=None):
    """A model of transformers through the gguf package's own table of names."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture.endswith("moe"):
        writer.add_expert_count(experts or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture.startswith("qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_tokenizer(writer)
    change(writer)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = values.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        if name.endswith("shared_expert_gate.weight"):
            stored = stored[0]
        if name.endswith("mlp.experts.gate_up_proj"):
            half = stored.shape[1] // 2
            parts = {"gate": stored[:, :half], "up": stored[:, half:]}
        elif name.endswith("mlp.experts.down_proj"):
            parts = {"down": stored}
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found not in leave:
                writer.add_tensor(found, np.ascontiguousarray(stored))
            continue
        for part, stack in parts.items():
            layer = name.split(".")[2]
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(stack))
    write_out(writer)


def tiny(kind, **settings):
    torch.manual_seed(3)
    config = getattr(transformers, kind + "Config")(**(COMMON | {"rms_norm_eps": 1e-5} | settings))
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "architecture", "settings"),
    [
        ("Qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("Qwen3Moe", "qwen3moe", MOE | {"head_dim": 32}),
    ],
)
def test_families_that_are_read_and_not_written(tmp_path, kind, architecture, settings):
    model = tiny(kind, **settings)
    write_by_package(model, tmp_path / "it.gguf", architecture)
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", "fp32")
    found = loaded("AutoModelForCausalLM", tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    before, after = model.config.to_dict(), found.config.to_dict()
    free = {"_name_or_path", "architectures", "dtype", "bos_token_id", "transformers_version"}
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


def test_biases_of_another_model_are_no_qwen2(tmp_path):
    leave = {f"blk.{layer}.attn_k.bias" for layer in (0, 1)}
    write_by_package(tiny("Qwen2"), tmp_path / "it.gguf", "qwen2", leave=leave)
    (why,) = run_json("dequantize", tmp_path / "it.gguf", tmp_path / "out")["missing"]
    assert "biases" in why


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
