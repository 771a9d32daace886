"""PiSSA and LoftQ on packed weights, typed as people type them: against float64, and against a zero start."""

import copy
import json
import subprocess

import pytest
import torch
from peft import LoftQConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.nn import QuantLinear, replace_linears
from monograph.nn.dense_source import remember_dense
from support.native_tool import program
from support.tiny_models import save_llama

pytestmark = pytest.mark.slow
RANK = 16


class Block(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up = nn.Linear(192, 256, bias=False, dtype=dtype)
        self.down = nn.Linear(256, 192, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def dense_block(dtype=torch.float32):
    """Weights with a spectrum that falls as that of trained ones does, 1 / sqrt(k)."""
    torch.manual_seed(0)
    block = Block(dtype)
    for layer in (block.up, block.down):
        u, _, vh = torch.linalg.svd(torch.randn_like(layer.weight, dtype=torch.float32), full_matrices=False)
        layer.weight.data = (u / torch.arange(1, u.shape[1] + 1).sqrt() @ vh).to(dtype)
    return block


def config(start, **options):
    return LoraConfig(
        r=RANK, lora_alpha=24, target_modules=["up", "down"], init_lora_weights=start, **options
    )


def quantised(block, name="nf4", double_quant=True):
    return replace_linears(copy.deepcopy(block), name, double_quant=double_quant, skip=())


def stands_for(layer):
    """Base and adapter of a layer in float64."""
    low = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    return layer.base_layer.dequantize(torch.float32).double() + layer.scaling["default"] * low


def distance(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_pissa_keeps_the_zero_points_of_a_folder(name):
    """A folder's layer knows them by its tensors alone."""
    block = dense_block(torch.bfloat16)
    for part in ("up", "down"):
        packed = mg.quantize(getattr(block, part).weight.data, name, block_size=32, rule="minmax")
        setattr(block, part, QuantLinear(packed))
    weight = block.up.dequantize(torch.float32).double()
    model = get_peft_model(block, config("pissa"))
    layer = model.base_model.model.up
    low = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    left = (weight - layer.scaling["default"] * low).float()
    wanted = mg.quantize(left, layer.base_layer.format.name, block_size=32, rule="minmax")
    assert torch.equal(layer.base_layer.zero_points, wanted.scales[1])
    assert torch.equal(layer.base_layer.values, wanted.values)
    assert distance(stands_for(layer), weight) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", ["pissa", "pissa_niter_8"])
def test_pissa_of_a_packed_base_keeps_the_true_residual(start, dtype):
    packed = quantised(dense_block(dtype))
    weight = packed.up.dequantize(torch.float32).double()
    model = get_peft_model(packed, config(start))
    layer = model.base_model.model.up
    found = layer.scaling["default"] * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    best = u[:, :RANK] * s[:RANK] @ vh[:RANK]
    if start == "pissa":  # the factors are rounded to the base's dtype
        assert distance(found, best) <= {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    else:  # other directions where singular values are close, but an approximation as good
        assert (weight - found).norm() <= 1.01 * (weight - best).norm()
    # The base is the quantised residual of those very factors: the sum is off by one quantisation only.
    again = mg.quantize((weight - found).float(), "nf4", double_quant=True)
    assert torch.equal(again.values.reshape(-1), layer.base_layer.values.reshape(-1))
    error = distance(stands_for(layer), weight)
    assert error == pytest.approx(
        distance(again.dequantize(torch.float32).double() + found, weight), rel=1e-6
    )
    reported = mg.adapter_start(model)
    assert not reported.against_dense
    assert reported.before == 0
    x = torch.randn(5, 192, dtype=dtype)
    wanted = torch.nn.functional.linear(x.double(), stands_for(layer))
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    assert distance(layer(x).double(), wanted) <= bound
    mg.optimize(model)
    assert distance(layer(x).double(), wanted) <= bound


@pytest.mark.parametrize("name", ["nf4", "fp4", "mxfp4"])
@pytest.mark.parametrize("start", ["pissa", "loftq1", "loftq5"])
def test_the_start_is_closer_to_the_dense_weights_than_a_zero_start(start, name):
    """The papers' claim."""
    dense = dense_block()
    options = (
        {"loftq_config": LoftQConfig(loftq_bits=4, loftq_iter=int(start[-1]))} if "loftq" in start else {}
    )
    packed = quantised(dense, name, double_quant=name == "nf4")
    zero = {
        n: distance(getattr(packed, n).dequantize(torch.float32).double(), getattr(dense, n).weight.double())
        for n in ("up", "down")
    }
    model = mg.add_lora(packed, config(start.rstrip("15"), **options), dense=dense)
    errors = {
        n: distance(stands_for(getattr(model.base_model.model, n)), getattr(dense, n).weight.double())
        for n in ("up", "down")
    }
    for n, error in errors.items():
        assert error < 0.87 * zero[n], (errors, zero)
    reported = mg.adapter_start(model)
    assert reported.against_dense
    assert reported.layers == 2
    assert min(errors.values()) - 1e-6 <= reported.after <= max(errors.values()) + 1e-6
    assert min(zero.values()) - 1e-6 <= reported.before <= max(zero.values()) + 1e-6
    print(start, name, str(reported))


def test_loftq_without_dense_weights_and_foreign_ones_are_refused():
    loftq = {"loftq_config": LoftQConfig(loftq_bits=4)}
    with pytest.raises(ValueError, match="the dense weights are gone"):
        get_peft_model(quantised(dense_block()), config("loftq", **loftq))
    other = dense_block()
    other.up.weight.data = torch.randn_like(other.up.weight)
    with pytest.raises(ValueError, match="it is not what was quantised"):
        mg.add_lora(quantised(dense_block()), config("loftq", **loftq), dense=other)
    eight = {"loftq_config": LoftQConfig(loftq_bits=8)}
    with pytest.raises(ValueError, match="loftq_bits is 8, wanted 4: the base is nf4"):
        mg.add_lora(quantised(dense_block()), config("loftq", **eight), dense=dense_block())


@pytest.mark.parametrize("start", ["olora", "OLoRA", "corda", "lora_ga"])
def test_other_starts_are_refused_by_name(start):
    with pytest.raises(ValueError, match=f"up: init_lora_weights is '{start}' on a packed weight"):
        get_peft_model(quantised(dense_block()), config(start))


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_starts_that_leave_the_base_alone_work(start):
    packed = quantised(dense_block())
    before = packed.up.values.clone()
    x = torch.randn(3, 192)
    base = packed(x)
    model = get_peft_model(packed, config(start))
    assert torch.equal(model.base_model.model.up.base_layer.values, before)
    assert mg.adapter_start(model) is None
    assert torch.equal(model(x), base) == (start in (True, "gaussian", "eva", "mica"))


def test_a_changed_base_never_computes_without_its_adapter():
    model = get_peft_model(quantised(dense_block()), config("pissa"))
    x = torch.randn(3, 192)
    with pytest.raises(RuntimeError, match="took its start out of the base"), model.disable_adapter():
        model(x)
    for call in (model.unload, lambda: model.delete_adapter("default")):
        with pytest.raises(ValueError, match="took its start out of the base"):
            call()
    with pytest.raises(ValueError, match="must be the only one"):
        model.add_adapter("second", config(True))
    plain = get_peft_model(quantised(dense_block()), config(True))
    with pytest.raises(ValueError, match="must be the only one"):
        plain.add_adapter("second", config("pissa"))
    mixed = dense_block()
    mixed.down = QuantLinear.from_linear(mixed.down)
    with pytest.raises(ValueError, match="wants all target_modules packed, or none"):
        get_peft_model(mixed, config("pissa"))


@pytest.mark.parametrize("dora", [False, True])
def test_pissa_merges_into_what_it_computes(dora):
    model = get_peft_model(quantised(dense_block()), config("pissa", use_dora=dora)).eval()
    mg.optimize(model)
    x = torch.randn(3, 192)
    want = model(x)
    merged = model.merge_and_unload()
    assert distance(merged(x), want) <= 1e-5


def trained(model, x):
    """A few steps, so that the saved factors are not those of the start."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("start", ["pissa_niter_2", "loftq3"])
def test_a_saved_start_comes_back_on_its_base_only(tmp_path, start, dense):
    if start == "loftq3" and not dense:
        pytest.skip("LoftQ has dense weights")
    options = {"loftq_config": LoftQConfig(loftq_bits=4, loftq_iter=3)} if start == "loftq3" else {}
    source = dense_block() if dense else None
    model = mg.add_lora(quantised(dense_block()), config(start.rstrip("3"), **options), dense=source)
    x = torch.randn(4, 192)
    trained(model, x)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["init_lora_weights"] == "monograph_residual"
    assert not written["loftq_config"]

    torch.manual_seed(99)  # another state of the generator than that of the start
    base = quantised(dense_block())
    if dense:
        with pytest.raises(ValueError, match="made from the dense weights, which are not known here"):
            PeftModel.from_pretrained(quantised(dense_block()), tmp_path)
        remember_dense(base, dense_block())
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    for name in ("up", "down"):
        got, made = (getattr(m.base_model.model, name).base_layer for m in (again, model))
        assert torch.equal(got.values, made.values)
    mg.optimize(again)
    assert torch.equal(again(x), model(x))
    # saved once more, it is the same adapter
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["init_lora_weights"] == (
        "monograph_residual"
    )

    other = dense_block()
    other.up.weight.data *= 1.01
    with pytest.raises(ValueError, match="was started on another base"):
        PeftModel.from_pretrained(quantised(other), tmp_path)
    with pytest.raises(ValueError, match="belongs to a packed base that it has changed"):
        PeftModel.from_pretrained(dense_block(), tmp_path)
    done = subprocess.run(
        [str(program("read_adapters", "core/monograph/adapter")), "adapter", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert 'is "monograph_residual"' in done.stderr
    assert "merge_and_unload in Python merges it" in done.stderr
    assert "path_initial_model" not in done.stderr


def test_a_changed_base_is_not_converted_and_its_mark_is_not_lost(tmp_path):
    """PEFT's conversion rewrites the config of the folder that it reads, and then fails."""
    init = tmp_path / "init"
    model = get_peft_model(quantised(dense_block()), config("pissa"))
    model.save_pretrained(init)
    files = {path.name: path.read_bytes() for path in init.iterdir()}
    for call in (
        lambda: model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(init)),
        lambda: model.save_pretrained(tmp_path / "out", True, None, "auto", True, str(init)),
    ):
        with pytest.raises(ValueError, match=r"path_initial_model_for_weight_conversion is .*wanted None"):
            call()
    assert {path.name: path.read_bytes() for path in init.iterdir()} == files
    assert not (tmp_path / "out").exists()

    written = json.loads(files["adapter_config.json"])
    (init / "adapter_config.json").write_text(json.dumps(written | {"init_lora_weights": True}))
    lost = r"lora_start_A.*init_lora_weights of its adapter_config.json is not 'monograph_residual'"
    for base in (quantised(dense_block()), dense_block()):
        with pytest.raises(ValueError, match=lost):
            PeftModel.from_pretrained(base, init)
    done = subprocess.run(
        [str(program("read_adapters", "core/monograph/adapter")), "adapter", str(init)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "lora_start_" in done.stderr
    assert "the adapter has changed its packed base" in done.stderr


def test_a_changed_base_is_not_swapped_under(tmp_path):
    get_peft_model(quantised(dense_block()), config("gaussian")).save_pretrained(tmp_path / "plain")
    model = get_peft_model(quantised(dense_block()), config("pissa"))
    model.save_pretrained(tmp_path / "pissa")
    x = torch.randn(3, 192)
    before = model(x)
    for name in ("plain", "pissa"):
        with pytest.raises(ValueError, match=r"hotswap: adapter 'default'.* changed its packed base"):
            hotswap_adapter(model, tmp_path / name, "default")
    assert torch.equal(model(x), before)
    plain = get_peft_model(quantised(dense_block()), config(True))
    with pytest.raises(ValueError, match=r"hotswap: .*lora_start_.* changed its packed base"):
        hotswap_adapter(plain, tmp_path / "pissa", "default")
    hotswap_adapter(plain, tmp_path / "plain", "default")


def test_load_adapter_of_transformers_names_the_way_that_works(tmp_path):
    save_llama(tmp_path)

    def load():
        return mg.from_pretrained(tmp_path, mg.MonographConfig("nf4"))

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    get_peft_model(load(), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"load_adapter of transformers .*PeftModel.from_pretrained"):
        load().load_adapter(str(tmp_path / "adapter"))
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": True}))
    with pytest.raises(ValueError, match=r"lora_start_A.* is not 'monograph_residual'"):
        load().load_adapter(str(tmp_path / "adapter"))


def test_a_dense_head_among_packed_targets_is_named(tmp_path, monkeypatch):
    save_llama(tmp_path)
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights="pissa")
    with pytest.raises(ValueError, match=r"^lm_head is Linear, not packed.*'pissa' wants all target_modules"):
        get_peft_model(mg.from_pretrained(tmp_path, mg.MonographConfig("nf4")), lora)
    # PEFT's own LoftQ wants CUDA; there it writes the dense base, and a saved adapter would not tell.
    monkeypatch.setattr(PeftLinear, "loftq_init", lambda *_: None)
    mixed = dense_block()
    mixed.down = QuantLinear.from_linear(mixed.down)
    with pytest.raises(ValueError, match="down is packed and up is not: init_lora_weights='loftq'"):
        get_peft_model(mixed, config("loftq", loftq_config=LoftQConfig()))


def test_dense_weights_that_have_gone_are_named(tmp_path):
    folder = save_llama(tmp_path / "model")
    model = mg.from_pretrained(folder, mg.MonographConfig("nf4"))
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    for gone in ("/nope", "some/name"):
        with pytest.raises(ValueError, match=f"^dense weights: {gone} is no folder .*dense=FOLDER.$"):
            mg.add_lora(model, lora, dense=gone)
    assert not any("lora" in name for name, _ in model.named_modules())  # before the model is touched
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=f"^dense weights: {folder} is no folder"):
        get_peft_model(model, lora)


def test_loftq_config_has_pefts_defaults():
    starts = [
        mg.adapter_start(
            mg.add_lora(quantised(dense_block()), config("loftq", loftq_config=options), dense=dense_block())
        )
        for options in ({"loftq_bits": 4}, {"loftq_iter": 1}, LoftQConfig())
    ]
    assert starts[0] == starts[1] == starts[2]
    with pytest.raises(ValueError, match="loftq_config has 'loftq_itr', wanted loftq_bits and loftq_iter"):
        mg.add_lora(
            quantised(dense_block()), config("loftq", loftq_config={"loftq_itr": 5}), dense=dense_block()
        )


def test_loftq_of_one_iteration_is_an_ordinary_adapter(tmp_path):
    options = {"loftq_config": LoftQConfig(loftq_bits=4, loftq_iter=1)}
    model = mg.add_lora(quantised(dense_block()), config("loftq", **options), dense=dense_block())
    x = torch.randn(4, 192)
    trained(model, x)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["init_lora_weights"] is True
    again = mg.optimize(PeftModel.from_pretrained(quantised(dense_block()), tmp_path)).eval()
    assert torch.equal(again(x), model(x))


def test_a_model_quantised_while_it_loads_knows_its_dense_weights(tmp_path):
    save_llama(tmp_path)
    quantization = mg.MonographConfig("nf4", double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization)
    lora = LoraConfig(
        r=8,
        target_modules="all-linear",
        init_lora_weights="loftq",
        loftq_config=LoftQConfig(loftq_bits=4, loftq_iter=2),
    )
    wrapped = get_peft_model(model, lora)
    start = mg.adapter_start(wrapped)
    assert start.against_dense
    assert start.layers == 14
    assert 0 < start.after < start.before
    wrapped.save_pretrained(tmp_path / "adapter")
    base = mg.from_pretrained(tmp_path, mg.MonographConfig("nf4", double_quant=True))
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.arange(24).reshape(2, 12)
    mg.optimize(wrapped)
    mg.optimize(again)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, wrapped.eval()(tokens).logits)
