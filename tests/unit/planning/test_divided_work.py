"""What a divided block sends, against what emulated cards are seen to send."""

import copy
import dataclasses
import types
from typing import Any

import pytest
import torch
from devicebridge.families.comfy.native import NativeModel, runs_over
from devicebridge.families.tensor_plan import BlockList
from devicebridge.families.token_plan import BlockRows, TokenPlan
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.parallel.placement import block_flops
from devicebridge.planning import times as work_module
from devicebridge.planning.times import forward_work, has_guidance, key_bytes
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.placed import forward_of
from devicebridge.tests.unit.parallel.test_tensor_experts import PLAN, Block
from devicebridge.tests.unit.parallel.test_tensor_parallel import HIDDEN, PLANS, WIDTH, Fused, Model, Separate
from torch import nn

LAYOUT = NativeModel("toy.Toy", ("blocks",), (), "a toy", linears=runs_over(sample=("*modulation*",)), tensor=PLANS)
TOKENS = 9


def _shares(model: Model, size: int) -> dict:
    plans = {f"blocks.{i}": (find_plan(PLANS, block), block) for i, block in enumerate(model.blocks)}
    return {name: (plan, shares_of(block, plan, size)) for name, (plan, block) in plans.items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [Fused, Separate])
def test_bytes_are_those_that_one_card_sends_another(make, size, monkeypatch) -> None:
    monkeypatch.setattr(work_module, "NUM_TEXT_TOKENS", 0)
    model = Model([make()])
    work = forward_work(model, LAYOUT, _shares(model, size), TOKENS)
    with emulated_cards(4) as cards, torch.no_grad():
        (plan, shares), block = _shares(model, size)["blocks.0"], model.blocks[0]
        copies = [copy.deepcopy(block) for _ in range(size - 1)]
        own, *others = [divide_block(each, plan, shares, rank) for rank, each in enumerate((block, *copies))]
        for shard, card in zip((own, *others), CARDS, strict=False):
            shard.block.to(card)
        parallel = TensorParallel(CARDS[:size], {own.block: (own, others)})
        parallel.attach()
        x, vec = torch.randn(1, TOKENS, WIDTH).to(CARDS[0]), torch.randn(1, 1, WIDTH).to(CARDS[0])
        with forward_of(parallel):
            block(x, vec)
        back = [each for each in cards.copies if (each.source, each.target) == (CARDS[1], CARDS[0])]
        parallel.remove()
    # One copy more: the first forward compares the outputs. Numbers have four bytes here, and are forecast with two.
    outputs = 4 * TOKENS * WIDTH
    squares = sum(each.num_bytes for each in back if each.shape[-1] == 1)
    found = (sum(each.num_bytes for each in back) - squares - outputs) / 2 + squares
    assert found == pytest.approx(work.sent_bytes, rel=0.06)  # the toys' gathered features are shared out unevenly


def test_operations_are_counted() -> None:
    model = Model([Separate(), Separate()])
    work = forward_work(model, LAYOUT, _shares(model, 2), 512)
    assert work.flops == 2 * (1024 * 2 * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + 4 * 1024**2 * WIDTH)
    assert work.stream_bytes == 2 * 1024 * WIDTH


def test_layers_that_every_card_computes_whole_are_counted_apart() -> None:
    """Convolutions along the tokens, too, as ACE-Step's MLP has them."""
    model = Model([Separate()])
    before = forward_work(model, LAYOUT, _shares(model, 2), 512)
    model.blocks[0].whole, model.blocks[0].along = nn.Linear(WIDTH, HIDDEN), nn.Conv1d(WIDTH, HIDDEN, 1)
    work = forward_work(model, LAYOUT, _shares(model, 2), 512)
    assert before.whole_flops == 0 and work.whole_flops == 2 * 1024 * 2 * WIDTH * HIDDEN
    assert work.flops == before.flops + work.whole_flops


def test_experts_are_summed_once_and_each_computes_its_share_of_the_tokens() -> None:
    block, tokens = Block(), 512 + 512
    layout = NativeModel("toy.Toy", ("blocks",), (), "a toy", linears=runs_over(routed_modules={"*.experts.*": 0.25}))
    work = forward_work(Model([block]), layout, {"blocks.0": (PLAN, shares_of(block, PLAN, 2))}, 512)
    width = block.tail.up.in_features
    # sums, and what the gate has chosen, and how much of it
    assert work.sent_bytes == tokens * (2 * 2 * width + 20)


@pytest.mark.parametrize(("joint", "tokens"), [(True, 512 + 512), (False, 512)])
def test_where_text_is_beside_the_stream_layers_see_the_picture_alone(joint, tokens) -> None:
    model = Model([Separate()])
    work = forward_work(model, dataclasses.replace(LAYOUT, linears=runs_over(is_joint=joint)), _shares(model, 2), 512)
    assert work.sent_bytes == tokens * (2 * 2 * WIDTH + 2 * 4)  # two sums, and the squares of two norms
    assert work.stream_bytes == 2 * tokens * WIDTH


def test_attention_is_as_wide_as_what_runs_over_tokens() -> None:
    """Not as a narrow layer of modulation, or one of the text."""
    block = Separate()
    before = block_flops(block, LAYOUT.linears, 4096, 512)
    block.modulation, block.txt_in = nn.Linear(2, WIDTH), nn.Linear(4, WIDTH)
    after = block_flops(block, LAYOUT.linears, 4096, 512)
    assert after == before + 2 * 2 * WIDTH + 2 * 512 * 4 * WIDTH


def test_guidance_is_a_number_where_the_model_says_so() -> None:
    assert not has_guidance(nn.Module())
    for given in (True, False):
        model: Any = types.SimpleNamespace(params=types.SimpleNamespace(guidance_embed=given))
        assert has_guidance(model) is given


@pytest.mark.parametrize(
    ("keys", "joint", "rows"),
    [
        ("=txt+img", False, 9 + 5), ("=x", True, 9 + 5), ("", False, 0),
        ("=x", False, 9),  # text is attended to, and every card has it
        ("attn1=v audio_attn1=a audio_to_video_attn=a video_to_audio_attn=v", False, 9 + 9),
        ("=txt+x/x", False, 9 + 5 + 9),  # two attentions, the second of the picture alone
    ],
)  # fmt: skip
def test_keys_and_values_of_all_rows_are_counted(keys, joint, rows) -> None:
    assert key_bytes(Separate(), keys, BlockList("blocks", is_joint=joint), (9, 5), 2) == 2 * rows * WIDTH * 2


def test_keys_are_those_of_the_lists_in_the_plan_of_tokens() -> None:
    """A class that cannot be divided, too."""
    model, plan = Model([Separate(), Separate()]), TokenPlan({"blocks": BlockRows("x=x@1", "attn=x")})
    blocks = dict.fromkeys(("blocks.0", "blocks.1"))
    work = forward_work(model, LAYOUT, blocks, 512, plan)
    assert work.key_bytes == 2 * 2 * 1024 * WIDTH * 2
    assert forward_work(model, LAYOUT, blocks, 512, plan, sent_size=1).key_bytes == work.key_bytes / 2
    assert work.stream_bytes == 2 * 1024 * WIDTH and work.sent_bytes == 0
    others = TokenPlan({"layers": BlockRows("x=x@1", "attn=x")})
    assert forward_work(model, LAYOUT, blocks, 512).key_bytes == 0
    assert forward_work(model, LAYOUT, blocks, 512, others).key_bytes == 0
