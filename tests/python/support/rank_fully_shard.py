"""Run on ranks by test_fully_shard.py: `fully_shard` per decoder layer over packed weights, each case against
the same model in this process alone."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import monograph as mg
from monograph.distributed import World
from monograph.nn import QuantLinear, replace_linears
from monograph.training import TrainStep
from monograph.training.regions import undo_regions
from monograph.training.step_graphs import decoder_layers
from support.tiny_models import tiny_llama

FORMATS = ("nf4", "fp4", "mxfp4", "mxfp8", "nvfp4", "nvfp4-divide", "fp8-block")
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1}
ODD = {"hidden_size": 60, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1}


def llama(
    format: str = "nf4",
    double_quant: bool = False,
    sizes: Any = EVEN,
    regions: bool = False,
    skip: Any = ("lm_head",),
    **lora: Any,
) -> Any:
    dense = tiny_llama(**sizes, vocab_size=61)
    model = replace_linears(dense, format, double_quant=double_quant, skip=skip)
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **lora)
    return mg.optimize(get_peft_model(model, config), regions=regions).train()


def experts(folder: str | pathlib.Path, format: str = "mxfp4") -> Any:
    base = mg.from_pretrained(folder, mg.MonographConfig(format), dtype=torch.float32)
    torch.manual_seed(0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    return mg.optimize(get_peft_model(base, lora)).train()


def batch(number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (2, 11 + number), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def sharded(model: Any, mesh: Any, compiled: Any = None, **options: Any) -> Any:
    for layer in decoder_layers(model):
        if compiled is not None:
            layer.compile(backend=compiled, fullgraph=True)
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def in_bf16(model: Any) -> Any:
    """As MixedPrecisionPolicy computes: parameters alone, no buffer and no packed byte."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def finer(model: Any, mesh: Any) -> Any:
    """Units within the layers, as others cut them: a LoRA layer, the attention, the MLP."""
    layer: Any
    for layer in decoder_layers(model):
        for part in (layer.mlp.up_proj, layer.self_attn, layer.mlp, layer):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def alone(model: Any, world: World) -> dict[str, torch.Tensor]:
    """The mean over ranks of the gradients of their batches, added in their order in float32."""
    total: dict[str, torch.Tensor] = {}
    for number in range(world.size):
        model.zero_grad()
        model(**batch(number), use_cache=False).loss.backward()
        for name, gradient in gradients(model).items():
            total[name] = gradient.float() + total.get(name, 0)
    return {name: gradient / world.size for name, gradient in total.items()}


def differing(got: Any, want: Any) -> list[str]:
    assert got.keys() == want.keys()
    assert all(float(g.abs().max()) > 0 for g in want.values())
    return [name for name in want if not torch.equal(got[name], want[name])]


def packed_bytes(model: Any) -> int:
    tensors = [p for p in model.parameters() if p.dtype == torch.uint8]
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def one_case(world: World, make: Any, cut: Any, checkpointing: bool = False, reference: Any = None) -> Any:
    """Gradients of a model that `cut` has sharded against one that is whole: 2 ranks, each with a batch of
    its own, whose mean rounds nothing; more ranks with that of rank 0 alone."""
    torch._dynamo.reset()
    model, plain = make(), (reference or make)()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    whole = packed_bytes(model)
    model = cut(model)
    held = packed_bytes(model)
    if world.size == 2:
        want = alone(plain, world)
        loss = model(**batch(world.rank), use_cache=False).loss
    else:
        for module in (model, *decoder_layers(model)):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
        plain(**batch(0), use_cache=False).loss.backward()
        want = gradients(plain)
        loss = model(**batch(0), use_cache=False).loss * float(world.rank == 0)
    loss.backward()
    return model, plain, {"differs": differing(gradients(model), want), "share": held / whole}


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def format_cases(world: World, formats: tuple[str, ...] = FORMATS) -> Any:
    cut = partial(sharded, mesh=init_device_mesh("cpu", (world.size,)))
    makes = {format: partial(llama, format) for format in formats}
    makes |= {"double": partial(llama, double_quant=True)}
    makes |= {"odd": partial(llama, double_quant=True, sizes=ODD)}
    return {name: one_case(world, make, cut)[2] for name, make in makes.items()}


def other_cases(world: World, experts_folder: str) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    cut, double = partial(sharded, mesh=mesh), partial(llama, double_quant=True)
    compiled = partial(sharded, mesh=mesh, compiled="aot_eager")
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases: dict[str, Any] = {
        "checkpointing": (double, cut, {"checkpointing": True}),
        "compiled": (double, compiled, {}),
        "compiled mxfp4": (partial(llama, "mxfp4"), compiled, {"checkpointing": True}),
        "regions": (partial(double, regions=True), cut, {"reference": double}),
        "finer": (double, partial(finer, mesh=mesh), {}),
        "dora": (partial(double, use_dora=True), cut, {}),
        "packed head": (partial(double, skip=()), cut, {}),
        "mixed precision": (
            double,
            partial(sharded, mesh=mesh, mp_policy=half),
            {"reference": lambda: in_bf16(double())},
        ),
        "experts": (partial(experts, experts_folder), cut, {}),
        "accelerate": (double, by_accelerate, {}),
    }
    return {name: one_case(world, make, how, **more)[2] for name, (make, how, more) in cases.items()}


def inductor_cases(world: World) -> Any:
    """Generated code against generated code: the layers alone, without any ranks, are compiled alike."""
    mesh = init_device_mesh("cpu", (world.size,))
    makes = {"double": partial(llama, double_quant=True), "mxfp4": partial(llama, "mxfp4")}
    cut = partial(sharded, mesh=mesh, compiled="inductor")
    return {
        name: one_case(world, make, cut, reference=partial(compiled_alone, make))[2]
        for name, make in makes.items()
    }


def compiled_alone(make: Any) -> Any:
    model = make()
    for layer in decoder_layers(model):
        layer.compile(backend="inductor", fullgraph=True)
    return model


def by_accelerate(model: Any) -> Any:
    """accelerate's own road, which on a CPU its `prepare` does not take."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator.state.fsdp_plugin = plugin
    return fsdp2_prepare_model(accelerator, model)


def calls(world: World, folder: str | pathlib.Path) -> Any:
    """What people call on a sharded model."""
    mesh = init_device_mesh("cpu", (world.size,))
    model, plain, found = one_case(world, partial(llama, double_quant=True), partial(sharded, mesh=mesh))
    layer = next(m for m in model.modules() if isinstance(m, QuantLinear))
    path = next(n for n, m in model.named_modules() if m is layer)
    other = plain.get_submodule(path)
    found["dequantize"] = refusal(layer.dequantize)
    found["weight"] = refusal(lambda: layer.weight + 1)
    found["merge"] = refusal(model.merge_adapter)
    found["unload"] = refusal(model.merge_and_unload)
    found["TrainStep"] = refusal(lambda: TrainStep(model))
    found["doctor"] = refusal(lambda: mg.doctor(model, batch(0), quiet=True))
    found["regions"] = refusal(lambda: mg.optimize(model, regions=True))
    regions = sharded(llama(regions=True), mesh)
    found["undo"] = refusal(lambda: undo_regions(regions))
    block: Any = decoder_layers(model)[0]
    block.unshard()
    found["unsharded"] = bool(torch.equal(layer.dequantize(), other.dequantize()))
    block.reshard()
    found["save"] = refusal(lambda: model.save_pretrained(f"{folder}/{world.rank}"))
    plain.save_pretrained(f"{folder}/plain{world.rank}")
    want = load_file(f"{folder}/plain{world.rank}/adapter_model.safetensors")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = world.of_first(state)
    model.save_pretrained(f"{folder}/state{world.rank}", state_dict=state)
    got = load_file(f"{folder}/state{world.rank}/adapter_model.safetensors")
    found["from state"] = got.keys() == want.keys() and all(torch.equal(got[n], t) for n, t in want.items())
    return found


def all_cases(world: World, experts_folder: str, folder: str | pathlib.Path) -> Any:
    formats = FORMATS if world.size == 2 else ("mxfp4", "fp8-block")
    found = {"cases": format_cases(world, formats)}
    if world.size == 2:
        found["cases"] |= other_cases(world, experts_folder)
        found["calls"] = calls(world, folder)
    return found
