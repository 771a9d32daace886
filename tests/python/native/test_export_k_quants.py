"""`export --type` q4_k_m, q5_k_m and q6_k: the types of llama-quantize, values no further off than ggml's."""

import gguf
import numpy as np
import pytest
import torch

from support.ggml_library import ggml
from support.gguf_models import model_of, save
from support.native_tool import run, run_json

KINDS = ("q4_k_m", "q5_k_m", "q6_k")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10}
# What llama-quantize (in llama-cpp-cffi 0.4.42) made of the f32 files of these models.
MORE = {f"blk.{layer}.{name}.weight": "Q6_K" for layer in (0, 3, 6, 8, 9) for name in ("attn_v", "ffn_down")}
OUTPUTS = [f"blk.{layer}.attn_output.weight" for layer in range(10)]  # of Gemma's: rows of 128
TINY = {"blk.2.attn_v.weight": "Q8_0", "blk.2.ffn_down.weight": "Q8_0", "output.weight": "Q8_0"}
CHOSEN = {
    ("Llama", "q4_k_m"): ("Q4_K", MORE | {"output.weight": "Q6_K"}),
    ("Llama", "q5_k_m"): ("Q5_K", MORE | {"output.weight": "Q6_K"}),
    ("Llama", "q6_k"): ("Q6_K", {}),
    ("Gemma3", "q4_k_m"): ("Q4_K", MORE | {"token_embd.weight": "Q6_K"} | dict.fromkeys(OUTPUTS, "Q5_0")),
    ("Gemma3", "q5_k_m"): ("Q5_K", MORE | {"token_embd.weight": "Q6_K"} | dict.fromkeys(OUTPUTS, "Q5_1")),
    ("Gemma3", "q6_k"): ("Q6_K", dict.fromkeys(OUTPUTS, "Q8_0")),
    ("tiny", "q4_k_m"): ("Q5_0", TINY),
    ("tiny", "q5_k_m"): ("Q5_1", TINY),
    ("tiny", "q6_k"): ("Q8_0", {}),
}


def values_like_weights(shape, seed):
    """Rows of other magnitudes, normal, with heavy tails or few values that are not small."""
    rng = np.random.default_rng(seed)
    kinds = [rng.standard_normal(shape), rng.standard_t(3, shape), rng.laplace(size=shape)]
    kinds.append(rng.standard_normal(shape) * (rng.random(shape) < 0.1))
    kinds.append(rng.standard_normal(shape) + 1)
    rows = np.exp2(rng.uniform(-8, 0, (shape[0], 1)))
    return torch.from_numpy((kinds[seed % 5] * rows * 0.05).astype(np.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    model = model_of("Llama", **SIZES)
    with torch.no_grad():
        for seed, parameter in enumerate(p for p in model.parameters() if p.dim() == 2):
            parameter.copy_(values_like_weights(tuple(parameter.shape), seed))
    save(model, "Llama", path / "model")
    for kind in ("f32", *KINDS):
        run("export", path / "model", path / f"{kind}.gguf", "--type", kind)
    return path


def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def types(path):
    return {name: tensor.tensor_type.name for name, tensor in tensors(path).items() if len(tensor.shape) == 2}


def chosen_types(name, kind, path):
    most, others = CHOSEN[name, kind]
    return {tensor: others.get(tensor, most) for tensor in types(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_types_are_those_of_llama_quantize(folder, kind):
    path = folder / f"{kind}.gguf"
    assert types(path) == chosen_types("Llama", kind, path)
    assert len(types(path)) == 72
    fields = gguf.GGUFReader(path).fields
    file_type = {"q4_k_m": "MOSTLY_Q4_K_M", "q5_k_m": "MOSTLY_Q5_K_M", "q6_k": "MOSTLY_Q6_K"}[kind]
    assert fields["general.file_type"].contents() == gguf.LlamaFileType[file_type]


@pytest.mark.parametrize("name", ["Gemma3", "tiny"])
def test_a_tied_head_and_short_rows(tmp_path, name):
    sizes = SIZES if name == "Gemma3" else {"num_hidden_layers": 3}
    family = "Llama" if name == "tiny" else name
    save(model_of(family, **sizes), family, tmp_path / "model")
    for kind in KINDS:
        path = tmp_path / f"{kind}.gguf"
        done = run("export", tmp_path / "model", path, "--type", kind)
        assert types(path) == chosen_types(name, kind, path)
        assert "because their rows are no multiple of 256: " in done.stdout + done.stderr


def error(blocks, kind, wanted):
    found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return float(((found.astype(np.float64) - wanted) ** 2).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_no_matrix_is_further_off_than_ggmls(folder, kind):
    """The squared error of each matrix, decoded by the gguf package."""
    library = ggml()
    if library is None:
        pytest.skip("xllamacpp is not installed")
    ratios = []
    dense = tensors(folder / "f32.gguf")
    for name, tensor in tensors(folder / f"{kind}.gguf").items():
        stored = tensor.tensor_type.name
        if not stored.endswith("_K"):
            continue
        wanted = np.ascontiguousarray(dense[name].data)
        other = np.zeros_like(tensor.data)
        rows, cols = wanted.shape
        library.ggml_quantize_chunk(
            tensor.tensor_type.value, wanted.ctypes.data, other.ctypes.data, 0, rows, cols, None
        )
        ratios.append(error(tensor.data, stored, wanted) / error(other, stored, wanted))
    print(kind, "squared error against ggml's: largest", max(ratios), "mean", np.mean(ratios))
    assert len(ratios) > 60
    assert max(ratios) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_tool_reads_what_it_wrote(folder, tmp_path, kind):
    """Same bytes by any number of threads; the error against the folder is that of the format."""
    run("export", folder / "model", tmp_path / f"{kind}.gguf", "--type", kind, "--jobs", 3)
    assert (tmp_path / f"{kind}.gguf").read_bytes() == (folder / f"{kind}.gguf").read_bytes()
    assert run_json("verify", tmp_path / f"{kind}.gguf")["findings"] == []
    limit = {"q4_k_m": 0.1, "q5_k_m": 0.05, "q6_k": 0.03}[kind]
    assert (
        run_json("diff", folder / "model", tmp_path / f"{kind}.gguf", "--tolerance", limit)["mismatches"] == 0
    )


def test_numbers_that_no_block_holds_are_refused(folder, tmp_path):
    model = model_of("Llama", **SIZES)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 7] = 1e9
    save(model, "Llama", tmp_path / "model")
    message = run("export", tmp_path / "model", tmp_path / "it.gguf", "--type", "q4_k_m", code=3).stderr
    assert "row 5, column 7" in message
    assert "q4_k" in message
    assert not (tmp_path / "it.gguf").exists()
