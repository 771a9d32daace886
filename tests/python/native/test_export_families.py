"""`monograph export` of Qwen2, Phi 3 and gpt-oss, and the way back: the same values, settings and logits.

llama.cpp itself with such a file is test_export_llama_cpp.py.
"""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import monograph as mg
from support.gguf_models import SETTINGS, model_of, save
from support.llama_cpp_model import tensors
from support.native_tool import run, run_json

TYPES = {name.lower(): kind for name, kind in gguf.GGMLQuantizationType.__members__.items()}
FAMILIES = ["Qwen2", "Phi3", "GptOss"]
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model and the folder of each family."""
    made = {}
    for name in FAMILIES:
        model = model_of(name, **({"rope_parameters": YARN} if name == "GptOss" else {}))
        folder = tmp_path_factory.mktemp("models") / name
        save(model, name, folder)
        made[name] = (model, folder)
    return made


@pytest.fixture(scope="module")
def mxfp4(folders, tmp_path_factory):
    """gpt-oss as OpenAI ships it, experts in blocks and scales, and the folder of its values."""
    place = tmp_path_factory.mktemp("mxfp4")
    run("quantize", folders["GptOss"][1], place / "packed", "--to", "mxfp4", "--experts", "stack")
    stored = load_file(place / "packed" / "model.safetensors")
    assert sum(name.endswith("_blocks") for name in stored) == 4
    run("dequantize", place / "packed", place / "plain", "--to", "fp32")
    return place / "packed", place / "plain"


def by_name(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def wanted_type(name, values, kind):
    if values.ndim == 1 or name.endswith((".bias", "ffn_gate_inp.weight")):
        return TYPES["f32"]
    outer = name in ("token_embd.weight", "output.weight")
    shared = kind == "mxfp4" and "gpt-oss" in name
    return TYPES["q8_0" if shared or (outer and kind in ("q4_0", "mxfp4")) else kind]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_the_bytes_of_the_reference(tmp_path, folders, name, kind):
    model, folder = folders[name]
    run("export", folder, tmp_path / "it.gguf", "--type", kind, "--jobs", 2)
    found, wanted = by_name(tmp_path / "it.gguf"), tensors(model)
    if name == "Phi3":
        for part in ("long", "short"):
            factors = found.pop(f"rope_factors_{part}.weight").data
            assert factors.tolist() == SETTINGS[name]["rope_parameters"][f"{part}_factor"] or np.allclose(
                factors, SETTINGS[name]["rope_parameters"][f"{part}_factor"], rtol=1e-7
            )
    assert sorted(found) == sorted(wanted)
    for key, values in wanted.items():
        blocks = wanted_type(key, values, kind)
        if name == "GptOss" and kind == "mxfp4" and blocks == TYPES["mxfp4"] and "_exps" not in key:
            blocks = TYPES["q8_0"]
        assert found[key].tensor_type == blocks, key
        assert [int(size) for size in found[key].shape] == list(reversed(values.shape)), key
        reference = gguf.quants.quantize(values, found[key].tensor_type)
        assert found[key].data.tobytes() == reference.tobytes(), key


def test_the_pairs_are_those_of_the_architecture(tmp_path, folders):
    own = {}
    for name in FAMILIES:
        run("export", folders[name][1], tmp_path / f"{name}.gguf")
        fields = gguf.GGUFReader(tmp_path / f"{name}.gguf").fields
        found = {key: field.contents() for key, field in fields.items()}
        architecture = found["general.architecture"]
        own[architecture] = {
            key.removeprefix(f"{architecture}."): value
            for key, value in found.items()
            if key.startswith(f"{architecture}.")
        }
    assert set(own) == {"qwen2", "phi3", "gpt-oss"}
    assert own["qwen2"]["rope.freq_base"] == 1e6
    assert own["qwen2"]["attention.key_length"] == 16
    phi = own["phi3"]
    assert phi["rope.dimension_count"] == 8
    assert phi["attention.sliding_window"] == 100
    assert phi["rope.scaling.original_context_length"] == 256
    assert phi["rope.scaling.attn_factor"] == pytest.approx((1 + np.log(2) / np.log(256)) ** 0.5)
    oss = own["gpt-oss"]
    assert oss["attention.sliding_window"] == 8
    assert (oss["expert_count"], oss["expert_used_count"], oss["expert_feed_forward_length"]) == (4, 2, 96)
    assert (oss["rope.scaling.type"], oss["rope.scaling.factor"]) == ("yarn", 32.0)
    assert oss["rope.scaling.original_context_length"] == 64


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_is_read_back_as_the_same_model(tmp_path, folders, name):
    """By `dequantize` as a folder, and by `from_pretrained` as it is: beyond the window, and beyond what
    Phi 3's short factors are for."""
    model, folder = folders[name]
    ids = IDS.repeat(1, 7 if name == "Phi3" else 2)
    run("export", folder, tmp_path / "it.gguf", "--type", "f32")
    assert run_json("verify", tmp_path / "it.gguf")["findings"] == []
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    settings = [transformers.AutoConfig.from_pretrained(one).to_dict() for one in (folder, tmp_path / "back")]
    differ = {key for key in settings[0] | settings[1] if settings[0].get(key) != settings[1].get(key)}
    assert differ <= {"_name_or_path", "rope_parameters", "partial_rotary_factor", "bos_token_id"}
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    as_it_is = mg.from_pretrained(tmp_path / "it.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(ids).logits
        assert torch.equal(other(ids).logits, wanted)
        torch.testing.assert_close(as_it_is(ids).logits, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_read_back_as_they_are(tmp_path, folders, name):
    """Q8_0 of the file, of the folder that it becomes, and of the package: one model."""
    run("export", folders[name][1], tmp_path / "it.gguf", "--type", "q8_0")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    found = mg.from_pretrained(tmp_path / "it.gguf", dtype=torch.float32).eval()
    values = tensors(other)
    for key, tensor in by_name(tmp_path / "it.gguf").items():
        if key in values:
            decoded = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
            assert np.array_equal(values[key], decoded), key
    with torch.inference_mode():
        torch.testing.assert_close(found(IDS).logits, other(IDS).logits, rtol=1e-4, atol=1e-3)


def repacked(blocks, scales):
    """OpenAI's pairs of neighbours as ggml's: element i beside element i + 16, the scale in front."""
    low, high = blocks & 15, blocks >> 4
    codes = np.stack([low, high], -1).reshape(*blocks.shape[:-1], 32)
    joined = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], joined], -1)


@pytest.mark.parametrize("options", [(), ("--type", "mxfp4")], ids=["default", "mxfp4"])
def test_experts_in_mxfp4_keep_their_codes_and_scales(tmp_path, mxfp4, options):
    packed = mxfp4[0]
    # What no encoder chooses: blocks of zeros with a scale, and small codes under a large one.
    state = load_file(packed / "model.safetensors")
    odd = tmp_path / "odd"
    odd.mkdir()
    for path in packed.iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    state[f"{name}_blocks"][0, :2] = 0x81
    state[f"{name}_blocks"][1, 3] = 0
    state[f"{name}_scales"][1, 3] = 140
    save_file(state, odd / "model.safetensors", {"format": "pt"})
    run("export", odd, tmp_path / "it.gguf", *options)
    found = by_name(tmp_path / "it.gguf")
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.experts."
        for part, projection, rows in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", None)):
            blocks, scales = (
                state[f"{module}{projection}_proj_{kind}"].numpy() for kind in ("blocks", "scales")
            )
            wanted = repacked(blocks, scales)
            wanted = wanted if rows is None else wanted[:, rows::2]
            tensor = found[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert tensor.tensor_type == TYPES["mxfp4"]
            assert tensor.data.tobytes() == np.ascontiguousarray(wanted).tobytes(), (layer, part)
    rest = {tensor.tensor_type for key, tensor in found.items() if key.endswith("attn_q.weight")}
    assert rest == {TYPES["q8_0" if options else "f32"]}


def test_the_file_of_an_mxfp4_folder_is_the_folder(tmp_path, mxfp4):
    packed, plain = mxfp4
    run("export", packed, tmp_path / "it.gguf")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (plain, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    models = [mg.from_pretrained(one, dtype=torch.float32) for one in (tmp_path / "it.gguf", packed)]
    with torch.inference_mode():
        first, second = (model.eval()(IDS).logits for model in models)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-3)
    run("export", packed, tmp_path / "f32.gguf", "--type", "f32")
    run("export", plain, tmp_path / "plain.gguf", "--type", "f32")
    assert {k: t.data.tobytes() for k, t in by_name(tmp_path / "f32.gguf").items()} == {
        k: t.data.tobytes() for k, t in by_name(tmp_path / "plain.gguf").items()
    }


@pytest.mark.parametrize("name", ["Qwen2", "Phi3"])
def test_a_tied_head_is_one_tensor(tmp_path, name):
    save(model_of(name, tie_word_embeddings=True), name, tmp_path / "model")
    run("export", tmp_path / "model", tmp_path / "it.gguf", "--type", "q8_0")
    assert "output.weight" not in by_name(tmp_path / "it.gguf")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert wanted.config.tie_word_embeddings
    found = mg.from_pretrained(tmp_path / "it.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(found(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-3)


def test_heads_that_are_wider_than_the_model(tmp_path):
    """Qwen2 and gpt-oss: 4 heads of 48 of a model of 64."""
    for name in ("Qwen2", "GptOss"):
        model = model_of(name, head_dim=48)
        save(model, name, tmp_path / name)
        run("export", tmp_path / name, tmp_path / f"{name}.gguf", "--type", "f32")
        run("dequantize", tmp_path / f"{name}.gguf", tmp_path / f"{name}-back", "--to", "fp32")
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-back", dtype="float32")
        with torch.inference_mode():
            assert torch.equal(other.eval()(IDS).logits, model(IDS).logits)


# What llama-quantize (in llama-cpp-cffi 0.4.42, by llama_model_quantize) made of the f32 file of a Phi 3 of
# 10 layers: the first, the last and every third between them have more bits.
MORE = (0, 3, 6, 8, 9)
PHI_TYPES = {"q4_k_m": ("Q4_K", "Q5_K"), "q5_k_m": ("Q5_K", "Q6_K"), "q6_k": ("Q6_K", "Q6_K")}


@pytest.mark.parametrize("kind", PHI_TYPES)
def test_types_of_phi_are_those_of_llama_quantize(tmp_path, kind):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    save(model_of("Phi3", **sizes, **rope), "Phi3", tmp_path / "model")
    run("export", tmp_path / "model", tmp_path / "it.gguf", "--type", kind)
    most, fused = PHI_TYPES[kind]
    for name, tensor in by_name(tmp_path / "it.gguf").items():
        if len(tensor.shape) == 1:
            continue
        wanted = {"attn_qkv": fused, "output": "Q6_K"}.get(name.split(".")[-2], most)
        if "ffn_down" in name and int(name.split(".")[1]) in MORE:
            wanted = "Q6_K"
        assert tensor.tensor_type.name == wanted, name


def settings(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def rope(**values):
    """A context goes beside it too: transformers takes that one."""

    def change(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        context = {key: value for key, value in values.items() if key.startswith("original_")}
        config |= context | {"rope_parameters": config["rope_parameters"] | values}
        path.write_text(json.dumps(config))

    return change


def state(change):
    def edit(folder):
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return edit


def without(name):
    return state(lambda stored: stored.pop(name))


LAYER = "model.layers.1."
REFUSED = {
    "Qwen2": {
        "sliding window": (settings(use_sliding_window=True), "use_sliding_window is 'true'"),
        "a bias is missing": (without(f"{LAYER}self_attn.k_proj.bias"), "llama.cpp's 'blk.1.attn_k.bias'"),
        "one bias too many": (
            state(lambda s: s.__setitem__(f"{LAYER}self_attn.o_proj.bias", torch.zeros(64))),
            "'model.layers.1.self_attn.o_proj.bias': llama.cpp has no tensor for it in qwen2",
        ),
        "frequencies of Llama": (
            rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
            "rope_type is 'llama3', export to GGUF knows for qwen2 default, linear, yarn",
        ),
        "no rows": (settings(num_attention_heads=0), "num_attention_heads is '0'"),
    },
    "Phi3": {
        "scaling": (rope(rope_type="linear", factor=2.0), "knows for phi3 default, longrope"),
        "too few factors": (rope(long_factor=[1.0] * 3), "long_factor is a list of 3, wanted a list of 4"),
        "a factor of zero": (rope(short_factor=[1.0, 0.0, 1.0, 1.0]), "short_factor is '0.0'"),
        "no factors": (rope(long_factor=None), "long_factor is missing, wanted a list of 4"),
        "an odd part of a head": (rope(partial_rotary_factor=0.2), "partial_rotary_factor is '0.2'"),
        "more than a head": (rope(partial_rotary_factor=2.0), "partial_rotary_factor is '2.0'"),
        "two contexts": (settings(original_max_position_embeddings=32), "config.json has 32"),
        "no context": (
            settings(original_max_position_embeddings=0),
            "original_max_position_embeddings is '0'",
        ),
        "a context of one": (
            rope(original_max_position_embeddings=1),
            "is 1, wanted more",
        ),
        "other heads": (settings(head_dim=24), "head_dim 24 of 4 heads is not hidden_size 64"),
        "a matrix is missing": (without(f"{LAYER}mlp.gate_up_proj.weight"), "'blk.1.ffn_up.weight'"),
        "apart": (
            state(lambda s: s.__setitem__(f"{LAYER}self_attn.q_proj.weight", torch.zeros(64, 64))),
            "'model.layers.1.self_attn.q_proj.weight': llama.cpp has no tensor for it in phi3",
        ),
    },
    "GptOss": {
        "layers": (settings(layer_types=["full_attention"] * 2), "full attention in every second"),
        "limit": (settings(swiglu_limit=5.0), "swiglu_limit is 5.000000, llama.cpp has 7"),
        "alpha": (settings(swiglu_alpha=1.0), "swiglu_alpha is 1.000000"),
        "no biases": (settings(attention_bias=False), "attention_bias is false"),
        "tied": (settings(tie_word_embeddings=True), "opens no gpt-oss without a head"),
        "no rope": (settings(rope_parameters=None), "rope_parameters is missing"),
        "rounded ramp": (rope(truncate=True), "truncate is 'true', wanted false"),
        "other ramp": (rope(beta_fast=16.0), "beta_fast is '16.0', wanted 32"),
        "attention factor": (rope(attention_factor=1.0), "attention_factor is set"),
        "no sinks": (without(f"{LAYER}self_attn.sinks"), "'blk.1.attn_sinks.weight'"),
        "no bias of experts": (without(f"{LAYER}mlp.experts.down_proj_bias"), "'blk.1.ffn_down_exps.bias'"),
        "more than there are": (settings(num_experts_per_tok=7), "num_experts_per_tok is 7, of 4 experts"),
        "odd bias": (
            state(lambda s: s.__setitem__(f"{LAYER}mlp.experts.gate_up_proj_bias", torch.zeros(4, 191))),
            "'model.layers.1.mlp.experts.gate_up_proj_bias': llama.cpp has no tensor for it",
        ),
        "a bias of one": (
            state(lambda s: s.__setitem__(f"{LAYER}mlp.experts.down_proj_bias", torch.zeros(64))),
            "'model.layers.1.mlp.experts.down_proj_bias'",
        ),
        "not a number": (
            state(lambda s: s[f"{LAYER}mlp.experts.gate_up_proj"].__setitem__((3, 7, 21), float("nan"))),
            "'blk.1.ffn_up_exps.weight' has nan in row 10, column 7 of expert 3",
        ),
    },
}
CASES = [(name, case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name} {case}" for name, case in CASES])
def test_what_llama_cpp_would_do_otherwise_is_refused_by_name(tmp_path, folders, name, case):
    change, words = REFUSED[name][case]
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders[name][1].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    change(copy)
    error = run("export", copy, tmp_path / "it.gguf", "--type", "q8_0", code=3).stderr
    assert words in error, error
    assert not list(tmp_path.glob("*.gguf"))


def test_scales_that_are_not_numbers_are_refused(tmp_path, mxfp4):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in mxfp4[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    state(lambda s: s[f"{LAYER}mlp.experts.down_proj_scales"].__setitem__((2, 5, 1), 255))(copy)
    error = run("export", copy, tmp_path / "it.gguf", code=3).stderr
    assert "'blk.1.ffn_down_exps.weight' has nan in row 5, column 32 of expert 2" in error, error


@pytest.mark.parametrize("name", FAMILIES)
def test_what_llama_cpp_does_otherwise_is_said(tmp_path, folders, name):
    notes = run_json("export", folders[name][1], tmp_path / "it.gguf")["notes"]
    wanted = {
        "Qwen2": [],
        "Phi3": ["no sliding window for Phi 3: beyond 100", "of long texts where its context is above 256"],
        "GptOss": ["rounds the borders of yarn's ramp"],
    }[name]
    assert all(any(words in note for note in notes) for words in wanted), notes
