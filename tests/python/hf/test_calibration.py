"""Calibration: the sketch against float64, the file against what transformers and PEFT give their layers."""

import json
import pathlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode

import monograph as mg
from monograph.packing import PackedCollator
from monograph.training.input_sketch import DIRECTIONS, RANK, InputSketch, moments
from support.dense_experts import dense_copy
from support.recipe_files import make_instruction_world, small_recipe
from support.tiny_models import tiny_llama
from support.tiny_moe import save_tiny, tokens

WIDTH = 48  # at most RANK: then the sketch is the whole second moment


def sketch_of(x, parts=1):
    sketch = InputSketch(x.shape[1])
    for part in x.chunk(parts):
        sketch.add(moments(part))
    return sketch.result()


def inputs(kind, tokens=3000, size=256):
    """Activations with a spectrum like 1/i, a flat one, one with a huge channel, and few tokens."""
    torch.manual_seed(3)
    if kind == "few":
        return torch.randn(20, size)
    basis = torch.linalg.qr(torch.randn(size, size))[0]
    slopes = {"decaying": torch.arange(1, size + 1.0) ** -1, "flat": torch.ones(size), "outlier": None}
    if kind == "outlier":
        x = torch.randn(tokens, size) @ (basis * torch.arange(1, size + 1.0) ** -0.5) @ basis.t()
        x[:, 7] *= 300
        return x
    return torch.randn(tokens, size) * slopes[kind] @ basis.t()


@pytest.mark.parametrize("kind", ["decaying", "flat", "outlier", "few"])
def test_the_sketch_against_the_best_of_its_rank(kind):
    """In the trace at most 1 + r / (l - r - 1) times the error of the best rank r (Tropp et al. 2017, theorem
    4.1, for r = 64 and l = 128 directions), and nowhere more than the second moment itself."""
    x = inputs(kind)
    rows, diagonal = sketch_of(x, parts=3)
    exact = x.double().t() @ x.double() / len(x)
    assert rows.shape == (min(RANK, len(x)), x.shape[1])
    assert rows.dtype == diagonal.dtype == torch.float32
    # Sums of 512 products in float32 and a rounding of the result: 512 eps of the largest.
    slack = 512 * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(exact, 2)
    torch.testing.assert_close(diagonal.double(), exact.diagonal(), rtol=1e-4, atol=0)
    left = exact - rows.double().t() @ rows.double()
    assert torch.linalg.eigvalsh(left)[0] > -slack
    best = torch.linalg.eigvalsh(exact)[:-RANK].clamp_min(0).sum()
    bound = 1 + RANK / (DIRECTIONS - RANK - 1)
    assert left.diagonal().sum() <= bound * best + len(exact) * slack
    if kind in ("decaying", "outlier"):
        assert left.diagonal().sum() < 0.1 * exact.diagonal().sum()


@pytest.mark.parametrize("kind", ["falling", "few directions", "channels", "tiny"])
@pytest.mark.parametrize("inputs", [96, 384])
def test_no_column_of_a_sketch_exceeds_its_diagonal(kind, inputs):
    """Which the native tool holds files to, with an eighth to spare (core/monograph/merge/calibration.h)."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(1500, inputs, generator=generator, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(inputs, inputs, generator=generator, dtype=torch.float64))
    x = {
        "falling": lambda: x * 1.2 ** (-torch.arange(inputs) / 2) @ turn,  # below the least that is kept
        "few directions": lambda: 1000 * x[:, :4] @ turn[:4] + 0.1 * x,
        "channels": lambda: x * torch.logspace(0, -6, inputs),
        "tiny": lambda: 1e-18 * x,
    }[kind]()
    rows, diagonal = sketch_of(x.float(), parts=3)
    assert (rows.double().square().sum(0) <= (1 + 1e-5) * diagonal.double()).all()


def test_what_a_sketch_refuses():
    sketch = InputSketch(8)
    with pytest.raises(ValueError, match="no inputs were seen"):
        sketch.result()
    with pytest.raises(ValueError, match="the inputs have 4 columns, wanted 8"):
        sketch.add(moments(torch.zeros(2, 4)))
    sketch.add(moments(torch.zeros(2, 8)))
    rows, diagonal = sketch.result()
    assert not rows.any()
    assert not diagonal.any()
    sketch.add(moments(torch.full((2, 8), torch.nan)))
    with pytest.raises(ValueError, match="not finite"):
        sketch.result()


def llama(tie=False, **sizes):
    shape = {"vocab_size": 60, "hidden_size": WIDTH, "intermediate_size": 64} | sizes
    return tiny_llama(seed=1, **shape, tie_word_embeddings=tie).eval()


def adapted(model, **options):
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.eval()


def second_moments(model, batches):
    """Of what each linear layer of a model is given, by hooks, in float64; with their number of tokens."""
    found, handles = {}, []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not {"lora_A", "lora_B"} & set(path.split(".")):
            name = path.removeprefix("base_model.model.").removesuffix(".base_layer")

            def hook(_, args, name=name):
                x = args[0].reshape(-1, args[0].shape[-1]).double()
                total, count = found.get(name, (0, 0))
                found[name] = (total + x.t() @ x, count + len(x))

            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        for ids in batches:
            model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return {name: total / count for name, (total, count) in found.items()}


def assert_is(file, want, rtol=1e-3):
    """Of sizes that the rank holds, the sketch is the second moment, but for float32 forwards."""
    got = load_file(file)
    assert {name.rpartition(".")[0] for name in got} == set(want)
    for name, exact in want.items():
        rows = got[f"{name}.sketch"].double()
        scale = rtol * exact.diagonal().max()
        torch.testing.assert_close(rows.t() @ rows, exact, rtol=0, atol=scale)
        torch.testing.assert_close(got[f"{name}.diagonal"].double(), exact.diagonal(), rtol=0, atol=scale)


DOCUMENTS = [
    torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(length))
    for length in (9, 5, 14)
]


def padded(documents):
    longest = max(ids.shape[1] for ids in documents)
    rows = [nn.functional.pad(ids, (0, longest - ids.shape[1])) for ids in documents]
    masks = [(torch.arange(longest) < ids.shape[1]).long()[None] for ids in documents]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(masks)}


def test_a_packed_base_with_lora_against_peft(tmp_path):
    """The fused model on padded and on packed rows; PEFT's on the dequantised base, one document a time."""
    plain = adapted(mg.nn.replace_linears(llama(), "nf4"))
    for layer in list(plain.modules()):
        if isinstance(getattr(layer, "base_layer", None), mg.nn.QuantLinear):
            dense = nn.Linear(layer.in_features, layer.out_features, bias=False)
            dense.weight.data = layer.base_layer.dequantize()
            layer.base_layer = dense
    want = second_moments(plain, DOCUMENTS)
    assert len(want) == 15
    assert {"model.layers.1.mlp.down_proj", "lm_head"} < set(want)
    fused = mg.optimize(adapted(mg.nn.replace_linears(llama(), "nf4")))
    assert_is(mg.calibrate(fused, [padded(DOCUMENTS)], tmp_path / "padded"), want)
    collate = PackedCollator(pad_to_multiple_of=64, max_documents=8)
    packed = [collate([{"input_ids": ids[0].tolist()} for ids in DOCUMENTS])]
    assert_is(mg.calibrate(fused, packed, tmp_path / "packed"), want)
    assert not [m for m in fused.modules() if m._forward_pre_hooks or m._forward_hooks]


def test_a_tied_head_modules_to_save_and_a_shared_weight(tmp_path):
    """Names without PEFT's wrappers, and one sketch of all inputs of a weight that has two names."""
    model = llama(tie=True)
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    want = second_moments(model, DOCUMENTS)
    pooled = (want["model.layers.0.mlp.up_proj"] + want["model.layers.1.mlp.up_proj"]) / 2
    want |= {f"model.layers.{n}.mlp.up_proj": pooled for n in range(2)}
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["down_proj"])
    wrapped = get_peft_model(model, config)
    (tmp_path / "monograph.json").write_text(json.dumps({"base": {"sha256": "00ff"}}))
    file = mg.calibrate(wrapped, ({"input_ids": ids} for ids in DOCUMENTS), tmp_path)
    assert_is(file, want)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {
            "monograph.calibration": "1",
            "monograph.tokens": "56",
            "monograph.base_sha256": "00ff",
        }


class _Products(TorchFunctionMode):
    """What transformers' loop over experts multiplies with down_proj, told by its sizes."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.rows = shape, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear and args[1].shape == self.shape:
            self.rows.append(args[0].double())
        return func(*args, **(kwargs or {}))


def test_packed_experts_with_lora_against_transformers_loop(tmp_path):
    """Pooled over experts and the tokens routed to them; padding is left out."""
    folder = save_tiny(tmp_path, "qwen3_moe", layers=1)
    packed = mg.from_pretrained(folder, mg.MonographConfig("nf4"), dtype=torch.float32)
    loop = dense_copy(tmp_path, packed)
    fused = mg.add_lora(packed, LoraConfig(r=4, target_modules=["q_proj"]), experts=True)
    wrapper = next(m for m in fused.modules() if getattr(m, "parameter_name", "") == "gate_up_proj")
    experts = loop.model.layers[0].mlp.experts
    a, b = wrapper.lora_A["default"].weight.data, wrapper.lora_B["default"].weight.data
    b.normal_(std=0.3)
    a, b = a.reshape(8, 4, 64), b.reshape(64, 4, 8)  # PEFT's layout
    experts.gate_up_proj.data += wrapper.scaling["default"] * torch.einsum("ore,eri->eoi", b, a)
    ids, hidden = tokens(rows=3, length=9), []
    experts.register_forward_pre_hook(lambda _, args: hidden.append(args[0].double()))
    products = _Products((64, 32))
    with torch.no_grad(), products:
        for row in ids:
            loop(row[None])
    x, inner = (torch.cat([t.reshape(-1, t.shape[-1]) for t in found]) for found in (hidden, products.rows))
    assert len(inner) == 2 * len(x) == 54
    name = "model.layers.0.mlp.experts."
    want = {f"{name}gate_up_proj": x.t() @ x / len(x), f"{name}down_proj": inner.t() @ inner / len(inner)}
    batch = {"input_ids": nn.functional.pad(ids, (0, 3)), "attention_mask": torch.ones(3, 12).long()}
    batch["attention_mask"][:, 9:] = 0
    got = load_file(mg.calibrate(fused, [batch], tmp_path / "out"))
    for key, exact in want.items():
        rows = got[f"{key}.sketch"].double()
        torch.testing.assert_close(rows.t() @ rows, exact, rtol=0, atol=1e-3 * float(exact.diagonal().max()))


def test_experts_that_compute_otherwise_are_refused(tmp_path):
    loop = dense_copy(save_tiny(tmp_path, "qwen3_moe", layers=1), nn.Module())
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts does not compute with monograph"):
        mg.calibrate(loop, [{"input_ids": tokens()}], tmp_path / "out")
    with pytest.raises(ValueError, match="no batch reached a linear layer"):
        mg.calibrate(loop, [], tmp_path / "out")
    with pytest.raises(ValueError, match="calibrate: LlamaModel has no head"):
        mg.calibrate(llama().model, [], tmp_path / "out")
    broken = llama()
    broken.model.layers[1].input_layernorm.weight.data.fill_(torch.inf)
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.\w+\.\w+: the inputs, or their squares, are not"
    ):
        mg.calibrate(broken, [{"input_ids": tokens(length=4)[:, :4] % 60}], tmp_path / "out")
    assert not (tmp_path / "out" / "calibration.safetensors").exists()


def test_the_same_bytes_for_any_threads_and_twice(tmp_path):
    """Wide enough for the threads of every operator to share the work, and for a true sketch."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    model = mg.optimize(adapted(mg.nn.replace_linears(llama(**sizes).bfloat16(), "nf4")))
    batches = [{"input_ids": tokens(rows=4, length=300, seed=n) % 60} for n in range(2)]
    files, before = [], torch.get_num_threads()
    try:
        for run, threads in enumerate((1, 2, 2)):
            torch.set_num_threads(threads)
            files.append(mg.calibrate(model, batches, tmp_path / str(run)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    contents = [pathlib.Path(file).read_bytes() for file in files]
    assert contents[0] == contents[1] == contents[2]
    assert load_file(files[0])["model.layers.0.mlp.down_proj.sketch"].shape == (RANK, 512)


def test_a_recipe_writes_it_beside_the_adapter(tmp_path):
    from monograph.recipe import check_keys
    from monograph.recipe.train import train

    make_instruction_world(tmp_path)
    keys = {"output_dir": str(tmp_path / "out"), "max_steps": 1, "step_mode": "eager", "micro_batch_size": 2}
    recipe = small_recipe(tmp_path, "instruction", **keys)
    file = tmp_path / "out" / "calibration.safetensors"
    train(check_keys(recipe | {"calibration": 3}).recipe)
    with safe_open(file, "pt") as opened:
        record = json.loads((tmp_path / "out" / "monograph.json").read_text())["base"]["sha256"]
        assert opened.metadata()["monograph.base_sha256"] == record
        assert 192 < int(opened.metadata()["monograph.tokens"]) <= 256  # four rows of 64
        base = load_file(tmp_path / "model" / "model.safetensors")
        linears = [
            name.removesuffix(".weight") for name in base if name.endswith(("proj.weight", "head.weight"))
        ]
        wanted = {f"{name}.{part}" for name in linears for part in ("sketch", "diagonal")}
        assert set(opened.keys()) == wanted
    train(check_keys(recipe).recipe)  # another adapter: the sketches were not its own
    assert not file.exists()
    with pytest.raises(ValueError, match="calibration is -1, wanted true, false or a number of rows"):
        check_keys(recipe | {"calibration": -1})


def test_what_calibrate_refuses_before_it_runs_the_model(tmp_path):
    model, calls = llama(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = {"input_ids": torch.randint(0, 60, (2, 5))}
    for batches, found in ((batch, "str"), ([batch["input_ids"]], "Tensor")):
        with pytest.raises(TypeError, match=f"calibrate: a batch is of type {found}, wanted a mapping"):
            mg.calibrate(model, batches, tmp_path / "out")
    square = {**batch, "attention_mask": torch.ones(2, 1, 5, 5)}
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1, 5, 5\], wanted \[rows, tokens\]"):
        mg.calibrate(model, [square], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        mg.calibrate(model, [batch], tmp_path / "file")
    (tmp_path / "adapter").mkdir()
    for text in ("[]", '{"base": "llama"}'):
        (tmp_path / "adapter" / "monograph.json").write_text(text)
        with pytest.raises(ValueError, match=r"monograph\.json: .* wanted a mapping"):
            mg.calibrate(model, [batch], tmp_path / "adapter")
    assert not calls
