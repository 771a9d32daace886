"""Memory of a layer of experts: the peak of a step, skipped slots, pages of experts without tokens."""

import ctypes
import mmap
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from monograph.bench.peak_memory import peak_bytes
from monograph.ops.experts import Activation, experts
from monograph.ops.formats import format_named
from monograph.ops.layout import make_layout

MIB = 1 << 20
HIDDEN, INNER, TOKENS, TOP, RANK, EXPERTS = 2048, 768, 1024, 8, 16, 32
# Huge pages are off (PR_SET_THP_DISABLE): whether the system has one to give moves the peak by 4 MiB.
SETUP = """
import ctypes
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from monograph.ops.experts import experts
from monograph.ops.layout import make_layout

hidden, inner, tokens, top, rank, all_experts, here, mxfp4 = {sizes}

def stack(rows, cols):
    values = torch.randint(0, 256, (here, rows, cols // 2), dtype=torch.uint8)
    scales = torch.randint(118, 122, (here, rows, cols // 32), dtype=torch.uint8)
    return values, [scales], make_layout(mxfp4, 32, (here, rows, cols))

first, second = stack(2 * inner, hidden), stack(hidden, inner)
ids = torch.randn(tokens, all_experts).topk(top, -1).indices
x, dy = (torch.randn(tokens, hidden).bfloat16() for _ in range(2))
weights = torch.rand(tokens, top)
shapes = (rank * here, hidden), (2 * inner, rank * here), (rank * here, inner), (hidden, rank * here)
low = [(torch.randn(shape) * 0.02).requires_grad_() for shape in shapes]

def step(x, ids, weights, dy):
    x, weights = x.requires_grad_(), weights.requires_grad_()
    lora = dict(lora1=(low[0], low[1], 2.0), lora2=(low[2], low[3], 2.0))
    y = experts(x, ids, weights, first, second, **lora)
    return y, torch.autograd.grad(y, [x, weights, *low], dy)

step(x[:2].clone(), torch.zeros(2, top, dtype=torch.int64), weights[:2].clone(), dy[:2])  # code, engine
"""


def beyond(here):
    """What a step takes beyond pre, which backward keeps, and its results; and pre."""
    sizes = (HIDDEN, INNER, TOKENS, TOP, RANK, EXPERTS, here, format_named("mxfp4").number)
    pre = 2 * TOKENS * TOP * 2 * INNER
    results = 2 * 2 * TOKENS * HIDDEN + 4 * TOKENS * TOP + 4 * RANK * here * (2 * HIDDEN + 3 * INNER)
    return peak_bytes(SETUP.format(sizes=sizes), "made = step(x, ids, weights, dy)") - pre - results, pre


def test_peak_of_a_step_and_of_an_eighth_of_the_slots():
    """At most pre once more and 64 MB; a float of every weight would be 604 MB. A rank that has an eighth of
    the experts, and so of the slots, takes at most a fifth."""
    all_of_it, pre = beyond(EXPERTS)
    assert all_of_it <= pre + 64 * 10**6, f"{all_of_it / MIB:.0f} MiB beyond pre and results"
    eighth, _ = beyond(EXPERTS // 8)
    assert eighth <= 0.2 * all_of_it, f"{eighth / MIB:.0f} of {all_of_it / MIB:.0f} MiB"


libc = ctypes.CDLL(None, use_errno=True)


def pages_of(tensor):
    """First byte, and bytes, of the whole pages around a tensor."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return first, tensor.data_ptr() + tensor.nbytes - first


def resident(tensor):
    """Pages of a mapped tensor that are in memory."""
    first, size = pages_of(tensor)
    found = (ctypes.c_ubyte * ((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), found) == 0
    return sum(byte & 1 for byte in found)


@pytest.mark.per_isa
def test_pages_of_experts_without_tokens_are_not_read(tmp_path):
    """A mapped file that was put out of memory, 2 of 32 experts with tokens, forward and backward."""
    count, hidden, inner, used = 32, 256, 256, [5, 20]
    shapes = {"first": (count, 2 * inner, hidden), "second": (count, hidden, inner)}
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, (e, rows, cols) in shapes.items():
        state[f"{name}_blocks"] = torch.randint(
            0, 256, (e, rows, cols // 2), dtype=torch.uint8, generator=generator
        )
        state[f"{name}_scales"] = torch.randint(
            118, 122, (e, rows, cols // 32), dtype=torch.uint8, generator=generator
        )
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    mapped = load_file(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for tensor in mapped.values():
        first, size = pages_of(tensor)
        for advice in (mmap.MADV_RANDOM, mmap.MADV_DONTNEED):
            assert libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) == 0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(resident(t) for t in mapped.values()):
        pytest.skip("this file system keeps the file in memory")
    first, second = (
        (
            mapped[f"{name}_blocks"],
            [mapped[f"{name}_scales"]],
            make_layout(format_named("mxfp4").number, 32, shape),
        )
        for name, shape in shapes.items()
    )
    x = torch.randn(24, hidden).bfloat16().requires_grad_()
    ids = torch.tensor(used).expand(24, 2).contiguous()
    y = experts(x, ids, torch.ones(24, 2), first, second, activation=Activation.SILU)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.abs().max() > 0
    assert dx.abs().max() > 0
    for name, tensor in mapped.items():
        for e in range(count):
            # Scales of an expert are half a page: neighbours share theirs.
            pages = resident(tensor[e])
            if e in used:
                assert pages >= tensor[e].nbytes // mmap.PAGESIZE, (name, e)
            elif min(abs(e - u) for u in used) > 2:
                assert pages == 0, (name, e)
