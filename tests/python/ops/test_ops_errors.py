"""Errors of the operator library: what they name, and what they do not show."""

import pathlib
import re

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.library import library_path
from monograph.ops.linear import linear
from monograph.ops.linear_shared import linear_shared


def layer():
    torch.manual_seed(0)
    return QuantLinear.from_linear(nn.Linear(64, 8), "nf4")


def double_calls():
    x, packed = torch.randn(3, 64, dtype=torch.float64), layer().packed
    arguments = (packed.values, list(packed.scales), packed.layout)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    heads = torch.randn(3, 1, 8, dtype=torch.float64)
    labels, plain = torch.zeros(3, dtype=torch.int64), (torch.randn(8, 64), [], [0, 0, 8, 64])
    ops = mg.ops
    return {
        "linear": lambda: mg.linear(x, packed),
        "linear of QuantLinear": lambda: layer()(x),
        "linear with adapters": lambda: linear(x, *arguments, None, x[:, :4], torch.randn(8, 4)),
        "linear_shared": lambda: linear_shared(x, [arguments[0]], [arguments[1]], [arguments[2]]),
        "quantize": lambda: mg.quantize(x),
        "dequantize": lambda: packed.dequantize(torch.float64),
        "varlen_attention": lambda: ops.varlen_attention.varlen_attention(heads, heads, heads, cu),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy.linear_cross_entropy(x, *plain, labels),
        "linear_log_probs": lambda: ops.linear_log_probs.linear_log_probs(x, *plain, labels),
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", double_calls())
def test_float64_is_named(name, autocast):
    """Autocast leaves float64 alone, as torch's own does, so that it is named there too."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(RuntimeError) as refused,
    ):
        double_calls()[name]()
    text = str(refused.value)
    assert f"{name.split()[0]}: " in text
    assert "has dtype float64, wanted bfloat16, float16 or float32" in text


def test_no_error_shows_a_path_of_the_machine_that_built():
    x, packed = torch.randn(3, 65), layer().packed
    errors = []
    for call in (
        lambda: mg.linear(x, packed),
        lambda: packed.dequantize(torch.int8),
        lambda: torch.ops.monograph.pack(torch.tensor([-1]), 10, 0, 0, 0),
        lambda: linear(torch.empty(2**40, 0), torch.empty(0), [], [0, 0, 2**20, 0]),
    ):
        with pytest.raises(RuntimeError) as refused:
            call()
        errors.append(str(refused.value))
    for text in errors:
        assert not re.search(r"(^|[\s'\"(,])/\w", text), text
        assert "\n" not in text


def test_the_library_holds_no_path_of_the_machine_that_built_it():
    """torch's headers and our sources stand in it by names below their own folders."""
    library = library_path().read_bytes()
    assert b"torch/csrc/stable/library.h" in library
    for folder in (
        pathlib.Path(torch.__file__).parent,
        pathlib.Path(__file__).parents[3],
        pathlib.Path.home(),
    ):
        assert str(folder).encode() not in library
