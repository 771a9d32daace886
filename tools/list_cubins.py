"""SHA-256 of the device code in the CUDA library, by architecture: what doctor's report names.

    python tools/list_cubins.py LIBRARY --cuobjdump PROGRAM --out monograph_cuda.json

The code of one architecture is that of all units, in the order of the library.
"""

import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import tempfile


def cubins(library: pathlib.Path, cuobjdump: pathlib.Path) -> dict[str, str]:
    found: dict[str, list[tuple[int, pathlib.Path]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(cuobjdump.resolve()), "-xelf", "all", str(library.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for path in pathlib.Path(folder).iterdir():
            place = re.fullmatch(r".*\.(\d+)\.(sm_\w+)\.cubin", path.name)
            if place is None:
                raise SystemExit(f"{cuobjdump.name} wrote {path.name}, wanted NAME.NUMBER.sm_XX.cubin")
            found.setdefault(place[2], []).append((int(place[1]), path))
        return {
            architecture: hashlib.sha256(b"".join(path.read_bytes() for _, path in sorted(parts))).hexdigest()
            for architecture, parts in sorted(found.items())
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--cuobjdump", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    listed = cubins(arguments.library, arguments.cuobjdump)
    if not listed:
        raise SystemExit(f"{arguments.library.name} has no device code")
    arguments.out.write_text(json.dumps({"cubins": listed}, indent=2) + "\n")


if __name__ == "__main__":
    main()
