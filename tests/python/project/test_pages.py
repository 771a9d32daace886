"""The manual: four kinds of pages, each short, each beginning with what it gives and a command to paste."""

import re

import pytest

from support.native_tool import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
HOW_TO = """
chat preferences experts gptq_awq gguf larger_than_memory several_processes resume merge serve broken_graph
memory_estimate tool_alone train_without_python
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
    kinds = {"start", "recipes", "how_to", "reference", "explain", "project"}
    assert {page.parent.relative_to(ROOT / "docs").as_posix() for page in PAGES} == kinds


def test_there_is_a_how_to_for_each_task():
    assert sorted(HOW_TO.split()) == sorted(path.stem for path in (ROOT / "docs" / "how_to").glob("*.md"))


def test_the_tables_of_other_keys_have_a_filter():
    text = (ROOT / "docs" / "reference" / "other_keys.md").read_text()
    (name,) = re.findall(r'<input type="search" id="([\w-]+)"', text)
    assert f'getElementById("{name}")' in text
