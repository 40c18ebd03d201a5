"""Orders of a pipeline's stages, against a simulation that knows only what depends on what."""

import pytest
from devicebridge.parallel.local.schedule import Work, num_held, plan_order

CASES = [(n, m, ahead) for n in (1, 2, 3, 8) for m in (1, 2, 5, 8) for ahead in (0, 1)]


def _simulate(order):
    """Time at which each entry ends if F takes 1 and B takes 2, (stage, work) -> time; raises if nothing can go on."""
    ends, position, free_at = {}, [0] * len(order), [0.0] * len(order)
    while any(p < len(o) for p, o in zip(position, order, strict=True)):
        is_stuck = True
        for stage, entries in enumerate(order):
            if position[stage] == len(entries):
                continue
            work = entries[position[stage]]
            if work.is_backward:
                last = stage == len(order) - 1
                before = (stage, Work(False, work.microbatch)) if last else (stage + 1, work)
            else:
                before = (stage - 1, work) if stage else None
            if before is not None and before not in ends:
                continue
            start = max(free_at[stage], ends[before] if before else 0.0)
            ends[stage, work] = free_at[stage] = start + (2 if work.is_backward else 1)
            position[stage] += 1
            is_stuck = False
        assert not is_stuck, "the orders wait for each other"
    return ends


@pytest.mark.parametrize(("stages", "microbatches", "ahead"), CASES)
def test_every_micro_batch_goes_through_every_stage_once_in_order(stages, microbatches, ahead):
    order = plan_order(stages, microbatches, ahead)
    _simulate(order)
    assert len(order) == stages
    for entries in order:
        for is_backward in (False, True):
            assert [w.microbatch for w in entries if w.is_backward == is_backward] == list(range(microbatches))


@pytest.mark.parametrize(("stages", "microbatches", "ahead"), CASES)
def test_held_is_the_most_between_forward_and_backward(stages, microbatches, ahead):
    held = num_held(stages, microbatches, ahead)
    for entries, expected in zip(plan_order(stages, microbatches, ahead), held, strict=True):
        count = most = 0
        for work in entries:
            count += -1 if work.is_backward else 1
            most = max(most, count)
        assert most == expected
    if not ahead:
        assert held == [min(stages - stage, microbatches) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 8), (8, 16)])
def test_equal_stages_take_the_time_of_a_full_pipeline(stages, microbatches):
    ends = _simulate(plan_order(stages, microbatches))
    assert max(ends.values()) == 3 * (microbatches + stages - 1)
