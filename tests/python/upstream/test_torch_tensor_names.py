"""Private names of torch about tensors, operators and modules: each does what the package relies on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.upstream import torch_names as names
from support.relies_on import relies_on


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@relies_on("assert_async")
@pytest.mark.parametrize("compiled", [False, True])
def test_an_assertion_raises_its_message_also_inside_a_graph(compiled: bool) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        names.assert_async((x > 0).all(), "x has a value of 0 or less")
        return x * 2

    run = torch.compile(doubled, backend="aot_eager", fullgraph=True) if compiled else doubled
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="x has a value of 0 or less"):
        run(torch.zeros(3))


class Seen(torch.Tensor):
    """A tensor without storage that notes which operators reach it."""

    calls: list[Any]
    __torch_function__ = names.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args[0].calls.append(func)
        return torch.zeros(args[0].shape)


@relies_on("disabled_torch_function", "make_wrapper_subclass")
def test_a_tensor_without_storage_is_looked_at_for_nothing_and_sees_every_operator() -> None:
    seen = names.make_wrapper_subclass(
        Seen, (2, 3), strides=(1, 2), dtype=torch.bfloat16, device="cpu", requires_grad=False
    )
    seen.calls = []
    assert (seen.shape, seen.stride(), seen.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert seen.numel() == 6
    assert not seen.calls
    assert type(seen + 1) is torch.Tensor
    assert seen.calls == [torch.ops.aten.add.Tensor]


class Named(torch.Tensor):
    pass


@relies_on("disable_torch_function")
def test_results_of_a_subclass_are_plain_inside() -> None:
    named = torch.ones(2).as_subclass(Named)
    assert type(named + 1) is Named
    with names.disable_torch_function():
        assert type(named + 1) is torch.Tensor


@relies_on("make_subclass")
def test_a_parameter_of_a_subclass_has_the_memory_it_was_made_of() -> None:
    class Own(nn.Parameter):
        pass

    data = torch.ones(2, 0, dtype=torch.uint8)
    made = names.make_subclass(Own, data, False)
    assert type(made) is Own
    assert (made.shape, made.dtype, made.requires_grad) == (data.shape, torch.uint8, False)
    assert made.data_ptr() == data.data_ptr()


@relies_on("_has_compatible_shallow_copy_type", "_is_view")
def test_moving_and_tracing_a_model_asks_its_parameters_these() -> None:
    asked: set[str] = set()

    class Asked(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.add(getattr(func, "__name__", ""))
            with names.disable_torch_function():
                return func(*args, **(kwargs or {}))

    model = nn.Module()
    model.weight = Asked(torch.ones(2))
    model.to(torch.float64)
    assert "_has_compatible_shallow_copy_type" in asked
    names.FakeTensorMode().from_tensor(Asked(torch.ones(2)))
    assert "_is_view" in asked
    away = ShardPlaceholder(torch.ones(4, 4), "away", 2)
    model.away = away
    model.to("cpu")
    assert model.away is away
    assert not away._is_view()
    with pytest.raises(RuntimeError, match="away is sharded over 2 ranks"):
        away + 1


@relies_on("TorchDispatchMode", "tree_leaves", "tree_map_only")
def test_a_mode_sees_the_operators_below_autograd_with_their_arguments() -> None:
    found: list[tuple[Any, int]] = []

    class Notes(names.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [t for t in names.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            found.append((func, len(tensors)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with Notes():
        torch.cat([x, x]).sum().backward()
    assert (torch.ops.aten.cat.default, 2) in found
    assert torch.ops.aten.sum.default in [func for func, _ in found]
    assert torch.ops.aten.slice.Tensor in [func for func, _ in found]  # of the backward
    nested = {"a": [1, "b"], "c": (2, 3)}
    assert names.tree_map_only(int, lambda n: n * 10, nested) == {"a": [10, "b"], "c": (20, 30)}


@relies_on("version")
def test_the_version_counts_changes_in_place_and_views_share_it() -> None:
    x = torch.zeros(4)
    view, before = x[:2], names.version_of(x)
    x.add_(1)
    view.add_(1)
    assert names.version_of(x) == names.version_of(view) == before + 2
    x.data.add_(1)  # why values are compared, too
    assert names.version_of(x) == before + 2
    with torch.inference_mode():
        assert names.version_if_counted(torch.zeros(1)) is None


@relies_on("operator_schema")
def test_a_schema_says_what_a_call_writes() -> None:
    x, out = torch.zeros(2), torch.zeros(2)
    assert names.written(torch.ops.aten.add_.Tensor, (x, x), {})[0] is x
    assert names.written(torch.ops.aten.add.out, (x, x), {"out": out})[0] is out
    assert names.written(torch.ops.aten.add.Tensor, (x, x), {}) == []
    assert names.schema_of(torch.ops.aten.mm.default).name == "aten::mm"
    assert names.schema_of(len) is None


def squared(library: Any, name: str) -> Any:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * x, "CompositeExplicitAutograd")
    return getattr(torch.ops.monograph_names, name).default


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def formula(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * gradient


@pytest.fixture
def library() -> Iterator[Any]:
    made = torch.library.Library("monograph_names", "FRAGMENT")
    yield made
    made._destroy()


@relies_on("autograd_info", "make_autograd_impl")
def test_a_formula_with_a_check_before_it_differentiates_below_the_check(library: Any) -> None:
    operator, checked = squared(library, "checked"), []
    kernel = names.make_autograd_impl(operator, names.autograd_info(formula, keep))

    def with_check(keyset: Any, *arguments: Any) -> Any:
        checked.append(len(arguments))
        return kernel(keyset, *arguments)

    library.impl("checked", with_check, "Autograd", with_keyset=True)
    x = torch.tensor([3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(operator(x), x)
    assert gradient.item() == 6
    assert operator(x.detach()).item() == 9
    assert checked == [1, 1]


def test_why_not_the_public_registration_it_drops_tangents_silently(library: Any) -> None:
    """If this fails, torch.library.register_autograd can be used as it is: see ops/autograd.py."""
    operator = squared(library, "dropped")
    torch.library.register_autograd("monograph_names::dropped", formula, setup_context=keep, lib=library)
    value, tangent = torch.func.jvp(operator, (torch.tensor([3.0]),), (torch.ones(1),))
    assert value.item() == 9
    assert tangent.item() == 0  # 6 is right


@relies_on("current_dual_level", "transforms_active")
def test_forward_mode_and_transforms_are_noticed() -> None:
    found: list[tuple[bool, bool]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append((names.in_forward_mode(), names.transforms_active()))
        return x.sum()

    x = torch.ones(2)
    note(x)
    torch.func.jvp(note, (x,), (x,))
    torch.func.grad(note)(x)
    with torch.autograd.forward_ad.dual_level():
        note(x)
    note(x)
    assert found == [(False, False), (True, True), (False, True), (True, False), (False, False)]


@relies_on("top_saved_tensors_hooks")
def test_a_checkpoint_is_noticed_inside_alone() -> None:
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(names.top_saved_tensors_hooks(False) is not None)
        return x * 2

    x = torch.ones(2, requires_grad=True)
    note(x)
    checkpoint(note, x, use_reentrant=False)
    note(x)
    assert found == [False, True, False]


@relies_on(
    "process_group_named",
    "all_gather_into_tensor",
    "wait_tensor",
    "functional_operators",
    "_c10d_functional::all_gather_into_tensor",
)
def test_collectives_are_nodes_of_a_graph_and_have_the_values_outside(one_rank: Any) -> None:
    from monograph.upstream import collectives

    group, graphs = one_rank.group_name, []
    assert names.process_group_named(group).size() == 1
    x = torch.arange(4.0)
    assert torch.equal(names.all_gathered(x, 1, group), x)
    assert torch.equal(collectives.all_to_all_single(x, [4], [4], one_rank), x)
    out = torch.empty(4)
    collectives.all_gather_to(out, x, 1, one_rank)
    assert torch.equal(out, x)
    assert torch.equal(collectives.all_reduce(x.clone(), one_rank), x)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    def both(x: torch.Tensor) -> torch.Tensor:
        return names.all_gathered(x, 1, group) + collectives.all_reduce(x, one_rank)

    assert torch.equal(torch.compile(both, backend=backend, fullgraph=True)(x), 2 * x)
    found = {getattr(names.schema_of(t), "name", str(t)) for t in graphs}
    found |= {str(t) for t in graphs}
    assert any("all_gather_into_tensor" in name for name in found)
    assert any("all_reduce" in name for name in found)
    assert names.schema_of(torch.ops._c10d_functional.all_gather_into_tensor.default).name == names.GATHER


@relies_on("StorageWeakRef")
def test_a_weak_reference_knows_when_a_storage_is_gone() -> None:
    x = torch.ones(4)
    view, reference = x[1:], names.StorageWeakRef(x.untyped_storage())
    del x
    gc.collect()
    assert not reference.expired()
    del view
    gc.collect()
    assert reference.expired()


@relies_on("neg_view")
def test_a_negated_view_shares_its_memory() -> None:
    x = torch.tensor([1.0, -2.0])
    view = names.neg_view(x)
    assert view.is_neg()
    assert view.data_ptr() == x.data_ptr()
    assert view.tolist() == [-1, 2]
    assert torch.view_as_complex(torch.ones(1, 2)).conj().imag.is_neg()  # where such views come from


@relies_on("apply_to_module")
def test_every_cast_of_a_module_goes_through_apply() -> None:
    calls: list[torch.dtype] = []

    class Own(nn.Module):
        def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
            calls.append(fn(torch.zeros(1)).dtype)
            return self

    own = nn.Sequential(Own())
    own.half()
    own.to(torch.bfloat16)
    own.double()
    assert calls == [torch.float16, torch.bfloat16, torch.float64]


@relies_on("load_from_state_dict")
def test_loading_calls_each_module_with_its_prefix() -> None:
    calls: list[tuple[str, bool]] = []

    class Own(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            calls.append((prefix, f"{prefix}weight" in state_dict))
            super()._load_from_state_dict(state_dict, prefix, *rest)

    model = nn.Sequential(Own(2, 2), Own(2, 2))
    model.load_state_dict(model.state_dict())
    assert calls == [("0.", True), ("1.", True)]


@relies_on("children", "parameters_of", "buffers_of")
def test_what_a_module_holds_is_what_was_set_on_it() -> None:
    module = nn.Module()
    module.child, module.weight = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    module.register_buffer("mean", torch.zeros(1))
    module.register_parameter("bias", None)
    assert list(names.children(module)) == ["child"]
    assert names.parameters_of(module) == {"weight": module.weight, "bias": None}
    assert names.buffers_of(module)["mean"] is module.mean
    names.parameters_of(module)["weight"] = other = nn.Parameter(torch.zeros(1))
    assert module.weight is other
    del module.child
    assert not names.children(module)


@relies_on("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
@pytest.mark.parametrize(
    ("place", "register"),
    [
        (0, "register_forward_hook"),
        (1, "register_forward_pre_hook"),
        (2, "register_full_backward_hook"),
        (3, "register_full_backward_pre_hook"),
    ],
)
def test_a_hook_of_a_module_stands_where_it_is_looked_for(place: int, register: str) -> None:
    module = nn.Linear(1, 1)
    assert not any(names.hooks(module))
    handle = getattr(module, register)(lambda *_: None)
    assert [bool(kind) for kind in names.hooks(module)] == [n == place for n in range(4)]
    handle.remove()
    assert not any(names.hooks(module))


@relies_on("tensor_hooks", "post_accumulate_hooks")
def test_a_hook_of_a_tensor_stands_where_it_is_looked_for() -> None:
    tensor = nn.Parameter(torch.ones(1))
    assert not any(names.hooks_of_tensor(tensor))
    first = tensor.register_hook(lambda g: g)
    assert [bool(kind) for kind in names.hooks_of_tensor(tensor)] == [True, False]
    first.remove()
    second = tensor.register_post_accumulate_grad_hook(lambda t: None)
    assert [bool(kind) for kind in names.hooks_of_tensor(tensor)] == [False, True]
    second.remove()
    assert not any(names.hooks_of_tensor(tensor))


@relies_on("has_any_global_hook")
def test_a_hook_of_all_modules_is_noticed() -> None:
    assert not names.has_any_global_hook()
    handle = register_module_forward_hook(lambda *_: None)
    assert names.has_any_global_hook()
    handle.remove()
    assert not names.has_any_global_hook()


@relies_on("ignored_by_ddp")
def test_ddp_leaves_out_what_it_is_told_to(one_rank: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    DistributedDataParallel(model)
    names.leave_out_of_ddp(model, ["weight"])
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
        DistributedDataParallel(model)
