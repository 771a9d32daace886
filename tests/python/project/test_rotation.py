"""The rotating lane: ages, what is red, and which stage is next."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import rotation  # noqa: E402  a tool, not a package

NAMES = [stage.name for stage in rotation.STAGES]


class Clone:
    """A repository of its own with the tool inside and every stage recorded at its first commit."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "tools").mkdir(parents=True)
        (folder / ".ci").mkdir()
        shutil.copy(ROOT / "tools" / "rotation.py", folder / "tools")
        self.git("init", "-q")
        self.git("config", "user.name", "someone")
        self.git("config", "user.email", "someone@example.com")
        first = self.commit("README.md")
        self.record({name: first for name in NAMES})

    def git(self, *arguments):
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, file, times=1):
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(times):
            with path.open("a") as text:
                text.write("line\n")
            self.git("add", "-A")
            self.git("commit", "-q", "-m", file)
        return self.git("rev-parse", "HEAD")

    def record(self, commits, seconds=60):
        rows = {name: {"passed": commit, "seconds": seconds} for name, commit in commits.items()}
        (self.folder / ".ci").mkdir(exist_ok=True)
        (self.folder / ".ci" / "rotation.json").write_text(json.dumps(rows))

    def run(self, *arguments):
        command = [sys.executable, "tools/rotation.py", *map(str, arguments)]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "clone")


def test_age_counts_the_commits_that_touch_the_paths_of_a_stage(clone):
    clone.commit("ops/cuda/x.cu", times=2)
    clone.commit("docs/x.md", times=3)
    table = clone.run("table")
    assert table.returncode == 0, table.stderr
    ages = dict(re.findall(r"^(\w+) +passed (\d+) commits ago$", table.stdout, re.MULTILINE))
    assert ages["cuda"] == "2"
    assert ages["site"] == "3"
    assert "tsan               up to date" in table.stdout


def test_more_than_200_commits_are_red_and_named(clone):
    clone.commit("mkdocs.yml", times=200)
    assert clone.run("table").returncode == 0
    clone.commit("mkdocs.yml")
    table = clone.run("table")
    assert table.returncode == 1
    assert table.stdout.splitlines()[-1].endswith("1 overdue: site")


def test_a_commit_that_is_no_ancestor_has_never_passed(clone):
    first = clone.git("rev-parse", "HEAD")
    clone.git("checkout", "-q", "-b", "other")
    elsewhere = clone.commit("core/x.cpp")
    clone.git("checkout", "-q", "-")
    for commit in (elsewhere, "0" * 40, ""):
        clone.record({name: first for name in NAMES} | {"tsan": commit})
        table = clone.run("table")
        assert table.returncode == 1
        assert "tsan               never passed, OVERDUE" in table.stdout


def test_a_new_stage_is_due_at_once_and_overdue_200_commits_after_it_was_added(clone):
    record = json.loads((clone.folder / ".ci" / "rotation.json").read_text())
    del record["site"]
    (clone.folder / ".ci" / "rotation.json").write_text(json.dumps(record))
    assert clone.run("table").returncode == 1
    assert clone.run("add", "site").returncode == 0
    table = clone.run("table")
    assert table.returncode == 0
    assert "site               never passed, added 0 commits ago" in table.stdout
    assert clone.run("next", "--left", 3600).stdout == "", "nobody knows how long it takes"
    clone.commit("docs/x.md", times=201)
    assert "site               never passed, added 201 commits ago, OVERDUE" in clone.run("table").stdout
    clone.run("passed", "site", 5)
    assert "site               up to date" in clone.run("table").stdout


def test_the_oldest_due_stage_that_fits_is_next(clone):
    assert clone.run("next", "--left", 3600).stdout == ""
    clone.commit("mkdocs.yml", times=2)
    clone.commit("tools/check_cuda.py", times=3)
    assert clone.run("next", "--left", 3600).stdout == "cuda\n"
    assert clone.run("next", "--left", 3600, "--not", "cuda").stdout == "site\n"
    assert clone.run("next", "--left", 3600, "--not", "cuda", "site").stdout == ""
    assert clone.run("next", "--left", 60).stdout == "", "60 s were recorded, and a margin is wanted"


def test_a_stage_that_passed_is_recorded_only_for_a_tree_that_is_head(clone):
    head = clone.commit("docs/x.md")
    recorded = clone.folder / ".ci" / "rotation.json"
    assert clone.run("passed", "site", 12).stdout == ""
    assert json.loads(recorded.read_text())["site"] == {"passed": head, "seconds": 12}
    (clone.folder / "docs" / "x.md").write_text("another line")
    refused = clone.run("passed", "site", 13)
    assert "not recorded" in refused.stdout
    assert json.loads(recorded.read_text())["site"]["seconds"] == 12


def test_a_shallow_clone_is_told_apart(clone, tmp_path):
    clone.commit("docs/x.md", times=3)
    shallow = tmp_path / "shallow"
    clone.git("clone", "-q", "--depth", "1", f"file://{clone.folder}", str(shallow))
    done = subprocess.run(
        [sys.executable, "tools/rotation.py", "table"], cwd=shallow, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "shallow" in done.stderr


def test_every_stage_is_a_function_of_the_lane_and_has_paths_that_exist():
    lane = (ROOT / ".ci" / "rotating.sh").read_text()
    for stage in rotation.STAGES:
        assert f"\n{stage.name}() {{" in lane, stage.name
        for path in stage.paths:
            if not path.startswith(":"):
                assert (ROOT / path).exists(), (stage.name, path)


def test_the_record_names_known_stages_only():
    assert set(rotation.read_record()) <= set(NAMES)


@pytest.mark.parametrize("overdue", [False, True])
def test_a_run_is_red_when_a_stage_fails_or_is_overdue(clone, overdue):
    """`.ci/run` itself, with lanes of two stages that only print."""
    shutil.copy(ROOT / ".ci" / "run", clone.folder / ".ci")
    run = clone.folder / ".ci" / "run"
    run.write_text(re.sub(r"^required=\(.*\)$", "required=(one two)", run.read_text(), flags=re.MULTILINE))
    names = "".join(f"{name}() {{ echo of {name}; }}\n" for name in NAMES)
    (clone.folder / ".ci" / "required.sh").write_text(
        "one() { echo of one; }\ntwo() { [[ ! -e broken ]]; }\n"
    )
    (clone.folder / ".ci" / "rotating.sh").write_text(names)
    (clone.folder / ".ci" / "release.sh").write_text("")
    clone.commit("mkdocs.yml")
    environment = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}

    def ci(*arguments):
        command = ["bash", ".ci/run", *arguments]
        return subprocess.run(command, cwd=clone.folder, env=environment, capture_output=True, text=True)

    if overdue:
        clone.record({})
        environment["CI_MINUTES"] = "0"
        done = ci()
        assert done.returncode == 1
        assert "never passed, OVERDUE" in done.stdout
        assert done.stdout.splitlines()[-1] == f"ran: 2 of 2 required, 0 of {len(NAMES)} rotating: none"
        return
    done = ci()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"ran: 2 of 2 required, 1 of {len(NAMES)} rotating: site"
    (clone.folder / "broken").touch()
    done = ci()
    assert done.returncode == 1
    assert re.search(r"^two +FAILED after \d+ s$", done.stdout, re.MULTILINE)
    assert "of site" not in done.stdout
    assert ci("two").returncode == 1
