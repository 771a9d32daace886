"""A packed folder holds one set of values for every command: rounded once to the type it was made from."""

import gguf
import numpy as np
import pytest
import torch

from support.gguf_models import model_of, save
from support.native_tool import run


def exported(folder, out):
    run("export", folder, out, "--to", "gguf", "--type", "f32")
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(out).tensors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("to", ["nf4", "mxfp4", "fp8-block"])
def test_export_of_a_packed_folder_is_that_of_the_dequantised_one(tmp_path, to, dtype):
    model = model_of("Llama").to(dtype)
    save(model, "Llama", tmp_path / "model")
    run("quantize", tmp_path / "model", tmp_path / "packed", "--to", to, "--quiet")
    run("dequantize", tmp_path / "packed", tmp_path / "plain", "--quiet")
    packed = exported(tmp_path / "packed", tmp_path / "packed.gguf")
    plain = exported(tmp_path / "plain", tmp_path / "plain.gguf")
    assert packed.keys() == plain.keys()
    for name, values in plain.items():
        np.testing.assert_array_equal(packed[name], values, err_msg=name)
