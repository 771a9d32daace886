"""The Python tables are those of the C++ core and of bitsandbytes."""

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type

import monograph as mg
from monograph.formats import FORMATS, format_named, format_numbered, value_table
from monograph.ops.quantize import dynamic_map


@pytest.mark.parametrize("name", FORMATS)
def test_values_agree_in_python_cpp_and_bitsandbytes(name):
    fmt = FORMATS[name]
    table = value_table(fmt, torch.device("cpu"))
    codes = torch.tensor([c << 4 | c for c in range(16)], dtype=torch.uint8)
    one = torch.ones(1).view(torch.uint8)
    decoded = torch.ops.monograph.dequantize(codes, [one], [fmt.number, 32, 32], torch.float32)[::2]
    assert torch.equal(decoded, table)
    assert torch.equal(table, get_4bit_type(name, device="cpu"))
    assert sorted(fmt.order) == list(range(16))
    assert torch.equal(table[list(fmt.order)], table.sort().values)


def test_dynamic_map_is_bitsandbytes_own():
    assert torch.equal(dynamic_map(), create_dynamic_map())


def test_unknown_names_and_blocks_list_the_known_ones():
    with pytest.raises(ValueError, match=r"format is 'int3', known are nf4, fp4"):
        format_named("int3")
    with pytest.raises(ValueError, match="not the number of a packed format"):
        format_numbered(77)


@pytest.mark.parametrize("block", [0, -64, 16, 48, 65, 8192])
def test_invalid_block_sizes_are_refused_q6(block):
    """Requirement Q6: never skipped silently, in Python, in C++ and in the portable implementation."""
    weight = torch.randn(4, 4096)
    with pytest.raises(ValueError, match=f"block size is {block}"):
        mg.quantize(weight, "nf4", block_size=block)
    with pytest.raises(RuntimeError, match=f"block size is {block}"):
        torch.ops.monograph.quantize(weight, 1, block, False, False)
    packed = mg.quantize(weight)
    with pytest.raises(RuntimeError, match=f"block size is {block}"):
        torch.ops.monograph.dequantize(packed.values, list(packed.scales), [1, block, 4, 4096], torch.float32)
