"""Our header parser against the Rust reader of the `safetensors` package, on the same bytes.

Rule: what Rust refuses we refuse; what both accept both read alike. Where we alone refuse, the reason must be
one of DECISIONS. The number of mutated files is 120,000, or MONOGRAPH_MUTATIONS; the seed is fixed and
printed with each finding.

Needs the program check_headers: built with the unit tests, or named by MONOGRAPH_CHECK_HEADERS.
"""

import collections
import json
import os
import pathlib
import random
import struct
import subprocess

import pytest

pytestmark = pytest.mark.slow
safetensors = pytest.importorskip("safetensors")

ROOT = pathlib.Path(__file__).resolve().parents[3]
SEED = 20261115
MUTATIONS = int(os.environ.get("MONOGRAPH_MUTATIONS", "120000"))

# A part of our message -> why we refuse what Rust accepts.
DECISIONS = {
    "unknown key": "the format's JSON schema allows no other key in an entry",
    "the name occurs twice": "the format forbids duplicate keys; Rust keeps the last",
    "__metadata__: duplicate key": "the same, inside the metadata",
    "__metadata__ must be an object": "Rust reads null as no metadata",
    "the entry must be an object": "serde also reads a struct from an array",
    "dtype must be a string": "serde also reads a variant from an object",
    "more than 64 dimensions": "our limit",
    "the product of shape overflows": "Rust multiplies the zero first and never sees the overflow",
}

NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "-1",
    "-0",
    "1.0",
    "1e1",
    "01",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "null",
    "true",
    '"1"',
    "[]",
    "{}",
    "2305843009213693952",
    "4611686018427387905",
]
BYTES = list('{}[],:" \t\n\r\0\f\\\ufeff\u00a0')
TOKENS = [
    r"\u0041",
    r"\ud800",
    r"\udc00",
    r"\ud834\udd1e",
    r"null",
    r"true",
    r'"a"',
    r'"dtype"',
    r'"shape"',
    r'"data_offsets"',
    r'"__metadata__"',
    r'"x":1',
    r'"__metadata__":null',
    r'"__metadata__":{"a":"b"}',
    r"//",
    r"NaN",
]
# By width in bits, as the format names them.
WIDTHS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "C64 F64 I64 U64",
}
DTYPES = {name: bits for bits, names in WIDTHS.items() for name in names.split()}
VALUES = [
    '"U8"',
    '{"U8":null}',
    '["U8",[0],[0,0]]',
    "[0," * 70 + "0" + "]" * 70,
    "[" + "1," * 66 + "1]",
    '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    "[0,9223372036854775808,4]",
]


def good_header(rng: random.Random) -> tuple[str, int]:
    """A header that both accept, and the bytes of its data."""
    entries, end = [], 0
    for index in range(rng.randrange(4)):
        dtype = rng.choice(list(DTYPES))
        shape = [rng.choice([0, 1, 2, 3]) for _ in range(rng.randrange(3))] + [4] * rng.randrange(2)
        bits = DTYPES[dtype]
        for dimension in shape:
            bits *= dimension
        if bits % 8:
            continue
        members = [
            ("dtype", json.dumps(dtype)),
            ("shape", json.dumps(shape)),
            ("data_offsets", json.dumps([end, end + bits // 8])),
        ]
        rng.shuffle(members)
        end += bits // 8
        name = rng.choice(["a", "layer.weight", "é", 'q"\\', "", "\t"]) + str(index)
        entries.append(json.dumps(name, ensure_ascii=rng.random() < 0.5) + ":{" + join(rng, members) + "}")
    if rng.random() < 0.4:
        pairs = {rng.choice("abc") + str(i): rng.choice(["", "pt", "é\n"]) for i in range(rng.randrange(3))}
        entries.append('"__metadata__":' + json.dumps(pairs))
    rng.shuffle(entries)
    return blank(rng) + "{" + ",".join(entries) + "}" + blank(rng), end


def join(rng: random.Random, members: list[tuple[str, str]]) -> str:
    return ",".join(f'{blank(rng)}"{key}"{blank(rng)}:{value}' for key, value in members)


def blank(rng: random.Random) -> str:
    return "".join(rng.choice(" \t\r\n") for _ in range(rng.randrange(3))) if rng.random() < 0.2 else ""


def mutate_text(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    to = min(len(text), at + rng.randrange(6))
    kind = rng.randrange(7)
    if kind == 0:  # a number becomes another
        spots = [i for i, c in enumerate(text) if c.isdigit() and (i == 0 or not text[i - 1].isdigit())]
        if spots:
            at = rng.choice(spots)
            to = next((i for i in range(at, len(text)) if not text[i].isdigit()), len(text))
            return text[:at] + rng.choice(NUMBERS) + text[to:]
    if kind == 1:  # a token comes in
        return text[:at] + rng.choice(BYTES + TOKENS) + text[at:]
    if kind == 2:  # some text goes
        return text[:at] + text[to:]
    if kind == 3:  # some text is doubled
        return text[:to] + text[at:]
    if kind == 4:  # a whole entry or member is doubled or replaced
        pieces = text.split(",")
        source, target = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        pieces.insert(target, pieces[source])
        return ",".join(pieces)
    if kind == 5:  # one known word for another
        words = [*DTYPES, "dtype", "shape", "data_offsets", "__metadata__"]
        return text.replace(rng.choice(words), rng.choice([*words, "stride", "\\u0064type"]), 1)
    # a value of another kind
    cut = text.find(":", at)
    end = min((i for i in (text.find(",", cut + 1), text.find("}", cut + 1)) if i > 0), default=len(text))
    return text[: cut + 1] + rng.choice(VALUES) + text[end:]


def mutated_file(rng: random.Random) -> bytes:
    text, data_bytes = good_header(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        text = mutate_text(rng, text)
    header = bytearray(text.encode("utf-8", "surrogatepass"))
    if header and rng.random() < 0.2:  # one byte, UTF-8 or not
        header[rng.randrange(len(header))] = rng.randrange(256)
    length = len(header)
    if rng.random() < 0.1:
        length = rng.choice([length - 1, length + 1, 0, 2**63, 2**64 - 8, 2**64 - 1, 100_000_001]) % 2**64
    if rng.random() < 0.1:
        data_bytes = max(0, data_bytes + rng.choice([-1, 1, 4, -4]))
    file = struct.pack("<Q", length) + bytes(header) + rng.randbytes(data_bytes)
    return file[: rng.randrange(len(file))] if rng.random() < 0.02 else file


def read_by_rust(file: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Name -> dtype, shape, bytes; None if refused."""
    try:
        tensors = safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return None
    return {name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"])) for name, tensor in tensors}


def read_by_us(file: bytes, line: str) -> dict[str, tuple[str, list[int], bytes]] | None:
    if not line.startswith("accept"):
        return None
    tensors = {}
    for text in line.split(" ")[1:]:
        name, dtype, shape, offset, size = text.split(":")
        dimensions = [int(dimension) for dimension in shape.split(",")[:-1]]
        content = file[int(offset) : int(offset) + int(size)]
        tensors[bytes.fromhex(name).decode()] = dtype, dimensions, content
    return tensors


def find_program() -> str:
    named = os.environ.get("MONOGRAPH_CHECK_HEADERS")
    # Other presets build for other machines (aarch64) or slowly (sanitizers).
    program = named or str(ROOT / "build/release/core/monograph/safetensors/check_headers")
    if not os.path.exists(program):
        pytest.skip("check_headers is not built: cmake --preset release && cmake --build --preset release")
    return program


def ours(files: list[bytes]) -> list[str]:
    stream = b"".join(struct.pack("<I", len(file)) + file for file in files)
    run = subprocess.run([find_program()], input=stream, capture_output=True, check=True)
    lines = run.stdout.decode().split("\n")[:-1]
    assert len(lines) == len(files)
    return lines


def test_never_accepts_what_rust_refuses() -> None:
    rng = random.Random(SEED)
    files = [mutated_file(rng) for _ in range(MUTATIONS)]
    both, neither = 0, 0
    decisions: collections.Counter[str] = collections.Counter()
    for number, (file, line) in enumerate(zip(files, ours(files), strict=True)):
        rust, found = read_by_rust(file), read_by_us(file, line)
        if found is not None:
            assert rust is not None, f"seed {SEED}, file {number}: we accept, Rust refuses: {file!r}"
            assert found == rust, f"seed {SEED}, file {number}: read differently: {file!r}"
            both += 1
        elif rust is None:
            neither += 1
        else:
            reason = next((decision for decision in DECISIONS if decision in line), None)
            assert reason, f"seed {SEED}, file {number}: Rust accepts, {line}: {file!r}"
            decisions[reason] += 1
    print(
        f"{len(files)} files: {both} accepted and {neither} refused by both, by decision: {dict(decisions)}"
    )
    # The comparison means something only if both sides of it are common.
    assert both > len(files) // 20
    assert neither > len(files) // 5


def test_every_decision_is_real() -> None:
    """Each row of DECISIONS has a file that Rust accepts and we refuse for that reason."""
    good = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    zero = '{"dtype":"U8","shape":%s,"data_offsets":[0,0]}'
    examples = {
        "unknown key": ('{"a":' + good[:-1] + ',"x":1}}', 1),
        "the name occurs twice": (f'{{"a":{good},"a":{good}}}', 1),
        "__metadata__: duplicate key": ('{"__metadata__":{"k":"1","k":"2"}}', 0),
        "__metadata__ must be an object": ('{"__metadata__":null}', 0),
        "the entry must be an object": ('{"a":["U8",[1],[0,1]]}', 1),
        "dtype must be a string": ('{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}', 1),
        "more than 64 dimensions": ('{"a":' + zero % ("[" + "0," * 64 + "0]") + "}", 0),
        "the product of shape overflows": ('{"a":' + zero % "[0,4294967296,4294967296]" + "}", 0),
    }
    assert examples.keys() == DECISIONS.keys()
    files = [struct.pack("<Q", len(text)) + text.encode() + bytes(size) for text, size in examples.values()]
    for reason, file, line in zip(examples, files, ours(files), strict=True):
        assert read_by_rust(file) is not None, reason
        assert line.startswith("refuse"), line
        assert reason in line, line
