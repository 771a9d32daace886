"""`monograph merge FILE.gguf`: the same file with other codes. Values are decoded by the gguf package, the
order of rows is torch's, the merged values are computed in float64."""

import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.gguf_adapters import adapter_on
from support.gguf_bases import MIXTURE, mixed_base, unturned
from support.gguf_models import model_of, save
from support.llama_cpp_model import NAMES
from support.native_tool import run, run_json

ALL = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return mixed_base("Llama", tmp_path_factory.mktemp("base"))


def changes(adapter, scale=1.0):
    """B A of each module, float64."""
    state = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for key, a in state.items():
        if "lora_A" in key:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[module] = scale * state[key.replace("lora_A", "lora_B")].double() @ a.double()
    return found


def tensor_of(module):
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def decoded_tensors(path, config):
    """float64 by llama.cpp's names, rows in the order of transformers."""
    found, turned = {}, config.model_type in ("llama", "mistral")
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        data = np.asarray(tensor.data)
        values = torch.tensor(gguf.quants.dequantize(data, tensor.tensor_type).reshape(shape)).double()
        for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if turned and f".{part}." in tensor.name:
                values = unturned(values, heads)
        found[tensor.name] = values
    return found


def merged(file, adapter, out, *more):
    return run_json("merge", file, "--adapter", adapter, "--out", out, *more)


def along(change, wanted):
    return ((change * wanted).sum() / wanted.square().sum()).item()


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return adapter_on(base[1], tmp_path_factory.mktemp("adapter") / "lora", lora_alpha=8)


def test_the_adapter_is_in_the_file(base, adapter, tmp_path):
    """What is kept by type, as the report says it; the report's other numbers are those of the values."""
    file, model = base
    report = merged(file, adapter, tmp_path / "merged.gguf")
    nearest = merged(file, adapter, tmp_path / "nearest.gguf", "--rounding", "nearest")
    before = decoded_tensors(file, model.config)
    after = decoded_tensors(tmp_path / "merged.gguf", model.config)
    wanted = changes(adapter)
    rows = {row["name"].removesuffix(".weight"): row for row in report["weights"]}
    assert rows.keys() == wanted.keys()
    assert report["below_threshold"] == 0
    for module, change in wanted.items():
        name = tensor_of(module)
        stored = after[name] - before[name]
        assert rows[module]["kept"] == pytest.approx(along(stored, change), abs=1e-6)
        assert rows[module]["realised_norm"] == pytest.approx(stored.norm().item(), rel=1e-6)
        assert rows[module]["format"] == MIXTURE[name.split(".")[2]]
        assert 0.97 < rows[module]["kept"] < 1.03, rows[module]
        assert rows[module]["error_along_adapter"] < 0.3
    assert nearest["whole"]["kept"] < 0.8
    print({row["format"]: (row["kept"], row["error_along_adapter"], row["cosine"]) for row in rows.values()})


def test_rows_of_queries_and_keys_are_in_the_order_of_the_file(base, adapter, tmp_path):
    """The control: the same codes in the other order are another change."""
    file, model = base
    merged(file, adapter, tmp_path / "merged.gguf")
    before = decoded_tensors(file, model.config)
    after = decoded_tensors(tmp_path / "merged.gguf", model.config)
    for module, change in changes(adapter).items():
        name = tensor_of(module)
        stored = after[name] - before[name]
        assert along(stored, change) > 0.97
        if ".attn_q." in name or ".attn_k." in name:
            heads = model.config.num_attention_heads
            heads = heads if "attn_q" in name else model.config.num_key_value_heads
            assert along(unturned(stored, heads), change) < 0.3


def test_everything_else_keeps_its_bytes(base, tmp_path):
    file, model = base
    adapter = adapter_on(model, tmp_path / "lora", target_modules=["v_proj"])
    merged(file, adapter, tmp_path / "merged.gguf")
    old, new = gguf.GGUFReader(file), gguf.GGUFReader(tmp_path / "merged.gguf")
    end = int(old.data_offset)
    assert file.read_bytes()[:end] == (tmp_path / "merged.gguf").read_bytes()[:end]
    assert file.stat().st_size == (tmp_path / "merged.gguf").stat().st_size
    pairs = zip(old.tensors, new.tensors, strict=True)
    differ = [a.name for a, b in pairs if a.data.tobytes() != b.data.tobytes()]
    assert differ == [f"blk.{i}.attn_v.weight" for i in range(model.config.num_hidden_layers)]
    none = adapter_on(model, tmp_path / "zeros", strength=0.0)
    merged(file, none, tmp_path / "same.gguf")
    before, after = (decoded_tensors(f, model.config) for f in (file, tmp_path / "same.gguf"))
    assert all(torch.equal(before[name], values) for name, values in after.items())


def test_the_same_bytes_for_any_number_of_threads(base, adapter, tmp_path):
    for jobs in (1, 3):
        merged(base[0], adapter, tmp_path / f"{jobs}.gguf", "--jobs", jobs)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


@pytest.mark.parametrize("kind", ALL)
def test_every_type_keeps_an_adapter(tmp_path, kind):
    file, model = mixed_base("Qwen3", tmp_path, dict.fromkeys(MIXTURE, kind), num_hidden_layers=1)
    adapter = adapter_on(model, tmp_path / "lora", lora_alpha=8)
    report = merged(file, adapter, tmp_path / "merged.gguf")
    assert {row["format"] for row in report["weights"]} == {kind}
    assert 0.95 < report["whole"]["kept"] < 1.05
    print(kind, report["whole"]["kept"], report["whole"]["error_along_adapter"], report["whole"]["cosine"])


def test_codes_of_q8_0_are_the_nearest(tmp_path):
    """Every byte, where the scales of the base reach the merged values."""
    file, model = mixed_base("Qwen3", tmp_path, dict.fromkeys(MIXTURE, "q8_0"), num_hidden_layers=1)
    adapter = adapter_on(model, tmp_path / "lora", strength=0.2, lora_alpha=8)
    merged(file, adapter, tmp_path / "merged.gguf")
    old, new = ({t.name: t for t in gguf.GGUFReader(f).tensors} for f in (file, tmp_path / "merged.gguf"))
    checked = 0
    for module, change in changes(adapter).items():
        name = tensor_of(module)
        shape = [int(size) for size in reversed(old[name].shape)]
        blocks = [np.asarray(t[name].data).reshape(-1, 34) for t in (old, new)]
        same = (blocks[0][:, :2] == blocks[1][:, :2]).all(1)
        scale = blocks[0][:, :2].copy().view(np.float16).astype(np.float64)
        values = gguf.quants.dequantize(np.asarray(old[name].data), old[name].tensor_type).reshape(shape)
        number = (values.astype(np.float64) + change.numpy()).reshape(-1, 32) / scale
        codes = np.ceil(np.clip(number, -127, 127) - 0.5)
        assert np.array_equal(blocks[1][same, 2:].view(np.int8), codes[same])
        assert (np.abs(number[same]) <= 127.5 + 1e-9).all()
        # A scale is another one only where a value is out of reach.
        assert (np.abs(number[~same]).max(1) > 127.5 - 1e-9).all()
        checked += same.sum()
    assert checked > 1000


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_plain_floats_are_rounded_once(tmp_path, name, kind):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    model = model_of(name, dtype)
    save(model, name, tmp_path / "model")
    run("export", tmp_path / "model", tmp_path / "base.gguf", "--type", kind)
    adapter = adapter_on(model, tmp_path / "lora", lora_alpha=8)
    merged(tmp_path / "base.gguf", adapter, tmp_path / "merged.gguf")
    before = decoded_tensors(tmp_path / "base.gguf", model.config)
    after = decoded_tensors(tmp_path / "merged.gguf", model.config)
    for module, change in changes(adapter).items():
        tensor = tensor_of(module)
        exact = before[tensor] + change
        near = exact.float() if kind == "f32" else exact.to(dtype)
        off = (after[tensor] - exact).abs()
        assert (off <= (near.double() - exact).abs() * (1 + 1e-6) + 1e-15).all(), module


def test_what_is_refused_is_named(base, adapter, tmp_path):
    file, model = base

    def refused(*words, code=3, to=tmp_path / "out.gguf", of=adapter, more=()):
        said = run("merge", file, "--adapter", of, "--out", to, *more, code=code).stderr
        assert all(word in said for word in words), said
        assert not to.exists()

    refused("--out", "must end in .gguf", code=2, to=tmp_path / "folder")
    refused("--to", "'same'", code=2, more=["--to", "nf4"])
    refused("--base", "'dequantized'", code=2, more=["--base", "original"])
    refused("--rounding", "'adapter' or 'nearest'", code=2, more=["--rounding", "calibrated"])
    for option in (
        ["--as", "nf4"],
        ["--experts", "stack"],
        ["--max-shard-size", "1GB"],
        ["--block-size", "64"],
    ):
        refused(option[0], "are not for a base in GGUF", code=2, more=option)
    refused("--base-model", "are both given", code=2, more=["--base-model", tmp_path])
    state = load_file(adapter / "adapter_model.safetensors")
    recorded = tmp_path / "recorded"
    shutil.copytree(adapter, recorded)
    save_file(state, recorded / "adapter_model.safetensors", {"monograph.base_sha256": "0" * 64})
    refused("was trained on the base with hash 000", "--another-base", of=recorded)
    wider = tmp_path / "wider"
    shutil.copytree(adapter, wider)
    rows = torch.zeros(model.config.vocab_size + 2, 256)
    tokens = {f"base_model.model.{name}.weight": rows.clone() for name in ("model.embed_tokens", "lm_head")}
    save_file(state | tokens, wider / "adapter_model.safetensors")
    text = (wider / "adapter_config.json").read_text()
    text = text.replace('"modules_to_save": null', '"modules_to_save": ["embed_tokens", "lm_head"]')
    (wider / "adapter_config.json").write_text(text)
    refused("new tokens", "dequantize", of=wider)
    command = ["merge", file, "--adapter", adapter, "--out", tmp_path / "out.gguf"]
    failed = run(*command, "--fail-below", 2, code=1)
    assert "was not written" in failed.stderr
    assert not (tmp_path / "out.gguf").exists()
    dry = run_json("merge", file, "--adapter", adapter, "--out", tmp_path / "out.gguf", "--dry-run")
    assert dry["bytes"] == file.stat().st_size
    assert not (tmp_path / "out.gguf").exists()
