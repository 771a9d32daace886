"""tests/python: one folder a room, what they share in support/, no test file that imports another."""

import ast

from support.native_tool import ROOT

TESTS = ROOT / "tests" / "python"
ROOMS = (
    "upstream",
    "ops",
    "quant",
    "nn",
    "memory",
    "packing",
    "distributed",
    "training",
    "hf",
    "many",
    "doctor",
    "recipe",
    "bench",
    "cli",
    "native",
    "project",
)


def imported(path):
    """The names that a file imports, anywhere in it; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def files(folder=TESTS):
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def test_a_room_holds_tests_and_fixtures_and_nothing_else():
    assert {path.parent.name for path in files() if path.parent != TESTS} == {*ROOMS, "support"}
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    for path in files():
        if path.parent != TESTS and path.name != "conftest.py":
            assert path.name.startswith("test_") == (path.parent.name in ROOMS), path


def test_no_file_imports_a_test_file():
    tests = {path.stem for path in files() if path.name.startswith("test_")}
    assert len(tests) > 170
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in files()
        for name in imported(path)
        if tests & set(name.split(".")) and not name.startswith(("support", "monograph"))
    ]
    assert found == []


def test_every_helper_is_used():
    """By an import, or as a program or a function of ranks that is named by its file."""
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    others = [ROOT / ".ci" / name for name in ("required.sh", "rotating.sh")]
    names = {name for path in texts for name in imported(path)}
    for path in (TESTS / "support").glob("*.py"):
        if path.name == "__init__.py" or f"support.{path.stem}" in names:
            continue
        written = [text for other, text in texts.items() if other != path]
        written += [other.read_text(encoding="utf-8") for other in others]
        wanted = (f"support.{path.stem}", f"support/{path.stem}", f'"{path.stem}.py"')
        assert any(word in text for text in written for word in wanted), path.name
