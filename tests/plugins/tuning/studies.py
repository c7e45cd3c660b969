"""Made-up trials for tests."""

from pipeline.records.study import DONE, Dimension, Look, StudyRecord, StudyShown, TrialRecord

SPACE = {
    "train.lr": Dimension(kind="float", low=1e-4, high=1e-1, log=True),
    "model.embedding_dim": Dimension(kind="choice", choices=("4", "8")),
}
ROWS = 1000  # of an epoch


def trial(number: int, ne: float = 0.5, state: str = DONE, *, samples: tuple[int, ...] = (), **changes) -> TrialRecord:
    """Trial ``number``; its NE at every look is ``ne``."""
    known = {
        "parameters": {"train.lr": 0.001 * (number + 1), "model.embedding_dim": "8"},
        "started": 1.0,
        "looks": tuple(Look(step=each // 10, samples=each, ne=ne) for each in samples),
        "steps": 100,
        "steps_total": 400,
        "ne": ne if state == DONE else None,
    }
    return TrialRecord(number=number, run=f"s-{number:05d}", state=state, **{**known, **changes})


def shown(trials: list[TrialRecord]) -> StudyShown:
    """A study of ``trials``."""
    record = StudyRecord(study="s", overrides=("experiment=demo",), space=SPACE, settings={}, created=1.0)
    done = [each for each in trials if each.state == DONE]
    best = min(done, key=lambda each: each.ne or 0) if done else None
    steps = sum(each.steps or 0 for each in trials)
    whole = sum(each.steps_total or 0 for each in trials)
    return StudyShown(
        study=record,
        trials=tuple(trials),
        best=best.number if best else None,
        importance={"train.lr": 0.9},
        steps=steps,
        steps_in_full=whole,
    )
