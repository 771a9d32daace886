"""tools/check_tree.py: circles of imports, imports upwards and speeds of GPUs are found, nothing else."""

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


def package(folder, **files):
    for name, text in {"__init__": "from p import sub", "sub__init__": "from p.a import x", **files}.items():
        path = folder / "p" / (name.replace("sub", "sub/", 1) + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "p"


@pytest.mark.parametrize(
    "line",
    [
        "from p.sub import y",
        "from p.sub.b import y",  # runs p/sub/__init__.py
        "try:\n    import p.sub\nexcept ImportError:\n    pass",
        "class A:\n    import p.sub",
    ],
)
def test_a_circle_is_found(tool, tmp_path, line):
    circles = tool.check_import_circles(package(tmp_path, a=line, subb=""))
    assert len(circles) == 1
    assert "p.sub" in circles[0]
    assert "p.a" in circles[0]


@pytest.mark.parametrize(
    "line",
    [
        "import p",  # every module runs the packages it lies in
        "def f():\n    from p.sub import y",
        "class A:\n    def f(self):\n        import p.sub",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.sub import y",
    ],
)
def test_what_does_not_run_at_import_is_no_circle(tool, tmp_path, line):
    assert tool.check_import_circles(package(tmp_path, a=line)) == []


def test_a_module_that_is_gone_is_found_wherever_it_is_imported(tool, tmp_path):
    lines = "from p.sub import y\nfrom q.gone import z\ndef f():\n    from p.gone import x"
    assert tool.check_imports_exist(package(tmp_path, a=lines)) == ["p/a.py:4: there is no module p.gone"]


def floors(folder, where, line):
    for name in (
        "__init__",
        "ops/__init__",
        "hf/__init__",
        "hf/peft/__init__",
        "hf/trl/__init__",
        "cli/__init__",
    ):
        path = folder / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    path = folder / "p" / f"{where}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    return folder / "p"


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("ops/a", "from p.hf import x"),
        ("ops/a", "from p import hf"),
        ("ops/a", "import p.hf.peft"),
        ("ops/a", "import p"),
        ("ops/a", "def f():\n    if 1:\n        from p.cli import x"),
        ("ops/__init__", "from p.hf.peft.y import x"),
        ("hf/peft/a", "from p.hf.trl.b import x"),
        ("hf/peft/a", "from p.hf.b import x"),
        ("hf/peft/__init__", "from p.hf import trl"),
        ("b", ""),
        ("new/__init__", ""),
    ],
)
def test_an_import_of_a_folder_above_is_found(tool, tmp_path, where, line):
    assert len(tool.check_floors(floors(tmp_path, where, line))) == 1


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("hf/peft/a", "from p.ops.b import x\nfrom p.hf.transformers import y\nimport torch"),
        ("hf/a", "from p.hf.trl import x"),
        ("hf/a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.cli import x"),
        ("cli/a", "import p\nfrom p.hf import trl"),
        ("__main__", "from p.cli import x"),
        ("__init__", "from p.cli import x"),
    ],
)
def test_an_import_of_what_is_below_is_none(tool, tmp_path, where, line):
    assert tool.check_floors(floors(tmp_path, where, line)) == []


def test_the_package_has_no_import_of_a_folder_above(tool):
    assert tool.check_floors() == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("On an H100 it is 2.5 times as fast", True),
        ("CUDA: 1200 tokens/s", True),
        ("faster than on the GPU", True),
        ("a kernel of sm_90 takes 0.3 ms", True),
        ("on 2 cores it is 1.7 times as fast", False),
        ("GPU kernels are compiled for sm_80", False),
    ],
)
def test_a_speed_of_a_gpu_is_found(tool, line, found):
    assert tool.speeds_of_gpus(f"before\n{line}\nbehind") == ([line] if found else [])


def test_no_speed_of_a_gpu_is_claimed_without_a_report(tool):
    assert tool.check_gpu_speeds() == []


def test_a_folder_without_a_row_is_found(tool, tmp_path):
    (tmp_path / "p" / "ops").mkdir(parents=True)
    (tmp_path / "p" / "ops" / "x.py").touch()
    page = tmp_path / "page.md"
    page.write_text("| `ops/` | operators |\n")
    assert tool.check_folders_are_named(tmp_path / "p", page) == []
    (tmp_path / "p" / "ops" / "new").mkdir()
    (tmp_path / "p" / "ops" / "new" / "y.py").touch()
    assert tool.check_folders_are_named(tmp_path / "p", page) == ["page.md: no row for p/ops/new/"]


def test_tests_may_be_longer_than_the_rest(tool):
    named = {
        "python/monograph/a.py": 400,
        "tools/a.py": 400,
        "core/monograph/merge/a.cpp": 400,
        "tests/python/ops/test_a.py": 500,
        "core/monograph/merge/tests/test_a.cpp": 500,
    }
    assert {name: tool.longest_allowed(name) for name in named} == named
