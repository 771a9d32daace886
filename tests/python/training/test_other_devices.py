"""What the package does on a device that is not the CPU, on a stand-in for one (shadow_device.py).

In a process of its own, as the device stays. References are the same calls on the CPU.
"""

import pathlib
import subprocess
import sys
from random import Random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from monograph.diagnosis.selftest import training
from monograph.hf.transformers.attention import NAME as OURS
from monograph.nn import QuantLinear
from monograph.nn.replace_linears import replace_linears
from monograph.ops import inductor_decompositions, inductor_fallbacks
from monograph.ops.seeded_dropout import hashed_dropout, kept
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep
from monograph.training.flat_parameters import FlatParameters
from support import hostile_arguments, hostile_calls, shadow_device, trl_heads
from support.tiny_models import tiny_llama

WHERE = "shadow"
PORTABLE = torch._C.DispatchKey.CompositeExplicitAutograd
# Their handles lie on the host: test_offload_device.py has them.
BETWEEN_TWO_DEVICES = {"offload", "reload", "wait"}
# Their argument is the name of a folder or file, as bytes on the host.
NAMES_A_FILE = {"checkpoint_sha256", "read_gguf"}
# Ranges of rows and their seeds: read by the host, so they stay there.
ON_THE_HOST = {"starts", "seeds"}
# They read where documents end, or which tokens count: loops and sizes depend on it.
READ_BY_THE_HOST = {
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "linear_cross_entropy_dw",
    "linear_entropy_dw",
    "pack",
    "pack_stream",
    "quantize",
    "split_quantize",
}


def ours(syncs):
    return [found for found in syncs if "monograph" in found[1] and "site-packages" not in found[1]]


def moved(value, where):
    if isinstance(value, torch.Tensor):
        return value.detach().to(where)
    return [moved(v, where) for v in value] if isinstance(value, list | tuple) else value


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def flat(found):
    """The tensors of what an operator returns, lists of them included."""
    if found is None or isinstance(found, torch.Tensor):
        return [] if found is None else [found]
    return [tensor for entry in found for tensor in flat(entry)]


class Portable(TorchDispatchMode):
    """The portable implementation of every operator of ours, those that an implementation calls included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space != "monograph" or name in READ_BY_THE_HOST:  # those call themselves on the CPU
            return func(*args, **(kwargs or {}))
        with self:  # torch has left it to call this
            return func._op_dk(PORTABLE, *args, **(kwargs or {}))


def operators_give_what_they_give_on_the_cpu():
    """The portable implementation of every operator that has one, on a valid call; the host reads nothing."""
    tried = set()
    for name in hostile_arguments.operators():
        operator = getattr(torch.ops.monograph, name).default
        has = torch._C._dispatch_has_kernel_for_dispatch_key(
            f"monograph::{name}", "CompositeExplicitAutograd"
        )
        call = getattr(hostile_calls, name)(Random(1))
        if (
            not has
            or not hostile_arguments._tensors(call)
            or name == "seeded_dropout"
            or name.startswith(("limit_", "spill_"))
            or name in BETWEEN_TWO_DEVICES | NAMES_A_FILE
        ):
            continue
        names = [argument.name for argument in operator._schema.arguments]
        here = moved(list(call), "cpu")
        there = [
            moved(value, "cpu" if name in ON_THE_HOST else WHERE)
            for name, value in zip(names, call, strict=False)
        ]
        with torch.no_grad():
            with Portable():
                wanted = flat(operator._op_dk(PORTABLE, *here))
            shadow_device.syncs.clear()
            got = flat(operator(*there))
        if name not in READ_BY_THE_HOST:
            assert ours(shadow_device.syncs) == [], (name, shadow_device.syncs)
        written = hostile_arguments._tensors(there), hostile_arguments._tensors(here)
        on_the_host = sum(name in ON_THE_HOST for name in names)
        compared = [*zip(got, wanted, strict=True), *zip(*written, strict=True)]
        assert sum(a.device.type != "shadow" for a, _ in compared) == on_the_host, name
        for a, b in compared:
            assert torch.equal(bits(a.cpu()), bits(b)), name
        tried.add(name)
    wanted = {
        "dequantize",
        "linear",
        "linear_dx",
        "experts",
        "varlen_attention",
        "rms_norm",
        "adamw",
        "rotary",
    }
    assert wanted <= tried, tried


def a_step_has_the_losses_of_the_cpu():
    """Batches come from the host; the step waits for nothing of ours."""
    found = {}
    for where in ("cpu", WHERE):
        step = TrainStep(training.small_model(torch.device(where)), mode="eager")
        losses = []
        for number in range(3):
            shadow_device.syncs.clear()
            result = step([training.batch(number, torch.device("cpu"))], 5e-3)
            assert ours(shadow_device.syncs) == [], shadow_device.syncs
            losses.append(result)
        assert step.state.steps.device.type == where
        found[where] = [float(result.loss) for result in losses]
        summed, count = step.evaluate(training.batch(0, torch.device("cpu")))
        found[where].append(float(summed) / count)
    assert found["shadow"] == pytest.approx(found["cpu"], rel=1e-5)


def a_step_waits_for_nothing_whatever_the_batch_is():
    """All reads by the host in the second step of two micro-batches, by the file that reads. Ours are none,
    and so nothing of ours hinders the capture of a graph. transformers looks at position_ids, and for sdpa at
    the padding, in eager mode only."""
    documents = [{"input_ids": list(range(1, 1 + n)), "labels": list(range(1, 1 + n))} for n in (5, 9, 3)]
    packed = PackedCollator(max_documents=4, pad_to_multiple_of=32)(documents)
    padded = PaddedCollator(pad_to_multiple_of=8)(documents)
    cases = (
        (torch.bfloat16, OURS, packed, 2),
        (torch.float16, OURS, padded, 0),
        (torch.bfloat16, "sdpa", padded, 4),
    )
    for dtype, attention, batch, reads in cases:
        step = TrainStep(_model_with_dropout(dtype, attention), mode="eager")
        step([batch, batch], 1e-3)
        shadow_device.syncs.clear()
        result = step([batch, batch], 1e-3)
        found = [pathlib.Path(file).name for _, file in shadow_device.syncs]
        assert found == ["masking_utils.py"] * reads, (dtype, attention, found)
        assert (result.loss_scale is None) == (dtype == torch.bfloat16)
        assert result.loss.isfinite()
        shadow_device.syncs.clear()
        loss, count = step.evaluate(batch)
        assert ours(shadow_device.syncs) == []
        assert count > 0
        assert loss.device.type == "shadow"


def _model_with_dropout(dtype, attention):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = tiny_llama(seed=None, dtype=dtype, num_hidden_layers=1, **sizes)
    base.set_attn_implementation(attention)
    replace_linears(base, "nf4", skip=("lm_head",), double_quant=True)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    return mg.optimize(get_peft_model(base, lora), attention=False).to(WHERE)


def dropout_is_a_hash_where_the_seed_lies():
    x = torch.ones(300, 70)
    seed = torch.tensor(2**62 + 12345)
    there = torch.ops.monograph.seeded_dropout(x.to(WHERE), seed.to(WHERE), 3, 0.25)
    assert ours(shadow_device.syncs) == []
    assert torch.equal(there.cpu(), hashed_dropout(x, seed, 3, 0.25))
    assert torch.equal(
        there.cpu() != 0, torch.tensor(_mask_in_python(int(seed), 3, 0.25, 300 * 70)).view(300, 70)
    )


def _mask_in_python(seed, stream, probability, count):
    """The definition in the docstring, in Python's integers."""
    key = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) % 2**64
    low, high = key % 2**32, key >> 32

    def mix(x):
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    return [mix(mix(i ^ low) ^ high) >> 8 < round((1 - probability) * 2**24) for i in range(count)]


def autocast_casts_there_too():
    packed = mg.quantize(torch.randn(32, 64).bfloat16(), "nf4").to(WHERE)
    x = torch.randn(4, 64).to(WHERE)
    with torch.autocast("shadow", dtype=torch.bfloat16):
        assert mg.linear(x, packed).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mg.linear(x, packed).dtype == torch.float32


def wrong_labels_and_offsets_are_refused_there():
    x, weight = torch.randn(4, 8).to(WHERE), torch.randn(16, 8).to(WHERE)
    for labels in ([0, 1, 2, 16], [0, -1, 2, 3]):
        with pytest.raises(RuntimeError, match="not in the vocabulary of 16"):
            mg.ops.linear_cross_entropy.linear_cross_entropy(
                x, weight, [], [0, 0, 16, 8], torch.tensor(labels).to(WHERE)
            )
    q = torch.randn(6, 2, 8).to(WHERE)
    for offsets in ([0, 4, 2, 6], [0, 7], [-1, 6]):
        cu = torch.tensor(offsets, dtype=torch.int32).to(WHERE)
        with pytest.raises(RuntimeError, match="ascending offsets"):
            mg.ops.varlen_attention.varlen_attention(q, q, q, cu)


def a_layer_moves_whole_and_aligned():
    """Mapped scales begin anywhere; on a device each tensor has memory of its own."""
    packed = mg.quantize(torch.randn(96, 128).bfloat16(), "nf4", double_quant=True)
    shifted = []
    for scale in packed.scales:
        room = torch.zeros(scale.numel() + 1, dtype=torch.uint8)
        room[1:] = scale.reshape(-1)
        shifted.append(room[1:].view(scale.shape))
    layer = mg.nn.QuantLinear(
        mg.PackedWeight(packed.format, packed.shape, 64, packed.values, tuple(shifted), torch.bfloat16)
    )
    wanted = layer(torch.ones(2, 128).bfloat16())
    layer.to(WHERE)
    assert {t.device.type for t in layer.parameters()} == {"shadow"}
    assert all(t.data_ptr() % 16 == 0 for t in layer.parameters())
    got = layer(torch.ones(2, 128).bfloat16().to(WHERE))
    assert torch.allclose(got.cpu().float(), wanted.float(), rtol=2**-7, atol=2**-7)
    assert layer.weight.device.type == "shadow"


def a_graph_for_the_cpu_keeps_its_operators_beside_an_accelerator():
    """Inductor has decompositions for this device's graphs, and a graph of CPU tensors keeps the kernels."""
    import torch._inductor.lowering as lowering  # what torch.compile would import
    from torch._inductor.decomposition import decompositions
    from torch._inductor.utils import run_and_get_code
    from torch.utils._python_dispatch import _disable_current_modes

    operator = torch.ops.monograph.linear.default
    for module in (inductor_decompositions, inductor_fallbacks):
        module.install()  # as on a machine that had this device when Inductor was imported
    assert operator in decompositions
    assert operator in lowering.lowerings
    packed = mg.quantize(torch.randn(32, 64), "nf4")
    x = torch.randn(4, 64)
    with _disable_current_modes(), torch._inductor.config.patch(force_disable_caches=True):
        found, code = run_and_get_code(torch.compile(mg.linear, fullgraph=True), x, packed)
    assert torch.equal(found, mg.linear(x, packed))
    assert "torch.ops.monograph.linear.default" in code[0]


def a_packed_head_of_trl_is_ours_there_with_the_numbers_of_trl_on_the_cpu():
    """A dense one is TRL's own until the device has a kernel: hf/test_takeover_devices.py."""
    theirs, ours_ = trl_heads.both()
    ours_.lm_head = QuantLinear.from_linear(ours_.lm_head, "nf4")
    theirs.lm_head.weight.data.copy_(ours_.lm_head.dequantize())
    ours_.to(WHERE)
    inputs = trl_heads.batch()
    want = theirs(**inputs, fused_lm_head=True)
    got = ours_(**moved_batch(inputs), fused_lm_head=True)
    for name in ("loss", *trl_heads.FIELDS):
        assert getattr(got, name).device.type == WHERE, name
        torch.testing.assert_close(
            getattr(got, name).cpu(), getattr(want, name), rtol=1e-4, atol=1e-4, check_dtype=False
        )
    found = torch.autograd.grad(got.loss, ours_.model.norm.weight)[0].cpu()
    torch.testing.assert_close(
        found, torch.autograd.grad(want.loss, theirs.model.norm.weight)[0], rtol=1e-3, atol=1e-5
    )


def moved_batch(inputs):
    return {name: tensor.to(WHERE) for name, tensor in inputs.items()}


def trained_parameters_on_two_devices_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(WHERE))
    with pytest.raises(ValueError, match=r"0\.weight on cpu, 1\.weight on shadow:0; wanted one"):
        FlatParameters(model)


PARTS = (
    operators_give_what_they_give_on_the_cpu,
    a_step_has_the_losses_of_the_cpu,
    a_step_waits_for_nothing_whatever_the_batch_is,
    dropout_is_a_hash_where_the_seed_lies,
    autocast_casts_there_too,
    wrong_labels_and_offsets_are_refused_there,
    a_layer_moves_whole_and_aligned,
    a_graph_for_the_cpu_keeps_its_operators_beside_an_accelerator,
    a_packed_head_of_trl_is_ours_there_with_the_numbers_of_trl_on_the_cpu,
    trained_parameters_on_two_devices_are_named,
)


def test_on_a_stand_in_for_an_accelerator():
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.split() == [part.__name__ for part in PARTS]


def test_masks_of_dropout_keep_their_share_and_are_apart():
    """Shares within five standard deviations; masks of two streams or seeds agree as independent ones do."""
    places, deviation = torch.arange(1 << 17), 0.5 / (1 << 17) ** 0.5
    masks = [
        kept(places, torch.tensor(seed), stream, 0.3) for seed, stream in ((1, 0), (1, 1), (2, 0), (2**62, 0))
    ]
    for i, mask in enumerate(masks):
        assert abs(float(mask.double().mean()) - 0.7) < 5 * deviation
        assert abs(float((mask[1:] == mask[:-1]).double().mean()) - 0.58) < 5 * deviation
        for other in masks[:i]:
            assert abs(float((mask == other).double().mean()) - 0.58) < 5 * deviation
    assert torch.equal(
        hashed_dropout(torch.ones(5000), torch.tensor(7), 2, 0.5, panel=999),
        hashed_dropout(torch.ones(5000), torch.tensor(7), 2, 0.5),
    )


if __name__ == "__main__":
    shadow_device.install()
    names = sys.argv[1:]
    with shadow_device.shadow():
        for part in PARTS:
            if not names or part.__name__ in names:
                torch.manual_seed(0)
                shadow_device.syncs.clear()
                part()
                print(part.__name__, flush=True)
