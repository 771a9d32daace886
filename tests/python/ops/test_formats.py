"""The Python tables are those of the C++ core and of bitsandbytes."""

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type

import monograph as mg
from monograph.ops.formats import ABSMAX_FORMATS, FORMATS, RULES, format_named, format_numbered, value_table
from monograph.ops.quantize import dynamic_map


@pytest.mark.parametrize("name", ABSMAX_FORMATS)
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


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ABSMAX_FORMATS])
def test_values_agree_in_python_cpp_and_torch(name):
    fmt = FORMATS[name]
    table = value_table(fmt, torch.device("cpu"))
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes if fmt.bits == 8 else codes[:16] | codes[:16] << 4
    cols = max(fmt.block_sizes[0], 16 if fmt.bits == 4 else 256)
    values = values.repeat_interleave(1 if fmt.bits == 8 else cols // 2)
    shape = [values.numel() * 8 // fmt.bits // cols, cols]
    ones = {"e8m0": [127], "e4m3": [0x38], "float32": [0, 0, 0x80, 0x3F]}[fmt.scale_types[0]]
    blocks = fmt.grid(shape, fmt.block_sizes[0])
    scales = torch.tensor(ones, dtype=torch.uint8).repeat(blocks[0] * blocks[1])
    layout = [fmt.number, fmt.block_sizes[0], *shape]
    decoded = torch.ops.monograph.dequantize(values, [scales], layout, torch.float32)
    decoded = decoded.reshape(-1) if fmt.bits == 8 else decoded[:, 0]
    assert torch.equal(decoded.nan_to_num(99.0), table.nan_to_num(99.0))
    if fmt.bits == 8:
        torch_table = codes.view(torch.float8_e4m3fn).float()
        assert torch.equal(table.nan_to_num(99.0), torch_table.nan_to_num(99.0))
    assert torch.equal(table.signbit()[: fmt.element.sign_code], torch.zeros(fmt.element.sign_code) > 0)


@pytest.mark.parametrize("name", FORMATS)
def test_rules_and_scale_types_agree_in_python_and_cpp(name):
    """The operator takes exactly the rules and sizes of the Python table, and its first is the default."""
    fmt = FORMATS[name]
    weight = torch.randn(128, 128)
    arguments = (fmt.number, fmt.default_block, False, False)
    numbers = {fmt.rule_number(rule) for rule in fmt.rules}
    for number in range(1, max(RULES.values()) + 2):
        if number in numbers:
            assert len(torch.ops.monograph.quantize(weight, *arguments, number)) >= 2
        else:
            with pytest.raises(RuntimeError, match=f"rule is {number}, format {name} wants 0"):
                torch.ops.monograph.quantize(weight, *arguments, number)
    for size in (1, 2, 3, 4):
        if size in {fmt.scale_bytes(kind) for kind in fmt.scale_types}:
            got = torch.ops.monograph.quantize(weight, *arguments, 0, size)
            assert got[1].numel() % size == 0
        else:
            with pytest.raises(RuntimeError, match=f"scale_bytes is {size}, format {name}"):
                torch.ops.monograph.quantize(weight, *arguments, 0, size)
    default = torch.ops.monograph.quantize(weight, *arguments)
    named = torch.ops.monograph.quantize(
        weight, *arguments, fmt.rule_number("default"), fmt.scale_bytes(None)
    )
    assert all(torch.equal(a, b) for a, b in zip(default, named, strict=True))
    with pytest.raises(ValueError, match=f"rule is 'nearest', format {name} wants one of default"):
        mg.quantize(weight, name, rule="nearest")
    with pytest.raises(ValueError, match=f"scale type is 'int8', format {name} wants one of"):
        mg.quantize(weight, name, scale_type="int8")


def test_dynamic_map_is_bitsandbytes_own():
    assert torch.equal(dynamic_map(), create_dynamic_map())


def test_unknown_names_and_blocks_list_the_known_ones():
    with pytest.raises(ValueError, match=r"format is 'int3', known are nf4, fp4"):
        format_named("int3")
    with pytest.raises(ValueError, match="not the number of a packed format"):
        format_numbered(77)


@pytest.mark.parametrize("block", [0, -64, 16, 48, 65, 8192])
def test_invalid_block_sizes_are_refused(block):
    """Never skipped silently, in Python, in C++ and in the portable implementation."""
    weight = torch.randn(4, 4096)
    with pytest.raises(ValueError, match=f"block size is {block}"):
        mg.quantize(weight, "nf4", block_size=block)
    with pytest.raises(RuntimeError, match=f"block size is {block}"):
        torch.ops.monograph.quantize(weight, 1, block, False, False)
    packed = mg.quantize(weight)
    with pytest.raises(RuntimeError, match=f"block size is {block}"):
        torch.ops.monograph.dequantize(packed.values, list(packed.scales), [1, block, 4, 4096], torch.float32)
