"""Every key of a batch reaches the model, or is refused by its name."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep, forward_loss
from monograph.training.micro_batches import digest, with_second_row
from support.region_models import build

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(scope="module")
def step():
    return TrainStep(build(), mode="eager")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"pixel_values": torch.zeros(2, 3, 4, 4)},
            r"micro-batch 0 has 'pixel_values', which LlamaModel.forward",
        ),
        ({"token_type_ids": torch.zeros_like(IDS)}, "has 'token_type_ids'"),
        ({"weights": torch.zeros_like(IDS)}, "has 'weights'"),
        ({"text": ["a", "b"]}, "has 'text'"),
        ({"labels": None}, "micro-batch 0 has no labels, only input_ids; wanted labels or shift_labels"),
        ({"input_ids": None}, "micro-batch 0 has no input_ids, only labels"),
        (
            {"input_ids": IDS[:, :0], "labels": IDS[:, :0]},
            r"input_ids has shape \(2, 0\), wanted \[rows, tokens\]",
        ),
        ({"input_ids": IDS[:0], "labels": IDS[:0]}, r"input_ids has shape \(0, 12\)"),
        ({"input_ids": IDS[0], "labels": IDS[0]}, r"input_ids has shape \(12,\)"),
        ({"labels": IDS[:, 1:]}, r"labels has shape \(2, 11\), wanted \(2, 12\) as input_ids"),
        ({"labels": IDS.tolist()}, "labels is a list, wanted a tensor"),
        ({"attention_mask": torch.ones(2, 11)}, r"attention_mask has shape \(2, 11\)"),
        (
            {"position_ids": torch.zeros(3, 2, 12)},
            r"position_ids has shape \(3, 2, 12\) on LlamaForCausalLM, wan",
        ),
        ({"cu_seqlens": torch.tensor([0, 12])}, r"cu_seqlens has shape \(2,\) for 2 rows"),
        ({"past_key_values": object()}, "past_key_values is a object, wanted a tensor"),
    ],
)
def test_what_is_not_read_is_refused_by_name(step, change, told):
    before = step.state.flat.clone()
    with pytest.raises(ValueError, match=told):
        step([BATCH | change], 1e-2)
    with pytest.raises(ValueError, match=told.replace("micro-batch 0", "the batch")):
        step.evaluate(BATCH | change)
    assert torch.equal(step.state.flat, before)


def test_the_batch_of_another_place_is_named(step):
    with pytest.raises(ValueError, match="micro-batch 1 has 'extra'"):
        step([BATCH, BATCH | {"extra": IDS}], 1e-2)


def test_positions_of_three_dimensions_after_two_rows_are_named(step):
    step([BATCH], 0.0)
    one = {name: tensor[:1] for name, tensor in BATCH.items()}
    with pytest.raises(ValueError, match=r"position_ids has shape \(3, 1, 12\) .*wanted \(1, 12\)"):
        step([one | {"position_ids": torch.zeros(3, 1, 12, dtype=torch.long)}], 0.0)


def test_a_second_row_follows_the_rows_of_every_tensor():
    one = {"input_ids": IDS[:1], "labels": IDS[:1], "attention_mask": torch.ones(1, 1, 12, 12)}
    one["position_ids"] = torch.zeros(3, 1, 12)
    shapes = {name: tuple(tensor.shape) for name, tensor in with_second_row(one, 2).items()}
    assert shapes == {
        "input_ids": (2, 12),
        "labels": (2, 12),
        "attention_mask": (2, 1, 12, 12),
        "position_ids": (3, 2, 12),
    }
    image = one | {"pixel_values": torch.zeros(1, 3, 4, 4)}  # may not lie by rows
    assert with_second_row(image, 2) is image


def test_what_collators_give_is_known(step):
    documents = [{"input_ids": IDS[0]}, {"input_ids": IDS[1, :5]}]
    for collate in (PackedCollator(), PackedCollator(max_documents=4), PaddedCollator()):
        batch = collate(documents)
        want = forward_loss(step.model, batch).item()
        assert step([batch], 0.0).loss.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_shift_labels_are_the_targets(mode):
    step = TrainStep(build(), mode=mode)
    shifted = torch.cat((IDS[:, 1:], torch.full((2, 1), -100)), dim=1)
    want = step.evaluate(BATCH)
    got = step.evaluate({"input_ids": IDS, "shift_labels": shifted})
    assert (got[0].item(), got[1]) == (want[0].item(), want[1])
    others = {"input_ids": IDS, "labels": IDS, "shift_labels": torch.where(shifted > 30, shifted, -100)}
    assert step([others], 0.0).targets == int((shifted > 30).sum())


def packed(**changes):
    ids = torch.cat((IDS[0], IDS[1]))[None]
    labels = ids.clone()
    labels[0, [0, 12]] = -100
    cu = torch.tensor([0, 12, 24], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu} | changes


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_cu_seq_lens_are_documents_also_without_positions(mode):
    step = TrainStep(build(), mode=mode)
    alone = sum(step.evaluate({"input_ids": row[None], "labels": row[None]})[0].item() for row in IDS)
    for batch in (
        packed(),
        packed(cu_seq_lens_q=torch.tensor([0, 12, 24]), cu_seq_lens_k=torch.tensor([0, 12, 24])),
    ):
        loss, targets = step.evaluate(batch)
        assert targets == 22
        assert loss.item() == pytest.approx(alone, rel=2e-2)  # bf16, and rotary positions that go on
    one = packed()
    del one["cu_seq_lens_q"], one["cu_seq_lens_k"]
    assert step.evaluate(one)[0].item() != loss.item()


def test_documents_that_contradict_each_other_are_named(step):
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        step([packed(cu_seq_lens_k=torch.tensor([0, 24]))], 0.0)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        step([packed(cu_seq_lens_k=None)], 0.0)


def test_an_attention_that_reads_no_borders_wants_positions_that_restart():
    model = build()
    model.base_model.model.set_attn_implementation("sdpa")
    step = TrainStep(model, mode="eager")
    for positions in (None, torch.arange(24)[None]):
        with pytest.raises(ValueError, match=r"packed rows \(cu_seq_lens_q\) with attention 'sdpa'"):
            step([packed(position_ids=positions)], 0.0)
    step([packed(position_ids=torch.arange(12).repeat(2)[None])], 0.0)


def image_model():
    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["full_attention"],
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_id=90,
        boi_token_id=91,
        eoi_token_id=92,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zero at first
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)"))


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_images_reach_the_model(mode):
    ids = IDS % 80
    ids[:, 2:6] = 90
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.where(ids != 90, -100), "token_type_ids": (ids == 90).long()}
    model = image_model()
    step = TrainStep(model, mode=mode)
    losses = []
    for pixels in (images, -3 * images):
        row = batch | {"pixel_values": pixels, "attention_mask": torch.ones_like(ids)}
        losses.append(step([row], 0.0).loss.item())
        with torch.no_grad():
            want = model(**row, use_cache=False).loss.item()
        assert losses[-1] == pytest.approx(want, rel=1e-5)
    assert losses[0] != losses[1]


def test_a_digest_sees_names_shapes_and_values():
    assert digest(BATCH) == digest({name: tensor.clone() for name, tensor in reversed(BATCH.items())})
    other = IDS.clone()
    other[1, 11] += 1
    found = {digest(BATCH), digest({"input_ids": IDS}), digest({"input_ids": other, "labels": IDS})}
    found |= {
        digest({"input_ids": IDS.reshape(1, 24), "labels": IDS}),
        digest({"input_ids": IDS, "mask": IDS}),
    }
    assert len(found) == 5
    assert all(0 <= number < 2**63 for number in found)


@pytest.mark.parametrize("mode", ["eager", "graph", "whole_step", "inductor"])
def test_a_step_without_any_target_changes_nothing(mode, caplog):
    """No mode compiles for it."""
    step = TrainStep(build(), mode=mode)
    state = step.state_dict()
    none = BATCH | {"labels": torch.full_like(IDS, -100)}
    one = {"input_ids": torch.ones(2, 1, dtype=torch.long), "labels": torch.ones(2, 1, dtype=torch.long)}
    with caplog.at_level(logging.WARNING, logger="monograph"):
        for row in (none, one, none):
            result = step([row, none], 1e-2)
            assert (result.loss.item(), result.grad_norm.item(), result.targets) == (0.0, 0.0, 0)
    assert caplog.text.count("a step without any target") == 1
    assert all(torch.equal(value, step.state_dict()[name]) for name, value in state.items())


def test_a_masked_step_after_others_is_no_update_by_momentum():
    step = TrainStep(build(), mode="eager")
    step([BATCH], 1e-2)
    before = step.state_dict()
    step([BATCH | {"labels": torch.full_like(IDS, -100)}], 1e-2)
    assert all(torch.equal(value, step.state_dict()[name]) for name, value in before.items())
    assert step([BATCH | {"labels": torch.full_like(IDS, -100)}, BATCH], 1e-2).targets == 22
