"""Seconds with the installed package: weights, an operator's error, steps as one graph, the native tool.

    python tools/release/smoke_test.py

Needs torch, safetensors and the wheel; no compiler. The last line is one JSON object with the versions.
`environments.py` runs it in new environments.
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import torch

import monograph as mg

NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip


def is_quantised_to_the_nearest() -> None:
    dense = torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    packed = mg.quantize(dense, "nf4", block_size=64)
    blocks = dense.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4)
    wanted = table[(blocks[:, :, None] / largest[:, :, None] - table).abs().argmin(2)] * largest
    error = (packed.dequantize(torch.float32).reshape(-1, 64) - wanted).abs().max().item()
    assert error < 1e-6, f"the dequantised weight differs by {error} from the nearest values of the table"


def errors_arrive_as_exceptions() -> None:
    packed = mg.quantize(torch.randn(8, 64), "nf4", block_size=64)
    for _ in range(100):
        try:
            mg.linear(torch.randn(2, 63), packed)
        except (RuntimeError, ValueError) as error:
            said = str(error)
        else:
            raise AssertionError("a wrong number of columns was not refused")
        assert "63" in said, f"the error does not name the 63 it found: {said}"
    values = torch.zeros(3, dtype=torch.uint8)
    try:  # past the checks of Python: what is thrown in C++
        torch.ops.monograph.dequantize(values, [values], [1, 2, 3], torch.float32)
    except RuntimeError:
        return
    raise AssertionError("torch.ops.monograph.dequantize took a layout of three numbers")


def steps_are_one_graph() -> None:
    torch.manual_seed(0)
    base = torch.nn.Linear(64, 64, bias=False)
    layer = mg.nn.QuantLinear.from_linear(base, "nf4", double_quant=True)
    down, up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)
    torch.nn.init.zeros_(up.weight)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=1e-2)

    def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(layer(x) + up(down(x)), target)

    graph = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = graph(x, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], f"thirty steps went from {losses[0]} to {losses[-1]}"


def the_tool_works() -> None:
    from safetensors.torch import save_file

    tool = str(pathlib.Path(sys.executable).with_name("monograph"))
    tool = tool if pathlib.Path(tool).exists() else str(shutil.which("monograph"))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "dense").mkdir()
        weight = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 128).bfloat16()}
        save_file(weight, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
        (folder / "dense" / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": false}')
        quantize = [tool, "quantize", str(folder / "dense"), str(folder / "nf4"), "--double-quant"]
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([tool, "verify", str(folder / "nf4")], check=True, stdout=subprocess.DEVNULL)
        path = folder / "nf4" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
        done = subprocess.run([tool, "verify", str(folder / "nf4")], capture_output=True, text=True)
        assert done.returncode == 3, f"a cut file: exit {done.returncode}, {done.stdout}{done.stderr}"


def main() -> None:
    checks = (is_quantised_to_the_nearest, errors_arrive_as_exceptions, steps_are_one_graph, the_tool_works)
    for check in checks:
        check()
        print(f"{check.__name__.replace('_', ' ')}: yes")
    print(
        json.dumps(
            {"python": platform.python_version(), "torch": torch.__version__, "libc": platform.libc_ver()[1]}
        )
    )


if __name__ == "__main__":
    main()
