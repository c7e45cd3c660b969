"""``profile.json``: what the train rows look like, for the planner and for people."""

from __future__ import annotations

from pipeline.ingest.moments import Moments
from pipeline.ingest.sampling import CLICKS_FOR, COUNTS_FOR
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.ingest.statistics_pass import Fit, Partial
from pipeline.ingest.tasks import typed
from pipeline.ingest.transform_pass import FittedState
from pipeline.records import ROW_WEIGHT, DenseProfile, FeatureProfile, Profile


def make_profile(spec: DataSpec, fit: Fit, state: FittedState) -> Profile:
    """Profile of a fitted log; every share is of train rows or train lookups."""
    rows, positives = fit.rows, fit.positives
    return Profile(
        rows=rows,
        label_rate={split: positives[split] / count if count else 0.0 for split, count in rows.items()},
        dense={f.name: _dense(fit.train.raw[f.name], fit.train.rows * f.width) for f in spec.dense},
        sparse={feature.name: _sparse(feature, fit.train, state) for feature in spec.sparse},
        tasks={t.name: _dense(fit.train.labels[typed(t.name)], fit.train.rows) for t in spec.tasks} or None,
        row_weight=_dense(fit.train.labels[ROW_WEIGHT], fit.train.rows) if spec.row_weight else None,
        base_rate=_base_rate(fit.train),
        sequences={name: lengths.profile() for name, lengths in fit.train.lengths.items()} or None,
    )


def _base_rate(train: Partial) -> float | None:
    """The click rate of the rows that the train rows stand for; None where each stands for itself."""
    if COUNTS_FOR not in train.labels:
        return None
    rows = train.labels[COUNTS_FOR].mean
    return train.labels[CLICKS_FOR].mean / rows if rows else None


def _dense(moments: Moments, rows: int) -> DenseProfile:
    seen = moments.count > 0
    return DenseProfile(
        missing_share=1 - moments.count / rows,
        minimum=moments.minimum if seen else 0.0,
        maximum=moments.maximum if seen else 0.0,
        mean=moments.mean,
        std=moments.std,
    )


def _sparse(feature: SparseSpec, train: Partial, state: FittedState) -> FeatureProfile:
    counts, missing = train.counts[feature.name], train.missing[feature.name]
    fitted = state.sparse[feature.name]
    hot_rows, hot_share = counts.curve(fitted, missing)
    of = train.rows if not feature.sequence else max(train.lookups[feature.name], 1)
    lookups = missing + feature.mapping.rows_per_id * (train.lookups[feature.name] - missing)
    return FeatureProfile(
        rows=fitted.rows,
        distinct=counts.distinct,
        missing_share=missing / of,
        pooling=lookups / train.rows,
        hot_rows=hot_rows,
        hot_share=hot_share,
    )
