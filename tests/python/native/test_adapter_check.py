"""`monograph adapter check`: adapters of every kind that PEFT writes, and planted faults.

Each is found, by its rule and key, and nothing else.
"""

import json

import pytest
import torch

from support.adapter_checks import check, renamed
from support.native_tool import run, run_json
from support.served_adapters import KINDS, edit_config, edit_tensors, saved, saved_experts

SERVERS = ("vllm", "sglang", "llama.cpp", "peft")
PREFIX = "base_model.model."
LAYER = PREFIX + "model.layers."
# What each server does not apply, by kind; a kind that is not here has no finding anywhere.
NOT_APPLIED = {
    "all_linear": {"sglang": {"target-modules"}},
    "rslora": {"sglang": {"scale"}, "llama.cpp": {"scale"}},
    "rank_pattern": {"vllm": {"scale"}, "sglang": {"scale"}},
    "alpha_pattern": {"vllm": {"scale"}, "sglang": {"scale"}, "llama.cpp": {"scale"}},
    "dora": {key: {"dora"} for key in SERVERS[:3]},
    "modules_to_save": {key: {"modules-to-save"} for key in SERVERS[:3]},
    "tokens": {key: {"tokens"} for key in SERVERS[:3]},
    "lora_bias": {key: {"bias"} for key in SERVERS[:3]},
    "biases": {key: {"bias"} for key in SERVERS[:3]},
    "tied_head": {"llama.cpp": {"tied-head"}},
    "regex": {"sglang": {"target-modules"}},
    "one_of_a_layer": {"sglang": {"group"}},
}


def rules(findings):
    return {finding["rule"] for finding in findings}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_server_does_not_apply_of_each_kind_is_found_and_nothing_else(tmp_path, kind):
    saved(kind, tmp_path)
    for server in SERVERS:
        findings = check(tmp_path, server)
        assert rules(findings) == NOT_APPLIED.get(kind, {}).get(server, set()), (server, findings)


def test_the_finding_names_key_scale_and_setting(tmp_path):
    saved("rank_pattern", tmp_path)
    findings = check(tmp_path, "vllm")
    assert [finding["key"] for finding in findings] == [
        f"{LAYER}{i}.self_attn.v_proj.lora_A.weight" for i in (0, 1)
    ]
    wanted = "vLLM before 0.32 multiplies with 2.0, it was trained with 4.0 (rank_pattern)"
    assert wanted in findings[0]["what"]
    text = run("adapter", "check", tmp_path / "base", tmp_path / "adapter", "--for", "vllm", code=1).stdout
    assert text.endswith("2 findings for vLLM\n")
    assert "monograph adapter convert" in text


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "granite", "gpt_oss"])
def test_experts_in_one_tensor_are_for_peft_alone(tmp_path, name):
    saved_experts(name, tmp_path)
    assert check(tmp_path, "peft") == []
    for server in SERVERS[:3]:
        findings = check(tmp_path, server)
        wanted = {"experts"}
        if server == "llama.cpp" and name == "granite":
            wanted = {"experts", "architecture"}
        if server == "sglang":
            wanted = {"experts", "group"}  # q without v
        assert rules(findings) == wanted, (server, findings)
        whole = name == "granite" or (name == "gpt_oss" and server != "llama.cpp")
        advice = "merge" if whole else "convert"
        assert all(advice in f["what"] for f in findings if f["rule"] == "experts")


Q0 = LAYER + "0.self_attn.q_proj.lora_A.weight"
C0 = Q0.replace("lora_A", "lora_C")


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


def with_nan(tensor):
    tensor[0, 3] = float("nan")
    return tensor


# A fault in the tensors of the plain adapter -> the rule, and the key it is about.
FAULTS = {
    "no prefix": (renamed("base_model.model.", ""), "prefix", Q0.removeprefix("base_model.model.")),
    "prefix twice": (renamed(PREFIX, PREFIX * 2), "prefix", PREFIX + Q0),
    "wrong path": (
        renamed("model.layers.", "language_model.layers."),
        "prefix",
        Q0.replace("model.layers", "language_model.layers"),
    ),
    "unknown module": (renamed("q_proj", "query"), "base", Q0.replace("q_proj", "query")),
    "name of the adapter": (
        renamed(".weight", ".default.weight"),
        "adapter-name",
        Q0.replace(".weight", ".default.weight"),
    ),
    "no B": (without(Q0.replace("lora_A", "lora_B")), "pair", Q0),
    "no A": (without(Q0), "pair", Q0.replace("lora_A", "lora_B")),
    "wrong inputs": (changed(Q0, lambda t: t[:, :32]), "shape", Q0),
    "other rank": (changed(Q0, lambda t: t[:4]), "rank", Q0),
    "three dimensions": (changed(Q0, lambda t: t[None]), "shape", Q0),
    "integers": (changed(Q0, lambda t: t.to(torch.int32)), "dtype", Q0),
    "not a number": (changed(Q0, with_nan), "not-finite", Q0),
    "unknown tensor": (lambda t: t | {C0: t[Q0].clone()}, "key", C0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_and_nothing_else(tmp_path, fault):
    saved("plain", tmp_path)
    change, rule, key = FAULTS[fault]
    edit_tensors(tmp_path / "adapter", change)
    for server in ("vllm", "peft"):
        findings = check(tmp_path, server)
        assert rules(findings) == {rule}, findings
        assert key in {finding["key"] for finding in findings}


def test_a_rank_that_the_config_does_not_have_is_found(tmp_path):
    saved("plain", tmp_path)
    edit_config(tmp_path / "adapter", r=4)
    for server in SERVERS:
        assert rules(check(tmp_path, server)) == {"rank"}


def test_exchanged_inputs_and_outputs_of_experts_are_found(tmp_path):
    """As PEFT before 0.20 has them, and as one module an expert."""
    saved_experts("qwen3", tmp_path)
    down = "base_model.model.model.layers.0.mlp.experts.lora_"

    def exchange(tensors):
        a, b = tensors[f"{down}A.weight"], tensors[f"{down}B.weight"]  # [12, 160], [64, 12]
        return tensors | {
            f"{down}A.weight": b.reshape(64, 4, 3).permute(2, 1, 0).reshape(12, 64),
            f"{down}B.weight": a.reshape(3, 4, 160).permute(2, 1, 0).reshape(160, 12),
        }

    edit_tensors(tmp_path / "adapter", exchange)
    for server in ("peft", "vllm"):
        findings = check(tmp_path, server)
        assert {f["rule"] for f in findings if f["key"].startswith(down)} == {"experts-transposed"}
    run(
        "adapter",
        "convert",
        tmp_path / "base",
        tmp_path / "adapter",
        "--for",
        "vllm",
        "--out",
        tmp_path / "out",
    )

    def turn(tensors):
        name = "base_model.model.model.layers.0.mlp.experts.1.down_proj.lora_"
        a, b = tensors[f"{name}A.weight"], tensors[f"{name}B.weight"]
        return tensors | {f"{name}A.weight": b.T, f"{name}B.weight": a.T}

    (tmp_path / "out").rename(tmp_path / "adapter2")
    edit_tensors(tmp_path / "adapter2", turn)
    done = run_json("adapter", "check", tmp_path / "base", tmp_path / "adapter2", "--for", "vllm", code=1)
    assert [f["rule"] for f in done["findings"]] == ["experts-transposed"]


def test_a_changed_embedding_beside_its_lora_is_found(tmp_path):
    """PEFT saves the base layer of an embedding with LoRA; servers skip it."""
    saved("embeddings", tmp_path)
    for server in SERVERS:
        assert check(tmp_path, server) == []
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    edit_tensors(tmp_path / "adapter", changed(name, lambda t: t + (torch.arange(320) == 7)[:, None]))
    for server in SERVERS[:3]:
        (finding,) = check(tmp_path, server)
        assert (finding["rule"], finding["key"]) == ("base-layer", name)
        assert "row 7" in finding["what"]
    assert check(tmp_path, "peft") == []


def test_the_largest_rank_of_the_server(tmp_path):
    saved("plain", tmp_path)
    assert check(tmp_path, "vllm", "--max-rank", 8) == []
    assert rules(check(tmp_path, "vllm", "--max-rank", 4)) == {"max-rank"}
    saved("plain", tmp_path / "large", r=600)
    assert rules(check(tmp_path / "large", "vllm")) == {"max-rank"}  # vLLM has no larger than 512
    assert check(tmp_path / "large", "sglang") == []


def test_settings_that_nobody_knows_are_a_finding(tmp_path):
    saved("plain", tmp_path)
    edit_config(tmp_path / "adapter", use_qalora=True)
    for server in SERVERS:
        (finding,) = check(tmp_path, server)
        assert finding["rule"] == "config"
        assert "use_qalora" in finding["what"]


def test_hostile_adapters_are_refused_or_found(tmp_path):
    saved("plain", tmp_path)
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    command = ("adapter", "check", base, adapter, "--for", "vllm")
    evil = 'x"\x1b[31m\n'
    edit_tensors(adapter, renamed("q_proj", evil))
    shown = run(*command, code=1).stdout
    assert "\x1b" not in shown
    assert json.loads(run(*command, "--json", code=1).stdout)["findings"]
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    run(*command, code=3)
    saved("plain", tmp_path)
    edit_config(adapter, r=2**40)
    assert rules(check(tmp_path, "vllm")) == {"config"}
    edit_config(adapter, r=8, target_modules=7)
    assert rules(check(tmp_path, "vllm")) == {"target-modules"}
    edit_config(adapter, target_modules=["q_proj"])
    edit_tensors(adapter, changed(Q0, lambda t: t[:0]))
    assert rules(check(tmp_path, "vllm")) == {"rank"}
    (adapter / "adapter_config.json").write_text("[1]")
    run(*command, code=3)
    run("adapter", "check", base, tmp_path / "gone", "--for", "vllm", code=5)
    assert "SERVER" in run("adapter", "check", "--help").stdout
    run("adapter", "check", base, adapter, "--for", "tgi", code=2)
