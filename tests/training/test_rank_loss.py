"""The ranking loss by its formulas: pairs and lists within groups, weights, padding, rows that compare with none."""

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.config import TrainConfig
from pipeline.config.compose import compose
from pipeline.config.fields import check_values
from pipeline.config.train import RankLossConfig
from pipeline.core.errors import ConfigError
from pipeline.embeddings.workers import Workers
from pipeline.ingest.stage import ingest
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.rank_loss import BLOCK, RankLoss
from pipeline.training.sampler import Order, keep_groups
from tests.embeddings.ranks import spawn
from tests.training.dataset import write_dataset

KINDS = ["pairwise", "listwise"]


def rank_loss(kind, world=1, **settings):
    return RankLoss(RankLossConfig(kind=kind, **settings), Workers(world, world))


def rows(count=300, groups=12, seed=0):
    """Logits, labels, weights and groups: some rows are padding, some of no group, one group has clicks alone."""
    random = np.random.default_rng(seed)
    group = random.integers(-1, groups, count)
    label = (random.random(count) < 0.4) | (group == 3)
    weight = random.choice([0.0, 0.5, 1.0, 2.5], count) / count
    label[-5:], weight[-5:] = False, 0.0
    logit = random.normal(-1, 1.5, count)
    return logit, label.astype(np.float32), weight, group


def formula(kind, logit, label, weight, group):
    """Loss and gradient by plain loops over pairs."""
    loss, gradient = 0.0, np.zeros(len(logit))
    for i in np.flatnonzero((label == 1) & (weight > 0) & (group >= 0)):
        among = (group == group[i]) & (weight > 0)
        if kind == "pairwise":
            among &= label == 0
        total = weight[among].sum()
        if total == 0:
            continue
        mean = 0.0
        for j in np.flatnonzero(among):
            if kind == "pairwise":
                mean += weight[j] / total * math.log1p(math.exp(logit[j] - logit[i]))
                slope = weight[i] * weight[j] / total / (1 + math.exp(logit[i] - logit[j]))
                gradient[j] += slope
                gradient[i] -= slope
            else:
                mean += weight[j] / total * math.exp(logit[j] - logit[i])
        if kind == "listwise":
            for j in np.flatnonzero(among):
                gradient[j] += weight[i] * weight[j] / total * math.exp(logit[j] - logit[i]) / mean
            gradient[i] -= weight[i]
            mean = math.log(mean)
        loss += weight[i] * mean
    return loss, gradient


def computed(loss, logit, label, weight, group=None):
    tensors = [torch.tensor(each, dtype=torch.float64) for each in (logit, label, weight)]
    logits = tensors[0].requires_grad_()
    value = loss(logits, *tensors[1:], None if group is None else torch.tensor(group, dtype=torch.int32))
    value.backward()
    return value.item(), logits.grad.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 12, 150])
def test_loss_and_gradient_are_those_of_plain_loops(kind, groups):
    made = rows(groups=groups)
    assert (made[1] * (made[2] > 0)).sum() > BLOCK, "several blocks"
    value, gradient = computed(rank_loss(kind, weight=0.7), *made)
    expected, slopes = formula(kind, *made)
    assert value == pytest.approx(0.7 * expected, rel=1e-12) and value > 0
    np.testing.assert_allclose(gradient, 0.7 * slopes, rtol=1e-9, atol=1e-15)
    assert (gradient[made[2] == 0] == 0).all() and (gradient[made[3] < 0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_groups_all_rows_are_one(kind):
    logit, label, weight, _ = rows()
    value, gradient = computed(rank_loss(kind), logit, label, weight)
    expected, slopes = formula(kind, logit, label, weight, np.zeros(len(logit), int))
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_loss(kind):
    logit, label, weight, group = (torch.tensor(each) for each in rows(count=40, groups=4))
    logit.requires_grad_()
    loss = rank_loss(kind)
    assert torch.autograd.gradcheck(lambda logits: loss(logits, label, weight, group), (logit,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("label", "group"),
    [
        pytest.param([0, 0, 0], None, id="no clicks"),
        pytest.param([1, 1, 0], [0, 1, 2], id="every row alone"),
        pytest.param([1, 0, 0], [-1, -1, -1], id="no groups"),
    ],
)
def test_rows_that_cannot_be_compared_teach_nothing(kind, label, group):
    value, gradient = computed(rank_loss(kind), [3.0, -1.0, 0.5], label, [1 / 3] * 3, group)
    assert value == 0 and (gradient == 0).all()


def test_a_group_of_clicks_alone_has_an_order_only_as_a_list():
    made = [3.0, -1.0], [1, 1], [0.5, 0.5], [7, 7]
    assert computed(rank_loss("pairwise"), *made)[0] == 0
    value, gradient = computed(rank_loss("listwise"), *made)
    # Of a list, clicked rows are to have equal logits.
    assert value > 0 and gradient[0] > 0 > gradient[1]


def test_numbers_of_table_rows_that_float32_rounds_are_groups_of_their_own():
    large = 2**31 - 1
    value, _ = computed(rank_loss("pairwise"), [3.0, -1.0], [1, 0], [0.5, 0.5], [large, large - 1])
    assert value == 0
    assert computed(rank_loss("pairwise"), [3.0, -1.0], [1, 0], [0.5, 0.5], [large, large])[0] > 0


def on_rank(folder, world):
    rank, made = dist.get_rank(), rows(groups=5)
    size = len(made[0]) // world
    own = [each[rank * size : (rank + 1) * size] for each in made]
    # Weights of a batch have the number of ranks as a factor.
    own[2] = own[2] * world
    outcome = {}
    for kind in KINDS:
        value, gradient = computed(rank_loss(kind, world), *own)
        outcome[kind] = [value, gradient.tolist()]
    (folder / f"rank{rank}.json").write_text(json.dumps(outcome))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_mean_over_ranks_is_the_loss_of_the_global_batch(world, tmp_path):
    spawn(on_rank, world, tmp_path, world)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    for kind in KINDS:
        expected, slopes = formula(kind, *rows(groups=5))
        assert np.mean([rank[kind][0] for rank in ranks]) == pytest.approx(expected, rel=1e-9)
        gradient = np.concatenate([rank[kind][1] for rank in ranks]) / world
        np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-15)


def test_held_out_rows_are_grouped_by_the_ids_of_the_log(tmp_path):
    """Of 400 users 20 have rows of their own in the table, and some rows have no user."""
    users = np.random.default_rng(4).integers(0, 400, 4000)
    lines = [f"{number % 3 == 0:d},{user},{'' if user == 7 else f'u{user}'}" for number, user in enumerate(users)]
    (tmp_path / "log.csv").write_text("\n".join(["label,x,user", *lines]))
    features = [
        "+data.dense={x: {transform: none}}",
        "+data.sparse={user: {rows: 22}, hashed: {column: user, mapping: hash, rows: 10000000}}",
    ]
    more = ["data.split.test_share=0.5", f"data.path={tmp_path}/log.csv"]
    config = compose(
        ["data=csv", "data.name=d", "data.label.column=label", *features, *more, "ingest.rows_per_group=64"]
    )
    store = Store(str(tmp_path / "store"))
    with store.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        dataset = draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    split = SplitReader(store, dataset, "test")
    user = split.column("x")
    for feature in ("user", "hashed"):
        numbers = split.number_ids(feature)
        assert (numbers[user == 7] == -1).all() and (user == 7).any()
        known = numbers[user != 7]
        pairs = {*zip(known.tolist(), user[user != 7].tolist(), strict=True)}
        assert len(pairs) == len(np.unique(known)) == len(np.unique(user)) - 1 > 300
        assert known.max() == len(pairs) - 1 and known.min() == 0


def test_a_batch_has_the_ids_of_the_feature_as_groups(tmp_path):
    columns = (SparseColumn(name="a", rows=5), SparseColumn(name="b", rows=4))
    store, dataset = write_dataset(tmp_path, train=200, sparse=columns)
    split = SplitReader(store, dataset, "train")
    order = Order(key="k", seed=0, global_batch=128)
    with BatchReader(split, order, group_by="b") as reader:
        first, last = list(reader)
    for batch in (first, last):
        ids = batch.sparse["b"].values()
        assert batch.groups.tolist() == [row if row > 1 else -1 for row in ids.tolist()]
        assert set(batch.groups.tolist()) == {-1, 2, 3}
    with BatchReader(split, order) as reader:
        assert next(reader).groups is None


def test_shuffled_rows_of_a_group_follow_its_first_one():
    order = np.array([4, 2, 0, 3, 1, 5])
    ids = np.array([7, 9, 7, 1, 9, 0])  # rows 3 and 5 have no id of their own
    assert keep_groups(order, ids).tolist() == [4, 1, 2, 0, 3, 5]
    random = np.random.default_rng(0)
    order, ids = random.permutation(500), random.integers(0, 40, 500)
    kept = keep_groups(order, ids)
    assert sorted(kept) == list(range(500))
    grouped = ids[kept] > 1
    borders = np.flatnonzero(np.diff(ids[kept][grouped]))
    assert len(borders) + 1 == len(set(ids[ids > 1].tolist()))


def ids_of_epoch(split, rank=0, world=1, start=(0, 0), epochs=1, **changes):
    """Ids of feature b by batch, padding left out."""
    order = Order(
        key="k", seed=3, global_batch=100, window_groups=2, group_by="b", rank=rank, world_size=world, **changes
    )
    with BatchReader(split, order, start=start, epochs=epochs) as reader:
        return [batch.sparse["b"].values()[batch.weights > 0].tolist() for batch in reader]


def test_groups_stay_together_on_any_ranks_and_after_a_resume(tmp_path):
    columns = (SparseColumn(name="a", rows=5), SparseColumn(name="b", rows=30))
    store, dataset = write_dataset(tmp_path, train=1000, sparse=columns, group=128)
    split = SplitReader(store, dataset, "train")
    whole = ids_of_epoch(split)
    loose = ids_of_epoch(split, shuffle=False)
    assert sorted(sum(whole, [])) == sorted(sum(loose, [])) == sorted(split.column("b").tolist())
    assert changes_of(whole) < changes_of(loose) / 2
    ranks = [ids_of_epoch(split, rank, 2) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole
    assert ids_of_epoch(split, start=(0, 4)) == whole[4:]
    second = ids_of_epoch(split, epochs=2)[len(whole) :]
    assert second != whole and changes_of(second) < changes_of(loose) / 2


def changes_of(batches):
    return sum(np.count_nonzero(np.diff(batch)) for batch in batches)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kind": "pairwise", "keep_groups": True},
            "train.rank_loss.keep_groups is true, but train.rank_loss.group_by",
        ),
        ({"weight": 0.5}, "train.rank_loss.weight is 0.5, but train.rank_loss.kind is none"),
        ({"group_by": "user"}, "train.rank_loss.group_by is user, but train.rank_loss.kind is none"),
        ({"kind": "pairs"}, "expected one of: none, pairwise, listwise"),
        ({"kind": "pairwise", "weight": -1.0}, "expected at least 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, said):
    with pytest.raises(ConfigError, match="rank_loss") as caught:
        check_values(TrainConfig(rank_loss=RankLossConfig(**settings)), "train")
    assert said in str(caught.value)
