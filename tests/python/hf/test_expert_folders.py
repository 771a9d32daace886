"""Quantised folders with experts: gpt-oss as shipped, stacks of `monograph quantize`, experts one by one."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import monograph as mg
from monograph.nn.packed_experts import PackedExperts
from support.dense_experts import CLOSE, dense_copy
from support.native_tool import run
from support.tiny_moe import save_tiny, tokens


def experts(model):
    return [layer for layer in model.modules() if isinstance(layer, PackedExperts)]


def rewrite(folder, change, config):
    """The tensors of a folder under other names, and its quantization_config."""
    state = change(load_file(folder / "model.safetensors"))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))


def mapped(folder, tensor):
    """Whether a tensor lies in the file of the folder, as the kernel says."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= tensor.data_ptr() < last:
            return name.strip().endswith(str(folder / "model.safetensors"))
    return False


def shipped(state):
    """MXFP4 bytes and exponents at random where gpt-oss has its experts."""
    made = {}
    for name, tensor in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, cols, rows = tensor.shape
            made[f"{name}_blocks"] = torch.randint(0, 256, (count, rows, cols // 32, 16), dtype=torch.uint8)
            made[f"{name}_scales"] = torch.randint(122, 126, (count, rows, cols // 32), dtype=torch.uint8)
        else:
            made[name] = tensor
    return made


def test_gpt_oss_as_shipped_is_mapped_and_not_copied(tmp_path):
    folder = save_tiny(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    rewrite(
        folder, shipped, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    )
    model = mg.from_pretrained(folder, dtype=torch.float32).eval()
    layers = experts(model)
    assert len(layers) == 2
    state = load_file(folder / "model.safetensors")
    for i, layer in enumerate(layers):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{i}.mlp.experts.{name}"
            blocks, scales = state[f"{key}_blocks"], state[f"{key}_scales"]
            want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(layer.dequantize(name), want)
            assert mapped(folder, getattr(layer, f"{name}_values"))
            assert mapped(folder, getattr(layer, f"{name}_block_scales"))
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    torch.testing.assert_close(model(tokens()).logits, other.float().eval()(tokens()).logits, **CLOSE)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3_moe", "nf4"),
        ("qwen3_moe", "mxfp4"),
        ("mixtral", "nvfp4"),
        ("gpt_oss", "mxfp4"),
        ("olmoe", "fp8-block"),
        ("granitemoe", "nf4"),
        ("granitemoe", "mxfp8"),
    ],
)
def test_stacks_that_the_tool_wrote_are_mapped(family, format, tmp_path):
    folder = save_tiny(tmp_path / "dense", family, dtype=torch.bfloat16)
    packed = tmp_path / "packed"
    run("quantize", folder, packed, "--to", format, "--experts", "stack")
    model = mg.from_pretrained(packed, dtype=torch.float32).eval()
    assert experts(model)
    for layer in experts(model):
        for name in layer.stacks:
            assert mapped(packed, getattr(layer, f"{name}_values"))
    want = dense_copy(folder, model)(tokens()).logits
    torch.testing.assert_close(model(tokens()).logits, want, **CLOSE)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layer, dense = (
        experts(model)[0],
        next(m for m in original.modules() if hasattr(m, "down_proj") and hasattr(m, "is_transposed")),
    )
    for name in layer.stacks:
        assert (layer.show(name) - getattr(dense, name)).norm() < 0.2 * getattr(dense, name).norm()


def one_by_one(spelling_format, parts):
    """Every linear expert quantised on its own, under a producer's names."""

    def change(state):
        made = {}
        for name, tensor in state.items():
            if ".experts." in name:
                packed = mg.quantize(tensor, spelling_format, double_quant=spelling_format == "nf4")
                made |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts(packed).items()}
            else:
                made[name] = tensor
        return made

    return change


FORMATS = {"nf4": "nf4", "fp8-block": "fp8-block", "mxfp4": "mxfp4", "nvfp4-divide": "nvfp4"}


@pytest.mark.parametrize("format", FORMATS)
def test_experts_that_are_stored_one_by_one_are_stacked(format, tmp_path):
    """Each keeps its own scales: the stack dequantises to what each expert alone does."""
    folder = save_tiny(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    dense = load_file(folder / "model.safetensors")
    settings = mg.MonographConfig(FORMATS[format], double_quant=format == "nf4")
    change = one_by_one(format, settings.method.unpack)
    rewrite(folder, change, settings.to_dict())
    model = mg.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(experts(model)) == 2
    for i, layer in enumerate(experts(model)):
        prefix = f"model.layers.{i}.mlp.experts"

        def alone(expert, name, prefix=prefix):
            weight = dense[f"{prefix}.{expert}.{name}.weight"]
            return mg.quantize(weight, format, double_quant=format == "nf4").dequantize(torch.float32)

        both = torch.stack([torch.cat([alone(e, "gate_proj"), alone(e, "up_proj")]) for e in range(8)])
        assert torch.equal(layer.dequantize("gate_up_proj"), both)
        down = torch.stack([alone(e, "down_proj") for e in range(8)])
        assert torch.equal(layer.dequantize("down_proj"), down)
    folder = save_tiny(tmp_path / "dense", "qwen3_moe", dtype=torch.bfloat16)
    torch.testing.assert_close(model(tokens()).logits, dense_copy(folder, model)(tokens()).logits, **CLOSE)


@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen3_moe", "nf4"), ("mixtral", "nvfp4"), ("gpt_oss", "mxfp4"), ("granitemoe", "fp8-block")],
)
def test_a_saved_model_is_read_back(family, format, tmp_path):
    """By from_pretrained with the same bits, and by the tool with the values that the model holds."""
    folder, saved = save_tiny(tmp_path / "dense", family, dtype=torch.bfloat16), tmp_path / "saved"
    settings = mg.MonographConfig(format, double_quant=format == "nf4")
    model = mg.from_pretrained(folder, settings).eval()
    model.save_pretrained(saved)
    again = mg.from_pretrained(saved).eval()
    for ours, theirs in zip(experts(model), experts(again), strict=True):
        for name in ours.stacks:
            for part in ours.stored_names(name):
                assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
            assert mapped(saved, getattr(theirs, f"{name}_values"))
    assert torch.equal(model(tokens()).logits, again(tokens()).logits)
    run("verify", saved)
    run("dequantize", saved, tmp_path / "bf16")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    for path, layer in model.named_modules():
        for name in layer.stacks if isinstance(layer, PackedExperts) else ():
            assert torch.equal(getattr(dense.get_submodule(path), name), layer.dequantize(name)), path


def test_experts_packed_one_by_one_are_not_saved(tmp_path):
    folder = save_tiny(tmp_path / "dense", "qwen3_moe", dtype=torch.bfloat16)
    run("quantize", folder, tmp_path / "packed", "--to", "nf4", "--experts", "separate")
    model = mg.from_pretrained(tmp_path / "packed")
    with pytest.raises(
        NotImplementedError, match=r"layers\.0\.mlp\.experts\.\w+: experts that were packed one"
    ):
        model.save_pretrained(tmp_path / "saved")
