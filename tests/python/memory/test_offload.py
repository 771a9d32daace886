"""Storages that leave memory and come back: the table, the hooks of autograd, the offloader."""

import gc
import pathlib
import re
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monograph as mg
from monograph.memory.offload import LeakedView, StorageOffloader
from monograph.memory.offload.places import Disk
from monograph.memory.offload.storages import StorageTable

MIB = 1 << 20
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu),
)


def anonymous_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text().split("\n")
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def bits(tensor: torch.Tensor) -> bytes:
    """Values in the order of the elements, conjugation and negation applied."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def views() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 8, 10)
    made = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "slice": base[1:5:2, 3:, ::3],
        "expanded": base[:, :1].expand(6, 8, 10),
        "scalar": base[2, 3, 4],
        "empty": base[:, 3:3],
        "overlapping": base.as_strided((5, 5), (1, 1), 7),
        "conjugated": torch.randn(4, 5, dtype=torch.complex64).conj(),
        "negated": torch.randn(4, 5, dtype=torch.complex64).conj().imag,
        "bytes": base.view(torch.uint8)[2:],
    }
    for dtype in DTYPES:
        made[str(dtype)] = torch.randint(0, 255, (3, 64), dtype=torch.uint8).view(
            torch.uint8 if dtype is torch.bool else dtype
        )
    made["torch.bool"] = torch.rand(3, 8) < 0.5
    return made


def test_every_dtype_and_view_comes_back_as_it_was(tmp_path):
    table = StorageTable(Disk(tmp_path))
    given = views()
    packed = {name: table.pack(t) for name, t in given.items()}
    for name, t in given.items():
        found = table.unpack(packed[name])
        assert found.dtype == t.dtype, name
        assert found.shape == t.shape, name
        assert found.stride() == t.stride(), name
        assert found.storage_offset() == t.storage_offset(), name
        assert found.is_conj() == t.is_conj(), name
        assert found.is_neg() == t.is_neg(), name
        assert bits(found) == bits(t), name
        assert found.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


def grouped_layer(weights: int = 32) -> dict[str, object]:
    """A layer of 32 grouped weights: values, scales and fp32 amax, views of one buffer per usage."""
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(weights * 32, 64, generator=generator)
    tensors, buffers = mg.split_quantize(dense, [32] * weights, "nvfp4", rowwise=True, columnwise=True)
    amax = [t.rowwise.scales[1].view(torch.float32) for t in tensors]
    return {"experts": tensors, "amax": amax, "buffers": buffers}


def test_a_layer_of_32_grouped_weights_moves_as_its_buffers(tmp_path):
    layer = grouped_layer()
    buffers = [b.clone() for b in layer["buffers"]]
    sizes = sum(b.numel() for b in buffers)
    values = [t.dequantize() for t in layer["experts"]]
    amax = [float(a) for a in layer["amax"]]
    offloader = StorageOffloader("disk", folder=tmp_path)
    moved = offloader.offload(layer, "layer")
    assert offloader.counts().writes == len(buffers) == 2
    assert offloader.counts().bytes_written == moved.nbytes == sizes
    assert layer["experts"][3].rowwise.values.is_meta
    moved.reload()
    counts = offloader.counts()
    assert (counts.reads, counts.bytes_read) == (2, sizes)
    assert all(torch.equal(a, b) for a, b in zip(layer["buffers"], buffers, strict=True))
    assert all(torch.equal(t.dequantize(), v) for t, v in zip(layer["experts"], values, strict=True))
    assert [float(a) for a in layer["amax"]] == amax
    assert layer["amax"][0].dtype == torch.float32
    # The views share their buffers again.
    layer["buffers"][0].zero_()
    assert not layer["experts"][5].rowwise.values.any()
    del moved
    assert offloader.counts().alive == 0


def test_memory_is_free_after_offload(tmp_path):
    owner = {"a": torch.ones(64 * MIB, dtype=torch.uint8)}
    owner["half"] = owner["a"][32 * MIB :].view(torch.float32)
    storage = weakref.ref(owner["a"])
    before = anonymous_bytes()
    moved = StorageOffloader("disk", folder=tmp_path).offload(owner)
    assert before - anonymous_bytes() >= 63 * MIB
    assert storage() is None
    moved.reload()
    assert before - anonymous_bytes() <= 2 * MIB
    assert float(owner["half"].view(torch.uint8).float().mean()) == 1.0


def test_a_leaked_view_is_named(tmp_path):
    layer = grouped_layer(4)
    kept = {"scales of somebody": layer["experts"][2].rowwise.scales[0]}
    values = layer["experts"][2].dequantize()
    with pytest.raises(LeakedView) as caught:
        StorageOffloader("disk", folder=tmp_path).offload(layer, "moe")
    text = str(caught.value)
    assert "moe['experts'][2].rowwise.scales[0]" in text
    assert "'scales of somebody' of a dict" in text
    assert torch.equal(layer["experts"][2].dequantize(), values)  # nothing is lost
    del kept, caught
    gc.collect()
    StorageOffloader("disk", folder=tmp_path).offload(layer, "moe").reload()
    assert torch.equal(layer["experts"][2].dequantize(), values)


def test_modules_shared_buffers_and_parameters(tmp_path):
    shared = torch.randn(100, 10)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_buffer("table", shared)
    model[1].register_buffer("table", shared[50:])
    model[1].packed = mg.quantize(torch.randn(8, 64), "nf4", double_quant=True)
    want = shared.clone()
    dense = model[1].packed.dequantize()
    weight = model[0].weight.data_ptr()
    del shared
    offloader = StorageOffloader("disk", folder=tmp_path)
    moved = offloader.offload(model)
    assert offloader.counts().writes == 1 + 5  # the shared buffer once; values and four scales
    assert model[0].table.is_meta
    moved.reload()
    assert torch.equal(model[0].table, want)
    assert torch.equal(model[1].table, want[50:])
    assert model[1].table.untyped_storage().data_ptr() == model[0].table.untyped_storage().data_ptr()
    assert torch.equal(model[1].packed.dequantize(), dense)
    assert model[0].weight.data_ptr() == weight
    with pytest.raises(TypeError, match="is a tuple"):
        offloader.offload((torch.ones(3),))


# autograd


def network(seed=0):
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32), nn.LayerNorm(32)) for _ in range(3)
    ]
    return nn.Sequential(*layers)


def gradients(model, x, context=None, *, checkpointed=False, inside=True):
    model.zero_grad()
    x = x.clone().requires_grad_()

    def forward():
        h = x
        for layer in model:
            h = checkpoint(layer, h, use_reentrant=False) if checkpointed else layer(h)
        return h.square().mean()

    if context is None:
        loss = forward()
    else:
        with context:
            loss = forward()
            if inside:
                loss.backward()
    if context is None or not inside:
        loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def equal(a, b):
    return all(bits(x) == bits(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_the_same_bits_in_eager_mode(tmp_path, checkpointed, inside):
    model, x = network(), torch.randn(50, 32)
    want = gradients(model, x, checkpointed=checkpointed)
    context = mg.offload_activations(model, folder=tmp_path, min_bytes=0)
    for _ in range(2):
        found = gradients(model, x, context, checkpointed=checkpointed, inside=inside)
        assert equal(found, want)
    counts = context.counts()
    assert counts.writes == counts.reads > 0
    assert counts.bytes_written == counts.bytes_read
    assert counts.alive == 0  # autograd let go of everything
    if checkpointed:
        assert counts.writes == 2 * 3 + 2  # the inputs of the layers, and what the loss keeps
    assert len(list(tmp_path.iterdir())) == 1
    del context
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_storage_move_once_and_live_until_the_last_is_unpacked(tmp_path):
    """A trial read 104 times for 81 writes."""
    table = StorageTable(Disk(tmp_path))
    base = torch.randn(300, 3)
    packed = [table.pack(base[:, i]) for i in range(3)]
    assert table.place.counts().writes == 1
    first = table.unpack(packed[0])
    second = table.unpack(packed[1])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del first, second  # nobody holds it now but the view that is still to come
    assert torch.equal(table.unpack(packed[2]), base[:, 2])
    assert table.place.counts().reads == 1
    again = [table.unpack(p) for p in packed]  # retain_graph: a second round is a second read
    assert table.place.counts().reads == 2
    assert all(torch.equal(a, base[:, i]) for i, a in enumerate(again))
    del packed, again
    assert table.place.counts().alive == 0


def test_what_was_written_to_since_moves_again(tmp_path):
    table = StorageTable(Disk(tmp_path))
    x = torch.zeros(100)
    first = table.pack(x)
    x.add_(1)
    second = table.pack(x)
    x.data.add_(1)  # no version tells
    third = table.pack(x)
    assert [float(table.unpack(p)[0]) for p in (first, second, third)] == [0.0, 1.0, 2.0]
    assert table.place.counts().writes == 3
    # A new storage at the old address is another one.
    for number in range(20):
        y = torch.full((1000,), float(number))
        kept = table.pack(y)
        del y
        assert float(table.unpack(kept)[0]) == number


def test_retain_graph_and_double_backward(tmp_path):
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)

    def second(context):
        with context:
            y = (x.tanh() @ x).square().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
        (again,) = torch.autograd.grad(y, x, retain_graph=True)
        (further,) = torch.autograd.grad(first.square().sum(), x)
        return [y.detach(), first.detach(), again, further]

    want = second(torch.enable_grad())
    context = mg.offload_activations(folder=tmp_path, min_bytes=0)
    assert equal(second(context), want)
    assert context.counts().alive == 0


def test_what_stays(tmp_path):
    model = nn.Linear(64, 64)
    with mg.offload_activations(model, folder=tmp_path, min_bytes=0) as context:
        x = torch.randn(8, 64, requires_grad=True)
        y = (x @ model.weight.t()).sum()  # a view of a parameter
        assert context.counts().writes == 1  # x
        y.backward()
    with mg.offload_activations(folder=tmp_path, min_bytes=4096) as context:
        torch.randn(1023, requires_grad=True).exp()
        assert context.counts().writes == 0
        kept = torch.randn(1024, requires_grad=True).exp()
        assert context.counts().writes == 1
        z = torch.randn(2048)
        mg.mark_not_offload(z[5:])
        z.requires_grad_().mul(z)
        assert context.counts().writes == 1
        torch.zeros(0, 5, requires_grad=True).exp()
        assert context.counts().writes == 1
    del kept


class RefusesFunctions(torch.Tensor):
    """A subclass that does not answer for its version."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor._version.__get__:
            raise NotImplementedError("_version")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["parameter", "view of a parameter", "small", "marked", "subclass"])
def test_what_stays_and_is_written_to_before_backward_is_refused_by_version(kind, tmp_path):
    """Torch's own check, which hooks of saved tensors switch off: without it x.grad is 200 in place of 2."""

    def backward(context, *, change=True):
        model, x = nn.Linear(2, 2, bias=False), torch.full((1, 2), 3.0, requires_grad=True)
        nn.init.ones_(model.weight)
        kept = model.weight if kind in ("parameter", "view of a parameter") else (x * 1)
        if kind == "subclass":
            kept = kept.as_subclass(RefusesFunctions)
        if kind == "marked":
            mg.mark_not_offload(kept)
        with context(model):
            if kind == "parameter":
                y = model(x).sum()
            else:
                y = (x @ kept.t() if kind == "view of a parameter" else torch.mul(kept, kept)).sum()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                if change:
                    kept.mul_(100)
            y.backward()
            with torch.no_grad():  # an optimizer's step
                model.weight.mul_(100)
        return x.grad

    def offloaded(model):
        return mg.offload_activations(model, folder=tmp_path, min_bytes=1024 if kind == "small" else 0)

    assert torch.equal(backward(offloaded, change=False), backward(lambda _: nullcontext(), change=False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(lambda _: nullcontext())
    with pytest.raises(
        RuntimeError, match=r"torch.float32 \[\d, 2\] is at version (\d), wanted version (\d)"
    ) as error:
        backward(offloaded)
    found, wanted = re.search(r"at version (\d), wanted version (\d)", str(error.value)).groups()
    assert int(found) == int(wanted) + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_steps_of_the_optimizer_do_not_change_a_version_that_stays(reentrant, tmp_path):
    def trained(made):
        model, x = network(), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        optimizer, context = torch.optim.AdamW(model.parameters(), lr=0.1), made(model)
        for _ in range(3):
            with context:
                y = checkpoint(model, x, use_reentrant=reentrant).square().mean() + model(x).mean()
                y.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for min_bytes in (0, MIB):
        found = trained(lambda m, n=min_bytes: mg.offload_activations(m, folder=tmp_path, min_bytes=n))
        assert equal(found, trained(lambda _: nullcontext()))


def test_nested_contexts_exceptions_and_threads(tmp_path):
    outer = mg.offload_activations(folder=tmp_path, min_bytes=0)
    inner = mg.offload_activations(folder=tmp_path, min_bytes=0)
    with outer, inner:
        torch.randn(9, requires_grad=True).exp()
    assert (outer.counts().writes, inner.counts().writes) == (0, 1)
    with pytest.raises(KeyError), outer:
        raise KeyError
    torch.randn(9, requires_grad=True).exp()  # nothing is left on
    assert outer.counts().writes == 0
    wrong = []

    def train(seed):
        model, x = network(seed), torch.randn(50, 32, generator=torch.Generator().manual_seed(seed))
        want = gradients(model, x)
        for _ in range(5):
            if not equal(gradients(model, x, outer), want):
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    shared = mg.offload_activations(folder=tmp_path, min_bytes=0)
    outer = shared
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_misuse(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="on the host \\(cpu\\) already, wanted to='disk'"):
        mg.offload_activations(model, to="host")
    with pytest.raises(ValueError, match="to is 'gpu', wanted 'host' or 'disk'"):
        mg.offload_activations(model, to="gpu")
    with pytest.raises(ValueError, match="wanted an existing folder"):
        mg.offload_activations(model, folder=tmp_path / "none")
    with pytest.raises(ValueError, match="min_bytes is -1"):
        mg.offload_activations(model, min_bytes=-1)
    for makes in (mg.offload_activations, lambda _, **given: StorageOffloader(**given)):
        for wrong, said in (
            ("1MiB", r"min_bytes is '1MiB' \(str\), wanted"),
            (None, "min_bytes is None"),
            (True, "min_bytes is True"),
        ):
            with pytest.raises(TypeError, match=said):
                makes(model, folder=tmp_path, min_bytes=wrong)
    for wrong in ("model", [model], nn.Linear):
        with pytest.raises(
            TypeError, match=f"model is a {type(wrong).__name__}, wanted an nn.Module, or None"
        ):
            mg.offload_activations(wrong, folder=tmp_path)
    with pytest.raises(ValueError, match="model is None beside to='host', wanted a model on another device"):
        mg.offload_activations(None, to="host")
    x = torch.randn(512, requires_grad=True)
    for wrong in (None, 3, [x]):
        with pytest.raises(TypeError, match=f"argument 1 is a {type(wrong).__name__}, wanted a tensor"):
            mg.mark_not_offload(x, wrong)
    with mg.offload_activations(None, folder=tmp_path, min_bytes=0) as context:
        x.exp()  # marked by none of the calls that were refused
        x * x
    assert context.counts().writes == 2
