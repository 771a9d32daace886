"""`monograph merge` of LoRA on parameters of experts, against PEFT in float64 and in the model's own type."""

import copy
import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.recipe.run.base_fingerprint import packing_of
from support import tiny_experts
from support.merge_reference import adapter_on, check_against_float64, stored
from support.native_tool import run, run_json
from support.tiny_models import load

TARGETS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
SETTINGS = TARGETS | {"r": 4, "rank_pattern": {"experts.down_proj": 2}}


def saved_adapter(name, folder, dtype=torch.bfloat16, seed=5, **settings):
    """The PEFT model with a random adapter that is saved to `folder`; fp32 factors."""
    return adapter_on(tiny_experts.model(name, dtype), folder, torch.float32, seed, **(SETTINGS | settings))


def merged64(name, adapter, base=None):
    """The merged model in float64. `base`: other values of the base's parameters, by name."""
    from peft import PeftModel

    model = tiny_experts.model(name).double()
    with torch.no_grad():
        for key, value in (base or {}).items():
            model.get_parameter(key).copy_(value)
    wrapped = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    return wrapped.merge_and_unload()


def merge(base, adapter, out, *more, weights="original"):
    return run_json(
        "merge", base, "--adapter", adapter, "--base", weights, "--out", out, "--warn-below", "0", *more
    )


def parameters(name):
    """The names of the experts' parameters in transformers, and in a stacked folder."""
    layer = tiny_experts.LAYER
    module = "block_sparse_moe" if name == "granite" else "mlp"
    ours = list(tiny_experts.stacks_names(name))
    return dict(
        zip([f"{layer}{module}.experts.{p}" for p in ("gate_up_proj", "down_proj")], ours, strict=True)
    )


@pytest.mark.parametrize("name", tiny_experts.MODELS)
def test_16_bit_merges_are_the_rounded_float64_result(tmp_path, name):
    base = tiny_experts.save(name, tmp_path / "base")
    model = saved_adapter(name, tmp_path / "adapter", use_rslora=name == "mixtral")
    report = merge(base, tmp_path / "adapter", tmp_path / "out")
    assert {row["name"] for row in report["weights"]} == {
        *parameters(name).values(),
        tiny_experts.LAYER + "self_attn.q_proj.weight",
    }
    # transformers saves the float64 reference under the names of the folder.
    merged64(name, tmp_path / "adapter").save_pretrained(tmp_path / "exact")
    wanted = load_file(tmp_path / "exact" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(base / "model.safetensors")
    assert found.keys() == wanted.keys() == source.keys()
    ties = 0
    for key, value in found.items():
        rounded, near = stored(wanted[key].numpy(), value.dtype)
        different = value.double().numpy() != rounded
        assert not (different & ~near).any(), key
        ties += int(different.sum())
        if tiny_experts.is_expert(key):
            assert not torch.equal(value, source[key]), key
    assert ties <= 2
    # Never further from it than PEFT's own merge.
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    peft = load_file(tmp_path / "peft" / "model.safetensors")
    for key, value in found.items():
        error = (value.double() - wanted[key]).abs()
        assert (error <= (peft[key].double() - wanted[key]).abs() * (1 + 1e-9) + 1e-300).all(), key


FORMATS = {
    "nf4": "nf4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4-divide",
    "fp8-block": "fp8-block",
}


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt_oss"])
def test_merges_onto_and_into_packed_experts(tmp_path, name):
    """Both spellings of the base, into 16 bits and packed again; and --as of the plain base."""
    base = tiny_experts.save(name, tmp_path / "base")
    saved_adapter(name, tmp_path / "adapter", target_modules=[])
    stacks, names = tiny_experts.stacks(base, name), parameters(name)

    def turned(value):
        return value.transpose(1, 2).contiguous() if name == "gpt_oss" else value

    for to, ours in FORMATS.items():
        folder = tmp_path / to
        run("quantize", base, folder, "--to", to, "--experts", "stack")
        trained_on = {
            p: turned(mg.quantize(stacks[key], ours).dequantize(torch.bfloat16)) for p, key in names.items()
        }
        exact = merged64(name, tmp_path / "adapter", trained_on)
        merge(folder, tmp_path / "adapter", tmp_path / f"{to}-out", weights="dequantized")
        dense = load(tmp_path / f"{to}-out", dtype=torch.bfloat16)
        for parameter in names:
            rounded, near = stored(exact.get_parameter(parameter).detach().numpy(), torch.bfloat16)
            different = dense.get_parameter(parameter).detach().double().numpy() != rounded
            assert not (different & ~near).any(), (to, parameter)
        # The same from the plain base, which stores its experts otherwise.
        merge(base, tmp_path / "adapter", tmp_path / f"{to}-as", "--as", to, "--as-experts", "packed",
              weights="dequantized")  # fmt: skip
        again = load(tmp_path / f"{to}-as", dtype=torch.bfloat16)
        assert all(torch.equal(again.get_parameter(p), dense.get_parameter(p)) for p in names), to
        assert (
            load_file(tmp_path / f"{to}-as" / "model.safetensors").keys()
            == load_file(base / "model.safetensors").keys()
        )
        # Packed again: the merged values, rounded to fp32, in our operator's bytes.
        nearest = ["--to", to, "--rounding", "nearest"]
        merge(folder, tmp_path / "adapter", tmp_path / f"{to}-packed", *nearest, weights="dequantized")
        run("dequantize", tmp_path / f"{to}-packed", tmp_path / f"{to}-back", "--to", "fp32")
        back = load_file(tmp_path / f"{to}-back" / "model.safetensors")
        for parameter, key in names.items():
            value = exact.get_parameter(parameter).detach().float()
            want = mg.quantize(turned(value), ours).dequantize(torch.float32)
            assert torch.equal(turned(back[key]), want), (to, key)


def test_merges_onto_experts_that_are_packed_one_by_one(tmp_path):
    base = tiny_experts.save("qwen3", tmp_path / "base")
    saved_adapter("qwen3", tmp_path / "adapter", target_modules=[])
    source = load_file(base / "model.safetensors")
    for to, ours in FORMATS.items():
        folder = tmp_path / to
        run("quantize", base, folder, "--to", to, "--experts", "separate")
        one_by_one = {
            key: mg.quantize(value, ours).dequantize(torch.bfloat16) if tiny_experts.is_expert(key) else value
            for key, value in source.items()
        }
        (tmp_path / "decoded").mkdir(exist_ok=True)
        save_file(one_by_one, tmp_path / "decoded" / "model.safetensors", metadata={"format": "pt"})
        trained_on = dict(
            zip(
                parameters("qwen3"),
                tiny_experts.stacks(tmp_path / "decoded", "qwen3").values(),
                strict=True,
            )
        )
        merged64("qwen3", tmp_path / "adapter", trained_on).save_pretrained(tmp_path / "exact")
        exact = load_file(tmp_path / "exact" / "model.safetensors")
        merge(folder, tmp_path / "adapter", tmp_path / f"{to}-out", weights="dequantized")
        found = load_file(tmp_path / f"{to}-out" / "model.safetensors")
        assert found.keys() == source.keys()
        nearest = ["--to", to, "--rounding", "nearest"]
        merge(folder, tmp_path / "adapter", tmp_path / f"{to}-packed", *nearest, weights="dequantized")
        run("dequantize", tmp_path / f"{to}-packed", tmp_path / f"{to}-back", "--to", "fp32")
        back = load_file(tmp_path / f"{to}-back" / "model.safetensors")
        for key in filter(tiny_experts.is_expert, source):
            rounded, near = stored(exact[key].numpy(), torch.bfloat16)
            different = found[key].double().numpy() != rounded
            assert not (different & ~near).any(), (to, key)
            # Each with its own scales again.
            want = mg.quantize(exact[key].float(), ours).dequantize(torch.float32)
            assert torch.equal(back[key], want), (to, key)


def test_quantised_scales_of_a_stack_have_one_offset(tmp_path):
    base = tiny_experts.save("qwen3", tmp_path / "base")
    saved_adapter("qwen3", tmp_path / "adapter", target_modules=[])
    stacks, names = tiny_experts.stacks(base, "qwen3"), parameters("qwen3")
    trained_on = {
        p: mg.quantize(stacks[key], "nf4", double_quant=True).dequantize(torch.bfloat16)
        for p, key in names.items()
    }
    exact = merged64("qwen3", tmp_path / "adapter", trained_on)
    as_trained = ["--as", "nf4", "--as-double-quant", "--as-experts", "packed"]
    merge(base, tmp_path / "adapter", tmp_path / "out", *as_trained, weights="dequantized")
    dense = load(tmp_path / "out", dtype=torch.bfloat16)
    packed = ["--to", "nf4", "--double-quant", "--experts", "stack", "--rounding", "nearest"]
    merge(base, tmp_path / "adapter", tmp_path / "packed", *as_trained, *packed, weights="dequantized")
    run("dequantize", tmp_path / "packed", tmp_path / "back", "--to", "fp32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for parameter, key in names.items():
        value = exact.get_parameter(parameter).detach()
        rounded, near = stored(value.numpy(), torch.bfloat16)
        different = dense.get_parameter(parameter).detach().double().numpy() != rounded
        assert not (different & ~near).any(), parameter
        want = mg.quantize(value.float(), "nf4", double_quant=True).dequantize(torch.float32)
        assert torch.equal(back[key], want), parameter


def test_plain_experts_become_a_packed_output(tmp_path):
    base = tiny_experts.save("gpt_oss", tmp_path / "base")
    saved_adapter("gpt_oss", tmp_path / "adapter", target_modules=[])
    exact = merged64("gpt_oss", tmp_path / "adapter")
    packed = ["--to", "mxfp4", "--experts", "stack", "--rounding", "nearest"]
    merge(base, tmp_path / "adapter", tmp_path / "out", *packed)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for parameter in parameters("gpt_oss"):
        value = exact.get_parameter(parameter).detach().float().transpose(1, 2).contiguous()
        want = mg.quantize(value, "mxfp4")
        assert torch.equal(found[parameter + "_blocks"].reshape(-1), want.values.reshape(-1))
        assert torch.equal(found[parameter + "_scales"].reshape(-1), want.scales[0].reshape(-1))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_several_adapters_and_one_projection(tmp_path):
    base = tiny_experts.save("qwen3", tmp_path / "base")
    down = {"target_parameters": ["down_proj"], "target_modules": []}
    for seed, name in enumerate(["one", "two"]):
        saved_adapter("qwen3", tmp_path / name, seed=seed, **(down if name == "two" else {}))
    run("merge", base, "--adapter", f"{tmp_path}/one:0.7", "--adapter", f"{tmp_path}/two:-0.25", "--base",
        "original", "--out", tmp_path / "out", "--to", "fp32", "--warn-below", "0")  # fmt: skip
    # Their changes add up.
    exact = {}
    plain = tiny_experts.model("qwen3").double().state_dict()
    one, two = (merged64("qwen3", tmp_path / name).state_dict() for name in ("one", "two"))
    found = load(tmp_path / "out", dtype=torch.float32).state_dict()
    for key, value in plain.items():
        exact[key] = value + 0.7 * (one[key] - value) - 0.25 * (two[key] - value)
        np.testing.assert_allclose(found[key].double(), exact[key], rtol=2**-23, atol=1e-9)
    assert (
        one["model.layers.0.mlp.experts.gate_up_proj"] != exact["model.layers.0.mlp.experts.gate_up_proj"]
    ).any()


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    base = tiny_experts.save("qwen3", tmp_path / "base")
    saved_adapter("qwen3", tmp_path / "adapter")
    file, config_file = (
        tmp_path / "adapter" / n for n in ("adapter_model.safetensors", "adapter_config.json")
    )
    tensors, config = load_file(file), json.loads(config_file.read_text())
    outer = "base_model.model.model.layers.0.mlp.experts.lora_"

    def refused(change=lambda t: None, folder=base, code=3, extra=(), **settings):
        changed = dict(tensors)
        change(changed)
        save_file(changed, file)
        config_file.write_text(json.dumps(config | settings))
        done = run("merge", folder, "--adapter", tmp_path / "adapter", "--base", "original", "--out",
                   tmp_path / "out", *extra, code=code)  # fmt: skip
        assert not (tmp_path / "out").exists()
        return done.stderr

    assert "LoRA for 2 parameters of it, the base has 1 that target_parameters names" in refused(
        target_parameters=["experts.down_proj"]
    )
    assert "wanted rank 4 of 3 experts" in refused(rank_pattern={})

    def narrower(t):
        t[outer + "A.weight"] = t[outer + "A.weight"][:, :-1].clone()

    assert "A has 159 inputs and B 64 outputs, the experts are [3, 64, 160]" in refused(narrower)
    assert "LoRA on a bias is not supported" in refused(
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "experts.down_proj_bias"]
    )
    other = tiny_experts.save("granite", tmp_path / "other")
    assert "the base has 0 that target_parameters names" in refused(folder=other)
    message = refused(code=2, extra=["--as", "nf4"])
    assert "--as" in message


def test_square_experts_of_an_old_peft_are_not_guessed(tmp_path):
    """gpt-oss-20b's down_proj is square: A may be that of the outputs. gate_up_proj or the version tells."""
    base = tiny_experts.save("gpt_oss", tmp_path / "base")
    only_down = {"target_parameters": ["experts.down_proj"], "target_modules": []}
    saved_adapter("gpt_oss", tmp_path / "adapter", **only_down)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"peft_version": "0.19.1"}))
    arguments = ["--adapter", tmp_path / "adapter", "--base", "original", "--out", tmp_path / "old"]
    done = run("merge", base, *arguments, code=3)
    assert "inputs and outputs cannot be told apart; wanted 0.20 or newer" in done.stderr
    saved_adapter("gpt_oss", tmp_path / "both", target_modules=[])
    file = tmp_path / "both" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": "0.19.1"}))
    merge(base, tmp_path / "both", tmp_path / "told")
    exact = merged64("gpt_oss", tmp_path / "both")
    exact.save_pretrained(tmp_path / "exact")
    check_against_float64(tmp_path / "told", copy.deepcopy(exact))


def test_the_record_of_an_adapter_says_whether_experts_were_packed(tmp_path):
    """Trained on the plain folder while it was packed: neither --as nor --as-experts is needed."""
    base = tiny_experts.save("qwen3", tmp_path / "base")
    saved_adapter("qwen3", tmp_path / "adapter")
    run("quantize", base, tmp_path / "nf4", "--experts", "stack")
    found = load_file(tmp_path / "nf4" / "model.safetensors")
    linears = sorted(key for key in found if key.endswith("_proj.weight"))
    lines = [f'"{key}" {hashlib.sha256(found[key].numpy().tobytes()).hexdigest()}\n' for key in linears]
    packed = {"format": "nf4", "block": 64, "double_quant": False, "rule": "default", "experts": True}
    packed["values_sha256"] = hashlib.sha256("".join(lines).encode()).hexdigest()
    record = {
        "sha256": run_json("inspect", base, "--hash")["sha256"],
        "weights": "dequantized",
        "packed": packed,
    }
    file = tmp_path / "adapter" / "monograph.json"
    file.write_text(json.dumps({"schema_version": 1, "base": record}))
    arguments = ["--adapter", tmp_path / "adapter", "--warn-below", "0", "--out"]
    run("merge", base, *arguments, tmp_path / "plain")
    run("merge", tmp_path / "nf4", *arguments, tmp_path / "packed")
    first, second = (load(tmp_path / name).state_dict() for name in ("plain", "packed"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    told = run("merge", base, *arguments, tmp_path / "other", "--as", "nf4", "--as-experts", "plain",
               "--base", "dequantized", code=3)  # fmt: skip
    assert "was trained on packed experts, --as-experts says plain" in told.stderr


def test_inspect_knows_the_change_of_experts(tmp_path):
    model = saved_adapter("qwen3", tmp_path / "adapter", rank_pattern={}, target_modules=[])
    rows = run_json("inspect", tmp_path / "adapter")["adapter"]["modules"]
    experts = model.base_model.model.model.layers[0].mlp.experts
    for row, wrapper in zip(rows, (experts, experts.base_layer), strict=True):
        delta = copy.deepcopy(wrapper).double().get_delta_weight("default")
        assert (row["rank"], row["experts"], row["scale"]) == (4, 3, 4.0)
        assert row["norm_change"] == pytest.approx(delta.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("qwen3", "stack"), ("qwen3", "separate"), ("mixtral", "stack"), ("granite", "stack")],
)
def test_a_changed_expert_is_noticed(tmp_path, name, spelling):
    """The record is of a model that was packed while it loaded, the base a folder that the tool packed."""
    base = tiny_experts.save(name, tmp_path / "base")
    saved_adapter(name, tmp_path / "adapter")
    packed = packing_of(mg.from_pretrained(base, mg.MonographConfig("nf4")))
    folder = tmp_path / "nf4"
    run("quantize", base, folder, "--experts", spelling)
    sha256 = run_json("inspect", base, "--hash")["sha256"]
    record = {"sha256": sha256, "weights": "dequantized", "packed": packed}
    file = tmp_path / "adapter" / "monograph.json"
    file.write_text(json.dumps({"schema_version": 1, "base": record}))
    arguments = ["--adapter", tmp_path / "adapter", "--warn-below", "0", "--out"]
    run("merge", folder, *arguments, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    key = next(k for k in tensors if tiny_experts.is_expert(k) and tensors[k].dtype == torch.uint8)
    tensors[key].view(-1)[7] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = run("merge", folder, *arguments, tmp_path / "other", code=3).stderr
    assert f"was trained on the base with hash {sha256}" in told


@pytest.mark.parametrize(
    ("name", "target"), [("qwen3", "gate.weight"), ("mixtral", "gate.weight"), ("granite", "router.weight")]
)
def test_lora_on_a_router(tmp_path, name, target):
    """Files of Mixtral and Granite call it otherwise than transformers does."""
    base = tiny_experts.save(name, tmp_path / "base")
    settings = {"target_modules": [], "target_parameters": [target], "rank_pattern": {}}
    saved_adapter(name, tmp_path / "adapter", **settings)
    report = merge(base, tmp_path / "adapter", tmp_path / "out")
    merged64(name, tmp_path / "adapter").save_pretrained(tmp_path / "exact")
    wanted = load_file(tmp_path / "exact" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(base / "model.safetensors")
    changed = [key for key, value in found.items() if not torch.equal(value, source[key])]
    assert changed == [row["name"] for row in report["weights"]]
    assert len(changed) == 1
    rounded, near = stored(wanted[changed[0]].numpy(), torch.bfloat16)
    assert not ((found[changed[0]].double().numpy() != rounded) & ~near).any()
