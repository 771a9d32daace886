"""Promise 2, measured: no dequantised weight in memory, bounded scratch for every shape."""

import pytest

from monograph.bench.peak_memory import peak_bytes

pytestmark = pytest.mark.slow
MIB = 1 << 20
SETUP = """
import monograph as mg
n, k, m, threads = {n}, {k}, {m}, {threads}
w = mg.quantize((torch.randn(n, k) * 0.02).bfloat16(), "{name}", double_quant={double})
x = torch.randn(m, k).bfloat16().requires_grad_()
dy = torch.randn(m, n).bfloat16()
small = mg.quantize(torch.randn(64, 64).bfloat16(), "{name}")
few = torch.randn(4, 64).bfloat16().requires_grad_()
torch.autograd.grad(mg.linear(few, small), few, torch.ones(4, 64).bfloat16())  # code, engine, thread pool
"""
WORK = """
y = mg.linear(x, w)
(dx,) = torch.autograd.grad(y, x, dy)
"""


def scratch_mib(name, n, k, m, threads):
    setup = SETUP.format(name=name, double=name == "nf4", n=n, k=k, m=m, threads=threads)
    return (peak_bytes(setup, WORK, threads) - 2 * m * (n + k)) / MIB


@pytest.mark.parametrize(("n", "k", "m"), [(14336, 4096, 512), (4096, 14336, 2048)])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_of_forward_and_backward(n, k, m, threads):
    """At most 4 MiB and 2 MiB per thread besides the outputs y and dx; 1 MiB allowed for the process.

    The weight in bf16 would be 112 MiB.
    """
    scratch = scratch_mib("nf4", n, k, m, threads)
    assert scratch <= 4 + 2 * threads + 1, f"{scratch:.1f} MiB besides the outputs"


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "fp8-block"])
def test_scratch_of_the_other_formats(name):
    """No copy of the weight either; in bf16 it would be 32 MiB."""
    scratch = scratch_mib(name, 4096, 4096, 512, 1)
    assert scratch <= 4 + 2 + 1, f"{scratch:.1f} MiB besides the outputs"
