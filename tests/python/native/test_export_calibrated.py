"""`monograph export --calibration`: codes with error feedback along the inputs of the layers.

Errors of outputs are those of x W^T in float64, on other texts than the calibration saw; blocks are decoded
by PyPI's gguf.
"""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support.gguf_models import VOCABULARY, model_of, save
from support.llama_cpp_model import NAMES
from support.native_tool import run, run_json

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
IO_ERROR = 5
KINDS = ("q4_k_m", "q5_k_m", "q6_k", "q4_0", "q8_0", "mxfp4")


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1, 64), generator=generator) for _ in range(count)]


def correlated(name, **settings):
    """Tokens that have 24 features in common, as those of a trained model have few."""
    model = model_of(name, **(SIZES | settings))
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        features = torch.randn(VOCABULARY, 24) @ torch.randn(24, 256)
        table.copy_(features / features.std() + 0.05 * torch.randn_like(table))
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter is not table:
                parameter.mul_(0.25)
    return model


def inputs_of_layers(model):
    """By the name of the module, [tokens, inputs] in float64."""
    seen, handles = {}, []

    def hook(name):
        return lambda _, args: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(hook(name)))
    with torch.no_grad():
        for batch in texts(8, 77):
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    place = tmp_path_factory.mktemp("dense")
    model = correlated("Qwen3")
    save(model, "Qwen3", place / "model")
    mg.calibrate(model, [{"input_ids": batch} for batch in texts(16, 5)], place)
    assert (place / "calibration.safetensors").exists()
    return model, place


def decoded(path):
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        found[tensor.name] = torch.tensor(values.reshape(shape))
    return found


def tensor_of(module):
    if module == "lm_head":
        return "output.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def export(place, out, kind, *more):
    return run_json("export", place / "model", out, "--type", kind, "--force", *more)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_layers_are_nearer(dense, tmp_path, kind):
    model, place = dense
    plain, along = (tmp_path / f"{how}.gguf" for how in ("plain", "along"))
    export(place, plain, kind)
    report = export(place, along, kind, "--calibration", place / "calibration.safetensors")
    assert (report["calibrated"], report["not_calibrated"]) == (15, 1)
    values, before = decoded(along), decoded(plain)
    weights = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    ratios = []
    for name, x in inputs_of_layers(model).items():
        exact = x @ weights[name].double().T
        errors = [((x @ table[tensor_of(name)].double().T) - exact).norm() for table in (values, before)]
        ratios.append((errors[0] / errors[1]).item())
    print(kind, "error of outputs against plain: mean", np.mean(ratios), "largest", max(ratios))
    assert len(ratios) == 15
    assert max(ratios) < 1
    assert np.mean(ratios) < 0.8
    # What the calibration does not know is not touched.
    assert torch.equal(values["token_embd.weight"], before["token_embd.weight"])


def scales_of(tensor):
    """The bytes of each block that are no codes."""
    kind = tensor.tensor_type.name
    blocks = np.asarray(tensor.data).reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
    where = {"Q4_K": slice(16), "Q5_K": slice(16), "Q6_K": slice(192, None), "Q4_0": slice(2)}
    return blocks[:, where[kind]]


@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q6_k", "q4_0"])
def test_scales_are_those_of_the_plain_encoder(dense, tmp_path, kind):
    """Codes alone differ."""
    _, place = dense
    plain, along = tmp_path / "plain.gguf", tmp_path / "along.gguf"
    export(place, plain, kind)
    export(place, along, kind, "--calibration", place / "calibration.safetensors")
    before, after = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (plain, along))
    changed = 0
    for name, tensor in after.items():
        if "Q" in tensor.tensor_type.name and tensor.tensor_type.name != "Q8_0":
            assert np.array_equal(scales_of(tensor), scales_of(before[name])), name
            changed += tensor.data.tobytes() != before[name].data.tobytes()
    assert changed == (14 if kind == "q4_0" else 15)  # whose head is q8_0


def dense_algorithm(weight, scale, sketch, diagonal):
    """Codes of Q8_0 in float64: H = diag(d) + G G^T as a whole matrix, GPTQ with it."""
    mean = diagonal.mean()
    g = (sketch / np.sqrt(mean)).T
    h = g @ g.T + np.diag(np.maximum(diagonal / mean - (g * g).sum(1), 0) + 0.01)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    weight, codes = weight.copy(), np.zeros(weight.shape)
    for i in range(weight.shape[1]):
        codes[:, i] = np.ceil(np.clip(weight[:, i] / scale[:, i], -127, 127) - 0.5)
        error = (weight[:, i] - codes[:, i] * scale[:, i]) / upper[i, i]
        weight[:, i:] -= np.outer(error, upper[i, i:])
    return codes


def test_codes_are_those_of_gptq_with_the_whole_matrix(dense, tmp_path):
    model, place = dense
    export(place, tmp_path / "it.gguf", "q8_0", "--calibration", place / "calibration.safetensors")
    (tensor,) = [t for t in gguf.GGUFReader(tmp_path / "it.gguf").tensors if t.name == "blk.1.attn_q.weight"]
    blocks = np.asarray(tensor.data).reshape(256, 8, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64).repeat(32, 2)
    found = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(256, 256)
    state = load_file(place / "calibration.safetensors")
    sketch, diagonal = (state[f"{Q}.{part}"].double().numpy() for part in ("sketch", "diagonal"))
    weight = model.model.layers[1].self_attn.q_proj.weight.detach().double().numpy()
    wanted = dense_algorithm(weight, scale.reshape(256, 256), sketch, diagonal)
    share = (found == wanted).mean()
    print("codes equal", share)
    assert share > 0.999


def test_the_same_bytes_for_any_threads_and_instruction_set(dense, tmp_path, monkeypatch):
    _, place = dense
    files = []
    for isa, jobs in (("", 1), ("", 3), ("scalar", 2), ("avx2", 1)):
        monkeypatch.setenv("MONOGRAPH_ISA", isa) if isa else monkeypatch.delenv("MONOGRAPH_ISA", False)
        more = ("--calibration", place / "calibration.safetensors", "--jobs", jobs)
        export(place, tmp_path / "it.gguf", "q4_k_m", *more)
        files.append((tmp_path / "it.gguf").read_bytes())
    assert files[1:] == files[:1] * 3


def test_experts_share_the_inputs_of_their_stack(tmp_path):
    model = correlated("Qwen3Moe", **EXPERTS)
    save(model, "Qwen3Moe", tmp_path / "model")
    model.set_experts_implementation("monograph")
    mg.calibrate(model, [{"input_ids": batch} for batch in texts(16, 5)], tmp_path)
    modules = {name.rsplit(".", 1)[0] for name in load_file(tmp_path / "calibration.safetensors")}
    assert "model.layers.1.mlp.experts.down_proj" in modules
    export(tmp_path, tmp_path / "plain.gguf", "q4_k_m")
    report = export(
        tmp_path, tmp_path / "it.gguf", "q4_k_m", "--calibration", tmp_path / "calibration.safetensors"
    )
    assert (report["calibrated"], report["not_calibrated"]) == (15, 1)  # 4 + 3 of each layer, and the head
    plain, along = decoded(tmp_path / "plain.gguf"), decoded(tmp_path / "it.gguf")
    seen = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in texts(4, 77):
            model(batch)
    handle.remove()
    x = torch.cat([part.reshape(-1, 256) for part in seen]).double()
    exact = model.model.layers[0].mlp.experts.gate_up_proj.detach().double()
    for part, rows in (("gate", exact[:, :256]), ("up", exact[:, 256:])):
        for expert in range(4):
            errors = [
                (x @ (file[f"blk.0.ffn_{part}_exps.weight"][expert].double() - rows[expert]).T).norm()
                for file in (along, plain)
            ]
            assert errors[0] < 0.9 * errors[1]


def edited(change):
    def write(path, copy):
        state = load_file(path)
        metadata = {"monograph.calibration": "1"}
        change(state, metadata)
        save_file(state, copy, metadata)

    return write


def truncated(path, copy):
    copy.write_bytes(path.read_bytes()[:-100])


Q = "model.layers.1.self_attn.q_proj"


def put(name, values):
    return edited(lambda state, _: state.__setitem__(name, values))


def number(name, value):
    return edited(lambda state, _: state[name].view(-1).__setitem__(7, value))


HOSTILE = {
    "truncated": (truncated, "the file has only"),
    "no version": (edited(lambda _, metadata: metadata.clear()), "monograph.calibration"),
    "nan": (number(Q + ".sketch", float("nan")), Q + ".sketch"),
    "infinite": (number(Q + ".diagonal", float("inf")), Q + ".diagonal"),
    "negative": (number(Q + ".diagonal", -1.0), Q + ".diagonal"),
    "half a module": (edited(lambda state, _: state.pop(Q + ".diagonal")), "has no"),
    "another type": (put(Q + ".diagonal", torch.ones(256, dtype=torch.float16)), "wanted F32"),
    "too many directions": (put(Q + ".sketch", torch.ones(65, 256)), "wanted [1 to 64, inputs]"),
    "other inputs": (
        edited(
            lambda state, _: state.update(
                {Q + ".sketch": torch.ones(1, 128), Q + ".diagonal": torch.ones(128)}
            )
        ),
        "has a sketch of 128 inputs, the weight has 256",
    ),
    "another model": (
        edited(
            lambda state, _: state.update(
                {"model.layers.7.mlp.up_proj" + end: value for end, value in ONE.items()}
            )
        ),
        "module 'model.layers.7.mlp.up_proj' is no weight of this model",
    ),
    "no module": (edited(lambda state, _: [state.pop(name) for name in list(state)]), "inputs of none"),
    "a contradiction": (
        edited(lambda state, _: state[Q + ".sketch"].mul_(1.5)),
        f"tensor '{Q}.sketch': the squares of column ",
    ),
    "no inputs but a sketch": (edited(lambda state, _: state[Q + ".diagonal"].zero_()), "its diagonal, 0.0"),
    "no tensor of a calibration": (put("model.norm.weight", torch.ones(256)), "neither MODULE.sketch"),
}
ONE = {".sketch": torch.ones(1, 256), ".diagonal": torch.ones(256)}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_with_a_calibration_is_named(dense, tmp_path, case):
    _, place = dense
    change, words = HOSTILE[case]
    copy = tmp_path / "changed.safetensors"
    change(place / "calibration.safetensors", copy)
    command = ["export", place / "model", tmp_path / "it.gguf", "--type", "q4_k_m", "--calibration", copy]
    error = run(*command, code=3).stderr
    assert "changed.safetensors" in error
    assert words in error, error
    assert not list(tmp_path.glob("*.gguf"))


def test_quantize_refuses_a_sketch_that_contradicts_its_diagonal(dense, tmp_path):
    """It rounded to nonsense and ended with 0."""
    _, place = dense
    change, words = HOSTILE["a contradiction"]
    change(place / "calibration.safetensors", tmp_path / "changed.safetensors")
    command = ["quantize", place / "model", tmp_path / "out", "--to", "nf4", "--calibration"]
    assert words in run(*command, tmp_path / "changed.safetensors", code=3).stderr
    assert not (tmp_path / "out").exists()


def test_quiet_prints_no_table(dense, tmp_path):
    _, place = dense
    command = ["export", place / "model", tmp_path / "it.gguf", "--type", "q8_0", "--quiet"]
    assert "q8_0" in run(*command, "--dry-run").stdout
    done = run(*command)
    assert done.stdout == done.stderr == ""


def test_plain_floats_and_missing_files_are_refused(dense, tmp_path):
    _, place = dense
    command = ["export", place / "model", tmp_path / "it.gguf", "--calibration"]
    file = place / "calibration.safetensors"
    assert "--type is bf16" in run(*command, file, "--type", "bf16", code=2).stderr
    missing = run(*command, tmp_path / "none.safetensors", "--type", "q6_k", code=IO_ERROR)
    assert "none.safetensors: cannot open" in missing.stderr
    assert not list(tmp_path.glob("*.gguf"))


def test_a_tied_head_and_vision_weights_are_no_other_model(tmp_path):
    """What the folder has and the file leaves out may be in the calibration."""
    model = correlated("Qwen3", tie_word_embeddings=True)
    save(model, "Qwen3", tmp_path / "model")
    mg.calibrate(model, [{"input_ids": batch} for batch in texts(4, 5)], tmp_path)
    shutil.copy(tmp_path / "calibration.safetensors", tmp_path / "c.safetensors")
    report = export(tmp_path, tmp_path / "it.gguf", "q4_k_m", "--calibration", tmp_path / "c.safetensors")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"]
    assert (report["calibrated"], report["not_calibrated"]) == (14, 1)
