"""The wheel `monograph-tool`: the native program of a wheel of monograph, and nothing else.

    python tools/release/tool_wheel.py build/upload/wheels/monograph-0.1.0-py3-none-*.whl build/upload/wheels

It has no Python code and requires no package, so pip installs it in seconds. The program is copied byte for
byte and named `monograph-tool`, so that both wheels can be installed side by side. The same wheel gives the
same bytes.
"""

from __future__ import annotations

import argparse
import base64
import email.parser
import hashlib
import pathlib
import zipfile

NAME = "monograph-tool"
# In a wheel's name and folders a hyphen separates fields.
FILE_NAME = NAME.replace("-", "_")
SUMMARY = (
    "Merge, check, convert, verify, compare and export checkpoints and adapters; without Python code or torch"
)
DESCRIPTION = """\
# monograph-tool

The native program of Monograph alone, for adapters that were trained elsewhere: with unsloth, axolotl, TRL or
PEFT. One file of machine code; it needs neither Python packages nor torch.

```
monograph-tool inspect my-lora
monograph-tool merge BASE --adapter my-lora --base original --out merged
monograph-tool adapter check BASE my-lora --for vllm
monograph-tool adapter convert BASE my-lora --for vllm --out my-lora-vllm
monograph-tool export merged merged.gguf --type q8_0
```

`monograph-tool COMMAND --help` tells more, with examples. The package `monograph` has the same program under
the name `monograph`, and trains.
"""
ARCHIVE_TIME = (1980, 1, 1, 0, 0, 0)


def _one(names: list[str], ending: str) -> str:
    found = [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files end in {ending}, wanted one")
    return found[0]


def _metadata(about: email.message.Message) -> str:
    fields = {
        "Metadata-Version": "2.4",
        "Name": NAME,
        "Version": about["Version"],
        "Summary": SUMMARY,
        "License-Expression": about["License-Expression"],
        "License-File": "LICENSE",
        "Requires-Python": about["Requires-Python"],
        "Description-Content-Type": "text/markdown",
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items() if value) + f"\n{DESCRIPTION}"


def files_of(wheel: pathlib.Path) -> dict[str, bytes]:
    """Path and content of each file of the new wheel but RECORD, from a wheel of monograph."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        program = archive.read(_one(names, ".data/scripts/monograph"))
        licence = archive.read(_one(names, ".dist-info/licenses/LICENSE"))
        tags = archive.read(_one(names, ".dist-info/WHEEL")).decode()
        metadata = archive.read(_one(names, ".dist-info/METADATA")).decode()
    about = email.parser.Parser().parsestr(metadata)
    tag_lines = [line for line in tags.splitlines() if line.startswith("Tag: ")]
    stem = f"{FILE_NAME}-{about['Version']}"
    wheel_lines = ["Wheel-Version: 1.0", f"Generator: {NAME}", "Root-Is-Purelib: false", *tag_lines]
    return {
        f"{stem}.data/scripts/{NAME}": program,
        f"{stem}.dist-info/METADATA": _metadata(about).encode(),
        f"{stem}.dist-info/WHEEL": ("\n".join(wheel_lines) + "\n").encode(),
        f"{stem}.dist-info/licenses/LICENSE": licence,
    }


def write_tool_wheel(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    files = files_of(wheel)
    record = f"{next(iter(files)).partition('.data/')[0]}.dist-info/RECORD"
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    # monograph-0.1.0-py3-none-manylinux_2_28_x86_64.whl: version and tags stay.
    target = folder / wheel.name.replace("monograph-", f"{FILE_NAME}-", 1)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, record: "".join([*rows, f"{record},,\n"]).encode()}.items():
            info = zipfile.ZipInfo(name, ARCHIVE_TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            archive.writestr(info, content)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path, help="a wheel of monograph")
    parser.add_argument("folder", type=pathlib.Path, help="where the wheel of the tool goes")
    arguments = parser.parse_args()
    print(write_tool_wheel(arguments.wheel, arguments.folder))


if __name__ == "__main__":
    main()
