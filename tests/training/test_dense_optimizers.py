"""Dense optimizers by their formulas, on one and on several ranks, through checkpoints; groups, options, averages."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.checkpoint.train_state import flatten_optimizer, load_optimizer
from pipeline.config import CheckpointConfig, TrainConfig
from pipeline.config.compose import compose
from pipeline.config.train import AverageConfig, DenseGroup, DenseOptions, SparseOptions
from pipeline.core.errors import ConfigError
from pipeline.models.layers import BatchNorm
from pipeline.plugins.shampoo import native
from pipeline.specs import DENSE_OPTIMIZERS
from pipeline.specs.optimizers import ParameterGroup as Group
from pipeline.training.optimizer import Average, dense_groups
from tests.embeddings.ranks import spawn
from tests.training import test_train

SHAPES = {"a.weight": (9, 14), "a.bias": (9,), "b.weight": (3, 9), "b.bias": (3,), "c.weight": (2, 3, 5)}
SMALL = {"block_size": 4, "factor_every": 2, "root_every": 3, "start_step": 2}
STEPS = 12


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step):
    """Like those of a layer: of low rank, with directions of very different size."""
    generator = torch.Generator().manual_seed(100 + step)
    made = {}
    for name, shape in SHAPES.items():
        scale = torch.logspace(0, -3, shape[-1])
        made[name] = 1e-3 * torch.randn(shape, generator=generator) * scale
    return made


def build(named, optimizer, lr=0.1, weight_decay=0.0, own=(), **options):
    spec = replace(DENSE_OPTIMIZERS.get(optimizer), **options)
    return spec.build([Group(list(named.values()), lr, weight_decay)], own)


def steps(named, optimizer, first=0, last=STEPS):
    for step in range(first, last):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient.clone()
        optimizer.step()


def plain_shampoo(named, *, lr, decay, beta1, beta2, eps, block_size, factor_every, root_every, start_step, grafting):
    """The formulas of ``shampoo_steps`` in float64, by eigenvalues, block after block; the last directions by name."""
    weights = {
        name: p.detach().double().flatten(1) if p.dim() > 1 else p.detach().double() for name, p in named.items()
    }
    state, said = {}, {}

    def root(factor):
        values, vectors = torch.linalg.eigh(factor)
        return vectors @ torch.diag((values + eps * values.max()) ** -0.25) @ vectors.T

    def one(key, g, t, number=0):
        s = state.setdefault(key, {"m": 0.0 * g, "v": 0.0 * g, "l": 0.0, "r": 0.0})
        s["m"] = beta1 * s["m"] + (1 - beta1) * g
        mean = s["m"] / (1 - beta1**t)
        if grafting == "adam":
            s["v"] = 0.999 * s["v"] + 0.001 * g * g
            graft = mean / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-10)
        else:
            s["v"] = s["v"] + g * g
            graft = mean / (s["v"].sqrt() + 1e-10)
        if g.dim() == 1:
            return graft
        old, new = (1.0, 1.0) if beta2 == 1 else (beta2, 1 - beta2)
        if (t - 1) % factor_every == 0:
            s["l"], s["r"] = old * s["l"] + new * g @ g.T, old * s["r"] + new * g.T @ g
        if t >= start_step and (t == start_step or (t - start_step) % root_every == (number // 4 + 1) % root_every):
            s["roots"] = root(s["l"]), root(s["r"])
        if t < start_step:
            return graft
        bent = s["roots"][0] @ mean @ s["roots"][1]
        return bent * graft.norm() / bent.norm()

    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            g = gradient.double().flatten(1) if gradient.dim() > 1 else gradient.double()
            said[name] = torch.zeros_like(g)
            if g.dim() == 1:
                said[name] = one((name, 0, 0), g, step + 1)
            else:
                cuts = [(r, c) for r in range(0, g.shape[0], block_size) for c in range(0, g.shape[1], block_size)]
                for number, (r, c) in enumerate(cuts):
                    part = (slice(r, r + block_size), slice(c, c + block_size))
                    said[name][part] = one((name, r, c), g[part], step + 1, number)
            weights[name] = weights[name] * (1 - lr * decay) - lr * said[name]
    return weights, said


@pytest.fixture(params=["PyTorch", "any CPU", "AVX2"])
def work(request, monkeypatch):
    """Shampoo's work by PyTorch, and by the compiled steps on two kinds of CPU."""
    library = native.library()
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif library is None:
        pytest.skip("the compiled library is not installed")
    else:
        library.limit(int(request.param == "AVX2"))
    yield
    if library is not None:
        library.limit(1)


@pytest.mark.parametrize("grafting", ["adagrad", "adam"])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 1.0), (0.0, 0.99)])
def test_shampoos_directions_are_those_of_a_plain_float64_implementation(work, grafting, beta1, beta2):
    ours = parameters()
    options = {"beta1": beta1, "beta2": beta2, "eps": 1e-6, "grafting": grafting, **SMALL}
    weights, directions = plain_shampoo(ours, lr=0.1, decay=0.01, **options)
    optimizer = build(ours, "shampoo", weight_decay=0.01, **options)
    steps(ours, optimizer, 0, STEPS - 1)
    before = {name: p.detach().double() for name, p in ours.items()}
    steps(ours, optimizer, STEPS - 1, STEPS)
    for name, parameter in ours.items():
        moved = (before[name] * (1 - 0.1 * 0.01) - parameter.detach().double()) / 0.1
        wanted = directions[name].view_as(moved)
        assert (moved - wanted).norm() / wanted.norm() < 1e-5, name
        torch.testing.assert_close(
            parameter.detach().double().view_as(weights[name]), weights[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.skipif(native.library() is None, reason="the compiled library is not installed")
def test_compiled_steps_of_blocks_of_any_shape_are_pytorchs(monkeypatch):
    shapes = [(70, 45), (33, 8), (8, 33), (1, 19), (17, 1), (64, 64), (90,), (1,)]
    generator, library, threads = torch.Generator().manual_seed(0), native.library(), torch.get_num_threads()
    first = {str(shape): torch.randn(shape, generator=generator) for shape in shapes}
    given = [{name: torch.randn(p.shape, generator=generator) for name, p in first.items()} for _ in range(4)]
    outcomes = []
    for used, cores in ((None, 1), (library, 1), (library, 3)):
        torch.set_num_threads(cores)
        monkeypatch.setattr(native, "library", lambda used=used: used)
        named = {name: nn.Parameter(p.clone()) for name, p in first.items()}
        groups = [Group(list(named.values())[:4], 0.1, 0.5), Group(list(named.values())[4:], 0.2, 0.0)]
        options = {"block_size": 48, "factor_every": 2, "root_every": 2, "start_step": 2, "eps": 1e-3}
        optimizer = replace(DENSE_OPTIMIZERS.get("shampoo"), **options).build(groups)
        for step, gradient in enumerate(given):
            for name, parameter in named.items():  # one parameter learns less often than the others
                parameter.grad = None if step % 2 and name == "(33, 8)" else gradient[name].clone()
            optimizer.step()
        state = {f"{n} {k}": v for n, p in named.items() for k, v in optimizer.state[p].items()}
        outcomes.append({name: p.detach() for name, p in named.items()} | state)
    torch.set_num_threads(threads)
    plain, compiled, spread = outcomes
    assert plain.keys() == compiled.keys()
    for name, value in compiled.items():
        assert torch.equal(value, spread[name]), name
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)


def test_lamb_moves_every_layer_by_the_same_share_of_its_norm():
    ours = parameters()
    before = {name: p.detach().clone() for name, p in ours.items()}
    steps(ours, build(ours, "lamb", lr=0.01), 0, 1)
    for name, parameter in ours.items():
        torch.testing.assert_close((parameter - before[name]).norm() / before[name].norm(), torch.tensor(0.01))


def test_lamb_is_its_papers_formula():
    ours, beta1, beta2, eps, decay, lr = parameters(), 0.9, 0.999, 1e-6, 0.1, 0.01
    weights = {name: p.detach().double().clone() for name, p in ours.items()}
    m, v = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        for name, gradient in gradients(step - 1).items():
            g = gradient.double()
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            r = m[name] / (1 - beta1**step) / ((v[name] / (1 - beta2**step)).sqrt() + eps) + decay * weights[name]
            weights[name] = weights[name] - lr * weights[name].norm() / r.norm() * r
    steps(ours, build(ours, "lamb", lr=lr, weight_decay=decay))
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", DENSE_OPTIMIZERS.names())
def test_each_goes_on_from_its_saved_state_to_the_bit(optimizer):
    options = SMALL if optimizer == "shampoo" else {}
    ours = parameters()
    first = build(ours, optimizer, **options)
    steps(ours, first, 0, 5)
    tensors, record = flatten_optimizer(first, ours)
    saved = {name: value.clone() for name, value in tensors.items()}
    record = json.loads(json.dumps(record))
    again = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    steps(ours, first, 5)
    second = build(again, optimizer, **options)
    load_optimizer(second, again, saved, record)
    steps(again, second, 5)
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert type(first).__name__ in DENSE_OPTIMIZERS.get(optimizer).classes


def on_ranks(folder):
    """Shampoo's work is dealt; saved after five steps and gone on with on another number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = parameters()
    optimizer = build(ours, "shampoo", **SMALL)
    steps(ours, optimizer, 0, 5)
    kept = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    optimizer.gather()
    if rank == 0:
        tensors, record = flatten_optimizer(optimizer, ours)
        saved = {name: value.clone() for name, value in tensors.items()}
        weights = {name: p.detach().clone() for name, p in ours.items()}
        torch.save([weights, saved, record], folder / f"saved-{world}")
    steps(ours, optimizer, 5)
    other = folder.parent / f"of{3 - world}" / f"saved-{3 - world}"
    torch.save([{name: p.detach() for name, p in ours.items()}, kept], folder / f"{rank}")
    if not other.exists():
        return
    weights, saved, record = torch.load(other)
    again = {name: nn.Parameter(w) for name, w in weights.items()}
    restored = build(again, "shampoo", **SMALL)
    load_optimizer(restored, again, saved, record)
    steps(again, restored, 5)
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_shampoo_deals_its_work_to_ranks_and_goes_on_with_another_number_of_them(tmp_path):
    for world in (1, 2):
        spawn(on_ranks, world, tmp_path / f"of{world}")
    (alone, whole), (one, some), (two, rest) = (torch.load(tmp_path / place) for place in ("of1/0", "of2/0", "of2/1"))
    assert all(torch.equal(alone[name], one[name]) and torch.equal(alone[name], two[name]) for name in alone)
    assert max(some, rest) < 0.7 * whole


def test_shampoo_trains_parameters_of_some_ranks_as_it_trains_shared_ones():
    weights = []
    for shared in (True, False):
        ours = parameters()
        steps(ours, build(ours, "shampoo", own=[] if shared else list(ours.values()), **SMALL))
        weights.append(ours)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_groups_get_their_rates_by_the_first_pattern_that_matches():
    train = TrainConfig(
        lr=0.1,
        weight_decay=0.2,
        dense_groups={"*.bias": DenseGroup(weight_decay=0.0), "a.*": DenseGroup(lr=0.5)},
    )
    named = parameters()
    groups = dense_groups(named, train)
    of = {id(p): name for name, p in named.items()}
    assert [([of[id(p)] for p in g.parameters], g.lr, g.weight_decay) for g in groups] == [
        (["b.weight", "c.weight"], 0.1, 0.2),
        (["a.bias", "b.bias"], 0.1, 0.0),
        (["a.weight"], 0.5, 0.2),
    ]


@pytest.mark.parametrize(
    ("patterns", "said", "hint"),
    [
        (["*.weigth"], "'\\*.weigth' matches no dense parameter; the model has: a.weight, a.bias,", "c.weight"),
        (["a.*", "a.bias"], "'a.bias' matches only parameters that a pattern before it has", "put it before 'a.*'"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused_with_the_names(patterns, said, hint):
    train = TrainConfig(dense_groups={pattern: DenseGroup(lr=0.1) for pattern in patterns})
    with pytest.raises(ConfigError, match=said) as caught:
        dense_groups(parameters(), train)
    assert hint in caught.value.hint


def test_an_option_that_the_optimizer_lacks_is_refused_before_anything_starts():
    assert TrainConfig(dense_optimizer="shampoo", dense_options=DenseOptions(block_size=8)).dense_spec.block_size == 8
    assert TrainConfig(sparse_optimizer="ftrl", sparse_options=SparseOptions(l1=0.5)).table_optimizer.l1 == 0.5
    with pytest.raises(ConfigError, match="train.sparse_options.l1 is 0.1, but train.sparse_optimizer=rowwise_adagrad"):
        compose(["experiment=demo", "run=r", "train.sparse_options.l1=0.1"])
    with pytest.raises(ConfigError, match="train.dense_options.momentum is 0.5, .*=adam does .*: beta1, beta2") as got:
        compose(["experiment=demo", "run=r", "train.dense_options.momentum=0.5"])
    assert got.value.hint == "train.dense_options.momentum=null, or train.dense_optimizer=sgd"
    with pytest.raises(ConfigError, match="train.average.decay is 0.9, but train.average.kind is none"):
        compose(["experiment=demo", "run=r", "train.average.decay=0.9"])


def test_an_average_takes_the_statistics_of_batch_norms_along():
    layer = BatchNorm(3)
    named = dict(layer.named_parameters())
    optimizer = build({name: named[name] for name in ("weight", "bias", "mean", "variance")}, "adam")
    average = Average(AverageConfig(kind="swa", start=0.0), optimizer, list(named.values()), STEPS)
    seen, generator = [], torch.Generator().manual_seed(3)
    for step in range(STEPS):
        optimizer.zero_grad()
        layer(5 + step * torch.randn(20, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        average.take(step)
        seen.append((layer.mean.detach().clone(), layer.variance.detach().clone()))
    average.swap()
    for at, statistic in enumerate((layer.mean, layer.variance)):
        torch.testing.assert_close(statistic.detach(), torch.stack([each[at] for each in seen]).mean(0))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_those_of_the_steps_that_count(kind):
    ours = parameters()
    optimizer = build(ours, "adam")
    average = Average(AverageConfig(kind=kind, decay=0.8, start=0.25, every=2), optimizer, list(ours.values()), STEPS)
    counted = []
    for step in range(STEPS):
        steps(ours, optimizer, step, step + 1)
        average.take(step)
        if step >= 3 and (step - 3) % 2 == 0:
            counted.append(ours["a.weight"].detach().clone())
    wanted = counted[0]
    for weights in counted[1:]:
        wanted = 0.8 * wanted + 0.2 * weights
    wanted = torch.stack(counted).mean(0) if kind == "swa" else wanted
    last = ours["a.weight"].detach().clone()
    average.swap()
    torch.testing.assert_close(ours["a.weight"].detach(), wanted)
    average.swap()
    assert torch.equal(ours["a.weight"], last)


def test_a_mean_that_goes_back_to_better_weights_counts_those_of_then():
    ours = parameters()
    optimizer = build(ours, "adam")
    average = Average(AverageConfig(kind="swa", start=0.0), optimizer, list(ours.values()), STEPS)
    counted, kept, saved = [], {}, ({}, {})
    for step in range(STEPS):
        if step == 7:  # on a plateau: the weights of three steps are given up
            for name, parameter in ours.items():
                parameter.data.copy_(kept[name])
            load_optimizer(optimizer, ours, *saved)
            del counted[4:]
        steps(ours, optimizer, step, step + 1)
        average.take(step)
        counted.append(ours["a.weight"].detach().clone())
        if step == 3:
            kept = {name: parameter.detach().clone() for name, parameter in ours.items()}
            tensors, record = flatten_optimizer(optimizer, ours)
            saved = {name: value.clone() for name, value in tensors.items()}, json.loads(json.dumps(record))
    average.swap()
    torch.testing.assert_close(ours["a.weight"].detach(), torch.stack(counted).mean(0))


AVERAGED = {"sparse_optimizer": "lazy_adam", "average": AverageConfig(kind="ema", decay=0.8)}
CASES = {
    name: {"dense_optimizer": name, "sharding": test_train.MIXED}
    for name in DENSE_OPTIMIZERS.names()
    if name not in ("adam", "adagrad")
}
CASES["shampoo"] |= {"dense_options": DenseOptions(**{**SMALL, "block_size": 7})}
CASES["averaged"] = AVERAGED
CASES["grouped"] = {"dense_groups": {"*.bias": DenseGroup(lr=0.0)}}


def run_cases(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    outcomes = {name: test_train.run_case(folder / name, world, rank, **case) for name, case in CASES.items()}
    for name, case in CASES.items():
        settings = {**case, "then": {"epochs": 2}, "max_steps": 7, "checkpoint": CheckpointConfig(every_steps=3)}
        outcomes[f"{name}, stopped"] = test_train.run_case(folder / f"{name}, stopped", world, rank, **settings)
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


@pytest.mark.slow
def test_whole_trainings_stop_and_go_on_alike_and_ranks_train_the_same_model(tmp_path):
    outcomes = {}
    for world in (1, 2):
        spawn(run_cases, world, tmp_path / str(world))
        outcomes[world] = json.loads((tmp_path / f"{world}/0.json").read_text())
    for name in CASES:
        alone, both = outcomes[1][name], outcomes[2][name]
        assert both["digests"] == outcomes[2][f"{name}, stopped"]["digests"], name
        assert alone["ne"] == pytest.approx(both["ne"], rel=1e-6) and alone["ne"] < 1, name


def leave_averages(folder):
    cases = {
        "averaged": AVERAGED,
        "not averaged": {**AVERAGED, "average": AverageConfig(kind="ema", decay=0.8, use=False)},
    }
    found = {name: test_train.run_case(folder / name, 1, 0, **case) for name, case in cases.items()}
    (folder / "found.json").write_text(json.dumps(found))


def test_a_training_leaves_its_average_where_it_is_to_be_used(tmp_path):
    spawn(leave_averages, 1, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    averaged, last = found["averaged"], found["not averaged"]
    assert averaged["logits"] != last["logits"]
    assert averaged["ne"] == pytest.approx(last["ne"], abs=0.05)
