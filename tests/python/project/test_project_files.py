"""SECURITY.md, CITATION.cff and templates: the files, stages, limits and versions that they name are real."""

import pathlib
import re
import sys

import pytest
import yaml

from monograph.ops.formats import FORMATS
from support.native_tool import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_security_names_every_fuzz_target_and_only_files_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    listed = re.search(r"Fuzz targets: ((?:`\w+`(?:, )?)+)", text)
    assert listed, "SECURITY.md: the line of the fuzz targets"
    targets = {path.stem.removeprefix("fuzz_") for path in (ROOT / "core").rglob("fuzz_*.cpp")}
    assert set(re.findall(r"`(\w+)`", listed[1])) == targets
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / file).exists(), file
    stages = "".join(path.read_text() for path in (ROOT / ".ci").glob("*.sh"))
    for stage in re.findall(r"`\.ci/run (\w+)`", text):
        assert f"\n{stage}() {{" in stages, stage


def test_security_tells_the_limits_that_the_hostile_files_are_held_to():
    """A limit that is loosened in the test cannot stay a promise in the text."""
    text = (ROOT / "SECURITY.md").read_text()
    test = (ROOT / "tests" / "python" / "native" / "test_cli_hostile.py").read_text()
    seconds = re.search(r"LIMIT_SECONDS = ([\d.]+)", test)
    bytes_ = re.search(r"LIMIT_BYTES = ([\d_]+)", test)
    assert seconds
    assert bytes_
    assert f"under {float(seconds[1]):g} s and {int(bytes_[1]) // 10**6} MB" in text


def test_messages_name_sections_of_the_readme_that_are_there():
    headings = re.findall(r"^#+ (.+)$", (ROOT / "README.md").read_text(), re.M)
    named = [
        section
        for path in (ROOT / "python").rglob("*.py")
        for section in re.findall(r"README\.md, \"?\s*\"?section (\w+)", path.read_text())
    ]
    assert named
    assert set(named) <= set(headings)


def test_the_readme_is_short_and_names_the_formats_and_models_that_are_tested():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    (formats,) = re.findall(r"<!-- formats -->(.*?)<!-- end -->", text)
    assert formats == ", ".join(f"`{name}`" for name in FORMATS)
    (models,) = re.findall(r"<!-- models -->(.*?)<!-- end -->", text)
    timed = (ROOT / "bench" / "results" / "first_step_families.md").read_text()
    assert models.split(", ") == sorted(re.findall(r"^\| (\w+) \| [\d.]+ \|", timed, re.M))


def test_the_extra_of_training_has_what_the_first_scripts_import():
    project = (ROOT / "pyproject.toml").read_text()
    line = re.search(r"^train = \[(.*)\]$", project, re.M)
    assert line
    installed = set(re.findall(r'"([a-z]+)', line[1])) | {"torch", "monograph"}
    pages = [ROOT / "examples" / "first_run.py", *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    code = (ROOT / "examples" / "first_run.py").read_text()
    for page in pages[1:]:
        if page.name in ("README.md", "coming_from.md", "tutorial.md"):
            code += "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.M))
    assert "trl" in imported
    assert imported - sys.stdlib_module_names <= installed


def test_the_citation_has_the_version_and_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert citation["title"] == "Monograph"
    assert f'\nversion = "{citation["version"]}"\n' in project
    assert f'\nlicense = "{citation["license"]}"\n' in project
    assert citation["authors"] == [{"name": "Monograph contributors"}]


@pytest.mark.parametrize("path", [f for f in FORMS if f.name != "config.yml"], ids=lambda p: p.name)
def test_an_issue_form_is_one_that_github_shows(path: pathlib.Path):
    """GitHub drops a form without a word if a key is missing or an id stands twice."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert ("value" if field["type"] == "markdown" else "label") in field["attributes"]


def test_the_page_of_problems_names_tests_and_pages_that_exist():
    text = (ROOT / "docs" / "start" / "problems.md").read_text()
    named = re.findall(r"`(tests/python/[\w/]+\.py)`", text)
    assert len(set(named)) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
    for part in text.split("\n## ")[1:]:
        assert re.search(r" #\d+", part), part.splitlines()[0]
        assert "Shown by `tests/" in part, part.splitlines()[0]
