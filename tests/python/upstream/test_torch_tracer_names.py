"""Private names of torch about tracing and code generation: each does what the package relies on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monograph.diagnosis.report import Report
from monograph.diagnosis.tracing import recompiles
from monograph.recipe.config.compile_options import compile_options, mode_options
from monograph.upstream import torch_names as names
from support.relies_on import relies_on


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Partitioned(Exception):
    """What a partitioner raises that only wants to see the joint graph."""


def as_it_is(graph: Any, inputs: Any) -> Any:
    return names.make_boxed_func(graph.forward)


def cut(function: Any, *arguments: torch.Tensor, marked: Any = None) -> tuple[Any, Any, int]:
    """Forward and backward graph of a function as the partitioner cuts them, and its number of outputs."""
    found: list[Any] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        for node in joint.graph.nodes if marked else ():
            if node.target is marked:
                names.compute_again(node.meta)
        parts = names.min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        found.extend([*parts, num_fwd_outputs])
        return parts

    backend = names.aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    torch.compile(function, backend=backend, fullgraph=True)(*arguments).sum().backward()
    return tuple(found)  # type: ignore[return-value]


def kept(forward: Any, outputs: int) -> list[Any]:
    (output,) = forward.graph.find_nodes(op="output")
    return [node.target for node in output.args[0][outputs:] if node.op == "call_function"]


def two_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.mm(x, w), w)


@relies_on("aot_autograd", "make_boxed_func", "min_cut_rematerialization_partition")
def test_a_backend_cuts_the_joint_graph_and_gradients_are_those_of_eager_mode() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    wanted = torch.autograd.grad(two_products(x, w).sum(), [x, w])
    forward, backward, outputs = cut(two_products, x, w)
    assert outputs == 1
    assert kept(forward, outputs)
    assert torch.ops.aten.mm.default in [node.target for node in backward.graph.nodes]
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(w.grad, wanted[1])


@relies_on("BoxedCodeGen")
def test_a_boxed_graph_lets_an_input_go_with_its_last_use() -> None:
    gone: list[bool] = []
    held: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        gone.append(held[0]() is None)
        return x

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    doubled = graph.call_function(torch.add, (x, x))
    seen = graph.call_function(look, (doubled,))
    graph.output((graph.call_function(torch.mul, (seen, y)),))
    run = names.boxed(torch.fx.GraphModule({}, graph))
    given = [torch.ones(3), torch.full((3,), 2.0)]
    held.append(weakref.ref(given[0]))
    (found,) = run(given)
    assert torch.equal(found, torch.full((3,), 4.0))
    assert gone == [True]
    assert given == []
    assert run._boxed_call


@relies_on("recompute", "ac_graph_id")
def test_a_marked_node_is_computed_again_and_not_kept() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    wanted = torch.autograd.grad(two_products(x, w).sum(), [x, w])
    forward, _, outputs = cut(two_products, x, w, marked=torch.ops.aten.mm.default)
    assert kept(forward, outputs) == []
    assert x.grad is not None
    assert torch.equal(x.grad, wanted[0])


@relies_on("node_meta")
def test_what_is_traced_inside_gets_the_marks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with names.recomputed_in_backward():
            x = x.sin()
        return x.cos()

    with torch.fx.traceback.preserve_node_meta():  # as autograd's tracer does
        graph = names.make_fx(function)(torch.ones(2))
    by_name = {node.name: node.meta for node in graph.graph.nodes}
    assert by_name["sin"][names.RECOMPUTE].name == "MUST_RECOMPUTE"
    assert names.RECOMPUTE not in by_name["cos"]


class TwoWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        one, other = x @ x, x @ x.t()
        ctx.kept = one  # on the context, not by save_for_backward: no version is checked
        ctx.save_for_backward(other)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.kept * ctx.saved_tensors[0]


@relies_on("saved_tensor_with_no_vc_check")
def test_tensors_without_a_version_check_are_marked_and_come_last() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(TwoWays.apply(x).sum(), x)
    forward, _, outputs = cut(lambda x: TwoWays.apply(x), x)
    (output,) = forward.graph.find_nodes(op="output")
    marks = [bool(node.meta.get(names.NO_VERSION_CHECK)) for node in output.args[0][outputs:]]
    assert marks == [False, True]
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


@relies_on("CustomPartitionerFn", "inductor_decompositions")
def test_inductor_decomposes_by_its_table_and_asks_the_partitioner() -> None:
    library = torch.library.Library("monograph_tracer", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
    operator, found = torch.ops.monograph_tracer.thrice.default, []
    torch.library.register_fake("monograph_tracer::thrice", torch.empty_like, lib=library)
    torch.library.register_autograd("monograph_tracer::thrice", lambda ctx, g: g * 3, lib=library)

    class Sees(names.CustomPartitionerFn):  # type: ignore[misc, name-defined]
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
            assert "num_fwd_outputs" in options
            found.append([node.target for node in gm.graph.nodes])
            raise Partitioned

        def uuid(self) -> Any:
            return None

    def function(x: torch.Tensor) -> torch.Tensor:
        return operator(x)

    for decomposed in (False, True):
        if decomposed:
            names.inductor_decompositions[operator] = lambda x: x + x + x
        torch.compiler.reset()
        # With fallback_random the table is read at each compile, else once a process.
        options: Any = {"custom_partitioner_fn": Sees(), "fallback_random": True}
        run = torch.compile(function, options=options, fullgraph=True)
        with pytest.raises(Exception, match="Partitioned"):
            run(torch.ones(2, requires_grad=True))
    del names.inductor_decompositions[operator]
    assert operator in found[0]
    assert operator not in found[1]
    assert torch.ops.aten.add.Tensor in found[1]


@relies_on("make_fallback", "tag_to_layout_constraint", "layout_constraint_tag")
def test_an_operator_beside_a_decomposition_can_be_kept() -> None:
    from torch._inductor import lowering

    library = torch.library.Library("monograph_tracer", "FRAGMENT")
    library.define("beside(Tensor x) -> Tensor")
    operator = torch.ops.monograph_tracer.beside.default
    names.inductor_decompositions[operator] = lambda x: NotImplemented
    constraint = names.tag_to_layout_constraint(names.layout_constraint_tag(operator, with_default=True))
    with pytest.raises(AssertionError, match="both a fallback and a decomp"):
        names.make_fallback(operator, layout_constraint=constraint, warn=False)
    names.make_fallback(operator, layout_constraint=constraint, warn=False, override_decomp=True)
    assert operator in lowering.fallbacks
    assert operator in lowering.lowerings
    del names.inductor_decompositions[operator]


@relies_on("has_kernel_for")
def test_kernels_are_known_by_operator_and_key() -> None:
    assert names.has_kernel_for("aten::add.Tensor", "CPU")
    library = torch.library.Library("monograph_tracer", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    assert not names.has_kernel_for("monograph_tracer::nowhere", "CPU")
    library.impl("nowhere", lambda x: x, "CPU")
    assert names.has_kernel_for("monograph_tracer::nowhere", "CPU")
    assert not names.has_kernel_for("monograph_tracer::nowhere", "CUDA")


@relies_on("all_operators", "call_at_key", "DispatchKey", "destroy_library")
def test_a_kernel_is_replaced_until_it_comes_back() -> None:
    library = torch.library.Library("monograph_tracer", "FRAGMENT")
    library.define("replaced(Tensor x) -> Tensor")
    library.impl("replaced", lambda x: x + 1, "CPU")
    library.impl("replaced", lambda x: x + 2, "CompositeExplicitAutograd")
    operator = torch.ops.monograph_tracer.replaced.default
    assert "monograph_tracer::replaced" in names.all_operators()
    one = torch.zeros(1)
    assert [operator(one).item(), names.call_portable(operator, one).item()] == [1, 2]
    back = names.replaced_kernel(operator, "CPU", lambda x: x + 3)
    assert [operator(one).item(), names.call_portable(operator, one).item()] == [3, 2]
    back()
    assert [operator(one).item(), names.call_portable(operator, one).item()] == [1, 2]


@relies_on("varlen_backward")
def test_the_backward_of_torchs_attention_over_documents_takes_what_its_forward_gives() -> None:
    """By their schemas: there is no CPU kernel. test_attention_on_cuda.py computes with both."""
    assert callable(names.varlen_backward)  # its import registers the operator
    found = torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments
    assert [argument.name for argument in found] == [
        *("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
        *("is_causal", "rng_state", "scale", "window_size"),
    ]


@relies_on("inductor_config", "list_mode_options")
def test_options_and_modes_of_a_recipe_are_set_for_inductor_and_put_back() -> None:
    assert mode_options("max-autotune")["max_autotune"] is True
    before = names.inductor_config.max_autotune
    with compile_options({"shape_padding": False}, "max-autotune"):
        assert names.inductor_config.max_autotune is True
        assert names.inductor_config.shape_padding is False
    assert names.inductor_config.max_autotune is before


def counted(function: Any, **options: Any) -> tuple[Any, list[Any]]:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, **options), graphs


@relies_on("mark_dynamic", "maybe_mark_dynamic")
@pytest.mark.parametrize("mark", ["mark_dynamic", "maybe_mark_dynamic"])
def test_a_marked_length_is_one_graph_for_all(mark: str) -> None:
    run, graphs = counted(lambda x: x * 2, fullgraph=True)
    for length in (5, 6, 9):
        x = torch.ones(length, 3)
        getattr(names, mark)(x, 0)
        assert torch.equal(run(x), x * 2)
    assert len(graphs) == 1


def test_a_length_that_must_be_open_and_is_not_is_an_error_and_one_that_may_be_is_none() -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(5, 3) * 2

    may, must = torch.ones(5, 3), torch.ones(5, 3)
    names.maybe_mark_dynamic(may, 0)
    names.mark_dynamic(must, 0)
    assert torch.equal(counted(fixed, fullgraph=True)[0](may), may * 2)
    with pytest.raises(Exception, match=r"(?i)constraint|specializ"):
        counted(fixed, fullgraph=True)[0](must)


@relies_on("dynamo_config", "trace_autograd_ops")
def test_a_gradient_inside_a_graph_wants_the_setting() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * x).sum(), [x])[0]

    x = torch.ones(3, requires_grad=True)
    with names.dynamo_config.patch(trace_autograd_ops=True):
        run, graphs = counted(gradient, fullgraph=True)
        assert torch.equal(run(x), torch.full((3,), 2.0))
        assert len(graphs) == 1
    torch.compiler.reset()
    with names.dynamo_config.patch(trace_autograd_ops=False), pytest.raises(Exception, match="autograd"):
        counted(gradient, fullgraph=True)[0](x)


@relies_on("functorch_config", "enable_autograd_cache")
def test_without_the_setting_no_graph_comes_from_a_cache() -> None:
    def run(on: bool) -> int:
        torch.compiler.reset()
        names.counters.clear()
        x = torch.ones(3, requires_grad=True)
        with names.functorch_config.patch(enable_autograd_cache=on):
            torch.compile(lambda x: (x.sin() * 7).sum())(x).backward()
        found = names.counters["aot_autograd"]
        return sum(found[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass", "saved"))

    assert run(True) > 0
    assert run(False) == 0


@relies_on("skip_fwd_side_effects")
def test_a_checkpointed_layer_may_set_and_take_away_an_attribute_with_the_setting() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.gathered: Any = x.sin()
            y = self.gathered * x
            self.gathered = None
            return y

    layer, x = Layer(), torch.ones(3, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False).sum()

    with pytest.raises(Exception, match=r"(?i)side effect|mutat"):
        torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(x)
    torch.compiler.reset()
    with names.dynamo_config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


@relies_on("graph_break_reasons")
def test_the_cause_of_a_break_is_kept() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    names.graph_break_reasons.clear()
    run, graphs = counted(broken)
    run(torch.ones(2))
    assert len(graphs) == 2
    (found,) = names.graph_break_reasons
    assert "graph_break" in found.reason
    assert any("test_torch_tracer_names" in frame.filename for frame in found.user_stack)


@relies_on("counters")
def test_counters_are_those_of_this_process() -> None:
    names.counters.clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert names.counters["stats"]["unique_graphs"] == 1
    assert names.counters["inductor"]["fxgraph_cache_hit"] == 0
    names.counters.clear()
    assert names.counters["stats"]["unique_graphs"] == 0


@relies_on("compile_context")
def test_a_recompile_has_the_number_of_its_frame() -> None:
    found: list[tuple[int, int]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        number = names.compile_context.current_compile_id()
        found.append((number.frame_id, number.frame_compile_id))
        return graph.forward

    run = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    run(torch.ones(2))
    run(torch.ones(3))
    assert [compiled for _, compiled in found] == [0, 1]
    assert found[0][0] == found[1][0]
    assert names.compile_context.current_compile_id() is None


@relies_on("log_state", "torch._dynamo.guards.__recompiles")
def test_recompiles_are_logged_with_their_cause() -> None:
    report = Report()
    run, graphs = counted(lambda x: x + 1, dynamic=False)
    with recompiles(report):
        run(torch.ones(2))
        run(torch.ones(3))
    assert len(graphs) == 2
    (cause,) = report.recompiles
    assert "size" in cause.reason
    run(torch.ones(4))
    assert len(report.recompiles) == 1
    assert not logging.getLogger(names.RECOMPILES_LOG).handlers


@relies_on("compiled_call", "_compiled_call_impl", "original_module")
def test_a_compiled_module_is_undone_and_found_behind_its_wrapper() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = Twice()
    run, graphs = counted(module)
    assert names.original_module(run) is module
    assert names.original_module(module) is module
    module.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    module(torch.ones(1, 2))
    assert len(graphs) == 1
    vars(module).pop(names.COMPILED_CALL)
    module(torch.ones(3, 3, 2))
    assert len(graphs) == 1


def traced(length: int, function: Any) -> tuple[Any, Any, torch.Tensor]:
    """The graph of a function of [length, 3], what is known about its length, and the fake tensor."""
    env = names.ShapeEnv(duck_shape=False)
    mode = names.FakeTensorMode(shape_env=env)
    mode.cache_enabled = False
    context = names.StatelessSymbolicContext(
        dynamic_sizes=[names.DimDynamic.DYNAMIC, names.DimDynamic.STATIC]
    )
    fake = mode.from_tensor(torch.ones(length, 3), source=names.ConstantSource("x"), symbolic_context=context)
    with mode, names.enable_python_dispatcher(), torch.no_grad():
        graph = names.make_fx(function)(fake)
    return graph, env, fake


@relies_on(
    *("make_fx", "FakeTensorMode", "ShapeEnv", "DimDynamic", "StatelessSymbolicContext", "ConstantSource"),
    *("enable_python_dispatcher", "size_hint", "optimization_hint"),
)
def test_a_trace_over_an_open_length_computes_any_length_and_remembers_its_own() -> None:
    graph, _, fake = traced(7, lambda x: torch.cat([x, x]).reshape(-1, x.shape[0], 3) * x.shape[0])
    assert isinstance(fake.shape[0], torch.SymInt)
    assert type(fake.shape[1]) is int
    doubled = torch.cat([fake, fake]).shape[0]
    assert [names.size_hint(n) for n in (fake.shape[0], doubled, 3)] == [7, 14, 3]
    assert names.optimization_hint(doubled) == 14
    for length in (2, 5, 11):
        x = torch.randn(length, 3)
        assert torch.equal(graph(x), torch.stack([x, x]) * length)


def test_a_size_is_code_over_the_name_of_its_symbol_by_the_public_way() -> None:
    """SymInt knows how to become an expression of sympy; its node is not asked."""
    _, _, fake = traced(7, lambda x: x)
    size = torch.cat([fake, fake]).shape[0] + 1
    (symbol,) = sympy.sympify(size).free_symbols
    assert symbol == sympy.sympify(fake.shape[0])
    code = names.sympy_code(size)
    assert eval(code, {str(symbol): 10}) == 21
    assert names.sympy_code(4) == "4"


@relies_on("guards_expression", "evaluate_guards_expression")
def test_a_trace_says_for_which_lengths_it_holds() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 5 else x * 3

    _, env, fake = traced(7, branch)
    code = env.produce_guards_expression([fake.shape[0]])
    assert [bool(env.evaluate_guards_expression(code, [n])) for n in (5, 6, 100)] == [False, True, True]


@relies_on("is_compiling_flag")
def test_code_takes_its_eager_branch_while_others_compile() -> None:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        assert torch.compiler.is_compiling()
        with names.as_if_not_compiling():
            assert not torch.compiler.is_compiling()
        assert torch.compiler.is_compiling()
    finally:
        torch.compiler._is_compiling_flag = before
