"""A training state written part by part: the bytes of save_file, one tensor of it at a time."""

from __future__ import annotations

import pathlib
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from monograph.training.state_parts import StatePart, made, part_of, write_parts


def parts_of(tensors: dict[str, torch.Tensor]) -> list[StatePart]:
    return [part_of(name, tensor) for name, tensor in tensors.items()]


def test_the_file_is_that_of_save_file(tmp_path: pathlib.Path) -> None:
    tensors = {
        "steps": torch.tensor(3.0),
        "flat.b": torch.randn(3, 5),
        "flat.a": torch.randn(7),
        "flat.é": torch.randn(2, 0),
        "loss_scale_good_steps": torch.tensor(5, dtype=torch.int32),
        "count": torch.tensor(5),
    }
    write_parts(parts_of(tensors), str(tmp_path / "ours"))
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert made(parts_of(tensors)).keys() == load_file(tmp_path / "ours").keys()


def test_one_tensor_is_there_at_a_time(tmp_path: pathlib.Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def make() -> torch.Tensor:
        tensor = torch.ones(1000)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    parts = [StatePart(f"p{n}", torch.float32, torch.Size([1000]), make) for n in range(5)]
    write_parts(parts, str(tmp_path / "file"))
    assert most == [1] * 5
    write_parts(parts, None)
    assert most == [1] * 10


def test_a_part_that_is_not_what_was_announced_is_an_error(tmp_path: pathlib.Path) -> None:
    nothing = StatePart("a", torch.float32, torch.Size([2]), lambda: None)
    with pytest.raises(RuntimeError, match="a: this rank writes and did not get it"):
        write_parts([nothing], str(tmp_path / "file"))
    write_parts([nothing], None)  # a rank that writes nothing need not get it
    other = StatePart("a", torch.float32, torch.Size([2]), lambda: torch.ones(3))
    with pytest.raises(RuntimeError, match="as announced"):
        write_parts([other], str(tmp_path / "file"))
