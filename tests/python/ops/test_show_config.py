"""What `show_config` says of the instruction set."""

import os
import subprocess
import sys

import pytest
import torch

from monograph.diagnosis.report import Report
from monograph.ops.show_config import ISA_NAMES, config, kernels_in_use

CODE = "from monograph.ops.show_config import config; print(config()['isa'])"


def _shown(isa):
    environment = os.environ | {"MONOGRAPH_ISA": isa}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return run.stdout.splitlines()[-1]


# Of either architecture, its sets in their order.
ORDERS = (("scalar", "avx2", "avx512", "avx512_bf16", "amx"), ("scalar", "neon"))


@pytest.mark.parametrize(
    ("isa", "better"),
    [("scalar", "avx2"), ("avx2", "avx512"), ("avx512_bf16", "amx"), ("scalar", "neon")],
)
def test_a_cap_and_what_would_be_better_are_named(isa, better):
    machine = ISA_NAMES[torch.ops.monograph.system_info()[1]]
    order = next(order for order in ORDERS if better in order)
    if machine not in order[max(order.index(isa), 1) :]:
        pytest.skip(f"the machine has {machine}")
    line = _shown(isa)
    if machine != isa:
        assert line.startswith(f"{isa} (capped by MONOGRAPH_ISA; the machine has {machine}); ")
    assert f"; better: {better}" in line


def test_the_best_set_has_none_above():
    line, chosen = config()["isa"], ISA_NAMES[torch.ops.monograph.system_info()[0]]
    assert line.startswith(chosen)
    assert ("better" in line) == (chosen not in ("amx", "neon"))


def test_doctor_names_the_set():
    assert f"kernels         {kernels_in_use()}" in str(Report())
