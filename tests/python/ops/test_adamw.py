"""monograph::adamw against torch.optim.AdamW with clip_grad_norm_."""

import pytest
import torch

from monograph.ops.adamw import adamw

_TAIL = (torch.tensor(1e-2), 0.9, 0.999, 1e-8, [0.0], 1.0)


def state(seed=0):
    torch.manual_seed(seed)
    shapes = [(3, 5), (7,), (1,), (0, 4)]
    parameters = [torch.randn(s) for s in shapes]
    return parameters, [torch.zeros(s) for s in shapes], [torch.zeros(s) for s in shapes], torch.zeros(())


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e6])
def test_updates_are_torchs(max_norm):
    parameters, exp_avg, exp_avg_sq, steps = state()
    torch_parameters = [torch.nn.Parameter(p.clone()) for p in parameters]
    groups = [
        {"params": torch_parameters[:1], "weight_decay": 0.1},
        {"params": torch_parameters[1:], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-6)
    for number in range(5):
        gradients = [torch.randn_like(p) for p in parameters]
        kept = [g.clone() for g in gradients]
        for parameter, gradient in zip(torch_parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        limit = max_norm if max_norm > 0 else float("inf")
        want = torch.nn.utils.clip_grad_norm_(torch_parameters, limit)
        optimizer.step()
        rate = torch.tensor(3e-3)
        decay = [0.1, 0.0, 0.0, 0.0]
        norm = adamw(
            parameters, gradients, exp_avg, exp_avg_sq, steps, rate, 0.8, 0.95, 1e-6, decay, max_norm
        )
        assert abs(norm - want) <= 2**-20 * want
        assert steps.item() == number + 1
        assert all(torch.equal(g, k) for g, k in zip(gradients, kept, strict=True))
    for ours, other in zip(parameters, torch_parameters, strict=True):
        # Five steps of a few float32 roundings each, on values of order one.
        torch.testing.assert_close(ours, other.detach(), rtol=0, atol=40 * 2**-24)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    parameters, exp_avg, exp_avg_sq, steps = state()
    before = [p.clone() for p in (*parameters, *exp_avg, *exp_avg_sq, steps)]
    gradients = [torch.full_like(p, bad) for p in parameters]
    arguments = (torch.tensor(1e-2), 0.9, 0.999, 1e-8, [0.1] * 4, 1.0)
    assert not adamw(parameters, gradients, exp_avg, exp_avg_sq, steps, *arguments).isfinite()
    after = (*parameters, *exp_avg, *exp_avg_sq, steps)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_threads_do_not_change_a_bit():
    """Ranks make the same update of the same gradient: norm and parameters depend on its values alone."""
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        sizes = [1_000_003, 77, 40_000]  # torch shares out sums of more than 32768 numbers
        gradients = [torch.randn(n) * torch.logspace(-3, 3, n) for n in sizes]
        tensors = [[torch.zeros(n) for n in sizes] for _ in range(3)]
        tail = (torch.zeros(()), torch.tensor(1e-2), 0.9, 0.999, 1e-8, [0.1, 0.0, 0.0], 1.0)
        norm = adamw(tensors[0], gradients, *tensors[1:], *tail)
        found.append([norm, *tensors[0], *tensors[1], *tensors[2]])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_norm_is_that_of_float64():
    """torch's norm of so many numbers, one chain in float32, is 0.3 % short."""
    torch.manual_seed(0)
    gradient = torch.rand(40_000_000)
    want = gradient.double().square_().sum().sqrt().item()
    zeros = [[torch.zeros_like(gradient)] for _ in range(3)]
    tail = (torch.zeros(()), torch.tensor(1e-2), 0.9, 0.999, 1e-8, [0.0], 1.0)
    found = adamw(zeros[0], [gradient], *zeros[1:], *tail)
    assert abs(found.item() - want) <= 2**-24 * want


def test_gradients_of_any_type_and_stride():
    torch.manual_seed(0)
    gradient = torch.randn(6, 4)
    want = None
    for given in (gradient, gradient.double(), gradient.t().contiguous().t()):
        tensors = [[torch.ones(6, 4)], [torch.zeros(6, 4)], [torch.zeros(6, 4)]]
        tail = (torch.zeros(()), torch.tensor(1e-2), 0.9, 0.999, 1e-8, [0.1], 1.0)
        norm = adamw(tensors[0], [given], *tensors[1:], *tail)
        found = torch.cat([norm.reshape(1), *(t[0].flatten() for t in tensors)])
        assert want is None or torch.equal(found, want)
        want = found


def test_a_graph_that_saved_a_parameter_notices_the_step():
    p = torch.ones(3, requires_grad=True)
    loss = p.square().sum()
    with torch.no_grad():
        adamw([p], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], torch.zeros(()), *_TAIL)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_count_for_each_parameter_is_that_of_its_own_optimizer():
    """Two parameters, of which the second comes after three steps."""
    torch.manual_seed(0)
    starts = [torch.randn(40), torch.randn(24)]
    ours = [[p.clone() for p in starts], *([torch.zeros_like(p) for p in starts] for _ in range(2))]
    theirs = [torch.nn.Parameter(p.clone()) for p in starts]
    optimizer = torch.optim.AdamW(theirs[:1], lr=0.125, weight_decay=0.0, fused=True)
    steps = torch.tensor([3.0, 0.0])
    for number in range(6):
        gradients = [torch.randn_like(p) for p in starts]
        if number == 3:
            optimizer.add_param_group({"params": theirs[1:]})
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        if number < 3:
            single = [[part[0]] for part in ours]
            tail = (torch.tensor(float(number)), torch.tensor(0.125), 0.9, 0.999, 1e-8, [0.0], 0.0)
            adamw(single[0], gradients[:1], *single[1:], *tail)
        else:
            adamw(
                ours[0], gradients, *ours[1:], steps, torch.tensor(0.125), 0.9, 0.999, 1e-8, [0.0, 0.0], 0.0
            )
        for own, other in zip(ours[0], theirs, strict=True):
            # Each step moves by at most about 0.125, with a few float32 roundings.
            torch.testing.assert_close(own, other.detach(), rtol=0, atol=8 * (number + 1) * 2**-24)
    assert steps.tolist() == [6.0, 3.0]
    with pytest.raises(ValueError, match=r"steps is float32 \[3\], wanted float32 \[\] or \[2\]"):
        call(steps=torch.zeros(3))


def test_opcheck_and_one_graph_for_every_learning_rate():
    parameters, exp_avg, exp_avg_sq, steps = state()
    gradients = [torch.randn_like(p).bfloat16() for p in parameters]
    tail = (0.9, 0.999, 1e-8, [0.0] * 4, 1.0)
    whole = (parameters, gradients, exp_avg, exp_avg_sq, steps, torch.tensor(1e-2), *tail)
    torch.library.opcheck(torch.ops.monograph.adamw.default, whole)
    torch._dynamo.reset()
    compiled = torch.compile(adamw, fullgraph=True, backend="aot_eager")
    other = state()
    for number in range(3):
        rate = torch.tensor(1e-2 / (number + 1))
        adamw(parameters, gradients, exp_avg, exp_avg_sq, steps, rate, *tail)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compiled(other[0], gradients, *other[1:], rate, *tail)
    assert all(torch.equal(a, b) for a, b in zip(parameters, other[0], strict=True))


def tensors():
    return {
        "parameters": [torch.ones(4), torch.ones(4)],
        "gradients": [torch.ones(4), torch.ones(4)],
        "exp_avg": [torch.zeros(4), torch.zeros(4)],
        "exp_avg_sq": [torch.zeros(4), torch.zeros(4)],
        "steps": torch.zeros(()),
        "learning_rate": torch.tensor(0.1),
    }


def call(op="adamw", **changed):
    return getattr(torch.ops.monograph, op)(*(tensors() | changed).values(), 0.9, 0.99, 1e-8, [0.0, 0.0], 0.0)


@pytest.mark.parametrize("name", ["gradients", "exp_avg", "steps", "learning_rate"])
def test_other_devices_are_refused(name):
    given = tensors()[name]
    moved = given.to("meta") if isinstance(given, torch.Tensor) else [given[0], given[1].to("meta")]
    with pytest.raises(ValueError, match=f"adamw: {name} is on meta, wanted cpu as the others"):
        call(**{name: moved})


def test_tensors_that_share_memory_are_refused():
    one, wide, shared = torch.ones(4), torch.zeros(6), [torch.zeros(4), torch.zeros(4)]
    for changed in (
        {"parameters": [one, one]},
        {"exp_avg": [wide[:4], wide[2:]]},
        {"exp_avg": shared, "exp_avg_sq": shared},
        {"parameters": [wide[:4], one], "steps": wide[3]},
    ):
        with pytest.raises(ValueError, match="share memory"):
            call(**changed)
    call(exp_avg=list(torch.zeros(8).split(4)))


def test_counts_that_are_one_number_are_refused():
    with pytest.raises(ValueError, match=r"adamw: steps has strides \(0,\), wanted contiguous"):
        call(steps=torch.zeros(()).expand(2))


@pytest.mark.parametrize("op", ["adamw", "adamw_update"])
@pytest.mark.parametrize("name", ["steps", "learning_rate"])
def test_tensors_of_another_kind_are_refused(op, name):
    sparse = torch.ones(()).to_sparse()
    with pytest.raises(ValueError, match=f"{op}: {name} is sparse_coo, wanted an ordinary tensor"):
        call(op, **{name: sparse})
    quantized = torch.quantize_per_tensor(torch.ones(()), 1.0, 0, torch.quint8)
    with pytest.raises(ValueError, match=f"{op}: {name} is quantised by torch, wanted an ordinary tensor"):
        call(op, **{name: quantized})
