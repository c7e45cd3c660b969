"""Blocks on a bounded number of events at a time: the same vectors and gradients, in less memory."""

import numpy as np
import pytest
import torch

from pipeline.config.sequences import SequenceOptions
from pipeline.core.registry import with_options
from pipeline.models.layers import SequenceVector, initialise
from pipeline.specs import SEQUENCE_BLOCKS, BlockInputs
from pipeline.training.sequence_vectors import SHAPES, FilledUp, encode_in_parts, fill_up, split_samples

DIM, LENGTHS = 8, [3, 1, 9, 2, 2, 1, 7, 4]
BLOCKS = [
    ("sum", {}),
    ("din", {}),
    ("din", {"softmax": True}),
    ("sasrec", {"layers": 2}),
    ("bst", {"layers": 2}),
    ("hstu", {"layers": 2}),
]


def vector_of(name, options, dtype=torch.float64):
    spec = with_options(SEQUENCE_BLOCKS, name, SequenceOptions(**options), "here")
    vector = SequenceVector(
        [4, DIM], DIM, 200, spec.build(BlockInputs(dim=DIM, max_length=200)), targeted=spec.targeted, places=True
    )
    initialise(vector, 1)
    vector.start(1)
    return vector.to(dtype)


def inputs(lengths, dtype=torch.float64):
    """Columns, rows, candidates (of the first column alone) and samples, of leaves that take gradients."""
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(sum(lengths), w, generator=generator, dtype=dtype).requires_grad_() for w in (4, DIM)]
    candidate = torch.randn(len(lengths), 4, generator=generator, dtype=dtype).requires_grad_()
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return columns, rows, [candidate, None], len(lengths)


def result(vector, most, lengths=LENGTHS, dtype=torch.float64, module=None):
    """Vectors, and the gradients of inputs and of the parameters of ``module``, or of ``vector``."""
    columns, rows, candidates, samples = inputs(lengths, dtype)
    module = module or vector
    module.zero_grad()
    vectors = encode_in_parts(vector, most, columns, rows, candidates, samples)
    weights = torch.linspace(-1, 1, vectors.numel(), dtype=vectors.dtype).view_as(vectors)
    (vectors * weights).sum().backward()
    taken = [*columns, candidates[0], *module.parameters()]
    return [vectors.detach(), *(each.grad if each.grad is None else each.grad.clone() for each in taken)]


@pytest.mark.parametrize(
    ("lengths", "most", "parts"),
    [
        (LENGTHS, 9, [(2, 4), (1, 9), (3, 5), (1, 7), (1, 4)]),
        (LENGTHS, 100, [(8, 29)]),
        ([5, 6, 7], 1, [(1, 5), (1, 6), (1, 7)]),
        ([2, 2, 2, 2], 4, [(2, 4), (2, 4)]),
    ],
)
def test_parts_are_consecutive_samples_with_few_events(lengths, most, parts):
    assert split_samples(np.array(lengths), most) == parts


@pytest.mark.parametrize("most", [1, 7, 12])
@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_vectors_and_gradients_are_those_of_all_events_at_once(name, options, most):
    vector = vector_of(name, options)
    for whole, parts in zip(result(vector, None), result(vector, most), strict=True):
        if whole is None:
            assert parts is None
        else:
            torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("longest", [2, 10, 200])
@pytest.mark.parametrize(("samples", "mean"), [(512, 6.5), (3, 1.5), (4096, 1.9), (1, 1.0)])
def test_batches_of_like_length_have_few_shapes(samples: int, mean: float, longest: int) -> None:
    shapes = set()
    mean = min(mean, longest)
    for events in range(round(samples * mean * 0.95), round(samples * mean * 1.05) + 1):
        more_samples, more_events = fill_up(samples, max(events, samples), longest)
        assert more_samples <= more_events <= more_samples * longest, "each one that is added has 1 to longest events"
        shapes.add((samples + more_samples, max(events, samples) + more_events))
    # A tenth of a power of two is at most two steps of SHAPES, and such a power may end within it.
    assert len(shapes) <= 5 and SHAPES == 16
    assert fill_up(samples, samples, 1) == (0, 0), "a batch has one shape anyway"


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_what_fills_a_batch_up_changes_no_vector_and_no_gradient(name, options, most):
    vector, filled = vector_of(name, options), vector_of(name, options)
    whole = result(vector, most)
    seen = []
    filled.register_forward_pre_hook(lambda module, given: seen.append((given[3], len(given[1]))))
    found = result(FilledUp(filled, 200), most, module=filled)
    assert sum(samples for samples, _ in seen) > len(LENGTHS) and sum(events for _, events in seen) > sum(LENGTHS)
    for expected, one in zip(whole, found, strict=True):
        if expected is None:
            assert one is None
        else:
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        filled.eval()
        columns, rows, candidates, samples = inputs(LENGTHS)
        seen.clear()
        FilledUp(filled, 200)(columns, rows, candidates, samples)
    assert seen == [(len(LENGTHS), sum(LENGTHS))], "an evaluation has shapes of its own"


@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_under_autocast_too(name, options):
    """The second forward pass runs in the precision of the first."""
    vector = vector_of(name, options, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, parts = (result(vector, most, dtype=torch.float32) for most in (None, 9))
    for one, other in zip(whole, parts, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2 * float(one.abs().max()))


def test_what_is_dropped_is_dropped_again():
    """The gradient of a sum of values that are dropped or doubled is which of them were."""

    class Dropped(torch.nn.Module):
        def forward(self, columns, rows, candidates, samples):
            kept = torch.nn.functional.dropout(columns[0], 0.5)
            return torch.zeros(samples, 4, dtype=kept.dtype).index_add(0, rows, kept)

    columns, rows, candidates, samples = inputs(LENGTHS)
    columns[0].data.fill_(1.0)
    torch.manual_seed(5)
    vectors = encode_in_parts(Dropped(), 4, columns, rows, candidates, samples)
    torch.rand(3)  # the backward pass begins in another state
    vectors.sum().backward()
    assert sorted(set(columns[0].grad.flatten().tolist())) == [0.0, 2.0]
    torch.testing.assert_close(torch.zeros_like(vectors).index_add(0, rows, columns[0].grad), vectors.detach())


def peak_bytes(run):
    """The most memory that ``run`` holds at once, by what the allocator reports."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = np.array([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    return int(sizes.cumsum().max())


@pytest.mark.parametrize(("name", "options"), [("din", {}), ("hstu", {"layers": 2})])
def test_activations_take_less_memory(name, options):
    """Of 64 histories, at most two at a time: what remains grows with the events, not with what a block makes."""
    vector, lengths = vector_of(name, options, torch.float32), [100] * 64
    whole, parts = (peak_bytes(lambda most=most: result(vector, most, lengths, torch.float32)) for most in (None, 200))
    assert parts < 0.4 * whole
