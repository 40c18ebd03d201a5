"""A tail that reads weights and tensors past its modules, as those of LTX and ACE-Step do, in a pipeline."""

import dataclasses

import pytest
import torch
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.registry import find_family
from devicebridge.families.tensor_plan import BlockList
from devicebridge.parallel.block_lists import parts_of_tail, tail_parameters
from devicebridge.parallel.local.pipeline import Pipeline
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.parallel.runner import MicroBatch, Runner
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.streams import Clock
from torch import nn

pytestmark = pytest.mark.usefixtures("no_thread_left")
WIDTH = 4


class Rows:
    """An object with a tensor in a slot, as LTX-2's compressed timesteps are."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data


class Methods(nn.Module):
    """As LTX: one method makes what another one reads, with a weight of the model's own and a mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.time = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.front = nn.Parameter(torch.rand(WIDTH))
        self.table = nn.Parameter(torch.rand(WIDTH))

    def _prepare(self, x, *, mask):
        for_blocks, for_tail = self.time(x).chunk(2, dim=-1)
        return for_blocks * mask, [Rows(for_tail.view(len(x), -1, WIDTH)), None]

    def _finish(self, x, found, *, mask):
        x = self.out(x) * (self.table.to(x.device) + found[0].data[:, 0])
        full = torch.zeros_like(x)
        full[mask[:, 0]] = x[mask[:, 0]]
        return full

    def forward(self, x):
        mask = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        scale, found = self._prepare(x, mask=mask)
        x = self.embed(x) * scale + self.front
        for block in self.blocks:
            x = block(x)
        return self._finish(x, found, mask=mask)


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        made = self.linear(x)
        return made, made * 2


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.time_r = Times(), Times()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        (early, scale), (more, _) = self.time(x), self.time_r(x)
        found = early + more
        x = x * scale
        for layer in self.layers:
            x = layer(x)
        return self.out(x) * (self.table + found)


class Modules(nn.Module):
    """As ACE-Step 1.5: a part inside holds the blocks, and adds what the tail reads before it calls them."""

    def __init__(self):
        super().__init__()
        self.decoder = Decoder()
        self.front = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return self.decoder(x + self.front)


ROWS = {
    "methods": NativeModel(
        *("toy.Methods", ("blocks",), ("out",), "a toy"),
        tail_parameters=("table", "not in this build"),
        read_by_tail={"_prepare": 1},
        tail_arguments={"_finish": ("mask",)},
    ),
    "modules": NativeModel(
        *("toy.Modules", ("decoder.layers",), ("decoder.out",), "a toy"), tail_parameters=("decoder.table",),
        read_by_tail={"decoder.time": 0, "decoder.time_r": 0}, mixes_early=True,
    ),
}  # fmt: skip


def _family(model, row):
    return dataclasses.replace(
        find_family("flux2"), native=row, block_lists=tuple(map(BlockList, row.block_lists)),
        tail=(*row.tail, *tail_parameters(model, row)), read_by_tail=row.read_by_tail,
    )  # fmt: skip


def _split(name, cards, *, is_tail_away=True, **changes):
    torch.manual_seed(0)
    row = dataclasses.replace(ROWS[name], **changes)
    model = {"methods": Methods, "modules": Modules}[name]()
    family = _family(model, row)
    names = block_names(model, family)
    placement = plan_manual(names, list(cards), [len(names) * (i + 1) // len(cards) for i in range(len(cards) - 1)])
    if is_tail_away:
        placement = dataclasses.replace(placement, tail=family.tail)
    return model, apply_block_split(model, family, placement)


def _batches(model, count):
    def make(index):
        def forward(x):
            return model(x.to(CARDS[0])).square().mean() / count

        return MicroBatch(lambda: torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(index)), forward)

    return [make(index) for index in range(count)]


def _step(name, cards, *, count=4, piped=False, **split):
    with emulated_cards(4):
        model, handle = _split(name, cards, **split)
        runner = Pipeline(model, handle.bridge) if piped else Runner(model, cards[0])
        losses = [on_cpu(loss) for loss in runner.run(_batches(model, count))]
        return losses, {n: on_cpu(each.grad) for n, each in model.named_parameters() if each.grad is not None}


def _assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("num_cards", [2, 3])
def test_every_weight_of_front_blocks_and_tail_gets_the_gradient_of_plain_accumulation(name, num_cards):
    expected = _step(name, CARDS[:1])
    _assert_same(_step(name, CARDS[:num_cards], piped=True), expected)
    _assert_same(_step(name, CARDS[:num_cards]), expected)  # one after the other, the tail on the last card
    _assert_same(_step(name, CARDS[:num_cards], is_tail_away=False), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("methods", {"read_by_tail": {}}), ("methods", {"tail_arguments": {}}), ("modules", {"read_by_tail": {}}),
        ("modules", {"tail_parameters": ()}),
    ],
)  # fmt: skip
def test_what_a_row_does_not_name_stays_at_home_and_is_noticed(name, changes):
    with pytest.raises(RuntimeError, match="same device"):
        _step(name, CARDS[:2], piped=True, **changes)


@pytest.mark.parametrize("name", ROWS)
def test_weights_of_the_tail_go_where_it_is(name):
    with emulated_cards(2):
        model, split = _split(name, CARDS[:2])
        table = "table" if name == "methods" else "decoder.table"
        assert model.get_parameter(table).device == CARDS[1] and model.front.device == CARDS[0]
        modules, parameters = parts_of_tail(model, split._family)
        assert len(modules) == 1 and parameters == [model.get_parameter(table)]
        split.remove()
        assert not {"_prepare", "_finish"} & vars(model).keys()


def test_a_tail_at_home_is_left_as_it_is():
    with emulated_cards(2):
        model, _ = _split("methods", CARDS[:2], is_tail_away=False)
        assert model.table.device == CARDS[0] and not {"_prepare", "_finish"} & vars(model).keys()


@pytest.mark.parametrize(("name", "changes"), [("methods", {}), ("modules", {}), ("modules", {"mixes_early": False})])
def test_what_a_tail_reads_and_what_is_computed_with_before_the_blocks_is_there_in_time(name, changes, machine):
    with emulated_cards(3), machine.installed():
        model, split = _split(name, CARDS[:3], **changes)
        with Clock(machine, 0.0) as clock:
            Pipeline(model, split.bridge, ahead=0).run(_batches(model, 8))
    assert (clock.races > 0) is bool(changes)
