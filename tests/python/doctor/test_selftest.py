"""The self-test of a device: its whole logic on the CPU, each kind of fault found, reports checked."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from monograph.__main__ import main
from monograph.cli.doctor import MOST_BYTES
from monograph.diagnosis.selftest import CASES, digests, outcome, probes, providers, run, training, wrong_with
from monograph.diagnosis.selftest.device import Device, HostDevice, PeakMemory
from monograph.diagnosis.selftest.report import checksum
from monograph.ops import experts_torch
from monograph.ops.dequantize import portable_dequantize
from monograph.ops.formats import FORMATS
from monograph.ops.linear import portable_linear, portable_linear_dx
from monograph.ops.providers import TABLE

pytestmark = pytest.mark.slow
BY_NAME = {case.name: case for case in CASES}


class Portable(HostDevice):
    """The portable implementations, on the CPU."""

    def dequantize(self, values, scales, layout, dtype):
        return portable_dequantize(values, scales, layout, dtype)

    def linear(self, x, values, scales, layout, *rest):
        return portable_linear(x, values, scales, layout, *rest)

    def linear_dx(self, dy, values, scales, layout):
        return portable_linear_dx(dy, values, scales, layout)


@pytest.fixture(scope="module")
def whole_report() -> dict[str, Any]:
    return run(HostDevice())


def test_all_of_it_passes_on_the_cpu(whole_report):
    rows = {row["name"]: row for row in whole_report["tests"]}
    assert set(rows) == set(BY_NAME)
    for name, row in rows.items():
        wanted = "skipped" if name.startswith("probe ") else "pass"
        assert row["result"] == wanted, row
    assert whole_report["state"] == "incomplete"
    assert wrong_with(whole_report) == []


@pytest.mark.per_isa
def test_committed_digests_are_those_of_this_cpu():
    assert digests.of_the_cpu() == digests.committed()


@pytest.mark.parametrize("name", FORMATS)
def test_committed_digests_are_those_of_the_portable_implementation(name):
    assert outcome(BY_NAME[f"dequantize {name}"], Portable())["result"] == "pass"


def test_digests_cover_every_code_under_every_scale():
    for fmt in FORMATS.values():
        (_, (values, scales, layout)), *_ = digests.packed_cases(fmt)
        if fmt.name == "fp8-block":
            continue  # square blocks: every code, six scales of each type
        codes = 512 if fmt.bits == 4 else 256
        assert values.reshape(-1, 256).sort(dim=1).values.unique(dim=0).shape == (1, 256)
        per_unit = scales[0].reshape(layout[2], codes // layout[1], -1)
        assert len(per_unit[:, 0].unique(dim=0)) >= (256 if per_unit.shape[-1] == 1 else 60)


def test_without_a_card_everything_is_skipped_with_a_reason(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    path = tmp_path / "report.json"
    assert main(["doctor", "--device", "cuda", "--json", "--quiet", "--out", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(path.read_text())
    assert {"schema_version", "device", "state", "tests", "versions", "sha256"} <= report.keys()
    assert (report["schema_version"], report["device"], report["state"]) == (1, "cuda", "no device")
    assert [row["name"] for row in report["tests"]] == list(BY_NAME)
    for row in report["tests"]:
        assert (row["result"], bool(row["reason"])) == ("skipped", True), row
    assert main(["doctor", "--verify", str(path)]) == 0
    assert "no device" in capsys.readouterr().out


BARE = """
import sys
for name in ("transformers", "peft", "trl", "accelerate", "yaml", "rich", "datasets", "safetensors"):
    sys.modules[name] = None
from monograph.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def with_torch_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BARE, *arguments], capture_output=True, text=True)


def test_the_owner_of_a_card_needs_torch_alone():
    done = with_torch_alone("doctor", "--device", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["result"] for row in json.loads(done.stdout)["tests"]} == {"skipped"}


def test_a_command_that_needs_more_says_what_to_install():
    done = with_torch_alone("train", "recipe.yml")
    assert done.returncode == 5
    wanted = (
        "monograph: train needs yaml, which is not installed: pip install --no-build-isolation '.[train]'"
    )
    assert done.stderr.splitlines()[-1].startswith(wanted)


def test_the_page_says_what_was_run():
    """Its first line, and as many owners in its table as reports are kept that verify and passed."""
    root = pathlib.Path(__file__).parents[3]
    text = (root / "docs" / "explain" / "gpu.md").read_text()
    reports = [json.loads(path.read_text()) for path in (root / "bench" / "results" / "gpu").glob("*.json")]
    assert all(wrong_with(report) == [] for report in reports)
    if not reports:
        assert "not yet run on a GPU" in text.splitlines()[0]
    claimed = sum(map(int, re.findall(r"^\|.*self-tested by (\d+)", text, re.MULTILINE)))
    assert claimed <= sum(report["state"] == "passed" for report in reports)
    assert f"there are {len(reports)}." in text


def test_the_command_refuses_what_makes_no_sense(capsys, tmp_path):
    for arguments in (
        ["--device", "abacus"],
        ["--device=cuda", "--verify", "x"],
        ["--device=cuda", "my.yml"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", *arguments])
        assert stopped.value.code == 2
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert main(["doctor", "--verify", str(broken)]) == 3
    assert main(["doctor", "--verify", str(tmp_path / "none.json")]) == 3
    for text, said in (("[" * 100_000, "recursion"), (" " * (MOST_BYTES + 1), "bytes, a report has at most")):
        broken.write_text(text)
        capsys.readouterr()
        assert main(["doctor", "--verify", str(broken)]) == 3
        assert said in capsys.readouterr().err


class OneBit(HostDevice):
    def dequantize(self, values, scales, layout, dtype):
        out = super().dequantize(values, scales, layout, dtype)
        out.view(-1).view(torch.uint8)[len(out) // 2] ^= 1
        return out


class WrongByte(HostDevice):
    def quantize(self, weight, format, double_quant):
        parts = super().quantize(weight, format, double_quant)
        parts[0].view(-1)[3] += 1
        return parts


class NotANumber(HostDevice):
    def linear(self, x, *rest):
        out = super().linear(x, *rest)
        out.view(-1)[-1] = float("nan")
        return out


class Inexact(HostDevice):
    """Three 16-bit roundings too many, in one row."""

    def linear_dx(self, dy, *rest):
        out = super().linear_dx(dy, *rest)
        out[-1] *= 1.03
        return out


class NoLowRank(HostDevice):
    def linear(self, x, values, scales, layout, bias=None, u=None, b=None):
        return super().linear(x, values, scales, layout)


class PastTheEnd(HostDevice):
    def dequantize_out(self, values, scales, layout, out):
        super().dequantize_out(values, scales, layout, out)
        end = out.storage_offset() * out.element_size() + out.nbytes
        torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage(), end, [1]).fill_(0)


class Unsteady(HostDevice):
    calls = 0

    def linear_dx(self, dy, *rest):
        self.calls += 1
        out = super().linear_dx(dy, *rest)
        return out + 1e-3 if self.calls == 57 else out


class Unordered(HostDevice):
    """A side stream that does not wait: it gets what the memory held before."""

    def on_side_stream(self, work):
        return super().on_side_stream(work) * 0


class Stale(HostDevice):
    def captured(self, work):
        return work(), lambda: None


class Hoarder(HostDevice):
    def linear(self, x, values, scales, layout, *rest):
        rows, cols = layout[2:4]
        kept = [torch.empty(rows, cols) for _ in range(8)]
        return super().linear(x, values, scales, layout, *rest) + 0 * len(kept)


class Broken(HostDevice):
    def dequantize(self, *_):
        raise RuntimeError("an illegal memory access was encountered")


FAULTS: list[tuple[type[Device], str, str]] = [
    (OneBit, "dequantize nf4", "digests differ from the CPU's"),
    (WrongByte, "quantize mxfp8", "digests differ from the CPU's"),
    (NotANumber, "linear against float64", "not finite"),
    (Inexact, "linear_dx against float64", "times its bound"),
    (NoLowRank, "linear with a low-rank part against float64", "times its bound"),
    (PastTheEnd, "guard bytes around dequantised weights", "1 guard bytes behind the result"),
    (Unsteady, "the same bits in 100 runs", "linear_dx: run 57 of 100"),
    (Unordered, "side streams", "another result"),
    (Stale, "capture and replay of a graph", "inputs times 2.0"),
    (Hoarder, "memory against the formula", "linear: held"),
    (Broken, "dequantize fp8-block", "RuntimeError: an illegal memory access"),
]


@pytest.mark.parametrize(("faulty", "name", "reason"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_of_the_device_is_reported(faulty, name, reason):
    row = outcome(BY_NAME[name], faulty())
    assert (row["result"], reason in row["reason"]) == ("fail", True), row
    assert outcome(BY_NAME[name], HostDevice())["result"] == "pass"


def test_everybody_who_can_compute_an_operator_is_compared_and_timed(whole_report):
    rows = {row["name"]: row.get("figures") for row in whole_report["tests"]}
    for operator, names in (("experts", ["monograph", "torch", "portable"]), ("varlen_attention", None)):
        figures = rows[f"{operator} by everybody who can"]
        assert figures["chosen"] == "monograph"
        for name in names or ["monograph", "portable"]:
            assert len(figures[name]["ms_quartiles"]) == 3
            assert max(figures[name]["errors"]) <= 2**-4
    assert set(providers.OPERATORS) == set(TABLE)


def test_a_wrong_provider_is_reported(monkeypatch):
    real = experts_torch.experts
    monkeypatch.setattr(experts_torch, "experts", lambda *a: (real(*a)[0] * 1.1, real(*a)[1]))
    row = outcome(BY_NAME["experts by everybody who can"], HostDevice())
    assert row["result"] == "fail"
    assert "experts by torch: off the CPU's by" in row["reason"]


def test_a_fault_makes_the_exit_code_1_and_the_report_is_still_whole(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "monograph.diagnosis.selftest.CASES", tuple(BY_NAME[n] for n in ("dequantize nf4", "side streams"))
    )
    monkeypatch.setattr("monograph.diagnosis.selftest.device.DEVICES", {"cpu": OneBit})
    path = str(tmp_path / "report.json")
    assert main(["doctor", "--device", "cpu", "--quiet", "--out", path]) == 1
    assert "cpu: failed; 1 pass, 1 fail, 0 skipped" in capsys.readouterr().out
    assert main(["doctor", "--verify", path]) == 0


def _fma(x: float, y: float, z: float) -> float:
    if not all(map(math.isfinite, (x, y, z))) or x * y + z == 0:
        return x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    assert Fraction(float(exact)) == exact  # so that float32 rounds it once
    return float(exact)


def _definition(name: str) -> Callable[..., torch.Tensor]:
    """What a probe computes, in float64 or by indices: not what its reference in the package calls."""

    def mma(a, b, c):
        return (c.double() + torch.einsum("mk,kn->mn", a.double(), b.double())).float()

    def copy_async(data, used):
        return torch.cat([data[:used], torch.zeros_like(data[used:])])

    def shuffle_xor(x, mask):
        return torch.stack([x[lane ^ mask] for lane in range(32)])

    def combined(x, y):
        return {"mul_rn": torch.mul, "add_rn": torch.add, "div_rn": torch.div}[name](
            x.double(), y.double()
        ).float()

    def fma_rn(x, y, z):
        return torch.tensor([_fma(*row) for row in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)])

    def widen_bf16(x):
        return (x.view(torch.uint16).to(torch.int32) << 16).view(torch.float32)

    def widen_fp16(x):
        return torch.from_numpy(x.numpy().astype("float32"))

    table = {
        **{f.__name__: f for f in (copy_async, shuffle_xor, fma_rn, widen_bf16, widen_fp16)},
        **dict.fromkeys(("mul_rn", "add_rn", "div_rn"), combined),
    }
    if name.startswith("mma"):
        return mma
    packed = torch.bfloat16 if name.endswith("bf16") else torch.float16
    return table.get(name, lambda x: x.to(packed))


def test_the_probes_are_those_of_the_library():
    source = (pathlib.Path(__file__).parents[3] / "ops/cuda/probes.cpp").read_text()
    for registered in (r'm\.def\("probe_(\w+)\(', r'm\.impl\("probe_(\w+)"'):
        assert sorted(re.findall(registered, source)) == sorted(probes.PROBES)
    documented = re.findall(r"^    probe_(\w+)\(", probes.__doc__ or "", re.MULTILINE)
    assert documented == list(probes.PROBES)


@pytest.mark.parametrize("name", probes.PROBES)
def test_probes_pass_by_their_definition_and_find_a_wrong_one(monkeypatch, name):
    case = BY_NAME[f"probe {name}"]
    right = _definition(name)
    monkeypatch.setattr(probes, "operator", lambda _: right)
    assert outcome(case, HostDevice())["result"] == "pass"

    def wrong(*arguments):
        out = right(*arguments).clone()
        out.view(-1)[-1] += 1
        return out

    monkeypatch.setattr(probes, "operator", lambda _: wrong)
    row = outcome(case, HostDevice())
    assert (row["result"], "1 of" in row["reason"]) == ("fail", True), row
    transposed = {"mma_bf16", "mma_fp16"}
    if name in transposed:  # operands at the wrong places: the fault that no harness on a host can find
        monkeypatch.setattr(probes, "operator", lambda _: lambda a, b, c: right(a.t(), b, c))
        assert outcome(case, HostDevice())["result"] == "fail"


def test_losses_that_leave_the_cpus_are_reported(monkeypatch):
    curve = [4.0 - 0.1 * i for i in range(training.STEPS)]
    answers = iter([curve, [*curve[:-1], curve[-1] * 1.05], curve, [4.0] * 19 + [float("nan")]])
    monkeypatch.setattr(training, "losses", lambda *_: next(answers))
    name = f"{training.STEPS} losses beside the CPU's"
    assert "off by 0.05" in outcome(BY_NAME[name], HostDevice())["reason"]
    assert outcome(BY_NAME[name], HostDevice())["result"] == "fail"


def test_what_begins_after_the_budget_is_skipped():
    report = run(HostDevice(), budget=-1.0)
    assert {row["reason"] for row in report["tests"]} == {"-1 s were over"}


def test_peak_memory_counts_what_lives_at_one_time():
    with PeakMemory() as found:
        for _ in range(3):
            a = torch.ones(1000)
            b = a + 1
            del a, b
        kept = torch.ones(500)
        kept.view(50, 10).add_(1)
    assert (found.peak, found.now) == (8000, 2000)


def _altered(report: dict[str, Any], change: Callable[[dict[str, Any]], Any], sign: bool) -> dict[str, Any]:
    report = copy.deepcopy(report)
    change(report)
    if sign:
        report["contents_sha256"] = checksum(report)
    return report


def _row(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in report["tests"] if row["name"] == name)


def _passed(report: dict[str, Any]) -> dict[str, Any]:
    for row in report["tests"]:
        row["result"] = "pass"
    report["state"] = "passed"
    return report


ALTERED: list[tuple[str, bool, Callable[[dict[str, Any]], Any], str]] = [
    ("a result", False, lambda r: _row(r, "side streams").update(result="fail", reason="x"), "was altered"),
    ("a figure", False, lambda r: _row(r, "side streams")["figures"].update(rounds=9), "was altered"),
    ("a digest", True, lambda r: _row(r, "dequantize nf4")["figures"].popitem(), "other figures than those"),
    ("a missing test", True, lambda r: r["tests"].pop(), "times beside bitsandbytes: the test is missing"),
    ("a test twice", True, lambda r: r["tests"].append(r["tests"][0]), "is there 2 times"),
    ("an unknown test", True, lambda r: r["tests"].append({"name": "new", "result": "pass"}), "no such test"),
    ("a result's word", True, lambda r: _row(r, "side streams").update(result="ok"), "result is 'ok'"),
    ("no reason", True, lambda r: _row(r, "side streams").update(result="skipped"), "without a reason"),
    ("the state", True, lambda r: r.update(state="passed"), "the tests say 'incomplete'"),
    ("no device", True, lambda r: r.update(state="no device"), "but dequantize nf4 was run"),
    ("the schema", True, lambda r: r.update(schema_version=2), "schema_version is 2, wanted 1"),
    ("a missing key", True, lambda r: r.pop("sha256"), "sha256 is missing"),
    ("a new key", True, lambda r: r.update(speed=1), "speed is no key"),
    ("monograph", True, lambda r: r["versions"].update(monograph="9.9"), "monograph is '9.9'"),
    ("torch", True, lambda r: r["versions"].update(torch="1.13"), "torch is '1.13'"),
    ("a hash", True, lambda r: r["sha256"].update(library="abc"), "library is 'abc'"),
    ("a schema of true", True, lambda r: r.update(schema_version=True), "schema_version is True, wanted 1"),
    ("another device", True, lambda r: r.update(device="abacus"), "device is 'abacus', wanted one of cuda"),
    ("a NaN", True, lambda r: _row(r, "side streams")["figures"].update(x=[math.nan]), "are not finite"),
    ("no card", True, lambda r: _passed(r).update(device="cuda", hardware={}), "architecture is missing"),
    ("rows", True, lambda r: r.update(tests=[1]), "wanted an object with a name"),
]


@pytest.mark.parametrize(
    ("sign", "change", "problem"), [a[1:] for a in ALTERED], ids=[a[0].replace(" ", "-") for a in ALTERED]
)
def test_a_doctored_report_is_refused(whole_report, sign, change, problem):
    found = wrong_with(_altered(whole_report, change, sign))
    assert any(problem in text for text in found), found
    assert wrong_with([]) == ["the report is a list, wanted an object"]
