"""Puts together what the site is built from: the Markdown of the repository, a reference, figures.

    python tools/site/assemble_pages.py build/site/pages && mkdocs build --strict

The folder mirrors the repository, so that links between its files hold as they are written. Files that a page
links to and that are no page (recorded lines, recipes) are copied; a link to a folder becomes its text.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "monograph"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md", "bench/results/*.md")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)[^)\s]*\)")
# Parts of the package that people import, with what a page says of them.
MODULES = {
    "monograph": "The names of `import monograph as mg`.",
    "monograph.nn": "Modules on packed weights.",
    "monograph.training": "The training step.",
    "monograph.packing": "Several documents in one row.",
    "monograph.distributed": "Several processes.",
    "monograph.memory.offload": "Tensors that leave memory.",
    "monograph.ops": "The operators, `torch.ops.monograph.NAME`.",
}


def exported(module: str) -> dict[str, str]:
    """Name -> where it is defined, for each name of a module's `__all__`."""
    path = PACKAGE.joinpath(*module.split(".")[1:]) / "__init__.py"
    tree = ast.parse(path.read_text())
    places: dict[str, str] = {}
    listed: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("monograph"):
            for alias in node.names:
                places[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            listed = ast.literal_eval(node.value)
    missing = [name for name in listed if name not in places]
    if missing:
        raise ValueError(f"{module}: {missing} in __all__, wanted an import for each")
    return {name: places[name] for name in listed}


def write_reference(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for module, text in MODULES.items():
        lines = [f"# {module}\n\n{text} Made from the docstrings.\n"]
        for place in exported(module).values():
            if place in MODULES:
                lines.append(f"## {place.rpartition('.')[2]}\n\nThe module [{place}]({place}.md).\n")
            else:
                lines.append(f"::: {place}\n")
        (folder / f"{module}.md").write_text("\n".join(lines))


def copied(page: pathlib.Path, folder: pathlib.Path) -> str:
    """The text of a page; files that it links to are copied."""
    text = page.read_text()

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = (page.parent / target).resolve()
        if not file.exists():
            raise ValueError(f"{page.relative_to(ROOT)}: the link {target} leads nowhere")
        if file.is_dir():
            return f"`{match[1]}`"
        place = folder / file.relative_to(ROOT)
        if file.suffix != ".md" and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        return match[0]

    return LINK.sub(link, text)


def assemble(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            place = folder / page.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(copied(page, folder))
    write_reference(folder / "docs" / "reference")
    shutil.copyfile(pathlib.Path(__file__).with_name("extra.css"), folder / "extra.css")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder.resolve()
    try:
        assemble(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    from draw_figures import draw_all

    draw_all(folder / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
