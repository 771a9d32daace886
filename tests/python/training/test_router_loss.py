"""The loss of routers: transformers' own value and gradients, and one graph with the bits of eager mode."""

import pytest
import torch
from torch._dynamo.utils import counters

import monograph as mg
from monograph.training import TrainStep, add_router_loss, forward_loss
from monograph.training.regions import TRACES, forget
from support.expert_adapters import config, scaled
from support.tiny_moe import save_tiny, tiny_model, tokens

pytestmark = pytest.mark.slow
WITH_LOSS = ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "granitemoe"]
COEFFICIENT = 3.0  # large, for the loss to matter


def routed(model):
    causal = model.get_base_model() if hasattr(model, "peft_config") else model
    causal.config.output_router_logits = True
    causal.router_aux_loss_coef = COEFFICIENT
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", WITH_LOSS)
def test_transformers_value_and_gradients(family, padded):
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 7:] = 0
        batch["labels"][1, 7:] = -100
    theirs = routed(tiny_model(family))
    out = theirs(**batch)
    out.loss.backward()
    ours = routed(tiny_model(family))
    add_router_loss(ours)
    loss = forward_loss(ours, batch)
    loss.backward()
    torch.testing.assert_close(loss, out.loss)
    ours.config.output_router_logits = False
    alone = forward_loss(ours, batch)
    torch.testing.assert_close(loss - alone, COEFFICIENT * out.aux_loss, rtol=1e-5, atol=1e-5)
    assert loss - alone > 1
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        want = gradients[name].grad
        assert (parameter.grad - want).norm() <= 1e-5 * want.norm(), name


def build(folder, checkpointing):
    model = mg.from_pretrained(folder, mg.MonographConfig("mxfp4"), dtype=torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return routed(scaled(mg.add_lora(model, config(target_modules=["q_proj", "v_proj"]))).train())


@pytest.mark.parametrize(
    ("family", "checkpointing", "mode"),
    [("gpt_oss", False, "graph"), ("qwen3_moe", True, "whole_step")],
)
def test_one_graph_and_the_bits_of_eager(family, checkpointing, mode, tmp_path):
    forget()
    torch._dynamo.reset()
    counters.clear()
    folder = save_tiny(tmp_path, family)
    graph = TrainStep(build(folder, checkpointing), mode=mode)
    eager = TrainStep(build(folder, checkpointing), mode="eager")
    without = build(folder, checkpointing)
    without.get_base_model().config.output_router_logits = False
    without = TrainStep(without, mode="eager")
    for number, length in enumerate((12, 9, 15)):
        ids = tokens(length=length, seed=number)
        batch = {"input_ids": ids, "labels": ids}
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = graph([batch], 1e-2)
        want = eager([batch], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert got.grad_norm.item() == want.grad_norm.item() > 0
        assert torch.equal(graph.state.flat, eager.state.flat)
        if number == 0:
            other = without([batch], 1e-2)
            assert want.loss > other.loss + 1
            assert want.grad_norm != other.grad_norm
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert TRACES.retraced == 0
    # Evaluation is cross entropy alone.
    without.model.load_state_dict(graph.model.state_dict())
    assert graph.evaluate(batch)[0].item() == without.evaluate(batch)[0].item()


def test_micro_batches_share_it(tmp_path):
    """The mean over micro-batches: a step of two equal ones is a step of one."""
    folder = save_tiny(tmp_path, "qwen3_moe")
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    one = TrainStep(build(folder, False), mode="eager")([batch], 1e-2)
    two = TrainStep(build(folder, False), mode="eager")([batch, batch], 1e-2)
    torch.testing.assert_close(one.loss, two.loss)
    torch.testing.assert_close(one.grad_norm, two.grad_norm)


def test_what_is_refused():
    model = routed(tiny_model("qwen3_moe"))
    batch = {"input_ids": tokens(), "labels": tokens()}
    with pytest.raises(ValueError, match="but the routers are not tapped"):
        forward_loss(model, batch)
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM has no loss of its router"):
        add_router_loss(routed(tiny_model("deepseek_v3")))
