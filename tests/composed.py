"""What most tests compose, composed in the server that processes of tests are forked from: they have the trees, too."""

from pipeline.config.compose import compose

NAMED = ["data.path=logs", "data.name=logs", "+data.sparse.id={}"]
for overrides in (
    [],
    ["data=criteo", *NAMED],
    ["data=csv", *NAMED],
    ["data=parquet", "hardware=laptop", *NAMED],
    ["experiment=demo"],
):
    compose(overrides)
