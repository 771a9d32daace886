"""Hooks of mkdocs.yml: version and repository on every page, and options that are not broken at a hyphen."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Code in a line of text, not a block of it; then a word of it that begins with hyphens or has some inside.
INLINE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<\n]*)</code>")
HYPHENATED = re.compile(r"[^\s]*-[^\s]*")
LONGEST = 40  # letters; a longer word may be broken behind a mark, where a screen or a table is narrow
MARK = re.compile(r"(?<=[\w)\]])([(\[,=/._|]+)(?=\w)")


def version() -> str:
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml: no line 'version = ...' found")
    return found[1]


def on_config(config: Any) -> Any:
    config.site_name = f"{config.site_name} {version()}"
    config.copyright = f"Monograph {version()}, Apache-2.0"
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # set on GitHub's runners
        config.repo_url = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
        config.repo_name = repository
    return config


def _whole(word: re.Match[str]) -> str:
    return f'<span class="whole">{word[0]}</span>'


def _inline(code: re.Match[str]) -> str:
    words = []
    for word in code[1].split(" "):
        long = len(word) > LONGEST
        words.append(MARK.sub(r"\1<wbr>", word) if long else HYPHENATED.sub(_whole, word))
    return f"<code>{' '.join(words)}</code>"


def on_page_content(html: str, **_: Any) -> str:
    """Browsers end lines behind a hyphen, as in `--no-|tensors`, and nowhere in a long name."""
    return INLINE.sub(_inline, html)
