"""tools/check_prose.py: phrases are found over the ends of lines too, and with what to write instead."""

import importlib.util
import pathlib

import pytest

TOOL = pathlib.Path(__file__).parents[3] / "tools" / "check_prose.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_prose", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "QLoRA and its kin",
        "A loss that is no number ends the run.",
        "bytes that are cut\namong ranks",
        "    // The base is cut\n    // among ranks.",
        "# a loss that is\n# no number",
        "it was mended",
    ],
)
def test_a_phrase_is_found(tool, text):
    ((line, phrase, instead),) = tool.findings_in(f"first line\n{text}\n")
    assert line == 2
    assert phrase
    assert instead


@pytest.mark.parametrize(
    "text",
    [
        "such a layer is refused\nby name",
        "4.06 times as fast",
        "documents are kept apart",
        "while it loads",
        "## What is the limit first",
        "it runs as ever",
        "1.2 GiB of it no page of a\nfile",
        "bytes for a step, the least there is",
        "experts may be cut over ranks",
        "its last bits may differ",
        "a change that is none of low rank",
        "rows that are no multiple of 32",
        "Refused by name: a cast",
    ],
)
def test_a_phrase_of_the_manual_is_found_there_alone(tool, text):
    assert len(tool.findings_in(text, manual=True)) == 1
    assert tool.findings_in(text) == []
    assert tool.in_manual("README.md")
    assert tool.in_manual("docs/how_to/chat.md")
    assert not tool.in_manual("python/monograph/nn/quant_linear.py")


@pytest.mark.parametrize("text", ["kindness", "no number of rows", "amended", "this is not a number"])
def test_other_words_are_none(tool, text):
    assert tool.findings_in(text, manual=True) == []
