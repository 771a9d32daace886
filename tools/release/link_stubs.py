"""Libraries to link against, so that what is linked loads on systems as old as a manylinux policy.

    python tools/release/link_stubs.py build/stubs
    LDFLAGS="-L$PWD/build/stubs" cmake ...

A program takes the newest version of each symbol that the C library of the building machine has, and then
asks for that version. The folder written here has a libc, libm, libgcc_s and libstdc++ of the same names
with the symbols of this machine up to the policy's versions and nothing else; they hold no code. A linker
that looks there first takes the older versions. What the policy lacks comes from GCC's static libstdc++ (as
Red Hat's compilers do it) and, for a few functions of the C library, from old_glibc.c. Compilers and headers
stay the machine's own.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
from typing import NamedTuple

# Of auditwheel's manylinux_2_28: the C library of RHEL 8, the run time of GCC 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6")
# Until 2.34 in a library of their own, which then has to be loaded; today it is empty.
THREADS = re.compile(r"(__)?pthread_|sem_")
# Defined by old_start.c, which calls the system's own by its version.
REPLACED = {"__libc_start_main"}
SOURCES = tuple(pathlib.Path(__file__).resolve().with_name(name) for name in ("old_glibc.c", "old_start.c"))
SYMBOL = re.compile(
    r"^\s*\d+:\s+[0-9a-f]+\s+(?P<size>\w+)\s+(?P<kind>FUNC|IFUNC|OBJECT)\s+(?P<binding>GLOBAL|WEAK|UNIQUE)\s+"
    r"DEFAULT\s+\d+\s+(?P<name>[^@\s]+)@@?(?P<version>[A-Z]+_[0-9.]+)\s*$",
    re.MULTILINE,
)


class Symbol(NamedTuple):
    name: str
    version: str
    is_object: bool
    size: int


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("_")[1].split("."))


def oldest_enough(listing: str) -> list[Symbol]:
    """Of readelf's listing: of each name the newest version that the policy has."""
    found: dict[str, Symbol] = {}
    for match in SYMBOL.finditer(listing):
        version = match["version"]
        family = version.split("_")[0]
        if family not in NEWEST or number(version) > NEWEST[family]:
            continue
        symbol = Symbol(match["name"], version, match["kind"] == "OBJECT", int(match["size"], 0))
        before = found.get(symbol.name)
        if before is None or number(before.version) < number(version):
            found[symbol.name] = symbol
    return sorted(found.values())


def assembly(symbols: list[Symbol]) -> str:
    lines = []
    for index, (name, version, is_object, size) in enumerate(symbols):
        at = "@" if name in REPLACED else "@@"
        lines += [
            ".data" if is_object else ".text",
            f".globl stub_{index}",
            f".type stub_{index}, @{'object' if is_object else 'function'}",
            f".size stub_{index}, {size}",
            f"stub_{index}: .skip {size if is_object else 1}",
            f".symver stub_{index}, {name}{at}{version}, remove",
        ]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def write_library(folder: pathlib.Path, name: str, symbols: list[Symbol]) -> None:
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text(assembly(symbols))
    versions = sorted(
        {symbol.version for symbol in symbols}, key=lambda version: (version[:5], number(version))
    )
    script.write_text("".join(f"{version} {{ }};\n" for version in versions))
    link = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
    subprocess.run([*link, f"-Wl,--version-script={script}"], check=True)


def path_of(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write_stubs(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        command = ["readelf", "--dyn-syms", "--wide", path_of(name)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        symbols = oldest_enough(listing)
        if not symbols:
            raise SystemExit(f"{command[-1]}: no symbol of {', '.join(NEWEST)} found by readelf")
        if name == "libc.so.6":
            write_library(
                folder, "libpthread.so.0", [symbol for symbol in symbols if THREADS.match(symbol.name)]
            )
            symbols = [symbol for symbol in symbols if not THREADS.match(symbol.name)]
        write_library(folder, name, symbols)
    here = folder.resolve()
    flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-fno-stack-protector"]
    for source in SOURCES:
        subprocess.run(["gcc", *flags, "-c", str(source)], check=True, cwd=here)
    members = [f"{source.stem}.o" for source in SOURCES]
    subprocess.run(["ar", "rcs", "libold_glibc.a", *members], check=True, cwd=here)
    rest = (
        f"{here}/libold_glibc.a {path_of('libc_nonshared.a')} AS_NEEDED ( {path_of('ld-linux-x86-64.so.2')} )"
    )
    (folder / "libc.so").write_text(f"GROUP ( {here}/libc.so.6 {here}/libpthread.so.0 {rest} )\n")
    (folder / "libm.so").write_text(f"INPUT ( {here}/libm.so.6 )\n")
    (folder / "libgcc_s.so").write_text(f"GROUP ( {here}/libgcc_s.so.1 -lgcc )\n")
    (folder / "libstdc++.so").write_text(f"GROUP ( {here}/libstdc++.so.6 {path_of('libstdc++.a')} )\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    write_stubs(parser.parse_args().folder)


if __name__ == "__main__":
    main()
