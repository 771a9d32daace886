"""What a wheel is made of, as CycloneDX 1.6: itself by its SHA-256, what is compiled in, what it requires.

    python tools/release/bill_of_materials.py WHEEL OUT.cdx.json

Compiled in are headers of Debian packages, whose versions dpkg knows, and parts of GCC's run time. The
document is the same for the same wheel: its time is SOURCE_DATE_EPOCH (0 without it), its number a hash of
the wheel.
"""

from __future__ import annotations

import datetime
import email.parser
import hashlib
import os
import pathlib
import subprocess
import sys
import uuid
import zipfile

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

# Debian's package, its name to others, and the licence of what is taken from it.
COMPILED_IN = {
    "libcli11-dev": ("CLI11", "BSD-3-Clause"),
    "libxxhash-dev": ("xxHash", "BSD-2-Clause"),
    "libstdc++-12-dev": ("libstdc++", "GPL-3.0-or-later WITH GCC-exception-3.1"),
}


def metadata(wheel: pathlib.Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def version_of(package: str) -> str:
    ask = ["dpkg-query", "--show", "--showformat=${Version}", package]
    done = subprocess.run(ask, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{package}: not installed here, though the wheel has parts of it")
    return done.stdout


def compiled_in(package: str) -> Component:
    name, licence = COMPILED_IN[package]
    version = version_of(package)
    url = PackageURL("deb", "debian", package, version)
    said = LicenseFactory().make_with_expression(licence, acknowledgement=LicenseAcknowledgement.DECLARED)
    how = Property(name="monograph:how", value="compiled in")
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=str(url),
        licenses=[said],
        properties=[how],
    )


def required(line: str) -> Component:
    """Of "peft>=0.21; extra == 'train'": versions are a range, which pip decides."""
    requirement = Requirement(line)
    url = PackageURL("pypi", None, requirement.name)
    kept = [Property(name="monograph:requirement", value=line)]
    optional = requirement.marker is not None
    scope = ComponentScope.OPTIONAL if optional else ComponentScope.REQUIRED
    return Component(
        name=requirement.name,
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=f"{url}#{line}",
        scope=scope,
        properties=kept,
    )


def bill(wheel: pathlib.Path) -> Bom:
    about = metadata(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    licence = LicenseFactory().make_from_string(about["License-Expression"])
    url = PackageURL("pypi", None, about["Name"], about["Version"])
    itself = Component(
        name=about["Name"],
        version=about["Version"],
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=str(url),
        licenses=[licence],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        properties=[Property(name="monograph:file", value=wheel.name)],
    )
    parts = [compiled_in(package) for package in COMPILED_IN]
    parts += [required(line) for line in about.get_all("Requires-Dist", [])]
    found = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{digest}"))
    found.metadata.component = itself
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    found.metadata.timestamp = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    found.register_dependency(itself, parts)
    return found


def main() -> None:
    wheel, out = (pathlib.Path(word) for word in sys.argv[1:])
    text = JsonV1Dot6(bill(wheel)).output_as_string(indent=2)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"not CycloneDX 1.6: {wrong}")
    out.write_text(text + "\n")


if __name__ == "__main__":
    main()
