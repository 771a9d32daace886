"""The manual: four kinds of pages, each short, each beginning with what it gives and a command to paste."""

import re
import subprocess
import sys

import pytest

from support.native_tool import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
HOW_TO = """
chat preferences experts gptq_awq gguf larger_than_memory several_processes resume merge serve broken_graph
memory_estimate tool_alone train_without_python many_adapters
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_begins_with_what_you_will_have_and_a_command(page):
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[2].startswith("You will "), lines[2]
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("```"))
    assert first <= 25, f"the first block begins at line {first}"


def test_no_page_is_longer_than_300_lines_but_reference():
    lengths = {page.relative_to(ROOT).as_posix(): page.read_text().count("\n") for page in PAGES}
    long = [name for name, lines in lengths.items() if lines > 300 and not name.startswith("docs/reference/")]
    assert long == []


def test_every_page_lies_in_the_folder_of_its_kind():
    """But the table of promises, which is looked for by its name."""
    kinds = {"start", "recipes", "how_to", "reference", "explain", "project"}
    inside = [page for page in PAGES if page != ROOT / "docs" / "reliability.md"]
    assert len(inside) == len(PAGES) - 1
    assert {page.parent.relative_to(ROOT / "docs").as_posix() for page in inside} == kinds


def test_every_promise_has_a_test_that_exists_a_figure_and_a_date():
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text[text.index("| promise |") : text.index("## What is not")].strip().splitlines()[2:]
    assert len(table) >= 10
    stages = "".join(path.read_text() for path in (ROOT / ".ci").glob("*.sh"))
    for row in table:
        promise, held_by, figure, date = [cell.strip() for cell in row.strip("|").split("|")]
        assert promise
        assert figure
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", date), row
        files = re.findall(r"(?:tests/python|tools)/[\w/]+(?:\.py)?", held_by)
        named = re.findall(r"\.ci/run (\w+)", held_by)
        assert files or named, row
        assert [file for file in files if not (ROOT / file).exists()] == []
        assert [stage for stage in named if f"\n{stage}() {{" not in stages] == []
    for kind in ("Crash-safety", "Bit-identity", "Hostile input", "Versions", "ABI", "Memory"):
        assert f"| **{kind}.**" in text
    security = (ROOT / "SECURITY.md").read_text()
    assert "(docs/reliability.md)" in security


def test_tables_of_what_was_recorded_are_those_of_the_lines():
    command = [sys.executable, ROOT / "tools" / "reliability_page.py", "--check"]
    assert subprocess.run(command).returncode == 0


def test_there_is_a_how_to_for_each_task():
    assert sorted(HOW_TO.split()) == sorted(path.stem for path in (ROOT / "docs" / "how_to").glob("*.md"))


def test_the_tables_of_other_keys_have_a_filter():
    text = (ROOT / "docs" / "reference" / "other_keys.md").read_text()
    (name,) = re.findall(r'<input type="search" id="([\w-]+)"', text)
    assert f'getElementById("{name}")' in text
