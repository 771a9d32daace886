"""gpt-oss from a GGUF file alone: experts in MXFP4, gate and up as two stacks whose rows alternate."""

import copy
import json
import pathlib
import re

import gguf
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import monograph as mg
from monograph.hf.transformers.gguf_folder import gguf_folder
from monograph.hf.transformers.planned_model import planned_model
from monograph.memory.mapped_memory import MappedMemory
from monograph.nn import PackedEmbedding, QuantLinear
from support.gguf_bases import GPT_OSS, SIZES, mixed_base
from support.gguf_by_package import tiny, write_by_package
from support.gguf_mixtures import (
    EXPERTS,
    IDS,
    adapted,
    changed,
    check_gradients,
    check_merging_in_memory,
    check_one_graph_and_one_adapter,
    layers_of,
)
from support.native_tool import run, run_json


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Experts in MXFP4, the rest in Q8_0; transformers' model with the values of the gguf package."""
    return mixed_base("GptOss", tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """The decoded model as transformers writes it, in bf16."""
    place = tmp_path_factory.mktemp("decoded")
    copy.deepcopy(base[1]).to(torch.bfloat16).save_pretrained(place)
    return place


def test_values_are_those_of_the_gguf_package(base):
    file, wanted = base
    model, state = mg.from_pretrained(file, dtype=torch.float32), wanted.state_dict()
    packed = {p: m for p, m in model.named_modules() if isinstance(m, (QuantLinear, PackedEmbedding))}
    assert {m.format.name for m in packed.values()} == {"q8_0"}
    assert len(packed) == 2 * 4 + 2
    for path, layer in packed.items():
        assert torch.equal(layer.packed.dequantize(torch.float32), state[f"{path}.weight"]), path
    assert len(layers_of(model)) == 2
    for path, layer in layers_of(model).items():
        gate, up = layer.packed("gate_up_proj").gate, layer.packed("gate_up_proj").up
        assert {one.format.name for one in (gate, up, layer.packed("down_proj"))} == {"ggml_mxfp4"}
        for name in EXPERTS:
            assert torch.equal(layer.dequantize(name), state[f"{path}.{name}"])
            assert torch.equal(getattr(layer, name) * 1, state[f"{path}.{name}"])
    plain = {path for path, p in model.named_parameters() if p.dtype is not torch.uint8}
    ends = ("gate_up_proj_bias", "down_proj_bias", "sinks", "router.weight", "router.bias", "q_proj.bias")
    assert all(f"model.layers.1.mlp.experts.{end}" in plain for end in ends[:2])
    assert all(any(path.endswith(end) for path in plain) for end in ends)
    for path in plain:
        assert torch.equal(model.get_parameter(path).data, state[path]), path


def test_logits_are_those_of_transformers(base):
    """Its own experts on the decoded weights, float32; beyond the window too."""
    file, wanted = base
    model = mg.from_pretrained(file, dtype=torch.float32)
    with torch.no_grad():
        logits = wanted(IDS).logits
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(model.dequantize()(IDS).logits, logits, rtol=1e-4, atol=1e-3)
    assert not any(layer.stacks for layer in layers_of(model).values())


def test_settings_are_those_of_the_folder(base):
    before = transformers.AutoConfig.from_pretrained(base[0].parent / "model").to_dict()
    after = transformers.AutoConfig.from_pretrained(gguf_folder(base[0])).to_dict()
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    # The file of this test names no first token.
    assert differ <= {"_name_or_path", "quantization_config", "dtype", "architectures", "bos_token_id"}
    assert after["layer_types"] == ["sliding_attention", "full_attention"]
    assert after["rope_parameters"]["truncate"] is False


def test_every_byte_of_the_stacks_stays_in_the_file(base):
    model = mg.from_pretrained(base[0])
    with MappedMemory() as memory:
        for path, layer in layers_of(model).items():
            stored = [name for name, p in layer.named_parameters() if p.dtype is torch.uint8]
            assert sorted(stored) == [
                "down_proj_values", "gate_up_proj_gate_values", "gate_up_proj_up_values"
            ]  # fmt: skip
            for name in stored:
                assert memory.extents(getattr(layer, name).data_ptr(), getattr(layer, name).nbytes), path


def test_gradients_are_those_of_transformers_and_peft(base):
    check_gradients(*base)


@pytest.mark.slow
def test_one_graph_and_the_adapter_of_the_decoded_folder_to_the_bit(base, folder):
    file, _ = base
    before = file.read_bytes()
    check_one_graph_and_one_adapter([(file, {}), (folder, {"experts_implementation": "monograph"})])
    assert file.read_bytes() == before


def test_the_file_of_an_adapter_is_that_of_the_folder(base, folder, tmp_path):
    files = []
    for number, source in enumerate((base[0], folder)):
        adapted(source).save_pretrained(tmp_path / str(number))
        files.append(load_file(tmp_path / str(number) / "adapter_model.safetensors"))
    assert files[0].keys() == files[1].keys()
    assert any(".experts." in name for name in files[0])
    assert all(torch.equal(one, files[1][name]) for name, one in files[0].items())


def test_merging_and_unmerging_in_memory(base):
    check_merging_in_memory(base[0])


def test_a_plan_has_the_stored_tensors(base):
    planned, loaded = planned_model(str(base[0]), None, True), mg.from_pretrained(base[0])
    for layer in layers_of(planned).values():
        assert layer.gate_up_proj_gate_values.device.type == "meta"
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (planned, loaded)]
    assert shapes[0] == shapes[1]


def test_lora_is_merged_into_the_tensors_it_changes(base, tmp_path):
    file = base[0]
    for name, experts in (("attention", False), ("all", True)):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear")
        model = mg.add_lora(mg.from_pretrained(file), config, experts=experts)
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.data.normal_(std=0.05)
        model.save_pretrained(tmp_path / name)
        adapter, merged = tmp_path / name, tmp_path / f"{name}.gguf"
        lora = tmp_path / f"lora-{name}.gguf"
        run("adapter", "convert", file, adapter, "--for", "llama.cpp", "--out", lora)
        run("merge", file, "--adapter", adapter, "--out", merged)
        before, after = (
            {t.name: t.data.tobytes() for t in gguf.GGUFReader(one).tensors} for one in (file, merged)
        )
        differ = {name for name, data in before.items() if after[name] != data}
        parts = [f"attn_{part}" for part in ("q", "k", "v", "output")]
        parts += [f"ffn_{part}_exps" for part in ("gate", "up", "down")] if experts else []
        assert differ == {f"blk.{i}.{part}.weight" for i in range(2) for part in parts}
        factors = {tensor.name.rsplit(".", 1)[0] for tensor in gguf.GGUFReader(lora).tensors}
        assert factors == differ


def test_every_row_of_experts_is_merged_with_its_own(base, tmp_path):
    """In plain floats: gate and up of the new file are what PEFT merges, rows in turns."""
    kinds = {f"blk.{i}.ffn_{part}_exps.weight": "f32" for i in range(2) for part in ("gate", "up", "down")}
    file = changed(base[0], kinds)
    torch.manual_seed(0)
    model = mg.from_pretrained(file, dtype=torch.float32)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=targets))
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    run("merge", file, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged.gguf")
    model.merge_adapter()
    reader = gguf.GGUFReader(tmp_path / "merged.gguf")
    found = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    state = {name: p.detach().transpose(1, 2) for name, p in model.named_parameters() if p.dim() == 3}
    assert len(state) == 4
    for name, value in state.items():
        block = f"blk.{name.split('layers.')[1].split('.')[0]}.ffn_"
        parts = {"down": value} if "down_proj" in name else {"gate": value[:, ::2], "up": value[:, 1::2]}
        for part, wanted in parts.items():
            merged = found[f"{block}{part}_exps.weight"]
            torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate", "up"), ("down",)], ids="-".join)
def test_plain_stacks_beside_packed_ones(base, parts):
    file = changed(base[0], {f"blk.0.ffn_{part}_exps.weight": "f32" for part in parts})
    model = mg.from_pretrained(file, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, base[1](IDS).logits, rtol=1e-4, atol=1e-3)


def test_other_blocks_for_both(base):
    """Gate and up in one other type."""
    file = changed(base[0], {f"blk.0.ffn_{part}_exps.weight": "q8_0" for part in ("gate", "up")})
    model, want = mg.from_pretrained(file, dtype=torch.float32), {}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name.startswith("blk.0.") and tensor.name.endswith("_exps.weight"):
            values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
            want[tensor.name.split("_")[1]] = torch.from_numpy(values)
    layer = next(iter(layers_of(model).values()))
    found = layer.dequantize("gate_up_proj").transpose(1, 2)
    assert torch.equal(found[:, ::2], want["gate"])
    assert torch.equal(found[:, 1::2], want["up"])


def test_what_is_not_trained_as_it_lies_is_named(base, tmp_path):
    for kind, wanted in (("q8_0", "wanted one type: their rows alternate"), ("f32", "wanted both packed or")):
        file = changed(base[0], {"blk.0.ffn_up_exps.weight": kind})
        message = f"model.layers.0.mlp.experts: gate is ggml_mxfp4 and up {kind}, {wanted}"
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            mg.from_pretrained(file)
        assert "changed.gguf" in str(error.value)
    with pytest.raises(ValueError, match="which no quant method saves"):
        mg.from_pretrained(base[0]).save_pretrained(tmp_path / "again")


def test_the_tool_reads_it(base, folder, tmp_path):
    file = base[0]
    tensors = {one["name"]: one["format"] for one in run_json("inspect", file)["weights"]}
    assert tensors["blk.1.ffn_up_exps.weight"] == "mxfp4"
    assert run("verify", file, code=0)
    other = changed(base[0], {"blk.0.ffn_up_exps.weight": "q8_0"})
    assert run_json("diff", file, file)["mismatches"] == 0
    rows = run_json("diff", file, other, "--tolerance", 0.02)["weights"]
    assert {row["state"] for row in rows if row["name"] == "blk.0.ffn_up_exps.weight"} == {"within tolerance"}


def test_the_folder_of_the_file_is_that_of_transformers(base, tmp_path):
    """`monograph dequantize`: experts in stacks, inputs for rows, gate and up in turns."""
    run("dequantize", base[0], tmp_path / "out", "--to", "fp32")
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), base[1].state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(values, wanted[name]) for name, values in found.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, base[1](IDS).logits)
    files = []
    for jobs in (1, 3):
        run("dequantize", base[0], tmp_path / f"{jobs}", "--jobs", jobs)
        files.append((tmp_path / f"{jobs}" / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_packed_router_and_packed_biases_are_named(base):
    for name, message in (
        ("blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.router.weight is q8_0, wanted f32, f16, bf16"),
        ("blk.0.ffn_up_exps.bias", "experts.*.up_proj.bias is q8_0, wanted f32, f16, bf16"),
    ):
        file = changed(base[0], {name: "q8_0"})
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            mg.from_pretrained(file)
        assert "changed.gguf" in str(error.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of the gguf package with other pairs."""
    model, place = tiny("GptOss", **(SIZES | GPT_OSS)), tmp_path_factory.mktemp("pairs")
    count = iter(range(100))

    def write(change):
        file = place / f"{next(count)}.gguf"
        write_by_package(model, file, "gpt-oss", change)
        return file

    return write


def pair(key, value):
    def change(writer):
        writer.kv_data[0][key].value = value

    return change


def test_pairs_that_say_more(written):
    file = written(lambda w: (w.add_rope_scaling_yarn_beta_fast(16.0), w.add_sliding_window_pattern(1)))
    config = transformers.AutoConfig.from_pretrained(gguf_folder(file))
    assert config.rope_parameters["beta_fast"] == 16.0
    assert config.layer_types == ["full_attention"] * 2

    def without_yarn(writer):
        for key in ("type", "factor", "original_context_length"):
            del writer.kv_data[0][f"gpt-oss.rope.scaling.{key}"]

    config = transformers.AutoConfig.from_pretrained(gguf_folder(written(without_yarn)))
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 150000.0


REFUSED = [
    (pair("gpt-oss.expert_used_count", 7), "gpt-oss.expert_used_count is 7, of 6 experts"),
    (pair("gpt-oss.expert_count", 5), "gpt-oss.expert_count is 5, by the tensors 6"),
    (pair("gpt-oss.rope.scaling.type", "longrope"), "is 'longrope', known are none, linear, yarn"),
    (pair("gpt-oss.attention.sliding_window", 0), "gpt-oss.attention.sliding_window is 0"),
    (lambda w: w.add_rope_freq_base_swa(10000.0), "gpt-oss.rope.freq_base_swa is not gpt-oss.rope.freq_base"),
    (lambda w: w.add_float32("gpt-oss.swiglu_limit", 5.0), "key 'gpt-oss.swiglu_limit': transformers'"),
    (lambda w: w.add_expert_shared_count(1), "key 'gpt-oss.expert_shared_count': transformers'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_pairs_that_no_setting_gives_are_named(written, change, message):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        mg.from_pretrained(written(change))


@pytest.mark.parametrize(
    "name", ["blk.1.attn_sinks.weight", "blk.0.ffn_up_exps.bias", "blk.1.post_attention_norm.weight"]
)
def test_tensors_that_are_missing_are_named(written, name):
    file = written(lambda writer: None)
    file.write_bytes(file.read_bytes().replace(name.encode(), name[:-1].encode() + b"?"))
    with pytest.raises((ValueError, RuntimeError), match=re.escape(f"tensor '{name}' is missing")):
        mg.from_pretrained(file)


def test_the_head_is_never_the_embedding(written):
    file = written(lambda writer: None)
    name = (13).to_bytes(8, "little") + b"output.weight"
    assert file.read_bytes().count(name) == 1
    file.write_bytes(file.read_bytes().replace(name, name[:-1] + b"?"))
    with pytest.raises((ValueError, RuntimeError), match=r"tensor 'output\.weight' is missing"):
        mg.from_pretrained(file)


def test_words_are_cut_as_o200k_has_them(written):
    file = written(pair("tokenizer.ggml.pre", "gpt-4o"))
    stored = json.loads((pathlib.Path(gguf_folder(file)) / "tokenizer.json").read_text())
    assert stored["normalizer"] is None
    assert stored["model"]["ignore_merges"] is False
    words = transformers.AutoTokenizer.from_pretrained(gguf_folder(file)).backend_tokenizer.pre_tokenizer
    found = [word for word, _ in words.pre_tokenize_str("Don't STOP 12345 camelCase\n\n x/\n")]
    assert found == ["Don't", "ĠSTOP", "Ġ", "123", "45", "Ġcamel", "Case", "ĊĊ", "Ġx", "/Ċ"]
