"""Rules of the tree that no compiler checks. Exit code 1 and one line per finding.

    python tools/check_tree.py [--build build/release]

File length, no torch in core, no conditional macros outside the listed places, no import of a module that is
gone, no circle of imports in Python and no import of a folder above one's own, no include upwards in core,
every folder in docs/explain/architecture.md, every operator in docs/reference/operators.md, no standard
containers or algorithms in ISA units, no speed of a GPU in a text as long as no report of one is kept and,
with --build, no weak symbol in an ISA object that lacks the tag of its instruction set: the linker could
otherwise hand AVX-512 code to a baseline caller.
"""

import argparse
import ast
import graphlib
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Lines of a file at most: of tests, and of all others.
LONGEST = (500, 400)
CONDITIONALS_ALLOWED = {"core/monograph/gpu/prims.h"}
ISA_TAGS = {
    "avx2": "simd::Avx2",
    "avx512": "simd::Avx512",
    "avx512_bf16": "simd::Avx512Bf16",
    "amx": "simd::Amx",
    "neon": "simd::Neon",
}
ISA_INCLUDES = re.compile(
    r"#include (<(bit|cmath|cstddef|cstdint|cstring|immintrin\.h|arm_neon\.h|type_traits)>"
    r'|"monograph/(base|cpu|formats|kernels|simd)/)'
)

GPU_NAMES = re.compile(r"\b(GPUs?|CUDA|ROCm|[ABH][12]00|RTX|[345]090|sm_\d+|gfx\d+|XPU|MPS)\b", re.IGNORECASE)
SPEEDS = re.compile(
    r"\d\s?(x|times) (as fast|faster)|\bfaster\b|\d\s?(tokens|tok)/s|\d\s?[TG]FLOPS?\b|\d\s?[TG]B/s"
    r"|\d\s?(ms|µs|us)\b"
)


def sources(*suffixes: str) -> list[pathlib.Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    return [ROOT / f for f in listed if f.endswith(suffixes) and (ROOT / f).exists()]


def longest_allowed(name: str) -> int:
    """Lines that a file may have, by its path."""
    of_tests, of_others = LONGEST
    return of_tests if "tests" in name.split("/") else of_others


def check_length() -> list[str]:
    findings = []
    for path in sources(".h", ".cpp", ".cuh", ".cu", ".py", ".cmake"):
        name = str(path.relative_to(ROOT))
        lines, longest = path.read_text().count("\n"), longest_allowed(name)
        if lines > longest:
            findings.append(f"{name}: {lines} lines, at most {longest} wanted")
    return findings


def check_core_is_torch_free() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: mentions torch in code; core knows nothing above it"
        for path in sources(".h", ".cpp", ".cuh", ".cu")
        if path.is_relative_to(ROOT / "core") and re.search(r"#include.*torch|torch::", path.read_text())
    ]


# The folders of core, lowest first: a folder includes those before it, tests too. The first row is the
# library of kernels, which knows no files, the second that of checkpoints.
KERNELS = [
    "base",
    "cpu",
    "targets",
    "simd",
    "formats",
    "documents",
    "gpu",
    "kernels",
    "packing",
    "read_ahead",
]
CHECKPOINT = [
    "text",
    "files",
    "safetensors",
    "hash",
    "weights",
    "quant_methods",
    "convert",
    "adapter",
    "gguf",
    "serving",
    "gguf_adapter",
    "merge",
    "gguf_merge",
    "train",
]


def check_core_layers(core: pathlib.Path = ROOT / "core/monograph") -> list[str]:
    order = {folder: place for place, folder in enumerate([*KERNELS, *CHECKPOINT])}
    findings = [
        f"{core / folder}: {what} the order of core's folders in tools/check_tree.py"
        for folder in sorted({p.name for p in core.iterdir() if p.is_dir()} ^ set(order))
        for what in ("no folder, but in" if folder in order else "not in",)
    ]
    for path in sorted(core.rglob("*")):
        folder = path.relative_to(core).parts[0]
        if path.suffix not in {".h", ".cpp", ".cuh", ".cu"} or folder not in order:
            continue
        for included in re.findall(r'#include "monograph/(\w+)/', path.read_text()):
            if order.get(included, len(order)) > order[folder]:
                findings.append(f"{path}: includes monograph/{included}, which stands above {folder}/")
    return findings


def check_architecture(page: str | None = None, operators: str | None = None) -> list[str]:
    """A page names every folder of core, ops and cli, another has the schemas of all operators."""
    text = (ROOT / "docs" / "explain" / "architecture.md").read_text() if page is None else page
    folders = {path.parent.relative_to(ROOT) for path in sources(".h", ".cpp", ".cuh", ".cu", ".hip")}
    names = set()
    for folder in folders:
        if folder.parts[:2] == ("core", "monograph"):
            parts = [part for part in folder.parts[2:4] if part != "tests"]
            names |= {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        elif folder.parts[0] in {"ops", "cli"}:
            names.add(folder.parts[1] if len(folder.parts) > 1 else folder.parts[0])
    lost = [name for name in sorted(names - {"tests"}) if not re.search(rf"(?<![\w-]){name}[/`]", text)]
    findings = [f"docs/explain/architecture.md: the folder {name}/ is not named" for name in lost]
    tool = runpy.run_path(str(ROOT / "tools" / "update_operator_page.py"))
    schemas = tool["PAGE"].read_text() if operators is None else operators
    return findings + tool["findings"](schemas, tool["schemas"]())


def check_conditionals() -> list[str]:
    findings = []
    for path in sources(".h", ".cpp", ".cuh", ".cu"):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else)\b", line) and name not in CONDITIONALS_ALLOWED:
                findings.append(f"{name}:{number}: conditional macro; CMake decides what is built")
    return findings


def check_isa_units() -> list[str]:
    findings = []
    for path in sources(".cpp"):
        if path.stem not in ISA_TAGS or "kernels" not in path.parts:
            continue
        for line in path.read_text().splitlines():
            if line.startswith("#include") and not ISA_INCLUDES.match(line):
                findings.append(f"{path.relative_to(ROOT)}: {line}: not for an ISA unit")
    return findings


def imports_in(nodes: Iterable[ast.AST], *, functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports but those for the type checker; those inside functions, which run later, only if asked for."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_in(node.orelse, functions=functions)
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_in(ast.iter_child_nodes(node), functions=functions)


def imported_modules(name: str, tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The modules of `known` that run when `name` is imported: packages too, but for those it lies in."""
    found: set[str] = set()
    for node in imports_in(tree.body, functions=False):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias}" for alias in names)]
        for imported in names:
            parts = imported.split(".")
            found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return {module for module in found & set(known) if not f"{name}.".startswith(f"{module}.")}


# The folders of the Python package, lowest first: each may import those before it, inside functions too.
FLOORS = (
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
    "diagnosis",
    "recipe",
    "bench",
    "cli",
)
# Likewise inside two of them; the files of the folder itself stand above its subfolders.
FLOORS_INSIDE = {
    "hf": ("accelerate", "transformers", "peft", "trl"),
    "recipe": ("config", "data", "run", "trl"),
}


def floor_of(parts: tuple[str, ...]) -> tuple[int, int] | None:
    """Numbers of the folder and the subfolder of a module. None: it is the package itself, above all."""
    if not parts or parts[0] not in FLOORS:
        return None
    inside = FLOORS_INSIDE.get(parts[0], ())
    sub = inside.index(parts[1]) if len(parts) > 1 and parts[1] in inside else len(inside)
    return FLOORS.index(parts[0]), sub


def check_floors(package: pathlib.Path = ROOT / "python" / "monograph") -> list[str]:
    """One line per import of a folder above one's own, and per folder that has no floor."""
    findings = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = "/".join(parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if len(parts) == 1 and path.parent == package:
            if parts[0] != "__main__":
                findings.append(f"{name}.py lies in the package itself, wanted a folder of FLOORS")
            continue
        own = floor_of(parts)
        if parts and own is None:
            findings.append(f"{name}.py lies in {parts[0]}/, which has no floor in FLOORS")
        if own is None:
            continue
        for node in imports_in(ast.parse(path.read_text()).body, functions=True):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias}" for alias in modules]
            for module in modules:
                root, *rest = module.split(".")
                if root != package.name:
                    continue
                # What the package itself has is for bench and cli.
                other = floor_of(tuple(rest)) or (FLOORS.index("bench"), 0)
                if other > own:
                    findings.append(f"{name}.py:{node.lineno}: imports {module}, which stands above it")
    return findings


def check_folders_are_named(
    package: pathlib.Path = ROOT / "python" / "monograph",
    page: pathlib.Path = ROOT / "docs" / "explain" / "architecture.md",
) -> list[str]:
    """One line per folder of the package that has no row in the table of the page."""
    folders = {path.parent.relative_to(package) for path in package.rglob("*.py")} - {pathlib.Path()}
    text = page.read_text()
    return [
        f"{page.name}: no row for {package.name}/{folder.as_posix()}/"
        for folder in sorted(folders)
        if f"| `{folder.as_posix()}/` |" not in text
    ]


def modules_of(package: pathlib.Path) -> dict[str, pathlib.Path]:
    files: dict[str, pathlib.Path] = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def check_imports_exist(package: pathlib.Path = ROOT / "python" / "monograph") -> list[str]:
    """`from monograph.gone import x`: mypy takes it for a library that is not installed."""
    files = modules_of(package)
    return [
        f"{path.relative_to(package.parent)}:{node.lineno}: there is no module {node.module}"
        for path in files.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        if node.module.partition(".")[0] == package.name and node.module not in files
    ]


def check_import_circles(package: pathlib.Path = ROOT / "python" / "monograph") -> list[str]:
    files = modules_of(package)
    graph = {name: imported_modules(name, ast.parse(path.read_text()), files) for name, path in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"a circle of imports: {' <- '.join(error.args[1])}"]
    return []


def speeds_of_gpus(text: str) -> list[str]:
    """Lines that name a GPU and a speed."""
    return [line for line in text.splitlines() if GPU_NAMES.search(line) and SPEEDS.search(line)]


def check_gpu_speeds(reports: pathlib.Path = ROOT / "bench" / "results" / "gpu") -> list[str]:
    if list(reports.glob("*.json")):
        return []
    return [
        f"{path.relative_to(ROOT)}: a speed of a GPU without a report: {line.strip()[:80]}"
        for path in sources(".md")
        for line in speeds_of_gpus(path.read_text())
    ]


def check_weak_symbols(build: pathlib.Path) -> list[str]:
    findings, seen = [], 0
    for path in build.rglob("*.o"):
        tag = ISA_TAGS.get(path.name.removesuffix(".cpp.o"))
        if tag is None:
            continue
        seen += 1
        listing = subprocess.run(
            ["nm", "-C", "--defined-only", str(path)], check=True, capture_output=True, text=True
        ).stdout
        for line in listing.splitlines():
            fields = line.split(" ", 2)
            # V and u are read-only tables: the same bytes whatever the flags.
            if len(fields) == 3 and fields[1] == "W" and not re.search(tag + r"\b", fields[2]):
                findings.append(f"{path}: weak symbol without {tag}: {fields[2]}")
    if seen == 0:
        findings.append(f"{build}: no ISA objects found")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, help="a release build folder, for the weak symbols")
    arguments = parser.parse_args()
    findings = check_length() + check_core_is_torch_free() + check_core_layers() + check_conditionals()
    findings += check_architecture() + check_isa_units() + check_imports_exist()
    findings += check_import_circles() + check_floors()
    findings += check_folders_are_named()
    findings += check_gpu_speeds()
    if arguments.build:
        findings += check_weak_symbols(arguments.build)
    print("\n".join(findings) or "tree: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
