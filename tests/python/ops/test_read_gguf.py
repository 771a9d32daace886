"""monograph::read_gguf: places of tensors against the gguf package; names that are none."""

import gguf
import pytest
import torch

from monograph.ops.checkpoint_sha256 import checkpoint_sha256
from monograph.ops.read_gguf import is_gguf, read_gguf
from support.gguf_bases import MIXTURE, mixed_base
from support.native_tool import run_json


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return mixed_base("Llama", tmp_path_factory.mktemp("llama"))[0]


def test_every_tensor_is_where_the_package_finds_it(file):
    said = read_gguf(file)
    tensors = gguf.GGUFReader(file).tensors
    found = [one for one in tensors if one.name != "rope_freqs.weight"]
    assert len(found) == len(said["tensors"])
    for one, told in zip(found, said["tensors"], strict=True):
        assert told["type"] == one.tensor_type.name.lower()
        assert told["shape"] == [int(size) for size in reversed(one.shape)]
        assert (told["offset"], told["bytes"]) == (int(one.data_offset), int(one.n_bytes))
        assert ("head_rows" in told) == (".attn_q." in one.name or ".attn_k." in one.name)
    assert {told["type"] for told in said["tensors"]} == {*MIXTURE.values(), "f32"}
    assert said["config"]["model_type"] == "llama"
    assert said["tokenizer"]["model"]["type"] == "BPE"
    assert "no_tokenizer" not in said


def test_the_hash_is_that_of_inspect_and_of_the_tensors_alone(file, tmp_path):
    whole = checkpoint_sha256(file)
    assert run_json("inspect", file, "--hash", "--no-tensors")["sha256"] == whole
    raw = bytearray(file.read_bytes())
    place = raw.index(b"general.name") + len(b"general.name") + 4 + 8
    raw[place] ^= 1  # a letter of the model's name
    other = tmp_path / "other.gguf"
    other.write_bytes(raw)
    assert checkpoint_sha256(other) == whole
    raw[-1] ^= 1
    raw[-65] ^= 1
    other.write_bytes(raw)
    assert checkpoint_sha256(other) != whole


def test_a_file_is_known_by_its_first_bytes(file, tmp_path):
    assert is_gguf(file)
    plain = tmp_path / "sha256-1234"
    plain.write_bytes(file.read_bytes())
    assert is_gguf(plain)
    (tmp_path / "x").write_bytes(b"GGU")
    assert not is_gguf(tmp_path / "x")
    assert not is_gguf(tmp_path)


def test_what_is_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        read_gguf(tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match="missing"):
        read_gguf(tmp_path / "missing")
    for wrong, message in (
        (torch.zeros(0, dtype=torch.uint8), "is not a name"),
        (torch.zeros(3), "is not a name"),
        (torch.tensor([65, 0, 66], dtype=torch.uint8), "has a byte 0"),
        (torch.tensor([255, 254], dtype=torch.uint8), "wanted UTF-8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.monograph.read_gguf(wrong)
