"""What the site is assembled from; `.ci/run site` builds it, strictly."""

import importlib
import json
import re
import sys

import pytest
import yaml

from support.native_tool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "site"))

import assemble_pages
import draw_figures
import page_hooks
import take_screenshots


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    assemble_pages.assemble(folder)
    draw_figures.draw_all(folder / "docs")
    return folder


def paths_of(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else paths_of(value)


def test_every_page_is_in_the_menu_and_the_menu_has_no_other(pages):
    text = (ROOT / "mkdocs.yml").read_text()
    menu = list(paths_of(yaml.safe_load(text)["nav"]))
    assert sorted(menu) == sorted(str(page.relative_to(pages)) for page in pages.rglob("*.md"))


def test_the_pages_that_are_photographed_are_there(pages):
    names = [*take_screenshots.PAGES, *take_screenshots.DARK]
    sources = ["README" if name == "index" else name for name in names]
    assert [name for name in sources if not (pages / f"{name}.md").exists()] == []


def test_a_link_that_leads_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(assemble_pages, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("[here](docs/gone.md)")
    with pytest.raises(ValueError, match=r"README\.md: the link docs/gone\.md leads nowhere"):
        assemble_pages.assemble(tmp_path / "pages")


def test_the_reference_has_every_public_name(pages):
    for module in assemble_pages.MODULES:
        text = (pages / "docs" / "reference" / f"{module}.md").read_text()
        names = importlib.import_module(module).__all__
        shown = re.findall(r"^(?:::: \S+\.|## )(\w+)$", text, re.MULTILINE)
        assert sorted(shown) == sorted(names), module


def test_the_figures_are_the_recorded_numbers():
    """Three bars, each looked up in its file by hand."""
    lines = [json.loads(line) for line in (ROOT / "bench/results/trl.jsonl").read_text().splitlines()]
    summary = lines[-1]["summary"]
    seconds = draw_figures.trl_seconds()
    assert seconds["monograph"][1] == summary["dpo_eager_2_threads_seconds"]
    assert seconds["bitsandbytes"][2] == summary["grpo_eager_2_threads_bitsandbytes_seconds"]
    assert draw_figures.attention_ratios()["16 heads of keys"][0] == 23.376


def test_code_in_a_line_is_not_broken_inside_a_word():
    html = "<p><code>merge --no-scan x</code></p><pre><code>a --no-b</code></pre>"
    shown = page_hooks.on_page_content(html)
    assert '<code>merge <span class="whole">--no-scan</span> x</code>' in shown
    assert "<pre><code>a --no-b</code></pre>" in shown
    long = "state_dict=get_model_state_dict(model_of_this_name,options)"
    assert "state_<wbr>dict=<wbr>get_" in page_hooks.on_page_content(f"<code>{long}</code>")


def test_every_page_shows_the_version():
    class Config:
        site_name, copyright = "Monograph", ""

    found = page_hooks.on_config(Config())
    assert re.fullmatch(r"Monograph \d+\.\d+\.\d+", found.site_name)
    assert f'version = "{page_hooks.version()}"' in (ROOT / "pyproject.toml").read_text()


def test_a_hosted_build_links_to_its_repository(monkeypatch):
    class Config:
        site_name = "Monograph"

    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert not hasattr(page_hooks.on_config(Config()), "repo_url")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/monograph")
    found = page_hooks.on_config(Config())
    assert (found.repo_url, found.repo_name) == ("https://example.org/owner/monograph", "owner/monograph")


def test_one_colour_for_us_and_one_for_what_we_are_compared_with():
    from monograph.bench import plot

    assert draw_figures.OURS[0] == plot.OURS
    assert plot.PEER == draw_figures.PEER
    assert {name for *_, series, _, _, _ in draw_figures.FIGURES for name in series()} >= draw_figures.PEERS


def test_pictures_of_the_pages_have_words():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(words.split()) >= 4, f"{page.name}: {path}"
