"""Stage evaluate: figures of the trained model on the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import units
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, DamagedError
from pipeline.records.ensemble import members_of
from pipeline.records.result import Evaluation, Result, TaskFigures
from pipeline.records.runs import Step
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


class Evaluate(Stage):
    """Metrics, the reliability curve, and the logits that the gate compares serving with."""

    name = "evaluate"
    help = "evaluate the model on held-out rows"
    inputs = ("ingest", "plan", "partition", "train")
    needs_rows = True
    distributed = True
    settings = (use("evaluate", "global_batch"),)

    def check(self, config: Config) -> None:
        """There must be held-out rows."""
        if config.data.split.by == "hash" and config.data.split.test_share == 0:
            raise ConfigError(
                "data.split.test_share is 0, but stages names evaluate, which needs held-out rows",
                hint="data.split.test_share=0.2, or stages=[ingest,plan,partition,train]",
            )

    def modules(self, config: Config) -> tuple[str, ...]:
        """Prediction on ranks."""
        return ("pipeline.training.predict",)

    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Score the test rows with the final checkpoint on this rank; metrics, reliability and logits."""
        import numpy as np

        from pipeline.evaluation.bootstrap import evaluation_intervals
        from pipeline.evaluation.metrics import evaluate, evaluate_tasks, reliability
        from pipeline.stages.attention_record import ATTENTION, attention_json
        from pipeline.stages.judging import LOGITS
        from pipeline.stages.read import read_dataset, read_towers
        from pipeline.training.predict import predict
        from pipeline.training.settings import PredictionSettings

        final = inputs["train"].summary.get("final")
        if not final:
            raise ArtifactError(f"{inputs['train'].path} names no final checkpoint", hint="nightjar train force=true")
        plan, towers = read_towers(config, store, inputs, _readable(store, final))
        members = members_of(inputs["train"].summary)
        try:
            predictions = predict(PredictionSettings.of(config), store, inputs["ingest"], plan, final, towers, members)
        except DamagedError as error:
            hint = (
                f"remove {store.url_of(final)}; then stages=[train,evaluate] goes on from the newest whole checkpoint"
            )
            raise ArtifactError(error.message, hint=hint) from error
        if predictions is None:
            return None
        main = predictions.logits if predictions.logits.ndim == 1 else np.ascontiguousarray(predictions.logits[:, 0])
        figures: dict[str, Any] = evaluate(predictions.labels, main, predictions.true_probability, predictions.weights)
        clicked = predictions.labels == 1
        if predictions.weights is not None:
            clicked = clicked & (predictions.weights > 0)  # rows of no weight count as none in the intervals, too
        figures["clicks"] = int(clicked.sum())
        figures |= evaluation_intervals(predictions.labels, main, predictions.weights)
        if predictions.tasks:
            tasks = read_dataset(store, inputs["ingest"])[0].tasks
            others = evaluate_tasks(tasks, predictions.tasks, predictions.logits, predictions.weights)
            figures["tasks"] = {name: each.to_json() for name, each in others.items()}
        curve = reliability(predictions.labels, main, weights=predictions.weights)
        with self.draft(store, step) as draft:
            draft.write_json("metrics.json", figures)
            draft.write_json("reliability.json", curve.to_json())
            if predictions.attention:
                draft.write_json(ATTENTION, attention_json(config, store, inputs["ingest"], predictions.attention))
            with draft.open(LOGITS) as sink:
                np.lib.format.write_array(sink, predictions.logits, allow_pickle=False)
            return draft.commit(figures)

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, as ``eval``."""
        return {"eval": Evaluation.from_json(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """The metrics, and how near they are to the best that can be reached."""
        from pipeline.report.summary import doubts, reachable_gain

        part = result.eval
        if part is None:
            return {}
        lines = [
            f"NE {units.decimal(part.ne, 5)}   AUC {units.decimal(part.auc, 5)}   "
            f"log loss {units.decimal(part.logloss, 5)}   calibration {units.decimal(part.calibration)}",
            *_interval_lines(part),
            f"on {units.plural(part.samples, 'test row')}",
            *(f"warning: {line}" for line in doubts(part)),
        ]
        lines += [_task_line(name, each) for name, each in (part.tasks or {}).items()]
        if units.known(part.ne) and part.ne > 1:
            lines.append("NE above 1 is worse than predicting the click rate for every row: the model learned nothing")
            lines.append("that holds, or overfits. Try data.split.validation_share=0.1, fewer train.epochs, or")
            lines.append("model.dropout.")
        if units.known(part.bayes_ne):
            best = f"best reachable NE {units.decimal(part.bayes_ne, 5)}"
            gain = reachable_gain(part)
            lines.append(best if gain is None else f"{best}: {units.percent(gain)} of the reachable gain")
        return {"eval": lines}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        """How many rows were scored."""
        return [("Test rows", units.count(result.eval.samples if result.eval else None))]


def _interval_lines(part: Evaluation) -> list[str]:
    """The 95 % intervals, where there are some."""
    if part.ne_interval is None or part.auc_interval is None:
        return []
    ne, auc = (" to ".join(units.decimal(end, 5) for end in each) for each in (part.ne_interval, part.auc_interval))
    return [f"95% intervals: NE {ne}, AUC {auc}"]


def _task_line(name: str, part: TaskFigures) -> str:
    """The figures of a further task that its kind has, each with its name."""
    named = {"NE": part.ne, "AUC": part.auc, "RMSE": part.rmse, "unexplained": part.unexplained}
    figures = [f"{title} {units.decimal(value, 5)}" for title, value in named.items() if units.known(value)]
    figures += [f"calibration {units.decimal(part.calibration)}"] if units.known(part.calibration) else []
    return f"{name}: {'   '.join(figures) or 'no figures'} on {units.count(part.samples)} rows with a label"


def _readable(store: Store, checkpoint: str) -> list[Artifact]:
    """The checkpoint at that path, if it can be read; what is wrong with it is for those to say who need it."""
    from pipeline.checkpoint.index import committed

    return [each for each in committed(store, checkpoint.rpartition("/")[0]) if each.path == checkpoint]


SPEC = Evaluate()
