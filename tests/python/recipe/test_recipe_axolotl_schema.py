"""Every key of axolotl's schema has a state, and a recipe does with it what that state says."""

import io
import json
import pathlib
import subprocess
import sys
import tarfile

import pytest

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.key_support import state_of

TOOLS = pathlib.Path(__file__).parents[3] / "tools"
KEPT = json.loads((TOOLS / "axolotl_schema.json").read_text(encoding="utf-8"))
NAMES = KEPT["keys"]

SCHEMA = {
    "utils/schemas/config.py": """
class Inner(BaseModel):
    entry: int | None = None

class Base(BaseModel):
    inherited: int | None = None
    renamed: str | None = Field(default=None, alias="learning_rate")

class AxolotlInputConfig(Base, BaseModel):
    model_config = {"populate_by_name": True}
    counted: ClassVar[int] = 0
    lora_r: int | None = Field(default=None, json_schema_extra={"description": "rank"})
    special_tokens: Inner | None = None
    nested: Annotated[list[Inner], MinLen(1)] | None = None
""",
    "integrations/one/args.py": "class OneArgs(BaseModel):\n    of_plugin: bool | None = None\n",
    "integrations/one/__init__.py": (
        "class OnePlugin(BasePlugin):\n"
        "    def get_input_args(self):\n"
        "        return 'axolotl.integrations.one.OneArgs'\n"
    ),
    "integrations/other/args.py": "class Unused(BaseModel):\n    never: int = 0\n",
}


def test_no_key_of_the_schema_is_unknown():
    assert KEPT["axolotl"] == "0.19.0"
    assert len(NAMES) > 800
    assert [name for name in NAMES if state_of(name) is None] == []
    assert state_of("learning_rat") is None
    assert state_of("datasets.pth") is None
    assert state_of("datasets.type.fromat") is None


def test_the_tool_reads_a_schema_and_lists_what_is_unknown(tmp_path):
    """Inherited fields, aliases, entries of nested classes and keys of plugins; no class variables."""
    path = tmp_path / "axolotl-9.8.7.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in SCHEMA.items():
            entry = tarfile.TarInfo(f"axolotl-9.8.7/src/axolotl/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    command = [sys.executable, str(TOOLS / "axolotl_schema.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:-1] == [
        "axolotl 9.8.7: 9 keys, 6 unknown",
        "inherited",
        "nested",
        "nested.entry",
        "of_plugin",
        "renamed",
        "special_tokens.entry",
    ]
    assert done.returncode == 1


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    (root / "config.json").write_text("{}")
    data = [{"path": "train.jsonl", "type": "alpaca"}]
    return {"base_model": str(root), "adapter": "qlora", "lora_target_linear": True, "datasets": data}


def said_of(keys):
    """All lines about a recipe."""
    try:
        return check_keys(keys).notices
    except ConfigError as error:
        return error.errors


@pytest.mark.parametrize("engine", ["own", "trl"])
def test_each_state_is_what_a_recipe_does(engine, good):
    """Nothing is called unknown; what is refused or ignored is said by name. Mistakes come all at once."""
    good = good | ({"trainer": "trl"} if engine == "trl" else {})
    outer = [name for name in NAMES if "." not in name and name not in good]
    for state, said in (("refused", "not supported"), ("ignored", "ignored")):
        names = [name for name in outer if state_of(name) == (state, state) and name != "plugins"]
        assert len(names) > 80
        lines = said_of(good | dict.fromkeys(names, "something"))
        assert sorted(line.split(f": {said}; ")[0] for line in lines) == names
    lines = said_of(good | dict.fromkeys(outer, "something"))
    assert len(lines) > 250
    assert not [line for line in lines if "unknown key" in line]


@pytest.mark.parametrize("engine", ["own", "trl"])
def test_each_state_inside_a_dataset_is_what_a_recipe_does(engine, good):
    good = good | ({"trainer": "trl"} if engine == "trl" else {})
    inside = [name.removeprefix("datasets.") for name in NAMES if name.startswith("datasets.")]
    keys = [name for name in inside if "." not in name]
    lines = said_of(good | {"datasets": [dict.fromkeys(keys, 1)]})
    assert not [line for line in lines if "unknown key" in line]
    for name in keys:
        refused = [line for line in lines if line.startswith(f"datasets.0.{name}: not supported; ")]
        assert bool(refused) == (getattr(state_of(f"datasets.{name}"), engine) == "refused"), name
    kinds = [name.removeprefix("type.") for name in inside if name.startswith("type.")]
    words = [name for name in kinds if state_of(f"datasets.type.{name}").own == "honoured"]
    check_keys(good | {"datasets": [{"path": "a", "type": dict.fromkeys(words, "x")}]})
