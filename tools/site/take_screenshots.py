"""Takes pictures of ten pages of the site at 1280 and 390 pixels, and says what is cut in them.

    python tools/site/take_screenshots.py build/site/html build/site/pictures [--browser /usr/bin/chromium]

Needs `pip install playwright` and a Chromium. Exit code 1 and a line for each finding: a page wider than the
window, code that is cut, a picture without a text, a page that is not there. Not part of CI.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import pathlib
import threading
from typing import Any

PAGES = [
    "index", "docs/start/tutorial", "docs/start/memory", "docs/recipes/llama3", "docs/how_to/tool_alone",
    "docs/reference/cli", "docs/reference/other_keys", "docs/explain/architecture", "docs/figures",
    "bench/results/2026-11-15-xeon-amx",
]  # fmt: skip
WIDTHS = (1280, 390)
DARK = ("index", "docs/figures")
CUT = """() => {
  const found = [];
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room + 1)
    found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
  for (const code of document.querySelectorAll('pre > code'))
    if (code.scrollWidth > code.clientWidth + 1)
      found.push(`code is cut: ${code.textContent.trim().split('\\n')[0].slice(0, 60)}`);
  if (room >= 1200)
    for (const table of document.querySelectorAll('.md-typeset__table'))
      if (table.scrollWidth > table.parentElement.clientWidth + 1)
        found.push(`a table is cut: ${table.textContent.trim().replace(/\\s+/g, ' ').slice(0, 60)}`);
  for (const image of document.querySelectorAll('article img'))
    if (!image.alt) found.push(`no text for ${image.getAttribute('src')}`);
  return found;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing: requests of the browser are not worth a line."""


def serve(folder: pathlib.Path) -> http.server.ThreadingHTTPServer:
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def take(site: pathlib.Path, out: pathlib.Path, browser_path: str | None) -> list[str]:
    from playwright.sync_api import sync_playwright

    out.mkdir(parents=True, exist_ok=True)
    server = serve(site)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for scheme, pages in (("light", PAGES), ("dark", DARK)):
            for width in WIDTHS:
                size = {"width": width, "height": 900}
                context = browser.new_context(viewport=size, color_scheme=scheme)
                for name in pages:
                    tab = context.new_page()
                    answer = tab.goto(f"{address}/{name}.html", wait_until="load")
                    if not answer.ok:
                        found.append(f"{name}: there is no such page ({answer.status})")
                    picture = out / f"{name.replace('/', '_')}-{width}-{scheme}.png"
                    tab.screenshot(path=str(picture))
                    found += [f"{name} at {width}: {line}" for line in tab.evaluate(CUT)]
                    tab.close()
                context.close()
        browser.close()
    server.shutdown()
    return sorted(set(found))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=pathlib.Path, help="what mkdocs built")
    parser.add_argument("out", type=pathlib.Path, help="where the pictures go")
    parser.add_argument("--browser", help="Chromium's program; playwright's own unless given")
    arguments = parser.parse_args()
    found = take(arguments.site, arguments.out, arguments.browser)
    for line in found:
        print(line)
    print(
        f"wrote {len(list(arguments.out.glob('*.png')))} pictures to {arguments.out}; {len(found)} findings"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
