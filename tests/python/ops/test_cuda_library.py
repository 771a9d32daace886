"""monograph_cuda.so without a GPU: it loads beside the CPU's library, and says why where it may not."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest
import torch

from monograph.ops import library

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILT = ROOT / "build" / "cuda" / "ops" / "cuda" / library.CUDA_NAME
OPERATORS = [
    "dequantize",
    "dequantize_out",
    "linear",
    "linear_cross_entropy",
    "linear_dx",
    "linear_log_probs",
    "linear_scaled",
    "linear_shared",
    "linear_shared_dx",
    "quantize",
    "seeded_dropout",
]

CHILD = """
import sys
import torch
import monograph
from monograph.diagnosis.selftest.probes import PROBES

has = torch._C._dispatch_has_kernel_for_dispatch_key
assert not has("monograph::dequantize", "CUDA")
torch.ops.load_library(sys.argv[1])
missing = [name for name in sys.argv[2:] if not has("monograph::" + name, "CUDA")]
missing += [name for name in PROBES if not has("monograph_cuda::probe_" + name, "CUDA")]
assert not missing, missing
weight = monograph.quantize(torch.randn(8, 64), "nf4")
assert weight.dequantize(torch.float32).shape == (8, 64)
try:
    torch.ops.monograph_cuda.probe_mul_rn(torch.ones(2), torch.ones(2))
except NotImplementedError as error:
    print("refused:", str(error).splitlines()[0])
mapped = open("/proc/self/maps").read()
assert "libcudart" not in mapped and "libcuda.so" not in mapped
"""


@pytest.mark.skipif(not BUILT.exists(), reason=".ci/run cuda builds the library")
def test_it_loads_under_a_torch_without_cuda_and_registers_beside_the_cpu():
    command = [sys.executable, "-c", CHILD, str(BUILT), *OPERATORS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "refused:" in run.stdout
    assert "'CPU' backend" in run.stdout


@pytest.fixture
def cuda_torch(monkeypatch, tmp_path):
    """As if torch had CUDA and the library were installed; loading it is recorded."""
    loaded = []
    (tmp_path / library.CUDA_NAME).write_bytes(b"")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(library, "library_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return loaded


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (12080, "the driver is that of CUDA 12.8, monograph_cuda.so wants 13.0 or later"),
        (13000, None),
        (13010, None),
        (0, None),  # no driver, no card: nothing will be called
    ],
)
def test_an_old_driver_is_named_and_the_portable_implementations_stay(
    cuda_torch, monkeypatch, driver, reason
):
    monkeypatch.setattr(library, "driver_version", lambda: driver)
    assert library.why_no_cuda() == reason
    assert bool(cuda_torch) == (reason is None)


def test_an_old_torch_is_named(cuda_torch, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.1"))
    assert library.why_no_cuda() == "torch is 2.12.1, monograph_cuda.so wants 2.13 or later"
    assert not cuda_torch


def test_without_a_driver_the_version_is_0():
    assert library.driver_version() >= 0


@pytest.fixture(scope="module")
def tool():
    """tools/check_cuda.py, which finds its neighbour on the path as a script does."""
    folder = str(ROOT / "tools")
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location("check_cuda", ROOT / "tools" / "check_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(folder)
    return module


PTX = ".visible .entry dequantize_a(\n{{ mul.rn.f32 %f1, %f2, %f3; {} }}\n"
SASS = "\t\tFunction : dequantize_a\n FMUL R1, R2, R3 ;\n {} ;\n"


@pytest.mark.parametrize(
    ("ptx", "sass", "finding"),
    [
        ("add.rn.f32 %f1, %f1, %f4;", "HFMA2.MMA R1, -RZ, RZ, 0, 0", None),
        ("div.rn.f32 %f1, %f1, %f4;", "FFMA R1, R2, R3, R4", None),
        ("fma.rn.f32 %f1, %f1, %f4, %f5;", "NOP", "fused in PTX: fma.rn.f32"),
        ("mul.f32 %f1, %f1, %f4;", "NOP", "without a rounding of its own in PTX: mul.f32"),
        ("", "FFMA R1, R2, R3, R4", "fused as code: ['FFMA']"),
        ("", "HFMA2 R1, R2, R3, R4", "fused as code: ['HFMA2']"),
    ],
)
def test_the_check_finds_what_is_fused(tool, ptx, sass, finding):
    found = tool.check_dequantize(PTX.format(ptx), SASS.format(sass))
    assert [finding] == [text.partition(": ")[2] for text in found] if finding else not found


def test_the_check_finds_spills_and_registers_above_the_ceiling(tool):
    ceilings = {"a": {"80": 32}, "gone": {"80": 8}}
    assert tool.check_registers({"a": {"80": (32, 0)}}, ceilings, whole=False) == []
    found = tool.check_registers({"a": {"80": (33, 16)}, "b": {"80": (1, 0)}}, ceilings, whole=True)
    assert found == [
        "a on sm_80: 16 bytes of stack, wanted 0",
        "a on sm_80: 33 registers, at most 32 wanted",
        "b on sm_80: not in registers.json; see --update",
        "gone: in registers.json, not in the library",
    ]
