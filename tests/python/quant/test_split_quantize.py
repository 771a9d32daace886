"""split_quantize: many packed tensors as views of few buffers, against quantising each alone."""

import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.ops import split_quantize as module
from monograph.ops.formats import FORMATS
from monograph.ops.split_quantize import portable_split_quantize

ops = torch.ops.monograph

SPLITS = [32, 0, 64, 96]


def weight(dtype=torch.bfloat16, cols=64):
    return torch.randn(sum(SPLITS), cols, generator=torch.Generator().manual_seed(1)).to(dtype)


def same(found, want):
    assert found.shape == want.shape
    assert found.block_size == want.block_size
    for a, b in zip((found.values, *found.scales), (want.values, *want.scales), strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)
    assert torch.equal(found.dequantize(), want.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_each_tensor_has_the_bits_of_its_matrix_alone(name):
    w = weight()
    tensors, buffers = mg.split_quantize(w, SPLITS, name, rowwise=True, columnwise=True)
    assert [t.shape for t in tensors] == [(rows, 64) for rows in SPLITS]
    for one, piece in zip(tensors, w.split(SPLITS), strict=True):
        same(one.rowwise, mg.quantize(piece, name))
        same(one.columnwise, mg.quantize(piece.mT.contiguous(), name))
    # Everything lies in the two buffers, and those hold nothing else but padding.
    for use, buffer in zip(("rowwise", "columnwise"), buffers, strict=True):
        inside = buffer.untyped_storage().data_ptr()
        packed = [getattr(t, use) for t in tensors]
        parts = [p for q in packed for p in (q.values, *q.scales)]
        assert all(p.untyped_storage().data_ptr() == inside for p in parts if p.numel())
        assert 0 <= buffer.numel() - sum(p.numel() for p in parts) < 64 * len(parts)


def test_the_values_are_those_of_ocp_mxfp8_by_hand():
    """An independent reference: the rule `rceil` in float64, elements rounded by torch's own cast."""
    w = weight(torch.float32)
    tensors, _ = mg.split_quantize(w, SPLITS, "mxfp8", rowwise=True, columnwise=True)
    for one, piece in zip(tensors, w.split(SPLITS), strict=True):
        for packed, matrix in ((one.rowwise, piece), (one.columnwise, piece.mT)):
            blocks = matrix.double().reshape(-1, 32)
            scale = torch.exp2((blocks.abs().amax(1, keepdim=True) / 448.0).log2().ceil())
            codes = (blocks / scale).float().to(torch.float8_e4m3fn)
            want = (codes.double() * scale).reshape(matrix.shape)
            assert torch.equal(packed.dequantize(torch.float32).double(), want)


def test_shapes_only_and_single_usages():
    w = weight()
    tensors, buffers = mg.split_quantize(w, SPLITS, "mxfp8", rowwise=False, columnwise=False)
    assert buffers == []
    assert [t.shape for t in tensors] == [(rows, 64) for rows in SPLITS]
    assert all(t.rowwise is None and t.columnwise is None and t.nbytes == 0 for t in tensors)
    with pytest.raises(ValueError, match="shapes only"):
        tensors[0].dequantize()
    tensors, buffers = mg.split_quantize(w, SPLITS, "nvfp4", rowwise=False, columnwise=True)
    assert len(buffers) == 1
    assert tensors[2].rowwise is None
    want = mg.quantize(w.split(SPLITS)[2].mT.contiguous(), "nvfp4").dequantize().mT
    assert torch.equal(tensors[2].dequantize(), want)
    scale = tensors[2].columnwise.scales[1]
    assert scale.view(torch.float32).dtype == torch.float32  # aligned: fp32 views of the uint8 buffer


def test_equal_inputs_give_equal_buffers_and_memory_is_filled():
    a, b = (mg.split_quantize(weight(), SPLITS, "nvfp4", columnwise=True)[1] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_portable_gives_the_same_bits():
    for name, fmt in FORMATS.items():
        arguments = (weight(), SPLITS, fmt.number, fmt.block_sizes[0], True, True, False, 0)
        found = torch.ops.monograph.split_quantize(*arguments)
        want = portable_split_quantize(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), name


def test_opcheck_and_one_graph():
    for name in ("mxfp8", "nvfp4", "fp8-block"):
        number, block = FORMATS[name].number, FORMATS[name].block_sizes[0]
        opcheck(
            torch.ops.monograph.split_quantize.default,
            (weight(), SPLITS, number, block, True, True, False, 0),
        )

    def values(w):
        tensors, buffers = mg.split_quantize(w, [32, 64, 96], "mxfp8", columnwise=True)
        return tensors[1].dequantize() + tensors[1].columnwise.dequantize().mT, *buffers

    w = weight()
    found = torch.compile(values, fullgraph=True, backend="aot_eager")(w)
    assert all(torch.equal(a, b) for a, b in zip(found, values(w), strict=True))


def test_misuse():
    w = weight()
    with pytest.raises(RuntimeError, match="splits have 32 rows, the input has 192"):
        mg.split_quantize(w, [32], "mxfp8")
    with pytest.raises(RuntimeError, match="splits has 100 with 92 of 192 rows left"):
        mg.split_quantize(w, [100, 100], "mxfp8")
    with pytest.raises(RuntimeError, match="split 1 columnwise"):
        mg.split_quantize(w, [32, 40, 120], "mxfp8", columnwise=True)
    with pytest.raises(ValueError, match="wanted two dimensions"):
        mg.split_quantize(w[0], [64], "mxfp8")
    w[100, 3] = float("inf")
    with pytest.raises(RuntimeError, match=f"not finite at flat index {100 * 64 + 3}"):
        mg.split_quantize(w, SPLITS, "mxfp8")
    assert mg.split_quantize(w, SPLITS, "mxfp8", nonfinite="saturate")[0]


@pytest.mark.parametrize("splits", [[2**62], [64, 64], [-64, 256], []])
def test_wrong_splits_are_refused_without_memory(splits):
    """As the kernel does; a size of 2**62 rows would not fit into a number of bytes."""
    arguments = (splits, 3, 32, False, True, True, 0)
    for device in ("meta", "cpu"):
        with pytest.raises((ValueError, RuntimeError), match="split_quantize: splits"):
            torch.ops.monograph.split_quantize(torch.empty(192, 64, device=device), *arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_a_device_with_a_kernel_of_quantize_alone_splits_by_it(name, monkeypatch):
    """As on CUDA."""
    monkeypatch.setattr(module, "has_kernel", lambda operator, device: operator == "quantize")
    monkeypatch.setattr(module, "portable_quantize", None)
    fmt = FORMATS[name]
    given = (weight(), SPLITS, fmt.number, fmt.default_block, True, True, False, 0)
    found = portable_split_quantize(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, ops.split_quantize(*given), strict=True))
