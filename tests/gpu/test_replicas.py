"""A copy of the model on each of two real GPUs. Needs two CUDA or ROCm devices; skipped, with the reason, elsewhere."""

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs.job import run_job
from devicebridge.parallel.local.data_parallel import DataParallel
from devicebridge.tests.gpu.conftest import CARDS, NEEDS_TWO
from devicebridge.tests.replica_cases import make_replicas
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.tiny_split import make_batches_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_algorithms"), NEEDS_TWO]

NAMES = sorted(FAMILIES)


def _copied(name, count, **settings):
    made = make_replicas(name, CARDS, **settings)
    replicas = DataParallel(made)
    losses = [loss.cpu() for loss in replicas.run(make_batches_for(replicas.replica_for, name, count))]
    return losses, [parameter.grad.cpu() for parameter in made[0].parameters]


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_gpu_up_to_the_order_of_summation(name, count):
    (one,) = make_replicas(name, CARDS[:1])
    expected = []
    for batch in make_batches_for(lambda index: (one.model, one.device), name, count):
        loss = batch.forward(batch.prepare())
        loss.backward()
        expected.append(loss.detach().cpu())
    losses, gradients = _copied(name, count)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    for gradient, parameter in zip(gradients, one.parameters, strict=True):
        assert (gradient - parameter.grad.cpu()).norm() <= 1e-6 * parameter.grad.cpu().norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_repeats_itself_bit_for_bit(name):
    """With dropout: each card draws from its own generator, whatever the other thread does."""
    found = []
    for _ in range(3):
        for card in CARDS:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(5)
        found.append(_copied(name, 5, dropout=0.3))
    for losses, gradients in found[1:]:
        assert all(map(torch.equal, losses, found[0][0])) and all(map(torch.equal, gradients, found[0][1]))


def _run(folder, run, **sections):
    train = {"steps": 4, "batch_size": 1, "gradient_accumulation_steps": 5, "seed": 3}
    sections = {"train": train, "output": {"folder": str(folder / run)}, **sections}
    return run_job(make_tiny_job(folder, "flux2", **sections))


@pytest.mark.parametrize("scheme", ["none", "fp8", "int8"])
def test_a_job_on_two_gpus_is_that_of_one(tmp_path, scheme):
    model = {"dtype": "bfloat16", "quantize": scheme}
    one = _run(tmp_path, "one", model=model, split={"devices": ["cuda:0"]}, parallel={"strategy": "none"})
    devices = {"devices": ["cuda:0", "cuda:1"]}
    two = _run(tmp_path, "two", model=model, split=devices, parallel={"strategy": "data"})
    again = _run(tmp_path, "again", model=model, split=devices, parallel={"strategy": "data"})
    assert two.losses == pytest.approx(one.losses, rel=1e-3) and two.eval_before == one.eval_before
    assert again.losses == two.losses and again.lora_path.read_bytes() == two.lora_path.read_bytes()
