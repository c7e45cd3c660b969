"""Stage evaluate: figures of the trained model on the held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.config.sequences import AGE, event_feature
from pipeline.core import units
from pipeline.core.errors import ArtifactError, ConfigError, DamagedError
from pipeline.records.dataset import MISSING_ROW, TRANSFORMS, UNSEEN_ROW
from pipeline.records.ensemble import members_of
from pipeline.records.result import Evaluation, Result
from pipeline.records.runs import Step
from pipeline.specs.gate_check import ScoredRows
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.training.parquet import SplitReader
    from pipeline.training.predict import EventAttention

ATTENTION = "attention.json"


class Evaluate(Stage):
    """Metrics, the reliability curve, and the logits that the gate compares serving with.

    The gate does not go by these figures: it scores the rows anew, as the written version serves them.
    """

    name = "evaluate"
    help = "evaluate the model on held-out rows"
    inputs = ("ingest", "plan", "partition", "train")
    needs_rows = True
    distributed = True
    settings = (use("evaluate", "global_batch group_by"),)

    def check(self, config: Config) -> None:
        if config.data.split.by == "hash" and config.data.split.test_share == 0:
            raise ConfigError(
                "data.split.test_share is 0, but stages names evaluate, which needs held-out rows",
                hint="data.split.test_share=0.2, or stages=[ingest,plan,partition,train]",
            )

    def modules(self, config: Config) -> tuple[str, ...]:
        return ("pipeline.training.predict",)

    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Score the test rows with the final checkpoint on this rank; metrics, reliability and logits."""
        import numpy as np

        from pipeline.checkpoint.index import committed
        from pipeline.evaluation.bootstrap import evaluation_intervals
        from pipeline.evaluation.metrics import evaluate, evaluate_tasks, reliability
        from pipeline.evaluation.user_auc import evaluation_gauc
        from pipeline.stages.release_gate import LOGITS, number_groups
        from pipeline.stages.stage_inputs import read_dataset, read_towers
        from pipeline.training.config_settings import select_prediction_settings
        from pipeline.training.parquet import SplitReader
        from pipeline.training.predict import predict

        dataset, trained = inputs["ingest"], inputs["train"]
        final = trained.summary.get("final")
        if not final:
            raise ArtifactError(f"{trained.path} names no final checkpoint", hint="nightjar train force=true")
        # Read only the final checkpoint, since an earlier one may have been written with other towers.
        checkpoints = [each for each in committed(store, final.rpartition("/")[0]) if each.path == final]
        plan, towers = read_towers(config, store, inputs, checkpoints)
        members = members_of(trained.summary)
        try:
            predictions = predict(select_prediction_settings(config), store, dataset, plan, final, towers, members)
        except DamagedError as error:
            raise ArtifactError(
                error.message,
                hint=f"remove {store.url_of(final)}; then stages=[train,evaluate] goes on from the newest whole "
                "checkpoint",
            ) from error
        if predictions is None:
            return None

        labels, weights, logits = predictions.labels, predictions.weights, predictions.logits
        main = logits if logits.ndim == 1 else np.ascontiguousarray(logits[:, 0])
        figures: dict[str, Any] = evaluate(labels, main, predictions.true_probability, weights)
        clicked = labels == 1
        if weights is not None:
            # Rows of weight 0 do not count in the intervals either.
            clicked = clicked & (weights > 0)
        figures["clicks"] = int(clicked.sum())
        figures |= evaluation_intervals(labels, main, weights)
        groups = None
        if config.evaluate.group_by is not None:
            groups = number_groups(config, SplitReader(store, dataset, "test"))
        if groups is not None:
            scored = ScoredRows(labels=labels, candidate=main, weights=weights, users=groups)
            figures |= {"group_by": config.evaluate.group_by, **evaluation_gauc(scored)}
        if predictions.tasks:
            schema, _ = read_dataset(store, dataset)
            tasks = evaluate_tasks(schema.tasks, predictions.tasks, logits, weights)
            figures["tasks"] = {name: task.to_json() for name, task in tasks.items()}

        with self.draft(store, step) as draft:
            draft.write_json("metrics.json", figures)
            draft.write_json("reliability.json", reliability(labels, main, weights=weights).to_json())
            if predictions.attention:
                draft.write_json(ATTENTION, _attention_json(config, store, dataset, predictions.attention))
            with draft.open(LOGITS) as sink:
                np.lib.format.write_array(sink, logits, allow_pickle=False)
            return draft.commit(figures)

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return {"eval": Evaluation.from_json(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        if result.eval is None:
            return {}
        from pipeline.report.stage_figures import evaluation_lines

        return {"eval": evaluation_lines(result.eval)}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        figures = result.eval or Evaluation()
        return [("Test rows", units.count(figures.samples))]


def _attention_json(
    config: Config, store: Store, dataset: Artifact, attention: dict[str, EventAttention]
) -> dict[str, Any]:
    # Returns by sequence an example row, its target, and for each event its names, its age in seconds and its weight.
    from pipeline.ingest.event_columns import OLDEST
    from pipeline.training.parquet import SplitReader

    split = SplitReader(store, dataset, "test")
    fitted = store.read_json(f"{dataset.path}/{TRANSFORMS}").get("sequences", {}).get("groups", {})
    targets = {column.name: column.owner for column in split.schema.sparse}
    sequences = {sequence.name: sequence for sequence in split.schema.sequences}
    record: dict[str, Any] = {}
    for name, seen in attention.items():
        ids = _read_ids(split, seen.row)
        age = event_feature(name, AGE)
        names = {}
        for column in sequences[name].columns:
            if column.name != age:
                names[column.name.removeprefix(f"{name}__")] = _id_names(split, column.owner, ids[column.name])

        ages: list[float | None] = [None] * len(seen.weights)
        age_bins = fitted.get(name, {}).get("age_bins", 0)
        if age in ids and age_bins:
            # The ids of ages are numbers of bins of equal width in log(1 + seconds); an age is the middle of its bin.
            width = math.log1p(OLDEST) / age_bins
            ages = []
            for number in _id_names(split, age, ids[age]):
                # The name of a missing age is not a number.
                if number.isdecimal():
                    ages.append(math.expm1((int(number) + 0.5) * width))
                else:
                    ages.append(None)

        target = config.data.sequences[name].target
        target_names = None
        if target is not None:
            target_names = {target: ", ".join(_id_names(split, targets[target], ids[target]))}
        events = []
        for place, weight in enumerate(seen.weights.tolist()):
            named = {column: values[place] for column, values in names.items()}
            events.append({"names": named, "age": ages[place], "weight": weight})
        record[name] = {"row": seen.row, "target": target_names, "target_weight": seen.target, "events": events}
    return record


def _read_ids(split: SplitReader, row: int) -> dict[str, list[int]]:
    # Returns the table rows of every id column of one row of the split. Its whole row group is read, since files are
    # read by groups.
    group = next(each for each in split.groups if each.first <= row < each.first + each.rows)
    buffer, offset = split.allocate(group.rows), row - group.first
    ragged = split.read(group, buffer, 0)
    ids = {}
    for place, name in enumerate(split.single):
        ids[name] = [int(buffer.single[place, offset])]
    for name, column in ragged.items():
        ids[name] = column.values[column.offsets[offset] : column.offsets[offset + 1]].tolist()
    return ids


def _id_names(split: SplitReader, table: str, rows: list[int]) -> list[str]:
    # Returns the raw ids that have these rows of the table; without a vocabulary the numbers of the rows.
    import pyarrow.parquet as pq

    names = {MISSING_ROW: "(missing)", UNSEEN_ROW: "(rare or new)"}
    path = f"vocab/{table}.parquet"
    if path in split.dataset.files:
        with split.store.open(f"{split.dataset.path}/{path}") as source:
            known = pq.read_table(source, columns=["row", "id"], filters=[("row", "in", rows)]).to_pydict()
        names |= dict(zip(known["row"], known["id"], strict=True))
    return [str(names.get(row, f"row {row}")) for row in rows]


SPEC = Evaluate()
