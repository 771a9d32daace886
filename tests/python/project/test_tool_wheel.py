"""The wheel `monograph-tool`: the program of a wheel of monograph byte for byte, and nothing else."""

import json
import subprocess
import sys
import venv
import zipfile

import pytest

from support.native_tool import ROOT, program

sys.path.insert(0, str(ROOT / "tools" / "release"))

import tool_wheel

pytestmark = pytest.mark.slow
METADATA = """\
Metadata-Version: 2.4
Name: monograph
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.11

# Monograph
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A wheel of monograph with the program of the release build, and that of its tool."""
    folder = tmp_path_factory.mktemp("wheels")
    whole = folder / "monograph-1.2.3-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("monograph/__init__.py", "import torch\n")
        archive.write(program(), "monograph-1.2.3.data/scripts/monograph")
        archive.writestr("monograph-1.2.3.dist-info/METADATA", METADATA)
        archive.writestr(
            "monograph-1.2.3.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n"
        )
        archive.write(ROOT / "LICENSE", "monograph-1.2.3.dist-info/licenses/LICENSE")
    return whole, tool_wheel.write_tool_wheel(whole, folder)


def test_it_is_the_same_program_without_python_code(wheels, tmp_path):
    whole, alone = wheels
    assert alone.name == "monograph_tool-1.2.3-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(whole) as first, zipfile.ZipFile(alone) as second:
        copied = second.read("monograph_tool-1.2.3.data/scripts/monograph-tool")
        assert copied == first.read("monograph-1.2.3.data/scripts/monograph")
        about = second.read("monograph_tool-1.2.3.dist-info/METADATA").decode()
        assert not [name for name in second.namelist() if name.endswith((".py", ".so"))]
    assert "Requires-Dist" not in about
    assert "Name: monograph-tool\nVersion: 1.2.3\n" in about
    assert tool_wheel.write_tool_wheel(whole, tmp_path).read_bytes() == alone.read_bytes()


def test_a_wheel_without_a_program_is_refused(tmp_path):
    wheel = tmp_path / "monograph-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("monograph-1.2.3.dist-info/METADATA", METADATA)
    with pytest.raises(ValueError, match=r"0 files end in \.data/scripts/monograph, wanted one"):
        tool_wheel.write_tool_wheel(wheel, tmp_path)


def test_pip_installs_it_without_torch_and_every_command_works(wheels, tmp_path):
    """What `.ci/run upload` does with the wheel of a release."""
    venv.create(tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", wheels[1]]
    subprocess.run(install, check=True)
    done = subprocess.run(
        [python, ROOT / "tools/release/tool_smoke_test.py"], capture_output=True, text=True, env={}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["torch_installed"]
    assert found["commands"] == 15
    removed = [sys.executable, "-m", "pip", "--python", python, "uninstall", "-qy", "monograph-tool"]
    subprocess.run(removed, check=True)
    assert not python.with_name("monograph-tool").exists()
