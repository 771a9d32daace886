"""Tensors on two devices, or on one without a kernel: the error names operator, argument and both devices."""

import re
from random import Random
from typing import Any

import pytest
import torch

from support import hostile_arguments, hostile_calls

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# A seed may lie on the host; handles and ranges of rows do, whatever the device of the tensors beside them.
ALLOWED = {
    ("seeded_dropout", "x"),
    ("seeded_dropout_part", "x"),
    ("seeded_dropout_many", "x"),
    ("reload", "after"),
    ("wait", "after"),
    ("sum_rows_many", "dy"),
}


def arguments_of(name: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.monograph, name).default._schema.arguments]


def valid_call(name: str) -> list[Any]:
    """The drawn call that gives most of the tensors that may be missing."""
    draws = [getattr(hostile_calls, name)(Random(seed)) for seed in range(30)]
    return max(draws, key=lambda call: len(hostile_arguments._tensors(call)))


def moved(name: str) -> list[tuple[str, list[Any]]]:
    """(argument, call) with this argument, or the last entry of this list, on the meta device."""
    call, calls = valid_call(name), []
    for i, (argument, value) in enumerate(zip(arguments_of(name), call, strict=False)):
        if isinstance(value, torch.Tensor):
            calls.append((argument, [*call[:i], value.to("meta"), *call[i + 1 :]]))
        elif isinstance(value, list) and value and isinstance(value[-1], torch.Tensor):
            last = f"{argument}[{len(value) - 1}]"
            calls.append((last, [*call[:i], [*value[:-1], value[-1].to("meta")], *call[i + 1 :]]))
    return calls


OPERATORS = [name for name in hostile_arguments.operators() if hostile_arguments._tensors(valid_call(name))]
KERNELS = [
    name for name in OPERATORS if torch._C._dispatch_has_kernel_for_dispatch_key(f"monograph::{name}", "CPU")
]


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_on_two_devices_are_named(name):
    """What a user meets: torch gives such a call to the fake or the portable implementation."""
    for argument, call in moved(name):
        devices = {t.device.type for t in hostile_arguments._tensors(call)}
        if devices == {"meta"} or (name, argument) in ALLOWED:
            continue
        with pytest.raises((ValueError, RuntimeError)) as refused:
            getattr(torch.ops.monograph, name)(*call)
        text = str(refused.value)
        said = re.search(rf"{name}: (\w+)(?:\[\d+\])? is .*\bon (\w+), wanted (.*)", text)
        assert said, (argument, text)
        named = call[arguments_of(name).index(said[1])]
        assert said[2] in {t.device.type for t in hostile_arguments._tensors([named])}, (argument, text)
        assert (devices - {said[2]}).pop() in said[3], (argument, text)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_the_cpu_names_a_device_that_is_not_its_own(name):
    """What a backend meets: torch picks a kernel by one tensor, and another lies elsewhere."""
    operator = getattr(torch.ops.monograph, name).default
    for argument, call in moved(name):
        with pytest.raises(RuntimeError, match=rf"{name}: {re.escape(argument)} is on meta, wanted cpu"):
            operator.redispatch(CPU, *call)


def test_the_kernels_of_the_cpu_are_found():
    assert {"dequantize", "linear", "linear_cross_entropy", "pack", "quantize", "varlen_attention"} <= set(
        KERNELS
    )


def test_a_device_without_kernel_and_portable_implementation_is_named():
    data = torch.empty(16384, dtype=torch.uint8, device="meta")
    with pytest.raises(RuntimeError, match="limit_move: input is on meta, wanted cpu"):
        torch.ops.monograph.limit_move(data, data)
