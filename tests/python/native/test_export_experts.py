"""`monograph export` of mixtures of experts, from folders that store them one by one, stacked or packed.

Tensors are those of PyPI's gguf, or of ggml's C inside xllamacpp. llama.cpp itself with such a file is
test_export_llama_cpp.py.
"""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.nn import PackedExperts
from support.ggml_library import decoded, ggml
from support.gguf_mixtures import changed
from support.gguf_models import model_of, save
from support.llama_cpp_model import tensors
from support.measured_runs import measured_all
from support.native_tool import program, run, run_json

TYPES = {name.lower(): kind for name, kind in gguf.GGMLQuantizationType.__members__.items()}
FAMILIES = ["Qwen3Moe", "Mixtral"]
MODULES = {"Qwen3Moe": "mlp.experts", "Mixtral": "block_sparse_moe.experts"}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model and the folder of each family, as transformers writes it: experts one by one."""
    made = {}
    for name in FAMILIES:
        model = model_of(name)
        folder = tmp_path_factory.mktemp("models") / name
        save(model, name, folder)
        made[name] = (model, folder)
    return made


def by_name(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def wanted_type(name, values, kind):
    if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
        return TYPES["f32"]
    outer = name in ("token_embd.weight", "output.weight")
    shared = kind == "mxfp4" and not name.endswith("_exps.weight")
    return TYPES["q8_0" if shared or (outer and kind in ("q4_0", "mxfp4")) else kind]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_the_bytes_of_the_reference(tmp_path, folders, name, kind):
    model, folder = folders[name]
    run("export", folder, tmp_path / "it.gguf", "--type", kind, "--jobs", 2)
    found, wanted = by_name(tmp_path / "it.gguf"), tensors(model)
    assert sorted(found) == sorted(wanted)
    assert sum(values.ndim == 3 for values in wanted.values()) == 6
    for key, values in wanted.items():
        assert found[key].tensor_type == wanted_type(key, values, kind), key
        assert [int(size) for size in found[key].shape] == list(reversed(values.shape)), key
        reference = gguf.quants.quantize(values, found[key].tensor_type)
        assert found[key].data.tobytes() == reference.tobytes(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pairs_name_the_experts(tmp_path, folders, name):
    run("export", folders[name][1], tmp_path / "it.gguf")
    found = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "it.gguf").fields.items()}
    pairs = {key.split(".", 1)[1]: value for key, value in found.items() if ".expert_" in key}
    if name == "Mixtral":  # llama.cpp's "llama" has experts of feed_forward_length
        assert found["general.architecture"] == "llama"
        assert pairs == {"expert_count": 4, "expert_used_count": 2}
        assert found["llama.feed_forward_length"] == 96
    else:
        assert found["general.architecture"] == "qwen3moe"
        assert pairs == {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}


def stacked(folder, copy, module):
    """The folder with experts in stacks, as the classes of transformers have them."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    state, stacks = load_file(folder / "model.safetensors"), {}
    rest = {name: value for name, value in state.items() if f".{module}." not in name}
    own = ("w1", "w3", "w2") if "sparse" in module else ("gate_proj", "up_proj", "down_proj")
    experts = len({name.split(f"{module}.")[1].split(".")[0] for name in state if f".{module}." in name})
    for layer in range(2):
        at = f"model.layers.{layer}.{module}."
        gate, up, down = (
            torch.stack([state[f"{at}{expert}.{leaf}.weight"] for expert in range(experts)]) for leaf in own
        )
        stacks[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        stacks[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    save_file(rest | stacks, copy / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_every_storage_gives_the_same_file(tmp_path, folders, name, kind):
    """One by one, stacked, and packed either way: that of the folder that `dequantize` makes."""
    folder = folders[name][1]
    stacked(folder, tmp_path / "stacked", MODULES[name])
    for source in (folder, tmp_path / "stacked"):
        run("export", source, tmp_path / "it.gguf", "--type", kind, "--force")
        bytes_ = (tmp_path / "it.gguf").read_bytes()
        if source == folder:
            wanted = bytes_
        assert bytes_ == wanted
    for how, to in (("stack", "nf4"), ("stack", "mxfp4"), ("separate", "nf4"), ("separate", "int8")):
        packed = tmp_path / f"{how}-{to}"
        run("quantize", folder, packed, "--to", to, "--experts", how)
        run("dequantize", packed, tmp_path / f"{how}-{to}-plain")
        files = []
        for source in (packed, tmp_path / f"{how}-{to}-plain"):
            run("export", source, tmp_path / "it.gguf", "--type", kind, "--force")
            files.append((tmp_path / "it.gguf").read_bytes())
        assert files[0] == files[1]
        assert files[0] != wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_is_read_back_as_the_same_model(tmp_path, folders, name):
    """`monograph dequantize FILE.gguf`: equal weights, settings and logits; and opened as it lies."""
    model, folder = folders[name]
    run("export", folder, tmp_path / "it.gguf", "--type", "f32")
    assert run_json("verify", tmp_path / "it.gguf")["findings"] == []
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, other(ids).logits)
    assert run_json("diff", tmp_path / "it.gguf", folder)["mismatches"] == 0
    run("export", folder, tmp_path / "it.gguf", "--type", "q8_0", "--force")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "q8_0", "--to", "fp32")
    packed = mg.from_pretrained(tmp_path / "it.gguf", dtype=torch.float32)
    assert sum(isinstance(module, PackedExperts) for module in packed.modules()) == 2
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "q8_0", dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_router_is_named(tmp_path, folders, name):
    run("export", folders[name][1], tmp_path / "it.gguf", "--type", "q8_0")
    file = changed(tmp_path / "it.gguf", {"blk.1.ffn_gate_inp.weight": "q8_0"})
    message = "model.layers.1.mlp.gate.weight is q8_0, wanted f32, f16, bf16: routers are never packed"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        mg.from_pretrained(file)
    assert "changed.gguf" in str(error.value)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A mixture whose rows are blocks of 256, and a dense model that has the same rows in its MLP."""
    place = tmp_path_factory.mktemp("wide")
    model = model_of("Qwen3Moe", **WIDE)
    save(model, "Qwen3Moe", place / "model")
    sizes = WIDE | {"intermediate_size": 6 * 256}
    del sizes["moe_intermediate_size"]
    dense = model_of("Qwen3", **sizes)
    experts = [layer.mlp.experts for layer in model.model.layers]
    with torch.no_grad():
        for layer, source in zip(dense.model.layers, experts, strict=True):
            gate, up = source.gate_up_proj.chunk(2, 1)
            layer.mlp.gate_proj.weight.copy_(gate.reshape(-1, 256))
            layer.mlp.up_proj.weight.copy_(up.reshape(-1, 256))
        # Rows of down_proj too: hidden size and that of an expert are the same.
        for layer, source in zip(dense.model.layers, experts[::-1], strict=True):
            layer.mlp.down_proj.weight.copy_(source.down_proj.reshape(-1, 256).reshape(256, -1))
    save(dense, "Qwen3", place / "dense")
    return place


@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q6_k"])
def test_experts_have_the_blocks_of_dense_rows(tmp_path, wide, kind):
    """Bit for bit; down_proj where both have one type, block by block."""
    for name in ("model", "dense"):
        run("export", wide / name, tmp_path / f"{name}.gguf", "--type", kind)
    mixture, dense = by_name(tmp_path / "model.gguf"), by_name(tmp_path / "dense.gguf")
    for layer in range(2):
        for part in ("gate", "up"):
            found = mixture[f"blk.{layer}.ffn_{part}_exps.weight"]
            other = dense[f"blk.{layer}.ffn_{part}.weight"]
            assert found.tensor_type == other.tensor_type
            assert found.tensor_type.name == {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}[kind]
            assert found.data.tobytes() == other.data.tobytes()
        found = mixture[f"blk.{layer}.ffn_down_exps.weight"]
        other = dense[f"blk.{1 - layer}.ffn_down.weight"]
        if found.tensor_type == other.tensor_type:
            assert found.data.tobytes() == other.data.tobytes()
    before = (tmp_path / "model.gguf").read_bytes()
    run("export", wide / "model", tmp_path / "model.gguf", "--type", kind, "--jobs", 3, "--force")
    assert (tmp_path / "model.gguf").read_bytes() == before


@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q6_k"])
def test_decoded_experts_are_those_of_ggml_bit_for_bit(tmp_path, wide, kind):
    """`dequantize FILE.gguf` against dequantize_row_* of ggml's C."""
    library = ggml()
    if library is None:
        pytest.skip("xllamacpp is not installed")
    run("export", wide / "model", tmp_path / "it.gguf", "--type", kind)
    run("dequantize", tmp_path / "it.gguf", tmp_path / "back", "--to", "fp32")
    ours = load_file(tmp_path / "back" / "model.safetensors")
    compared = 0
    for name, tensor in by_name(tmp_path / "it.gguf").items():
        if not name.endswith("_exps.weight"):
            continue
        cols, rows, experts = (int(size) for size in tensor.shape)
        theirs = decoded(library, tensor.tensor_type.name, tensor.data, (experts, rows, cols))
        layer, part = name.split(".")[1], name.split("_")[1]
        for expert in range(experts):
            found = ours[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"].numpy()
            differ = int((found.view(np.uint32) != theirs[expert].view(np.uint32)).sum())
            assert differ == 0, name
            compared += found.size
    print(kind, "compared", compared, "0 differ")
    assert compared == 2 * 3 * 6 * 256 * 256


# What llama-quantize (in llama-cpp-cffi 0.4.42, by llama_model_quantize) made of the f32 files of Mixtral's
# models with 10 layers: the type of most, and of those layers that have more bits another.
MORE = (0, 3, 6, 8, 9)
MOST = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}


def type_of_llama_quantize(kind, experts, name):
    part = name.split(".")[-2]
    if part == "output":
        return "Q6_K"
    if part in ("attn_k", "attn_v") and experts == 8:
        return "Q8_0"
    if part == "attn_output" and experts == 8 and kind == "q4_k_m":
        return "Q5_K"
    if part in ("attn_v", "ffn_down_exps") and int(name.split(".")[1]) in MORE:
        return "Q6_K"
    return "F32" if part == "ffn_gate_inp" else MOST[kind]


@pytest.mark.parametrize("experts", [8, 4])
def test_types_are_those_of_llama_quantize(tmp_path, experts):
    sizes = WIDE | {"num_hidden_layers": 10, "num_local_experts": experts}
    save(model_of("Mixtral", **sizes), "Mixtral", tmp_path / "model")
    for kind in MOST:
        run("export", tmp_path / "model", tmp_path / "it.gguf", "--type", kind, "--force")
        found = by_name(tmp_path / "it.gguf")
        matrices = {name: tensor for name, tensor in found.items() if len(tensor.shape) > 1}
        assert len(found) == 103
        assert len(matrices) == 82
        for name, tensor in matrices.items():
            assert tensor.tensor_type.name == type_of_llama_quantize(kind, experts, name), (kind, name)


def test_memory_does_not_grow_with_the_experts(tmp_path):
    """Resident, mapped files too: 8 experts and 64."""
    commands = []
    for experts in (8, 64):
        sizes = WIDE | {"num_experts": experts, "num_hidden_layers": 4}
        save(model_of("Qwen3Moe", **sizes), "Qwen3Moe", tmp_path / str(experts))
        command = [program(), "export", tmp_path / str(experts), tmp_path / "it.gguf", "--type", "q4_k_m"]
        commands.append([*command, "--jobs", 1, "--force", "--quiet"])
    runs = measured_all(commands)
    assert [run.code for run in runs] == [0, 0]
    peaks = [run.peak_bytes for run in runs]
    size = (tmp_path / "64" / "model.safetensors").stat().st_size
    print("peaks", peaks, "file", size)
    assert size > 200e6
    assert peaks[1] - peaks[0] < 0.1 * size


def with_settings(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def with_state(change):
    def edit(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return edit


EXPERT = "model.layers.1.mlp.experts.3."


def without(*names):
    return with_state(lambda state: [state.pop(EXPERT + name + "_proj.weight") for name in names])


def narrow(state):
    state[EXPERT + "up_proj.weight"] = state[EXPERT + "up_proj.weight"][:16].contiguous()


def number(value):
    return with_state(lambda state: state[EXPERT + "down_proj.weight"].__setitem__((5, 7), value))


def unknown(state):
    state[EXPERT + "side_proj.weight"] = torch.zeros(32, 64)


REFUSED = {
    "weights of experts": (with_settings(norm_topk_prob=False), "norm_topk_prob is 'false', wanted true"),
    "dense layers": (with_settings(mlp_only_layers=[1]), "mlp_only_layers"),
    "every second layer": (with_settings(decoder_sparse_step=2), "decoder_sparse_step is 2, wanted 1"),
    "more than there are": (with_settings(num_experts_per_tok=7), "num_experts_per_tok is 7, of 6 experts"),
    "fewer in config.json": (
        with_settings(num_local_experts=5, num_experts=5),
        "is 6 x 64, config.json says 5 x 64",
    ),
    "width": (with_settings(moe_intermediate_size=16), "is 6 x 32 x 64, config.json says 6 x 16 x 64"),
    "an expert is missing": (without("gate", "up", "down"), "experts up to number 5"),
    "one without gate": (without("gate"), "gate has 5 experts"),
    "one is smaller": (with_state(narrow), EXPERT + "up_proj.weight"),
    "one matrix too many": (with_state(unknown), "side_proj"),
    "not a number": (number(float("nan")), "row 5, column 7 of expert 3"),
    "too large": (number(1e9), "row 5, column 7 of expert 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_do_otherwise_is_refused_by_name(tmp_path, folders, case):
    change, words = REFUSED[case]
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders["Qwen3Moe"][1].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    change(copy)
    error = run("export", copy, tmp_path / "it.gguf", "--type", "q8_0", code=3).stderr
    assert words in error, error
    assert not list(tmp_path.glob("*.gguf"))
