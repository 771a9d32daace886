"""No arguments crash an operator, and each is refused by a sentence that names it."""

import pathlib
import subprocess
import sys

import pytest
import torch

import monograph as mg
from support import hostile_arguments, hostile_calls

SCRIPT = pathlib.Path(hostile_arguments.__file__)
CALLS = 1500


def test_every_operator_has_a_valid_call():
    """A new operator is found by its schema; what it needs is a function in hostile_calls.py."""
    for name in hostile_arguments.operators():
        arguments = getattr(hostile_calls, name)(hostile_arguments.Random(1))
        getattr(torch.ops.monograph, name)(*arguments)


def test_hostile_calls_neither_crash_nor_surprise(tmp_path):
    """In a process of its own: a crash is reported as the call that caused it."""
    status = tmp_path / "status"
    command = [sys.executable, SCRIPT, "--calls", CALLS, "--seed", 12, "--portable", "--status", status]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    number = int.from_bytes(status.read_bytes(), "little")
    again = f"python {SCRIPT.name} --seed 12 --portable --only {number}"
    assert run.returncode == 0, f"{again}\n{run.stdout[-3000:]}\n{run.stderr[-2000:]}"
    assert "'failed': 0" in run.stdout


def weight():
    packed = mg.quantize(torch.randn(8, 64))
    return packed.values, list(packed.scales), list(packed.layout)


def test_lists_of_linear_shared_come_together():
    """u without b, du without a, a without u: each ended the process, or was ignored."""
    values, scales, layout = weight()
    layouts = [*layout, 1]
    x, u, b, a = torch.randn(3, 64), torch.randn(3, 4), torch.randn(8, 4), torch.randn(4, 64)
    shared, shared_dx = torch.ops.monograph.linear_shared, torch.ops.monograph.linear_shared_dx
    with pytest.raises(RuntimeError, match="u has 1 entries, b has 0; they must come together"):
        shared(x, [values], scales, layouts, [], [u], [], [])
    with pytest.raises(RuntimeError, match="du has 1 entries, a has 0"):
        shared_dx([torch.randn(3, 8)], [values], scales, layouts, [u], [])
    with pytest.raises(RuntimeError, match="a has 1 entries, wanted 0 or 0"):
        shared(x, [values], scales, layouts, [], [], [], [a])
    for count in (-1, 2, 2**63 - 1):
        with pytest.raises(
            RuntimeError, match=f"layouts claims {count} scales for weight 0, 1 of 1 are left"
        ):
            shared(x, [values], scales, [*layout, count], [], [u], [b], [])
    with pytest.raises(RuntimeError, match=r"a has the wrong shape, wanted \[4, 64\]"):
        shared(x, [values], scales, layouts, [], [u], [b], [a[:, :63]])
    with pytest.raises(RuntimeError, match=r"a has the wrong shape, wanted \[4, 64\]"):
        torch.ops.monograph.linear(x, values, scales, layout, None, u, b, a[:3])
    with pytest.raises(RuntimeError, match="a is given without u and b"):
        torch.ops.monograph.linear(x, values, scales, layout, None, None, None, a)


def test_shapes_whose_product_overflows():
    values, scales, _ = weight()
    empty = torch.empty(0, dtype=torch.uint8)
    ops = torch.ops.monograph
    for shape in ([2**32, 2**32], [2**62, 2], [2**62, 0], [0, 2**63 - 1], [2**60, 16], [2**33, 0, 2**33]):
        with pytest.raises(RuntimeError, match="too many elements"):
            ops.dequantize(empty, [empty], [1, 64, *shape], torch.float32)
        with pytest.raises(RuntimeError, match="too many elements"):
            ops.dequantize(values, scales, [1, 64, *shape], torch.float32)
    with pytest.raises(
        RuntimeError, match="a plain weight has 64 elements, layout says 4294967296 x 4294967296"
    ):
        ops.linear(torch.randn(3, 64), torch.randn(64), [], [0, 0, 2**32, 2**32], None, None, None, None)
    # 2^62 matrices without elements: four bytes each are 2^64, which is 0.
    with pytest.raises(RuntimeError, match="too many elements"):
        ops.quantize(torch.empty(2**62, 0, 16), 5, 16, False, False)
    # Rows without columns: nothing to compute, and no walk over them.
    none = torch.empty(0)
    assert ops.linear(torch.empty(2**40, 0), none, [], [0, 0, 0, 0], None, None, None, None).shape == (
        2**40,
        0,
    )
    with pytest.raises(
        RuntimeError, match=r"no memory for a result of shape \[1099511627776, 4096\] in float32"
    ):
        ops.linear(torch.empty(2**40, 0), none, [], [0, 0, 4096, 0], None, None, None, None)


def test_none_is_no_tensor():
    values, scales, layout = weight()
    ops = torch.ops.monograph
    with pytest.raises(RuntimeError, match="linear: x is None, wanted a tensor"):
        ops.linear(None, values, scales, layout, None, None, None, None)
    with pytest.raises(RuntimeError, match="dequantize: values is None"):
        ops.dequantize(None, scales, layout, torch.float32)
    elsewhere = torch.empty(3, 5, device="meta")
    with pytest.raises(ValueError, match="reload: handle is None, wanted a tensor"):
        ops.reload(None, elsewhere)
    with pytest.raises(ValueError, match="wait: handle is None, wanted a tensor"):
        ops.wait(None, elsewhere, [3, 5], torch.float32)
    with pytest.raises(RuntimeError, match="seeded_dropout: seed is None"):
        ops.seeded_dropout(torch.randn(3), None, 0, 0.5)


def test_devices_must_agree():
    values, scales, layout = weight()
    with pytest.raises(ValueError, match="linear: values is on meta, wanted cpu as the others"):
        torch.ops.monograph.linear(
            torch.randn(3, 64), values.to("meta"), scales, layout, None, None, None, None
        )


def test_memory_that_is_written_is_not_read():
    values, scales, layout = weight()
    both = torch.empty(8 * 64, dtype=torch.float32)
    values = both.view(torch.uint8)[: values.numel()].copy_(values.view(-1))
    with pytest.raises(RuntimeError, match="out shares memory with values"):
        torch.ops.monograph.dequantize_out(values, scales, layout, both.view(8, 64))


def test_moments_of_another_shape_are_not_written():
    """torch's fused kernel writes them by the shape of the parameter."""
    p = torch.zeros(64)
    with pytest.raises(
        ValueError, match=r"adamw: exp_avg\[0\] is float32 \[2\] on cpu, wanted float32 \[64\]"
    ):
        mg.ops.adamw.adamw(
            [p],
            [p],
            [torch.zeros(2)],
            [p],
            torch.tensor(0.0),
            torch.tensor(1e-3),
            0.9,
            0.99,
            1e-8,
            [0.0],
            1.0,
        )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, -64, False, False, 0, 0), "block size is -64"),
        ((5, 16, False, False, 0, 2**63 - 1), "scale_bytes is 9223372036854775807"),
        ((1, 64, False, False, 99, 0), "rule is 99"),
    ],
)
def test_the_fake_of_quantize_names_wrong_numbers(numbers, message):
    with pytest.raises(ValueError, match=f"quantize: {message}"):
        torch.ops.monograph.quantize(torch.empty(4, 64, device="meta"), *numbers)
