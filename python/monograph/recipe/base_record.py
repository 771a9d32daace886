"""What an adapter was trained on: the files of the base and their hashes, beside the adapter."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

NAME = "base.json"


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def base_record(folder: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Size and SHA-256 of config.json and every weight file; those unchanged since `known` are not read."""
    before = (known or {}).get("files", {}) if (known or {}).get("folder") == os.path.abspath(folder) else {}
    files: dict[str, Any] = {}
    for name in sorted(os.listdir(folder)):
        if name != "config.json" and not name.endswith(".safetensors"):
            continue
        path = os.path.join(folder, name)
        status = os.stat(path)
        seen = {"size": status.st_size, "modified_ns": status.st_mtime_ns}
        old = before.get(name, {})
        same = all(old.get(key) == value for key, value in seen.items())
        files[name] = {**seen, "sha256": old["sha256"] if same else _sha256(path)}
    together = hashlib.sha256("".join(f"{name} {files[name]['sha256']}\n" for name in files).encode())
    return {"folder": os.path.abspath(folder), "sha256": together.hexdigest(), "files": files}


def write_base_record(folder: str, output_dir: str) -> str:
    """Writes base.json into output_dir; gives the hash of the base."""
    path = os.path.join(output_dir, NAME)
    known = None
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
    record = base_record(folder, known)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(f"{path}.new", path)
    return record["sha256"]
