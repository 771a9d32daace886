"""A backend registers beside the CPU's, in a library of its own, without a change to ops/.

ops/tests/second_backend.cpp implements dequantize for another device with the checks of ops/arguments/. The
memory of that device cannot be read by the host (guarded_device.py). In a process of its own, as it stays.
"""

import ctypes
import os
import signal
import subprocess
import sys

import pytest
import torch

import monograph as mg
from monograph.ops.dequantize import portable_dequantize
from support import guarded_device as device
from support.native_tool import program

FORMATS = [
    ("nf4", True),
    ("nf4", False),
    ("fp4", True),
    ("mxfp4", False),
    ("nvfp4", False),
    ("fp8-block", False),
]


def weight(name="nf4", double_quant=True):
    torch.manual_seed(0)
    packed = mg.quantize(torch.randn(40, 64), name, double_quant=double_quant)
    return packed.values, list(packed.scales), list(packed.layout)


def on_device(values, scales):
    return device.to_device(values), [device.to_device(s) for s in scales]


def the_host_cannot_read_the_device():
    values, _ = on_device(*weight()[:2])
    child = os.fork()
    if child == 0:
        ctypes.string_at(values.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def the_same_bits_as_on_the_cpu():
    for name, double_quant in FORMATS:
        values, scales, layout = weight(name, double_quant)
        for dtype in (torch.bfloat16, torch.float32):
            found = torch.ops.monograph.dequantize(*on_device(values, scales), layout, dtype)
            assert str(found.device) == "privateuseone:0"
            reference = portable_dequantize(values, scales, layout, dtype)
            assert torch.equal(device.to_host(found), reference), (name, dtype)
            assert torch.equal(torch.ops.monograph.dequantize(values, scales, layout, dtype), reference), name


def refused(message, values, scales, layout, dtype=torch.float32):
    with pytest.raises(RuntimeError) as error:
        torch.ops.monograph.dequantize(values, scales, layout, dtype)
    assert message in str(error.value), error.value


def two_devices_are_named():
    values, scales, layout = weight()
    there, scales_there = on_device(values, scales)
    refused(
        "dequantize: scales[3] is on cpu, wanted privateuseone", there, [*scales_there[:3], scales[3]], layout
    )
    refused("dequantize: values is on cpu, wanted privateuseone", values, scales_there, layout)
    second = device.to_device(scales[3], index=1)
    message = "dequantize: scales[3] is on privateuseone:1, wanted privateuseone:0 as the others"
    refused(message, there, [*scales_there[:3], second], layout)


def the_checks_of_the_cpu_hold_there():
    values, scales, layout = weight()
    there, scales_there = on_device(values, scales)
    eight = device.empty([8], torch.uint8)
    refused("scales[3] (offset) has 8 bytes, wanted 4", there, [*scales_there[:3], eight], layout)
    refused("values has 1280 bytes, wanted 1312", there, scales_there, [*layout[:2], 41, 64])
    refused("layout[0] is 99, not the number of a packed format", there, scales_there, [99, *layout[1:]])
    refused("the output has dtype int64", there, scales_there, layout, torch.int64)


def test_a_second_backend_registers_beside_the_first():
    command = [sys.executable, __file__, str(program("second_backend.so", "ops"))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout}\n{run.stderr}"
    assert run.stdout.split() == [part.__name__ for part in PARTS]


PARTS = (
    the_host_cannot_read_the_device,
    the_same_bits_as_on_the_cpu,
    two_devices_are_named,
    the_checks_of_the_cpu_hold_there,
)

if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    empties = device.register()
    for part in PARTS:
        part()
        print(part.__name__)
