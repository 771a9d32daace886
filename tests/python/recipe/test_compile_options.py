"""torch_compile_options and torch_compile_mode: what may be written, and that Inductor gets it."""

import pytest
import torch

from monograph.ops import experts_torch, providers
from monograph.recipe import check_keys
from monograph.recipe.config.compile_options import OPTIONS, compile_options
from support.recipe_files import errors_of

# The ten options, in the order of their names.
_ten = """
assume_aligned_inputs comprehensive_padding coordinate_descent_check_all_directions
coordinate_descent_tuning decompose_mem_bound_mm epilogue_fusion fx_graph_cache max_autotune_gemm
shape_padding triton.cudagraphs
"""
TEN = _ten.split()


def test_ten_options_and_none_by_default(good):
    assert sorted(OPTIONS) == TEN
    assert check_keys(good).recipe.torch_compile_options is None


def test_options_are_checked_when_the_file_is_read(good):
    both = good | {"torch_compile": "auto", "sample_packing": True}
    read = check_keys(both | {"torch_compile_options": {"triton.cudagraphs": True}})
    assert [("no effect" in n, "sample_packing" in n) for n in read.notices] == [(True, False), (False, True)]
    assert check_keys(both | {"torch_compile_options": {"fx_graph_cache": True}}).notices == []
    off = good | {"torch_compile": False, "torch_compile_options": {"fx_graph_cache": True}}
    assert "torch_compile is false" in errors_of(off)[0]


def test_options_are_applied_and_put_back():
    import torch._inductor.config as inductor

    def now():
        return inductor.epilogue_fusion, inductor.triton.cudagraphs

    before = now()
    with compile_options({"epilogue_fusion": not before[0], "triton.cudagraphs": not before[1]}):
        assert now() == (not before[0], not before[1])
    assert now() == before
    with pytest.raises(RuntimeError), compile_options({"triton.cudagraphs": not before[1]}):
        raise RuntimeError
    assert now() == before
    with pytest.raises(AttributeError), compile_options({"epilogue_fusion": False, "triton.renamed": True}):
        pass
    assert now() == before


@pytest.mark.parametrize("name", TEN)
def test_torch_still_has_the_option(name):
    """Walks dotted names; a rename in torch fails here before it fails a user."""
    import torch._inductor.config as place

    for part in name.split("."):
        assert hasattr(place, part), f"torch {torch.__version__} has no inductor option {name}"
        place = getattr(place, part)
    assert isinstance(place, bool)


MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sets_what_torch_means_by_it_and_options_go_first(mode, good):
    import torch._inductor.config as inductor
    from torch._inductor import list_mode_options

    def now():
        return inductor.max_autotune, inductor.coordinate_descent_tuning, inductor.triton.cudagraphs

    keys = good | {"torch_compile": "auto", "torch_compile_mode": mode}
    keys |= {"device": "cuda"} if mode == "reduce-overhead" else {}
    read = check_keys(keys | {"torch_compile_options": {"coordinate_descent_tuning": False}})
    assert read.notices == []
    before, meant = now(), list_mode_options(mode)
    with compile_options(None, mode):
        assert now() == (
            meant.get("max_autotune", before[0]),
            meant.get("coordinate_descent_tuning", before[1]),
            meant.get("triton.cudagraphs", before[2]),
        )
        assert (now() == before) == (mode == "default")
    with compile_options(read.recipe.torch_compile_options, mode):
        assert not inductor.coordinate_descent_tuning
    assert now() == before


@pytest.mark.parametrize(
    ("card", "there", "asked", "who"),
    [
        ((9, 0), [], {}, []),
        ((8, 6), [], {}, ["experts by torch"]),
        ((9, 0), ["fla"], {}, ["causal_conv1d by fla", "gated_delta_rule by fla"]),
        ((9, 0), ["fla"], {"gated_delta_rule": "portable"}, ["causal_conv1d by fla"]),
    ],
)
def test_who_waits_where_a_cuda_graph_cannot_is_told(card, there, asked, who, good, monkeypatch):
    """Of the card that is here: reduce-overhead, max-autotune and the option mean CUDA graphs alike."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(experts_torch, "capability_of", lambda device: card)
    away = providers.LIBRARIES.keys() - {*there}
    monkeypatch.setattr(providers, "why_missing", lambda n, asked=False: "away" if n in away else None)

    def told(**more):
        keys = good | {"torch_compile": "auto", "device": "cuda", "sample_packing": False} | more
        notices = check_keys(keys | {"providers": asked or None}).notices
        return [notice for notice in notices if "for which no CUDA graph can wait" in notice]

    for mode in ("reduce-overhead", "max-autotune"):
        begins = f"torch_compile_mode: {mode}: triton.cudagraphs, and "
        found = told(torch_compile_mode=mode)
        assert [notice.removeprefix(begins).partition(":")[0] for notice in found] == who
    assert len(told(torch_compile_options={"triton.cudagraphs": True})) == len(who)
    for without in ("max-autotune-no-cudagraphs", "default", None):
        assert told(torch_compile_mode=without) == []
    off = {"triton.cudagraphs": False}
    assert told(torch_compile_mode="max-autotune", torch_compile_options=off) == []
    assert providers._asked == {}


def test_a_mode_is_one_of_torch_and_needs_torch_compile(good):
    assert errors_of(good | {"torch_compile_mode": "max-autotune"}) == [
        "torch_compile_mode: torch_compile is missing, so it would do nothing; write torch_compile: true (or "
        "auto) beside it"
    ]
    (message,) = errors_of(good | {"torch_compile": "auto", "torch_compile_mode": "fast"})
    assert message == f"torch_compile_mode is 'fast' (str), wanted {', '.join(MODES)} or empty"


def test_values_of_options_have_the_types_of_inductor(good, monkeypatch):
    """All ten are booleans in torch 2.13; one that is a number or a text would be taken as such."""
    both = good | {"torch_compile": "auto"}
    wrong = errors_of(both | {"torch_compile_options": {"epilogue_fusion": 1, "fx_graph_cache": "yes"}})
    assert wrong == [
        "torch_compile_options: epilogue_fusion is 1, wanted true or false",
        "torch_compile_options: fx_graph_cache is 'yes', wanted true or false",
    ]
    for name in ("cpp.threads", "max_autotune_gemm_backends"):
        monkeypatch.setitem(OPTIONS, name, None)
    options = {"cpp.threads": 2, "max_autotune_gemm_backends": "CPP"}
    assert check_keys(both | {"torch_compile_options": options}).recipe.torch_compile_options == options
    wrong = errors_of(
        both | {"torch_compile_options": {"cpp.threads": True, "max_autotune_gemm_backends": 1}}
    )
    assert [message.split(", wanted ")[1] for message in wrong] == ["a whole number", "text"]


def test_doctor_applies_mode_and_options(good, monkeypatch):
    import argparse

    import torch._inductor.config as inductor

    from monograph import diagnosis
    from monograph.cli import doctor as command
    from monograph.recipe.data import encode, prepare
    from monograph.recipe.run import batches, load_model

    seen = []
    report = argparse.Namespace(holds=True, to_json=lambda: "")

    def looked(*_, **__):
        seen.append((inductor.max_autotune, inductor.epilogue_fusion))
        return report

    monkeypatch.setattr(diagnosis, "doctor", looked)
    monkeypatch.setattr(encode, "load_tokenizer", lambda *_: argparse.Namespace(pad_token_id=0))
    monkeypatch.setattr(prepare, "prepare", lambda *_: argparse.Namespace(train=None))
    monkeypatch.setattr(load_model, "load_model", lambda *_: None)
    steps = argparse.Namespace(step=lambda *_: [None], sampler=argparse.Namespace(steps=lambda _: 2))
    monkeypatch.setattr(batches, "Batches", lambda *_, **__: steps)
    keys = {"torch_compile_mode": "max-autotune-no-cudagraphs", "torch_compile": "auto"}
    recipe = check_keys(good | keys | {"torch_compile_options": {"epilogue_fusion": False}}).recipe
    options = argparse.Namespace(config="recipe.yml", json=True, trace_only=True, quiet=True)
    assert command._doctor(recipe, options) == 0
    assert seen == [(True, False)]
    assert not inductor.max_autotune
