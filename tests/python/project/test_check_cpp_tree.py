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


@pytest.mark.parametrize(
    ("name", "lines", "longest"),
    [("core/a.h", 401, 400), ("core/tests/test_a.cpp", 501, 500), ("core/a.cpp", 400, 0)],
)
def test_a_long_file_is_found(tool, tmp_path, monkeypatch, name, lines, longest):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("\n" * lines)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "sources", lambda *suffixes: [path])
    wanted = [f"{name}: {lines} lines, at most {longest} wanted"] if longest else []
    assert tool.check_length() == wanted


PAGE = TOOL.parents[1] / "docs" / "explain" / "architecture.md"
OPERATORS = TOOL.parents[1] / "docs" / "reference" / "operators.md"


def test_a_folder_that_the_page_does_not_name_is_found(tool):
    text = PAGE.read_text()
    assert tool.check_architecture(text) == []
    found = tool.check_architecture(text.replace("`serving/`", "").replace("kernels/rotary", ""))
    assert [finding.split(": ")[1] for finding in found] == [
        "the folder kernels/rotary/ is not named",
        "the folder serving/ is not named",
    ]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("| `rotary` |", "| `rotation` |", "operator rotary has no row"),
        ("| `rotary` |", "| `rotation` |", "operator rotation has a row, but no schema"),
        ("| `rotary` |", "| `linear` |", "operator linear has two rows"),
        ("reload(Tensor handle, Tensor after)", "reload(Tensor handle)", "the schemas are not those of ops/"),
    ],
)
def test_an_operator_that_the_page_has_wrong_is_found(tool, old, new, what):
    text = OPERATORS.read_text()
    assert text.count(old) == 1
    found = tool.check_architecture(operators=text.replace(old, new))
    assert any(what in finding for finding in found)
