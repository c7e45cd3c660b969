"""What Optuna answers, from records alone."""

import subprocess
import sys

import pytest

from pipeline.config import TuneConfig
from pipeline.plugins.tuning.proposals import FAR, decided, first_rung, importance, next_rung, proposal
from pipeline.plugins.tuning.space import held, split
from pipeline.records.study import BROKEN, DONE, PRUNED, TRYING
from tests.plugins.tuning.studies import ROWS, SPACE, trial

ASHA = TuneConfig(min_epochs=0.5, reduction=3)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_proposal_depends_on_records_seed_and_number_alone(sampler: str) -> None:
    config = TuneConfig(sampler=sampler, seed=3)
    trials = [trial(number, 0.5 + 0.01 * number) for number in range(12)]
    asked = [proposal(SPACE, trials, config, 12) for _ in range(2)]
    assert asked[0] == asked[1]
    assert asked[0] != proposal(SPACE, trials, config, 13) != proposal(SPACE, trials, TuneConfig(seed=4), 13)
    for number in range(12, 20):
        drawn = proposal(SPACE, trials, config, number)
        assert 1e-4 <= drawn["train.lr"] <= 1e-1 and drawn["model.embedding_dim"] in ("4", "8")
        assert len(f"{drawn['train.lr']:e}".rstrip("0").split("e")[0].rstrip("0").replace(".", "")) <= 4


@pytest.mark.parametrize("override", ["x=range(0,1,0.03125)", "x=range(0,1,0.3)", "x=range(0.0001,0.1,0.00007)"])
@pytest.mark.filterwarnings("error")
def test_what_is_proposed_of_a_range_with_steps_can_be_judged(override: str) -> None:
    _, space = split([override])
    values = {proposal(space, [], TuneConfig(sampler="random"), number)["x"] for number in range(60)}
    assert all(held(space["x"], each) == each for each in values)
    assert override != "x=range(0,1,0.3)" or values == {0.0, 0.3, 0.6, 0.9}
    for value in values:
        decided(space, [trial(0, 0.5, TRYING, samples=(500,), parameters={"x": value})], ASHA, 0, ROWS, ROWS)


def test_proposals_learn_from_the_trials_and_from_those_of_an_earlier_study() -> None:
    good = [
        trial(n, 0.5 if n % 2 else 0.9, parameters={"train.lr": 0.05 if n % 2 else 0.0002, "model.embedding_dim": "4"})
        for n in range(30)
    ]
    config = TuneConfig()
    for own, earlier in ((good, []), ([], good)):
        drawn = [proposal(SPACE, own, config, number, earlier)["train.lr"] for number in range(100, 112)]
        assert sum(each > 0.01 for each in drawn) >= 9
    chance = [proposal(SPACE, good, TuneConfig(sampler="random"), number)["train.lr"] for number in range(100, 124)]
    assert 2 <= sum(each < 0.001 for each in chance) <= 18


def test_an_earlier_trial_outside_of_the_space_informs_nobody() -> None:
    outside = [trial(n, parameters={"train.lr": 5.0, "model.embedding_dim": "4"}) for n in range(20)]
    assert proposal(SPACE, [], ASHA, 7, outside) == proposal(SPACE, [], ASHA, 7)


def test_asha_lets_the_best_third_of_a_rung_go_on() -> None:
    trials = []
    for number, ne in enumerate((0.50, 0.60, 0.55, 0.49, 0.52, 0.48)):
        trials.append(trial(number, ne, TRYING, samples=(250, 500)))
        ends, trials[number] = decided(SPACE, trials, ASHA, number, ROWS, 4 * ROWS)
        trials[number] = trial(number, ne, PRUNED if ends else TRYING, samples=(250, 500), rungs=trials[number].rungs)
    assert [each.state for each in trials] == [TRYING, PRUNED, PRUNED, TRYING, PRUNED, TRYING]
    assert all(each.rungs == {"0": each.looks[-1].ne} for each in trials)


def test_a_decision_is_the_same_after_the_records_were_read_again() -> None:
    trials = [trial(n, 0.5 + n / 100, TRYING, samples=(500, 1500), rungs={"0": 0.5 + n / 100}) for n in range(6)]
    before = [decided(SPACE, trials, ASHA, number, ROWS, 4 * ROWS) for number in range(6)]
    again = [type(each).from_json(each.to_json()) for each in trials]
    assert [decided(SPACE, again, ASHA, number, ROWS, 4 * ROWS) for number in range(6)] == before
    assert before[0][1].rungs == {"0": 0.5, "1": 0.5} and not before[0][0]


def test_before_the_first_rung_nothing_ends_and_a_trial_asks_again_at_the_next_one() -> None:
    ends, record = decided(SPACE, [trial(0, 9.0, TRYING, samples=(499,))], ASHA, 0, ROWS, 4 * ROWS)
    assert not ends and record.asks_at == first_rung(ASHA, ROWS) == 500
    assert [next_rung(ASHA, ROWS, samples) for samples in (500, 1499, 1500)] == [1500, 1500, 4500]
    assert next_rung(TuneConfig(pruner="none"), ROWS, 0) == FAR


def test_hyperband_has_ladders_that_begin_later() -> None:
    config = TuneConfig(pruner="hyperband", min_epochs=0.5, reduction=3)
    ended = []
    for number in range(20):
        trials = [trial(n, 0.4, DONE, samples=(500,), rungs={"0": 0.4}) for n in range(number)]
        trials.append(trial(number, 0.9, TRYING, samples=(500,)))
        ended.append(decided(SPACE, trials, config, number, ROWS, 5 * ROWS)[0])
    assert 0 < sum(ended) < len(ended)


def test_importance_names_the_setting_that_decides() -> None:
    trials = [
        trial(n, 0.5 + abs(n - 4) / 10, parameters={"train.lr": 10 ** (-4 + n / 5), "model.embedding_dim": "48"[n % 2]})
        for n in range(16)
    ]
    shares = importance(SPACE, trials)
    assert shares is not None and next(iter(shares)) == "train.lr" and sum(shares.values()) == pytest.approx(1)
    assert importance(SPACE, [trials[0], trial(1, state=BROKEN), trial(2, state=PRUNED)]) is None


def test_importance_needs_no_scikit_learn() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from tests.plugins.tuning.studies import SPACE, trial\n"
        "from pipeline.plugins.tuning.proposals import importance\n"
        "print(sorted(importance(SPACE, [trial(n, 0.5 + n / 10) for n in range(4)])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['model.embedding_dim', 'train.lr']"
