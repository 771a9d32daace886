"""The sweep that begins docs/how_to/many_adapters.md, as it stands there."""

import json
import shlex

import pytest

from monograph.__main__ import main
from support.page_blocks import commands

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_commands_of_the_page_train_six_adapters_and_list_the_best_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = [command for page, command in commands() if page == "docs/how_to/many_adapters.md"]
    shown = [command for command in shown if command.startswith("python -m monograph ")]
    assert [shlex.split(command)[3] for command in shown] == ["example", "train", "sweep-report"]
    for command in shown:
        capsys.readouterr()
        assert main(shlex.split(command)[3:]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = {f"lr{rate}-r{rank}" for rate in ("0.004", "0.001", "2e-4") for rank in (2, 8)}
    assert {line.split()[0] for line in lines[1:]} == wanted
    losses = [float(line.split()[3]) for line in lines[1:]]
    assert losses == sorted(losses)
    assert losses[0] < losses[-1] / 2  # a rate that learns against one that does not
    assert (tmp_path / "tiny/sweep/losses.png").is_file()
    for name in wanted:
        config = json.loads((tmp_path / "tiny/sweep" / name / "adapter_config.json").read_text())
        assert name.endswith(f"-r{config['r']}")
