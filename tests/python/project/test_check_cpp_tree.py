"""tools/check_tree.py: the rules of the C++ half find what breaks them, and nothing else."""

import importlib.util
import pathlib

import pytest

TOOL = pathlib.Path(__file__).parents[3] / "tools" / "check_tree.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_tree", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def core_folder(tool, folder):
    for name in [*tool.KERNELS, *tool.CHECKPOINT]:
        (folder / name / "tests").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("file", "included", "found"),
    [
        ("text/a.h", "files", True),
        ("cpu/tests/test_a.cpp", "kernels", True),  # tests are no exception
        ("kernels/x/a.cu", "text", True),  # kernels know no files
        ("files/a.cpp", "text", False),
        ("merge/a.cpp", "kernels", False),
        ("text/a.h", "text", False),
        ("text/a.h", "unknown", True),
    ],
)
def test_an_include_upwards_is_found(tool, tmp_path, file, included, found):
    core = core_folder(tool, tmp_path)
    (core / file).parent.mkdir(parents=True, exist_ok=True)
    (core / file).write_text(f'#include "monograph/{included}/b.h"\n')
    findings = tool.check_core_layers(core)
    assert len(findings) == found
    if found:
        assert f"includes monograph/{included}" in findings[0]
        assert file in findings[0]


def test_a_folder_of_core_has_a_place_in_the_order(tool, tmp_path):
    core = core_folder(tool, tmp_path)
    (core / "drawer").mkdir()
    (core / "targets" / "tests").rmdir()
    (core / "targets").rmdir()
    findings = tool.check_core_layers(core)
    assert len(findings) == 2
    assert "drawer: not in the order" in findings[0]
    assert "targets: no folder, but in the order" in findings[1]
