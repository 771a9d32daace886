"""What the benchmarks cover: every allowed compile option alone, and the shapes of the models people name."""

import pytest
import torch._inductor.config

from monograph.bench.delta_rule import _cases, _channels
from monograph.bench.dequantize import SHAPES
from monograph.bench.own_step import SEEDS, asked, variants
from monograph.bench.step import LLAMA, QWEN
from monograph.recipe.config.compile_options import OPTIONS, compile_options, option_default

pytestmark = pytest.mark.slow


def test_our_step_is_measured_with_each_option_alone():
    found = variants()
    modes = [how["mode"] for name, how in found.items() if "=" not in name]
    assert modes == ["eager", "graph", "whole_step", "inductor"]
    alone = [how["options"] for how in found.values() if "options" in how]
    assert [name for options in alone for name in options] == list(OPTIONS)
    for (option,) in (options.items() for options in alone):
        name, value = option
        assert value is (not option_default(name))
        with compile_options(dict([option])):
            assert option_default(name) is value
    assert torch._inductor.config.epilogue_fusion is True
    assert len(SEEDS) == 2


def test_variants_are_asked_for_by_name_and_another_name_is_refused_with_all_of_them():
    assert asked(None) == asked([]) == variants()
    assert list(asked(["shape_padding=false", "eager"])) == ["eager", "shape_padding=false"]
    with pytest.raises(ValueError, match="--peers has 'shape_padding', wanted some of eager, graph") as error:
        asked(["eager", "shape_padding"])
    assert all(f"{name}=" in str(error.value) for name in OPTIONS)


def test_the_shapes_of_llama_and_qwen_are_dequantised():
    for config in (LLAMA, QWEN):
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        size = config.get("head_dim", hidden // config["num_attention_heads"])
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        assert {
            (queries, hidden),
            (keys, hidden),
            (hidden, queries),
            (inner, hidden),
            (hidden, inner),
        } <= set(SHAPES)
    assert (4096, 11008) in SHAPES


def test_the_operators_of_recurrent_layers_are_measured_at_the_shapes_of_qwen3_next():
    found = list(_cases(quick=False))
    for op in ("rule", "conv", "norm"):
        assert (op, 2048, 32, "both") in found
    assert ("rule", 8192, 4, "both") in found
    assert ("decode", 1, 32, "forward") in found
    assert {op for op, *_ in _cases(quick=True)} == {op for op, *_ in found}
    assert _channels(32) == 8192
