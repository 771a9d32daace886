"""Promise 2, measured: no dequantised weight in memory, bounded scratch for every shape."""

import pytest

from monograph.bench.peak_memory import peak_bytes

MIB = 1 << 20
SETUP = """
import monograph as mg
n, k, m, threads = {n}, {k}, {m}, {threads}
w = mg.quantize((torch.randn(n, k) * 0.02).bfloat16(), double_quant=True)
x = torch.randn(m, k).bfloat16().requires_grad_()
dy = torch.randn(m, n).bfloat16()
small = mg.quantize(torch.randn(64, 64).bfloat16())
few = torch.randn(4, 64).bfloat16().requires_grad_()
torch.autograd.grad(mg.linear(few, small), few, torch.ones(4, 64).bfloat16())  # code, engine, thread pool
"""
WORK = """
y = mg.linear(x, w)
(dx,) = torch.autograd.grad(y, x, dy)
"""


@pytest.mark.parametrize(("n", "k", "m"), [(14336, 4096, 512), (4096, 14336, 2048)])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_of_forward_and_backward(n, k, m, threads):
    """At most 4 MiB and 2 MiB a thread beside the outputs y and dx; 1 MiB allowed for the process.

    The weight in bf16 would be 112 MiB.
    """
    peak = peak_bytes(SETUP.format(n=n, k=k, m=m, threads=threads), WORK, threads)
    outputs = 2 * m * (n + k)
    assert peak - outputs <= (4 + 2 * threads + 1) * MIB, (
        f"{(peak - outputs) / MIB:.1f} MiB beside the outputs"
    )
