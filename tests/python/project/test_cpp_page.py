"""docs/reference/cpp.md shows the programs that `.ci/run installed` compiles."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_the_examples_are_those_that_are_compiled():
    shown = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/reference/cpp.md").read_text(), re.DOTALL)
    compiled = [
        (ROOT / "tests/installed" / name).read_text()
        for name in ("nf4_weight.cpp", "safetensors_file.cpp", "train_lora.cpp")
    ]
    assert shown == compiled
