"""Every allocation of the kernels' scratch fails in turn; run by test_thread_limits.py with the library of
failing calls preloaded.

Prints one line an operator: its name, how many allocations there were, and the exceptions they became.
"""

import ctypes
import threading
from collections.abc import Callable

import torch

import monograph as mg

FAILING = ctypes.CDLL(None)


def in_a_fresh_thread(body: Callable[[], object]) -> object:
    """A new thread has no scratch yet, and OpenMP gives it helpers that have none either."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(body())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def cases() -> dict[str, Callable[[], object]]:
    torch.manual_seed(1)
    rows, width = 96, 512
    x = torch.randn(rows, width, dtype=torch.bfloat16)
    w = mg.quantize(torch.randn(768, width, dtype=torch.bfloat16), "nf4", double_quant=True)
    packed = (w.values, list(w.scales), list(w.layout))
    dy = torch.randn(rows, 768, dtype=torch.bfloat16)
    head = torch.randn(1000, width, dtype=torch.bfloat16)
    labels = torch.arange(rows) % 1000
    q, k, v = (torch.randn(rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    cu = torch.tensor([0, 90, rows], dtype=torch.int32)
    attention = (cu, cu, None, None, True, 0, 0.125, 0.0)
    out, lse = torch.ops.monograph.varlen_attention(q, k, v, *attention)
    rule = [torch.randn(rows, heads, 64, dtype=torch.bfloat16) for heads in (2, 2, 4)]
    gates = (-torch.rand(rows, 4), torch.rand(rows, 4))
    documents = (cu, None, 0.125, True)
    return {
        "linear": lambda: torch.ops.monograph.linear(x, *packed, None, None, None, None),
        "linear_dx": lambda: torch.ops.monograph.linear_dx(dy, *packed, None, None),
        "linear_cross_entropy": lambda: torch.ops.monograph.linear_cross_entropy(
            x, head, [], [0, 0, 1000, width], None, labels, 0.0, 1.0, True
        ),
        "varlen_attention": lambda: torch.ops.monograph.varlen_attention(q, k, v, *attention),
        "varlen_attention_backward": lambda: torch.ops.monograph.varlen_attention_backward(
            torch.ones_like(out), q, k, v, out, lse, *attention
        ),
        "gated_delta_rule": lambda: torch.ops.monograph.gated_delta_rule(*rule, *gates, *documents, True),
        "gated_delta_rule_backward": lambda: torch.ops.monograph.gated_delta_rule_backward(
            rule[2], None, *rule, *gates, *documents
        ),
    }


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a is None and b is None


def main() -> None:
    torch.set_num_threads(2)
    for name, run in cases().items():
        FAILING.fail_call(b"aligned_alloc", -1, -1)
        wanted = in_a_fresh_thread(run)
        assert not isinstance(wanted, Exception), wanted
        count = FAILING.fail_call(b"aligned_alloc", -1, -1)
        raised = set()
        for at in range(count):
            FAILING.fail_call(b"aligned_alloc", at, at)
            found = in_a_fresh_thread(run)
            if isinstance(found, Exception):
                raised.add(f"{type(found).__name__}: {str(found).splitlines()[0]}")
            else:  # threads share the work as they come: this run may have allocated less
                assert equal(found, wanted), (name, at)
            FAILING.fail_call(b"aligned_alloc", -1, -1)
            assert equal(in_a_fresh_thread(run), wanted), (name, at)
        print(name, count, sorted(raised))


if __name__ == "__main__":
    main()
