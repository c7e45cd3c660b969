"""``data.leave_out``: features that count as missing in every row, on the same train and test rows."""

import polars as pl
import pytest

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError

from .conftest import csv_config, write_rows

FEATURES = {
    "dense": {"x": DenseFeature(), "y": DenseFeature(column="x", transform="percentile")},
    "sparse": {
        "c": SparseFeature(),
        "many": SparseFeature(column="ids", separator="|"),
        "n": SparseFeature(column="x"),
    },
    "split": SplitConfig(test_share=0.3),
}


def write_log(folder):
    """As ``write_rows``, with a column of several ids."""
    path = write_rows(folder / "log.csv", rows=400)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},ids", *(f"{line},a{i % 5}|b{i}" for i, line in enumerate(lines[1:]))]))
    return path


@pytest.mark.parametrize("name", ["x", "y", "c", "many", "n"])
def test_a_feature_is_missing_and_all_else_is_as_it_was(run_ingest, tmp_path, name):
    path = write_log(tmp_path)
    whole = run_ingest(csv_config(path, **FEATURES))
    without = run_ingest(csv_config(path, leave_out=[name], **FEATURES))
    assert without.schema.rows == whole.schema.rows and whole.schema.rows["test"] > 50
    for split in ("train", "test"):
        before, after = whole.split(split), without.split(split)
        assert after.columns == before.columns
        assert after.drop(name).equals(before.drop(name))
        values = after[name].explode() if after[name].dtype == pl.List else after[name]
        assert values.n_unique() == 1 and not after[name].equals(before[name])
    profile = without.json("profile.json")
    assert (profile["dense"] | profile["sparse"])[name]["missing_share"] == 1


def test_a_name_that_is_no_feature_is_refused_with_the_nearest(run_ingest, tmp_path):
    with pytest.raises(ConfigError, match="data.leave_out has 'mani'") as error:
        run_ingest(csv_config(write_log(tmp_path), leave_out=["mani"], **FEATURES))
    assert error.value.hint == "data.leave_out=[many]"
