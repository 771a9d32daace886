"""Private names of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy

from monograph.upstream.private_name import PrivateName, loads_on_use

_READ = "2.13.0"

_REGIONS = "regions: a layer is traced once for all lengths"

NAMES = {
    # operators and tensors
    "assert_async": PrivateName("torch:_assert_async", _READ, "checks inside a graph: tables, masks"),
    "disabled_torch_function": PrivateName(
        "torch._C:_disabled_torch_function_impl", _READ, "LazyWeight: operations reach __torch_dispatch__"
    ),
    "disable_torch_function": PrivateName(
        "torch._C:DisableTorchFunctionSubclass", _READ, "TracedWeight: its results are plain tensors"
    ),
    "make_wrapper_subclass": PrivateName(
        "torch:Tensor._make_wrapper_subclass", _READ, "LazyWeight: a tensor without storage"
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        _READ,
        "self-test, estimate: memory that operators hold; calibrate: what experts are given",
    ),
    "version": PrivateName("torch:Tensor._version", _READ, "calibrate, offload: changed in place since"),
    "tree_map_only": PrivateName("torch.utils._pytree:tree_map_only", _READ, "LazyWeight: its arguments"),
    "operator_schema": PrivateName(
        "torch._ops:OpOverload()._schema", _READ, "LazyWeight: which operations write"
    ),
    "autograd_info": PrivateName("torch._library.autograd:Info", _READ, "formulas without forward mode"),
    "make_autograd_impl": PrivateName(
        "torch._library.autograd:make_autograd_impl", _READ, "formulas without forward mode"
    ),
    "current_dual_level": PrivateName(
        "torch.autograd.forward_ad:_current_level", _READ, "formulas: whether forward mode is on"
    ),
    "transforms_active": PrivateName(
        "torch._C:_are_functorch_transforms_active", _READ, "formulas: whether torch.func differentiates"
    ),
    "make_subclass": PrivateName(
        "torch:Tensor._make_subclass", _READ, "sharding: what stands for a parameter that is elsewhere"
    ),
    "top_saved_tensors_hooks": PrivateName(
        "torch._C._autograd:_top_saved_tensors_default_hooks", _READ, "sharding: whether a checkpoint is on"
    ),
    "process_group_named": PrivateName(
        "torch.distributed.distributed_c10d:_resolve_process_group", _READ, "sharding: the group of a model"
    ),
    "all_gather_into_tensor": PrivateName(
        "torch.ops:_c10d_functional.all_gather_into_tensor", _READ, "sharding: the gather is in the graph"
    ),
    "wait_tensor": PrivateName(
        "torch.ops:_c10d_functional.wait_tensor", _READ, "sharding: the gather is in the graph"
    ),
    "tree_leaves": PrivateName("torch.utils._pytree:tree_leaves", _READ, "arguments of a call"),
    "functional_operators": PrivateName(
        "torch.distributed._functional_collectives:torch.ops._c10d_functional",
        _READ,
        "tree: collectives that a graph holds; the module registers what tracing them needs",
    ),
    "StorageWeakRef": PrivateName(
        "torch.multiprocessing.reductions:StorageWeakRef", _READ, "offload: whether a storage is gone"
    ),
    "neg_view": PrivateName("torch:_neg_view", _READ, "offload: views that are negated when they are read"),
    "CustomPartitionerFn": PrivateName(
        "torch._inductor.custom_graph_pass:CustomPartitionerFn", _READ, "offload: nodes in Inductor's graphs"
    ),
    # modules
    "apply_to_module": PrivateName("torch.nn:Module._apply", _READ, "QuantLinear: casts change no byte"),
    "load_from_state_dict": PrivateName(
        "torch.nn:Module._load_from_state_dict", _READ, "adapters that start from their base: what is loaded"
    ),
    "children": PrivateName("torch.nn:Module()._modules", _READ, "the head inside PEFT's modules_to_save"),
    "parameters_of": PrivateName("torch.nn:Module()._parameters", _READ, "what a module itself holds"),
    "buffers_of": PrivateName("torch.nn:Module()._buffers", _READ, "what a module itself holds"),
    "forward_hooks": PrivateName("torch.nn:Module()._forward_hooks", _READ, "hooks of heads and embeddings"),
    "forward_pre_hooks": PrivateName("torch.nn:Module()._forward_pre_hooks", _READ, "hooks of heads"),
    "backward_hooks": PrivateName("torch.nn:Module()._backward_hooks", _READ, "hooks of heads"),
    "backward_pre_hooks": PrivateName("torch.nn:Module()._backward_pre_hooks", _READ, "hooks of heads"),
    "tensor_hooks": PrivateName(
        "torch:Tensor._backward_hooks", _READ, "TrainStep: gradient hooks that a graph would not run"
    ),
    "post_accumulate_hooks": PrivateName(
        "torch:Tensor._post_accumulate_grad_hooks", _READ, "TrainStep: hooks that no step would run"
    ),
    "has_any_global_hook": PrivateName(
        "torch.nn.modules.module:_has_any_global_hook", _READ, "regions: hooks that every module runs"
    ),
    "compiled_call": PrivateName(
        "torch.nn:Module._compiled_call_impl", _READ, "doctor: Module.compile() is undone"
    ),
    "original_module": PrivateName(
        "torch._dynamo:OptimizedModule()._orig_mod", _READ, "doctor: the module behind a compiled one"
    ),
    "ignored_by_ddp": PrivateName(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        _READ,
        "share_base: frozen parameters are not broadcast",
    ),
    # the tracer
    "aot_autograd": PrivateName("torch._dynamo.backends.common:aot_autograd", _READ, "doctor: its backend"),
    "compile_context": PrivateName("torch._guards:CompileContext", _READ, "doctor: first or later compile"),
    "counters": PrivateName("torch._dynamo.utils:counters", _READ, "doctor: hits of Inductor's cache"),
    "dynamo_config": PrivateName("torch._dynamo:config", _READ, "whole_step: trace_autograd_ops"),
    "functorch_config": PrivateName(
        "torch._functorch:config", _READ, "modes with generated code: enable_autograd_cache"
    ),
    "enable_autograd_cache": PrivateName(
        "torch._functorch:config.enable_autograd_cache",
        _READ,
        "modes with generated code: it gave the graph of another eps to a checkpointed layer",
    ),
    "trace_autograd_ops": PrivateName(
        "torch._dynamo:config.trace_autograd_ops", _READ, "whole_step: autograd.grad inside the graph"
    ),
    "skip_fwd_side_effects": PrivateName(
        "torch._dynamo:config.skip_fwd_side_effects_in_bwd_under_checkpoint",
        _READ,
        "sharding: a checkpointed layer takes away what it has gathered",
    ),
    "graph_break_reasons": PrivateName(
        "torch._dynamo.utils:graph_break_reasons", _READ, "doctor: causes of breaks"
    ),
    "node_meta": PrivateName(
        "torch.fx.traceback:current_meta", _READ, "devices without kernels: a decoded weight is not kept"
    ),
    "inductor_decompositions": PrivateName(
        "torch._inductor.decomposition:decompositions", _READ, "devices without kernels: operators are fused"
    ),
    "make_fallback": PrivateName(
        "torch._inductor.lowering:make_fallback", _READ, "operators beside a decomposition: kept on the CPU"
    ),
    "tag_to_layout_constraint": PrivateName(
        "torch._inductor.lowering:tag_to_layout_constraint", _READ, "the layouts of their arguments"
    ),
    "layout_constraint_tag": PrivateName(
        "torch._library.utils:get_layout_constraint_tag", _READ, "the layouts of their arguments"
    ),
    "has_kernel_for": PrivateName(
        "torch._C:_dispatch_has_kernel_for_dispatch_key", _READ, "which operators have a kernel for a device"
    ),
    "varlen_backward": PrivateName(
        "torch.nn.attention.varlen:_varlen_attn_backward", _READ, "attention on CUDA: an operator of ours"
    ),
    "all_operators": PrivateName(
        "torch._C:_dispatch_get_all_op_names", _READ, "providers: the operators that there are"
    ),
    "call_at_key": PrivateName(
        "torch._ops:OpOverload()._op_dk", _READ, "providers: the portable implementation beside a kernel"
    ),
    "destroy_library": PrivateName("torch.library:Library._destroy", _READ, "providers: kernels come back"),
    "DispatchKey": PrivateName("torch._C:DispatchKey", _READ, "providers: the portable implementation"),
    "inductor_config": PrivateName("torch._inductor:config", _READ, "torch_compile_options of a recipe"),
    "list_mode_options": PrivateName(
        "torch._inductor:list_mode_options", _READ, "torch_compile_mode of a recipe"
    ),
    "log_state": PrivateName("torch._logging._internal:log_state", _READ, "doctor: the log of recompiles"),
    "mark_dynamic": PrivateName("torch._dynamo:mark_dynamic", _READ, "lengths that change"),
    "maybe_mark_dynamic": PrivateName("torch._dynamo:maybe_mark_dynamic", _READ, "lengths that may change"),
    "min_cut_rematerialization_partition": PrivateName(
        "functorch.compile:min_cut_rematerialization_partition", _READ, "doctor: what backward keeps"
    ),
    "make_boxed_func": PrivateName("functorch.compile:make_boxed_func", _READ, "doctor: its backend"),
    # regions
    "BoxedCodeGen": PrivateName("torch.fx.graph:_BoxedCodeGen", _READ, f"{_REGIONS}; inputs are let go"),
    "make_fx": PrivateName("torch.fx.experimental.proxy_tensor:make_fx", _READ, _REGIONS),
    "FakeTensorMode": PrivateName(
        "torch._subclasses.fake_tensor:FakeTensorMode", _READ, f"{_REGIONS}; estimate: a step without memory"
    ),
    "ShapeEnv": PrivateName("torch.fx.experimental.symbolic_shapes:ShapeEnv", _READ, _REGIONS),
    "guards_expression": PrivateName(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv.produce_guards_expression", _READ, _REGIONS
    ),
    "evaluate_guards_expression": PrivateName(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression", _READ, _REGIONS
    ),
    "DimDynamic": PrivateName("torch.fx.experimental.symbolic_shapes:DimDynamic", _READ, _REGIONS),
    "StatelessSymbolicContext": PrivateName(
        "torch.fx.experimental.symbolic_shapes:StatelessSymbolicContext", _READ, _REGIONS
    ),
    "ConstantSource": PrivateName("torch._dynamo.source:ConstantSource", _READ, _REGIONS),
    "enable_python_dispatcher": PrivateName(
        "torch._dispatch.python:enable_python_dispatcher", _READ, _REGIONS
    ),
    "size_hint": PrivateName("torch.fx.experimental.sym_node:SymNode.hint", _READ, _REGIONS),
    "is_compiling_flag": PrivateName("torch.compiler:_is_compiling_flag", _READ, _REGIONS),
    "optimization_hint": PrivateName(
        "torch.fx.experimental.symbolic_shapes:optimization_hint",
        _READ,
        "doctor: sizes of what is kept",
        formerly="torch.fx.experimental.symbolic_shapes:hint_int",  # 2.11
    ),
}

__getattr__ = loads_on_use(__name__, NAMES)

RECOMPILES_LOG = "torch._dynamo.guards.__recompiles"
COMPILED_CALL = "_compiled_call_impl"
GATHER = "_c10d_functional::all_gather_into_tensor"
# What torch asks of a parameter that it moves or guards.
LOOKS = ("_has_compatible_shallow_copy_type", "_is_view")
# Marks in the meta of a node.
RECOMPUTE, CHECKPOINTED_BLOCK = "recompute", "ac_graph_id"
NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
# Strings that torch reads or writes, and what for. Each has a test of what torch does with it.
STRINGS = {
    RECOMPILES_LOG: "doctor: the log of recompiles",
    COMPILED_CALL: "doctor: Module.compile() is undone",
    GATHER: "sharding: gathers in a graph",
    **dict.fromkeys(LOOKS, "sharding: what may be asked of a parameter that is elsewhere"),
    RECOMPUTE: "the partitioner: what is computed again in backward",
    CHECKPOINTED_BLOCK: "the partitioner: which block that belongs to",
    NO_VERSION_CHECK: "offload: kept tensors are counted by this mark",
}


def written(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call of an operator changes, `out=` included."""
    if not operator._schema.is_mutable:
        return []
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def schema_of(operator: Any) -> Any:
    """None for what is no operator."""
    return getattr(operator, "_schema", None)


def call_portable(operator: Any, *arguments: Any) -> Any:
    """The implementation of an operator for any device, also where there is a kernel."""
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


def replaced_kernel(operator: Any, key: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Until what it gives is called, `function` stands in the place of an operator's kernel."""
    namespace, _, name = operator._schema.name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel
        library.impl(name, function, key, allow_override=True)
    return library._destroy


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place."""
    return tensor._version


def version_if_counted(tensor: torch.Tensor) -> int | None:
    """The same; None for an inference tensor, whose changes are not counted. A subclass is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.is_inference() else tensor._version


def in_forward_mode() -> bool:
    """Inside torch.func.jvp or forward_ad.dual_level()."""
    return forward_ad._current_level >= 0


def all_gathered(shard: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """The shards of all ranks of a group behind each other: a collective that graphs hold."""
    row = torch.ops._c10d_functional.all_gather_into_tensor(shard, ranks, group)
    return torch.ops._c10d_functional.wait_tensor(row)


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    return module._forward_hooks


def hooks(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """The hooks of every kind that a call of the module runs."""
    return [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]


def backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def hooks_of_tensor(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Those of register_hook and of register_post_accumulate_grad_hook; None or empty without any."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def original_module(module: nn.Module) -> nn.Module:
    """The module that torch.compile has wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


def leave_out_of_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """DistributedDataParallel over this module neither broadcasts nor reduces these parameters."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def boxed(graph: Any) -> Any:
    """The GraphModule as a function of one list, which it empties: an input goes with its last use, while a
    call with arguments would hold all to its end."""
    graph.graph.set_codegen(NAMES["BoxedCodeGen"].load()())
    graph.recompile()

    def run(given: list[Any]) -> Any:
        return graph.forward(given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compute_again(meta: dict[str, Any], block: int = 0) -> None:
    """The partitioner keeps no node with this meta for backward."""
    meta |= {RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE, CHECKPOINTED_BLOCK: block}


@contextmanager
def recomputed_in_backward() -> Iterator[None]:
    """What is traced inside is computed again by a backward pass that needs it, never kept for it.

    The id is above those of checkpointed blocks: a block that reads the result is none that follows it.
    """
    meta, marks = torch.fx.traceback.current_meta, (RECOMPUTE, CHECKPOINTED_BLOCK)
    before: dict[str, Any] = {name: meta[name] for name in marks if name in meta}
    compute_again(meta, 2**62)
    try:
        yield
    finally:
        for name in marks:
            meta.pop(name, None)
        meta |= before


@contextmanager
def as_if_not_compiling() -> Iterator[None]:
    """torch.compiler.is_compiling() is False inside: code takes its eager branches."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def sympy_code(size: Any) -> str:
    """A size of a traced tensor as Python code over the names of its symbols."""
    return str(sympy.sympify(size)) if isinstance(size, torch.SymInt) else str(int(size))


def size_hint(size: int | torch.SymInt) -> int:
    """The size that a traced tensor had when its symbol was made; never a guess."""
    return size if isinstance(size, int) else int(size.node.hint)
