"""Who computes an operator on a device: every row of the table, libraries there and not, what was asked."""

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch

from monograph.ops import providers
from monograph.ops.providers import OURS, PORTABLE, TABLE, choose
from monograph.upstream.tested_versions import PROVIDERS
from monograph.upstream.torch_names import call_portable
from support.provider_rows import give_kernels, give_row

# Said a second time, by hand: who computes an operator where, best first.
EXPECTED = {
    ("causal_conv1d", "cpu"): ["monograph", "portable"],
    ("causal_conv1d", "cuda"): ["monograph", "fla", "portable"],
    ("gated_delta_rule", "cpu"): ["monograph", "portable"],
    ("gated_delta_rule", "cuda"): ["monograph", "fla", "portable"],
    ("experts", "cpu"): ["monograph", "torch", "portable"],
    ("experts", "cuda"): ["monograph", "torch", "portable"],
    ("varlen_attention", "cpu"): ["monograph", "portable"],
    ("varlen_attention", "cuda"): ["monograph", "torch", "flash-attn"],
}
ALWAYS = {"monograph", "portable", "torch"}
DEVICES = ("cpu", "cuda", "xpu", "mps", "privateuseone")


@pytest.fixture
def libraries(monkeypatch):
    """Says which libraries are there; gives the function that says it."""
    there: set[str] = set()

    def missing(provider, asked=False):
        return None if provider in there | ALWAYS else f"{provider} is not there"

    def put(*names):
        there.clear()
        there.update(names)

    monkeypatch.setattr(providers, "why_missing", missing)
    return put


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernels", [True, False])
def test_every_operator_on_every_device_with_and_without_each_library(
    device, kernels, libraries, monkeypatch
):
    give_kernels(monkeypatch, kernels)
    names = sorted(providers.LIBRARIES)
    for bits in range(2 ** len(names)):
        present = [name for i, name in enumerate(names) if bits >> i & 1]
        libraries(*present)
        found = providers.choices(device)
        assert set(TABLE) <= set(found)
        for operator, choice in found.items():
            order = EXPECTED.get((operator, device), ["monograph", "portable"])
            able = [
                name
                for name in order
                if name in {*present, "torch", "portable"} or (name == OURS and kernels)
            ]
            assert choice == (able[0] if able else "", choice.others, False), (operator, present)
            assert list(choice.others) == order[: order.index(able[0])] if able else order
            assert all(choice.others.values())
            assert list(providers.candidates(operator, device)) == able
            for gradient in ("_backward", "_dw"):
                assert (
                    choose(operator + gradient, device).provider == choice.provider or operator not in TABLE
                )
            taken = providers.may_take_over(device, operator)
            assert taken == (bool(able) and able[0] != PORTABLE), (operator, present)
    assert providers.may_take_over("meta", *found)


def test_the_table_lists_what_the_test_says():
    rows = {
        (operator, device): list(names) for operator, row in TABLE.items() for device, names in row.items()
    }
    assert rows == EXPECTED
    assert {name for names in rows.values() for name in names} - ALWAYS == set(providers.LIBRARIES)
    assert {distribution for _, distribution in providers.LIBRARIES.values()} == set(PROVIDERS)


def test_each_provider_of_the_table_has_its_functions():
    called = {(operator, name) for operator, row in TABLE.items() for names in row.values() for name in names}
    assert set(providers.CALLS) == {(o, name) for o, name in called if name not in (OURS, PORTABLE)}
    for (operator, _), module in providers.CALLS.items():
        source = importlib.util.find_spec(module).origin  # the library that it calls may be missing
        with open(source, encoding="utf-8") as file:
            defined = {node.name for node in ast.parse(file.read()).body if isinstance(node, ast.FunctionDef)}
        names = {name for name in providers._all_names() if providers.row_name(name) == operator}
        assert {"why_not", *names} <= defined, module


def test_real_libraries_are_found_by_import_and_version(monkeypatch):
    module, distribution = providers.LIBRARIES["flash-attn"]
    package = module.partition(".")[0]
    give_kernels(monkeypatch, False)
    if importlib.util.find_spec(package) is None:
        assert providers.why_missing("flash-attn") == "flash-attn is not installed"
    made = types.ModuleType(package)
    made.__spec__ = importlib.machinery.ModuleSpec(package, None)
    monkeypatch.setitem(sys.modules, package, made)
    providers._looked_up.cache_clear()
    real = importlib.metadata.version
    versions = {distribution: "2.8.3"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    assert providers.why_missing("flash-attn") is None
    versions[distribution] = "3.0.0"
    providers._looked_up.cache_clear()
    assert providers.why_missing("flash-attn") == "flash-attn is 3.0.0, tested is 2.8"
    assert providers.why_missing("flash-attn", asked=True) is None
    monkeypatch.setitem(providers.LIBRARIES, "flash-attn", ("flash_attn.gone", distribution))
    versions[distribution] = "2.8.1"
    assert "flash-attn does not import: ModuleNotFoundError" in providers.why_missing("flash-attn")
    providers._looked_up.cache_clear()


def test_what_is_asked_for_wins_and_comes_to_an_end(libraries, monkeypatch):
    give_kernels(monkeypatch, False)
    assert choose("varlen_attention", "cuda").provider == "torch"
    libraries("flash-attn")
    with providers.using({"varlen_attention": "flash-attn", "rms_norm": "portable"}):
        assert choose("varlen_attention", "cuda") == ("flash-attn", {}, True)
        assert choose("varlen_attention_backward", "cuda").provider == "flash-attn"
        assert providers.candidates("varlen_attention", "cuda") == ("flash-attn",)
        assert choose("varlen_attention", "xpu") == ("portable", {OURS: "no kernel for xpu"}, False)
        assert providers.may_take_over("cuda", "rms_norm")  # asked for
        assert not providers.may_take_over("cuda", "rotary")
        with providers.using({"varlen_attention": "portable"}):
            assert choose("varlen_attention", "cuda").provider == "portable"
            assert choose("rms_norm", "cuda").asked
        assert choose("varlen_attention", "cuda").provider == "flash-attn"
    assert choose("varlen_attention", "cuda") == ("torch", {OURS: "no kernel for cuda"}, False)
    libraries()
    with providers.using({"varlen_attention": "flash-attn"}):
        with pytest.raises(
            ValueError, match="varlen_attention by flash-attn on cuda: flash-attn is not there"
        ):
            choose("varlen_attention", "cuda")
        assert not choose("varlen_attention", "cpu").asked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rms_norm", "'rms_norm' has no provider"),
        ("=torch", "'' is no operator"),
        ("atention=torch", "'atention' is no operator that others can compute; those with several"),
        ("varlen_attention=fa3", "varlen_attention by 'fa3' is unknown, wanted one of flash-attn, mono"),
        ("linear=torch", "linear by 'torch' is unknown, wanted one of monograph, portable"),
        ("offload=torch", "offload by 'torch' is unknown"),
    ],
)
def test_words_that_mean_nothing_are_named(text, said):
    written = ".*; written as MONOGRAPH_PROVIDER=rms_norm=portable"
    with pytest.raises(ValueError, match=f"MONOGRAPH_PROVIDER is '{text}': {said}{written}"):
        providers.parsed(text)


def test_what_a_provider_says_of_a_card(monkeypatch):
    from monograph.ops import experts_torch

    give_kernels(monkeypatch, False)
    monkeypatch.setattr(experts_torch, "capability_of", lambda device: (8, 6))
    monkeypatch.setitem(TABLE["varlen_attention"], "cuda", (PORTABLE,))
    assert providers.notes(torch.device("cuda")) == [
        "experts by torch: grouped_mm of torch copies offsets to the host on sm_86"
    ]
    monkeypatch.setattr(experts_torch, "capability_of", lambda device: (9, 0))
    assert providers.notes(torch.device("cuda")) == []
    for operator in ("causal_conv1d", "gated_delta_rule"):
        give_row(monkeypatch, operator, "cuda", "fla")
    monkeypatch.setattr(providers, "why_missing", lambda name, asked=False: None)
    assert providers.notes(torch.device("cuda")) == [
        f"{operator} by fla: the host reads the number of chunks in each call"
        for operator in ("causal_conv1d", "gated_delta_rule")
    ]


def test_spaces_and_nothing_between_commas_are_fine():
    assert providers.parsed(" linear = portable ,, ") == {"linear": "portable"}
    assert providers.parsed("") == {}


def test_a_kernel_of_the_cpu_is_replaced_and_comes_back(monkeypatch):
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    operator = torch.ops.monograph.rms_norm.default
    arguments = (x, weight, None, 1e-6, False, True)
    want = operator(*arguments)
    called = []

    def portable(operator, *rest):
        called.append(operator._schema.name)
        return call_portable(operator, *rest)

    monkeypatch.setattr(providers, "call_portable", portable)
    for inside in (True, False):
        with providers.using({"rms_norm": "portable"} if inside else None):
            got = operator(*arguments)
        assert called == ["monograph::rms_norm"]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.fixture
def two_providers(monkeypatch):
    """A provider of rms_norm that takes numbers above 0 only, before the portable one, on the CPU."""
    module = types.ModuleType("a_provider")
    module.why_not = lambda operator, x, *rest: None if bool((x > 0).all()) else "x has numbers of 0 or less"
    module.rms_norm = lambda x, *rest: (x * 2, x[..., :0])
    monkeypatch.setitem(sys.modules, "a_provider", module)
    monkeypatch.setitem(TABLE, "rms_norm", {"cpu": ("theirs", PORTABLE)})
    monkeypatch.setitem(providers.CALLS, ("rms_norm", "theirs"), "a_provider")
    monkeypatch.setattr(providers, "_said", set())
    return providers.serve("rms_norm", lambda x, *rest: ("portable", rest))


def test_what_a_provider_cannot_do_the_next_does_and_it_is_said_once(two_providers):
    good, bad = torch.ones(2, 4), torch.zeros(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(two_providers(good, 1)[0], good * 2)
    words = "rms_norm on cpu by the portable implementation, slowly: theirs: x has numbers of 0 or less"
    with pytest.warns(UserWarning, match=words):
        assert two_providers(bad, 1) == ("portable", (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert two_providers(bad, 2) == ("portable", (2,))


def test_what_was_asked_for_and_cannot_raises(two_providers):
    with providers.using({"rms_norm": "theirs"}):
        assert torch.equal(two_providers(torch.ones(1), 1)[0], torch.full((1,), 2.0))
        with pytest.raises(ValueError, match=r"rms_norm on cpu: theirs: x has .*; .*=rms_norm=portable comp"):
            two_providers(torch.zeros(1), 1)


def test_a_row_without_a_portable_one_raises_with_all_reasons(two_providers, monkeypatch):
    give_row(monkeypatch, "rms_norm", "cpu", "theirs", "flash-attn")
    monkeypatch.setattr(
        providers, "why_missing", lambda name, asked=False: "it is away" if name == "flash-attn" else None
    )
    served = providers.serve("rms_norm", lambda *_: None, "else call somebody")
    with pytest.raises(
        ValueError, match=r"rms_norm on cpu: theirs: x has .*; it is away; else call somebody;"
    ):
        served(torch.zeros(1))


def _with(text, code):
    environment = os.environ | {"MONOGRAPH_PROVIDER": text}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_environment_is_read_and_shown():
    code = (
        "import json, monograph\n"
        "from monograph.ops.show_config import config\n"
        "from monograph.ops.providers import choose\n"
        "print(json.dumps([config()['providers cpu'], choose('rms_norm', 'cpu')]))"
    )
    run = _with("rms_norm=portable", code)
    assert run.returncode == 0, run.stderr[-2000:]
    line, choice = json.loads(run.stdout.splitlines()[-1])
    assert "rms_norm" in line.partition("portable: ")[2].partition(";")[0].split(", ")
    assert line.endswith("monograph: all others")
    assert choice == ["portable", {}, True]
    run = _with("rms_norm=fla", "import monograph")
    assert run.returncode == 1
    assert (
        run.stderr.strip().splitlines()[-1].startswith("ValueError: MONOGRAPH_PROVIDER is 'rms_norm=fla': ")
    )
