"""tools/check_hip.py: what it must find in code for AMD, and that kernels with mma are refused by name."""

import importlib.util
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_hip", ROOT / "tools" / "check_hip.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNEL = """
  - .agpr_count:     0
    .name:           one
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: 0
    .vgpr_spill_count: {spilled}
    .wavefront_size: {lanes}
"""


@pytest.mark.parametrize(
    ("architecture", "numbers", "findings"),
    [
        ("gfx942", {"scratch": 0, "spilled": 0, "lanes": 64}, []),
        ("gfx1201", {"scratch": 0, "spilled": 0, "lanes": 32}, []),
        ("gfx90a", {"scratch": 0, "spilled": 0, "lanes": 32}, ["one: wavefront_size is 32, wanted 64"]),
        (
            "gfx1201",
            {"scratch": 16, "spilled": 2, "lanes": 32},
            ["one: vgpr_spill_count is 2, wanted 0", "one: private_segment_fixed_size is 16, wanted 0"],
        ),
    ],
)
def test_spills_and_the_width_of_waves_are_seen(tool, architecture, numbers, findings):
    table = "amdhsa.kernels:" + KERNEL.format(**numbers)
    assert tool.check_resources(architecture, table) == (findings, 1)


@pytest.mark.parametrize(
    ("line", "fused"),
    [
        ("%1 = fmul float %a, %b", 0),
        ("%1 = fmul contract float %a, %b", 1),
        ("%1 = call float @llvm.fma.f32(float %a, float %b, float %c)", 1),
        ("%1 = call float @llvm.fmuladd.f32(float %a, float %b, float %c)", 1),
    ],
)
def test_what_is_fused_in_dequantise_is_seen(tool, line, fused):
    code = f"define void @dequantize_kernel(float %a) {{\n  {line}\n}}\n"
    assert len(tool.check_dequantize(code)) == fused
    assert tool.check_dequantize(code.replace("dequantize", "other")) == [
        "no kernel of dequantise in the code"
    ]


@pytest.mark.skipif(shutil.which("clang++-19") is None, reason=".ci/install brings clang 19")
def test_a_kernel_with_mma_is_refused_by_name(tool):
    source = """
    #include "monograph/kernels/linear/gpu.cuh"
    void use() { (void)&monograph::gpu::linear_mma_kernel<monograph::Nf4, monograph::Bf16, 1>; }
    """
    command = [
        tool.CLANG,
        "-x",
        "hip",
        "--offload-arch=gfx942",
        "--cuda-device-only",
        "-nogpuinc",
        "-nogpulib",
    ]
    command += ["-std=c++20", "-fsyntax-only", "-Icore/monograph/gpu/hip", "-Icore", "-"]
    run = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0
    assert "kernels with it are not for AMD" in run.stderr
