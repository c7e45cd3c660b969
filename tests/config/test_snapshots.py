"""Settings of ensembles: what is refused, with the override that helps."""

import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError

VALIDATED = "data.split.validation_share=0.1"
COUNT = "train.snapshots.count=3"


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (["train.snapshots.keep=2"], "train.snapshots.keep is 2, but train.snapshots.count is 1", "count=4"),
        ([COUNT], "there are no validation rows to choose members by", "data.split.validation_share=0.1"),
        (
            [COUNT, VALIDATED, "train.validate.patience=3"],
            "train.validate.patience would stop or lower",
            "train.validate.patience at its default",
        ),
        ([COUNT, VALIDATED, "train.average.kind=ema"], "train.average.kind=ema averages", "train.average.kind=none"),
        ([COUNT, VALIDATED, "train.mode=hogwild"], "needs one step after the other", "train.snapshots.count=1"),
        (
            [COUNT, VALIDATED, "train.snapshots.kind=cyclic", "train.schedule=constant"],
            "has no minimum",
            "train.schedule=cosine",
        ),
        ([COUNT, VALIDATED, "partition=dmt"], "cannot begin anew", "train.snapshots.kind=cyclic, or partition=flat"),
        ([COUNT, VALIDATED, "train.snapshots.perturbation=0.2"], "kind=reset perturbs nothing", "kind=perturb"),
    ],
)
def test_what_does_not_go_with_an_ensemble_is_refused(settings, message, hint):
    with pytest.raises(ConfigError) as caught:
        compose(["data=synthetic", *settings])
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_towers_take_the_kinds_that_go_on():
    assert compose(
        ["data=synthetic", COUNT, VALIDATED, "partition=dmt", "train.snapshots.kind=perturb"]
    ).train.snapshots.active
