"""The native tool on mixtures of experts, stored one by one and stacked, in every format."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support import tiny_experts
from support.native_tool import run, run_json
from support.tiny_models import load, logits

# The tool's name, ours, and what follows the name of a stack.
FORMATS = {
    "mxfp4": ("mxfp4", ["_packed", "_scale"]),
    "mxfp8": ("mxfp8", ["", "_scale"]),
    "nvfp4": ("nvfp4-divide", ["_packed", "_scale", "_global_scale"]),
    "fp8-block": ("fp8-block", ["", "_scale_inv"]),
}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny_experts.save(name, tmp_path_factory.mktemp(name) / "bf16") for name in tiny_experts.MODELS
    }


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def quantized(folder, out, to, experts="stack", *more):
    run("quantize", folder, out, "--to", to, "--experts", experts, *more)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("name", tiny_experts.MODELS)
def test_a_stacked_folder_has_the_bytes_of_our_operator(folders, tmp_path, name):
    stacks = tiny_experts.stacks(folders[name], name)
    source = load_file(folders[name] / "model.safetensors")
    plain = {key: value for key, value in source.items() if not tiny_experts.is_expert(key)}
    for to, (ours, endings) in FORMATS.items():
        if name == "gpt_oss" and to == "mxfp4":
            continue  # its own spelling: below
        found = quantized(folders[name], tmp_path / to, to)
        for key, stack in stacks.items():
            want = mg.quantize(stack, ours)
            for part, ending in zip((want.values, *want.scales), endings, strict=True):
                stored = found.pop(key + ending)
                assert torch.equal(raw(part), raw(stored)), (to, key, ending)
                assert stored.shape[0] == 3
            assert stored.shape[0] == len(stack)
        for key, value in plain.items():
            if "self_attn" not in key or "bias" in key:  # routers, norms, embeddings
                assert torch.equal(found[key], value), key
        config = json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
        assert config["monograph_experts"] == "stacked"
        assert run_json("verify", tmp_path / to)["findings"] == []


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_stacks_in_nf4_are_those_of_bitsandbytes_names(folders, tmp_path, name):
    for flags, double in ([], False), (["--double-quant"], True):
        out = tmp_path / f"nf4-{double}"
        found = quantized(folders[name], out, "nf4", "stack", *flags)
        for key, stack in tiny_experts.stacks(folders[name], name).items():
            state = {
                k.removeprefix(key): v for k, v in found.items() if k.startswith(key) and "bias" not in k
            }
            weight = mg.from_bitsandbytes({f"weight{k}": v for k, v in state.items()})
            want = mg.quantize(stack, "nf4", double_quant=double)
            assert weight.shape == tuple(stack.shape)
            assert all(torch.equal(raw(a), raw(b)) for a, b in zip(weight.scales, want.scales, strict=True))
            assert torch.equal(raw(weight.values), raw(want.values))


def test_gpt_oss_in_mxfp4_is_as_shipped(folders, tmp_path):
    """Names, shapes and config of OpenAI's folders; transformers decodes and loads it."""
    from transformers import Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = quantized(folders["gpt_oss"], tmp_path / "packed", "mxfp4")
    blocks, scales = found[GATE_UP + "_blocks"], found[GATE_UP + "_scales"]
    assert (blocks.shape, blocks.dtype) == ((3, 128, 2, 16), torch.uint8)
    assert (scales.shape, scales.dtype) == ((3, 128, 2), torch.uint8)
    source = load_file(folders["gpt_oss"] / "model.safetensors")
    kept = [key for key in source if not tiny_experts.is_expert(key)]
    assert all(torch.equal(found[key], source[key]) for key in kept)
    assert len(found) == len(kept) + 4
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert "model.layers.*.self_attn" in Mxfp4Config.from_dict(config).modules_to_not_convert
    for key, stack in tiny_experts.stacks(folders["gpt_oss"], "gpt_oss").items():
        want = mg.quantize(stack, "mxfp4")
        assert torch.equal(raw(found[key + "_blocks"]), raw(want.values)), key
        assert torch.equal(raw(found[key + "_scales"]), raw(want.scales[0])), key
    # Decoded, the parameters lie as transformers has them: [experts, inputs, outputs].
    run("dequantize", tmp_path / "packed", tmp_path / "bf16")
    back = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {key: value.shape for key, value in back.items()} == {k: v.shape for k, v in source.items()}
    for key in (GATE_UP, GATE_UP.replace("gate_up", "down")):
        want = convert_moe_packed_tensors(found[key + "_blocks"], found[key + "_scales"])
        assert torch.equal(back[key], want), key
    packed = load(tmp_path / "packed", dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))
    assert torch.equal(logits(packed), logits(load(tmp_path / "bf16")))
    assert not torch.equal(logits(packed), logits(load(folders["gpt_oss"])))


@pytest.mark.parametrize("name", tiny_experts.MODELS)
def test_transformers_loads_what_dequantize_writes(folders, tmp_path, name):
    for to in ("nf4", "nvfp4", "fp8-block"):
        quantized(folders[name], tmp_path / to, to)
        run("dequantize", tmp_path / to, tmp_path / f"{to}-bf16")
        model = load(tmp_path / f"{to}-bf16")
        ours = "nvfp4-divide" if to == "nvfp4" else to
        for key, stack in tiny_experts.stacks(folders[name], name).items():
            end = {"input_linear.weight": "gate_up_proj", "output_linear.weight": "down_proj"}
            short = next((end[e] for e in end if key.endswith(e)), key.rpartition(".")[2])
            (parameter,) = [p for n, p in model.named_parameters() if n.endswith("experts." + short)]
            want = mg.quantize(stack, ours).dequantize(torch.bfloat16)
            assert torch.equal(parameter, want.transpose(1, 2) if name == "gpt_oss" else want), (to, key)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt_oss"])
def test_diff_compares_experts_however_they_are_stored(folders, tmp_path, name):
    quantized(folders[name], tmp_path / "packed", "mxfp8")
    rows = run_json("diff", folders[name], tmp_path / "packed", code=4)["weights"]
    assert {row["state"] for row in rows} == {"same bytes", "differs"}
    experts = {row["name"]: row for row in rows if row["name"] in tiny_experts.stacks(folders[name], name)}
    for key, stack in tiny_experts.stacks(folders[name], name).items():
        back = mg.quantize(stack, "mxfp8").dequantize(torch.float32).double()
        error = (back - stack.double()).norm() / stack.double().norm()
        assert experts[key]["relative_error"] == pytest.approx(error.item(), rel=1e-9)
    run("dequantize", tmp_path / "packed", tmp_path / "back", "--to", "fp32")
    assert run_json("diff", tmp_path / "packed", tmp_path / "back")["mismatches"] == 0


def test_experts_one_by_one_in_every_format(folders, tmp_path):
    source = load_file(folders["qwen3"] / "model.safetensors")
    experts = [key for key in source if tiny_experts.is_expert(key)]
    assert len(experts) == 9
    for to in (*FORMATS, "nf4"):
        quantized(folders["qwen3"], tmp_path / to, to, "separate")
        assert run_json("inspect", tmp_path / to)["by_format"][to]["tensors"] == 9 + 4
        assert run_json("verify", tmp_path / to)["findings"] == []
        run("dequantize", tmp_path / to, tmp_path / f"{to}-bf16")
        back = load_file(tmp_path / f"{to}-bf16" / "model.safetensors")
        ours = FORMATS[to][0] if to in FORMATS else to
        for key in experts:  # each with its own scales
            assert torch.equal(back[key], mg.quantize(source[key], ours).dequantize(torch.bfloat16)), key


def test_packed_experts_are_stacked_as_they_are(tmp_path):
    """Each keeps its own scales: the stack decodes to what its experts did."""
    torch.manual_seed(0)
    folder, state = tmp_path / "bf16", {}
    for expert in range(2):
        module = f"model.layers.0.mlp.experts.{expert}."
        gate = torch.randn(128, 64).bfloat16() * (expert + 1)
        state |= {module + "gate_proj.weight": gate, module + "up_proj.weight": -gate}
        state[module + "down_proj.weight"] = torch.randn(64, 128).bfloat16()
    state["model.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 64).bfloat16()
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 64, "model_type": "qwen3_moe"}')
    for to in (*FORMATS, "nf4"):
        quantized(folder, tmp_path / f"{to}-one", to, "separate")
        stacked = quantized(tmp_path / f"{to}-one", tmp_path / to, to, "stack")
        assert not any("experts.0" in key for key in stacked)
        assert run_json("diff", tmp_path / f"{to}-one", tmp_path / to)["mismatches"] == 0
        before, after = (
            json.loads((tmp_path / f / "config.json").read_text())["quantization_config"]
            for f in (f"{to}-one", to)
        )
        assert after == before | {"monograph_experts": "stacked"}
    # What a stack cannot hold.
    quantized(folder, tmp_path / "nested", "nf4", "separate", "--double-quant")
    odd = dict(state)
    odd["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.randn(128, 64).bfloat16()
    (tmp_path / "odd").mkdir()
    save_file(odd, tmp_path / "odd" / "model.safetensors")
    (tmp_path / "odd" / "config.json").write_text('{"hidden_size": 64}')
    quantized(tmp_path / "odd", tmp_path / "odd-nvfp4", "nvfp4", "separate")
    for source, to, why in (
        ("nested", "nf4", "quantised scales with an offset of its own"),
        ("odd-nvfp4", "nvfp4", "experts.1.up_proj.weight' has another global scale than its gate"),
    ):
        done = run("quantize", tmp_path / source, tmp_path / "out", "--to", to, "--experts", "stack", code=3)
        assert why in done.stderr, done.stderr


def test_experts_of_producers_one_by_one(tmp_path):
    """FP8 blocks of DeepSeek with bf16 scales, NVFP4 of ModelOpt."""
    torch.manual_seed(0)
    state, wanted = {}, {}
    for expert in range(2):
        for to, suffixes in {
            "fp8-block": ["weight", "weight_scale_inv"],
            "nvfp4": ["weight", "weight_scale", "weight_scale_2"],
        }.items():
            weight = mg.quantize(torch.randn(160, 192) * (expert + 1), to)
            module = f"model.layers.{0 if to == 'nvfp4' else 1}.mlp.experts.{expert}.gate_proj."
            parts = [weight.values, *weight.scales]
            if to == "fp8-block":
                parts = [parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float32).reshape(2, 2)]
            else:
                scale = parts[1].view(torch.float8_e4m3fn).reshape(160, 12)
                parts = [parts[0], scale, parts[2].view(torch.float32).reshape([])]
            state |= {module + s: p.clone() for s, p in zip(suffixes, parts, strict=True)}
            wanted[module + "weight"] = weight.dequantize(torch.bfloat16)
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    rows = {row["name"]: row for row in run_json("inspect", tmp_path / "in")["weights"]}
    assert {(row["format"], row["written_by"]) for row in rows.values()} == {
        ("fp8-block", "DeepSeek"),
        ("nvfp4", "ModelOpt"),
    }
    run("dequantize", tmp_path / "in", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[key], wanted[key]) for key in wanted)


def test_what_cannot_be_stacked_is_refused_by_name(folders, tmp_path):
    state = load_file(folders["qwen3"] / "model.safetensors")
    config = json.loads((folders["qwen3"] / "config.json").read_text())
    out = tmp_path / "out"

    def refused(change, *more):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        changed = dict(state)
        change(changed)
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        done = run("quantize", folder, out, "--experts", "stack", *more, code=3)
        assert not out.exists()
        return done.stderr

    up = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert "up has 2 experts up to number 2, down has 3" in refused(lambda s: s.pop(up))
    other = refused(lambda s: s.update({up: s[up].float()}))
    assert "1.up_proj.weight' is fp32" in other
    unknown = refused(lambda s: s.update({up.replace("up_proj", "w9"): s[up].clone()}))
    assert "experts.1.w9.weight' is none of gate_proj" in unknown
    stack = "model.layers.0.mlp.experts.gate_up_proj"

    def fuse(s):
        for key in [key for key in s if tiny_experts.is_expert(key)]:
            s.pop(key)
        s[stack] = torch.zeros(3, 40, 50)

    assert "no dimension is hidden_size of config.json" in refused(fuse)
    packed = tmp_path / "packed"
    quantized(folders["qwen3"], packed, "fp8-block", "separate")
    done = run("quantize", packed, out, "--to", "fp8-block", "--experts", "stack", code=3)
    assert "gate has 160 rows, wanted whole blocks of 128" in done.stderr

    def odd(s):
        fuse(s)
        s[stack] = torch.zeros(3, 3, 64)

    message = refused(odd, "--block-size", "128")
    assert (
        "gate_up_proj': an expert has 192 elements, format nf4 wants a multiple of the block of 128"
        in message
    )


def test_a_refusal_comes_without_notes_and_quiet_without_a_table(folders, tmp_path):
    folder, out = folders["qwen3"], tmp_path / "out"
    command = ["quantize", folder, out, "--to", "nf4", "--experts", "stack"]
    assert "note: load the stacked experts with Monograph" in run(*command).stderr
    refused = run(*command, code=3).stderr
    assert "exists; choose another name" in refused
    assert "note:" not in refused
    done = run(*command, "--force", "--quiet")
    assert done.stdout == done.stderr == ""
