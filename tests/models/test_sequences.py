"""Blocks over events that differ in number: gradients, no padding between samples, exported programs, precision."""

import copy

import pytest
import torch

from pipeline.core.errors import ConfigError
from pipeline.core.registry import with_options
from pipeline.models.layers import Jagged, SequenceVector
from pipeline.models.layers.jagged import EVEN_ROWS, fillers
from pipeline.publishing.program import PROGRAM, read_program
from pipeline.specs import SEQUENCE_BLOCKS, BlockInputs
from tests.tiers import with_slow

DIM, LENGTHS = 8, [3, 1, 5, 2]
BLOCKS = [
    ("sum", {}),
    ("din", {}),
    ("din", {"softmax": True, "hidden": [6]}),
    ("sasrec", {"layers": 2, "heads": 1}),
    ("bst", {"layers": 2, "heads": 1}),
    ("bst", {"heads": 1}),
    ("hstu", {"heads": 1}),
    ("hstu", {"layers": 2, "heads": 1, "ages": True}),
]
ONE_OF_EACH = [BLOCKS[0], BLOCKS[1], BLOCKS[3], BLOCKS[5], BLOCKS[6]]


def rows_of(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def block_of(name, options, dim=DIM):
    from pipeline.config.sequences import SequenceOptions

    spec = with_options(SEQUENCE_BLOCKS, name, SequenceOptions(**options), "here")
    torch.manual_seed(0)
    return spec, spec.build(BlockInputs(dim=dim, max_length=6, ages=4))


def vector_of(name, options, widths=(4, DIM)):
    spec, block = block_of(name, options)
    age = 0 if spec.ages else None  # the first column has four values, as ``ages`` says
    vector = SequenceVector(list(widths), DIM, 6, block, targeted=spec.targeted, places=True, age=age)
    vector.start(1)
    return vector


def inputs(lengths=LENGTHS, widths=(4, DIM), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(sum(lengths), w, generator=generator, dtype=dtype) for w in widths]
    candidates = [torch.randn(len(lengths), w, generator=generator, dtype=dtype) for w in widths]
    return columns, rows_of(lengths), candidates, len(lengths)


def test_sums_and_places_are_those_of_each_sample():
    rows = rows_of(LENGTHS)
    jagged, values = Jagged.of(rows, 4), torch.randn(11, 3)
    parts = values.split(LENGTHS)
    torch.testing.assert_close(jagged.sum(values), torch.stack([part.sum(0) for part in parts]))
    assert jagged.ages.tolist() == [2, 1, 0, 0, 4, 3, 2, 1, 0, 1, 0]
    shares = jagged.softmax(values[:, :1])
    torch.testing.assert_close(shares, torch.cat([part[:, :1].softmax(0) for part in parts]))


@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_gradients_are_those_of_finite_differences(name, options):
    spec, block = block_of(name, options, dim=3)
    block = block.double()
    generator = torch.Generator().manual_seed(3)
    events = torch.randn(11, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    jagged = Jagged.of(rows_of(LENGTHS), 4)
    given = (events, target) if spec.targeted else (events,)
    if spec.ages:
        given += (torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True),)
    assert torch.autograd.gradcheck(
        lambda events, target=None, *ages: block(events, jagged, target, *ages), given, eps=1e-6, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_a_sample_does_not_depend_on_the_others(name, options):
    vector = vector_of(name, options)
    columns, rows, candidates, samples = inputs()
    together = vector(columns, rows, candidates, samples)
    assert together.shape == (4, DIM) and together.dtype == torch.float32
    start = 0
    for sample, length in enumerate(LENGTHS):
        own = slice(start, start + length)
        alone = vector(
            [each[own] for each in columns],
            torch.zeros(length, dtype=torch.int64),
            [each[sample : sample + 1] for each in candidates],
            1,
        )
        torch.testing.assert_close(alone[0], together[sample])
        start += length


@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_bf16_is_near_float32(name, options):
    vector = vector_of(name, options)
    given = inputs()
    exact = vector(*given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = vector(*given)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("name", "options"), with_slow(BLOCKS, ONE_OF_EACH))
def test_an_exported_block_scores_any_number_of_samples_and_events(name, options, tmp_path):
    vector = vector_of(name, options).eval()

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vector = vector

        def forward(self, candidates, events, rows):
            parts = candidates.split([4, DIM], dim=1)
            return self.vector(events.split([4, DIM], dim=1), rows, parts, candidates.shape[0])

    samples, events = torch.export.Dim("samples"), torch.export.Dim("events")
    example = (torch.zeros(3, 4 + DIM), torch.zeros(6, 4 + DIM), rows_of([2, 2, 2]))
    with torch.no_grad():
        program = torch.export.export(Whole(), example, dynamic_shapes=({0: samples}, {0: events}, {0: events}))
        for lengths in (LENGTHS, [6], [1] * 9):
            columns, rows, candidates, count = inputs(lengths)
            given = torch.cat(candidates, 1), torch.cat(columns, 1), rows
            torch.testing.assert_close(program.module()(*given), vector(columns, rows, candidates, count))
        program.example_inputs = None
        torch.export.save(program, tmp_path / PROGRAM)
        archived = read_program(tmp_path / PROGRAM)  # as versions of earlier releases hold it: no operator is refused
        torch.testing.assert_close(archived(*given), program.module()(*given))


def test_a_target_is_what_its_events_would_be():
    vector = vector_of("din", {}, widths=(4, 4))
    columns, rows, candidates, samples = inputs(widths=(4, 4))
    zeros = [candidates[0], torch.zeros_like(candidates[1])]
    torch.testing.assert_close(
        vector(columns, rows, [candidates[0], None], samples), vector(columns, rows, zeros, samples)
    )


def test_the_place_of_an_event_counts_from_the_newest():
    vector = vector_of("sum", {})
    columns, rows, candidates, samples = inputs()
    plain = copy.deepcopy(vector)
    plain.places = None
    difference = vector(columns, rows, candidates, samples) - plain(columns, rows, candidates, samples)
    torch.testing.assert_close(difference[1], vector.places[0])
    torch.testing.assert_close(difference[0], vector.places[:3].sum(0))


@pytest.mark.parametrize(("name", "options"), [("bst", {"layers": 2}), ("hstu", {"layers": 2})])
def test_no_event_sees_a_later_one(name, options):
    """The vector of a cut history is that of the same events, whatever followed."""
    vector = vector_of(name, options, widths=(DIM,))
    vector.places = None  # they count from the newest
    columns, rows, candidates, samples = inputs([6], widths=(DIM,))
    layer, jagged = vector.block.layers[0], Jagged.of(rows, 1)
    whole = layer(columns[0], jagged, last=False)
    first = layer(columns[0][:3], Jagged.of(rows[:3], 1), last=False)
    if name == "bst":  # hstu divides by the number of events
        torch.testing.assert_close(whole[:3], first)
    changed = columns[0].clone()
    changed[4:] = 7.0
    torch.testing.assert_close(layer(changed, jagged, last=False)[:4], whole[:4])
    torch.testing.assert_close(layer(columns[0], jagged, last=True), whole[5:])


@pytest.mark.parametrize("lengths", [[1], [3, 9, 3, 40, 8, 17, 200], [5] * 7])
def test_grids_hold_every_event_once_and_pad_little(lengths):
    jagged = Jagged.of(rows_of(lengths), len(lengths))
    grids = jagged.grids
    assert torch.equal(grids.events[grids.cells], torch.arange(sum(lengths)))
    assert len(grids.events) == sum(samples * width for samples, width in grids.sizes)
    assert sorted(torch.cat(grids.lengths).tolist()) == sorted(lengths)
    for own, (samples, width) in zip(grids.lengths, grids.sizes, strict=True):
        assert len(own) == samples and int(own.max()) == width <= max(int(own.min()) + 7, 1.25 * int(own.min()))
    for part, own in zip(grids.split(grids.events), grids.lengths, strict=True):
        for sample, length in zip(part.view(len(own), -1), own.tolist(), strict=True):
            assert sample[:length].diff().eq(1).all() and sample[length:].eq(sample[0]).all()


def test_a_bias_by_age_weighs_events_of_some_ages_more():
    """Keys of one age are preferred, and the gradient of that preference reaches the ages."""
    _, block = block_of("hstu", {"ages": True, "heads": 1})
    events, jagged, target = torch.ones(4, DIM), Jagged.of(rows_of([4]), 1), torch.ones(1, DIM)
    old = torch.zeros(4, 4)
    old[0, 0] = 1.0
    plain = block(events, jagged, target, torch.zeros(4, 4))
    with torch.no_grad():
        block.layers[0].age.weight.copy_(torch.tensor([[3.0, 0.0, 0.0, 0.0]]))
    assert torch.equal(block(events, jagged, target, torch.zeros(4, 4)), plain)
    ages = old.requires_grad_()
    changed = block(events, jagged, target, ages)
    assert not torch.allclose(changed, plain)
    changed.square().sum().backward()
    assert ages.grad is not None and ages.grad.abs().sum() > 0


@pytest.mark.parametrize("block", ["bst", "hstu"])
def test_heads_divide_the_width(block):
    with pytest.raises(ConfigError, match="has 3 heads, expected a divisor of model.embedding_dim, 8"):
        block_of(block, {"heads": 3})


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_out_of_training_a_vector_does_not_depend_on_the_other_samples(name, options, autocast):
    """Not by a bit: whichever samples are taken together, and however many."""
    lengths = torch.randint(1, 7, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    vector = vector_of(name, options).eval()
    columns, rows, candidates, samples = inputs(lengths)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def made(first, last):
        own = slice(starts[first], starts[last])
        taken = [each[own] for each in columns], rows[own] - first, [each[first:last] for each in candidates]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return vector(*taken, last - first)

    whole = made(0, samples)
    assert whole.shape == (150, DIM) and whole.std() > 0.01
    for cuts in ([0, 64, 128, 150], [0, 1, 38, 150], [0, 75, 150]):
        parts = torch.cat([made(first, last) for first, last in zip(cuts, cuts[1:], strict=False)])
        assert torch.equal(parts, whole), cuts
    with torch.no_grad():
        torch.testing.assert_close(
            vector.train()(columns, rows, candidates, samples),
            vector.eval()(columns, rows, candidates, samples),
            atol=1e-5,
            rtol=1e-4,
        )


@pytest.mark.parametrize("events", [1, 63, 64, 65, 127, 128, 1000])
def test_what_fills_a_batch_up_has_one_event_or_two_a_sample(events):
    for samples in {1, min(events, 64), events}:
        more_events, more = fillers(events, samples)
        assert (events + more_events) % EVEN_ROWS == (samples + more) % EVEN_ROWS == 0
        assert more <= more_events <= 2 * more and (samples != events or more == more_events)
