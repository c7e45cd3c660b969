"""What most tests compose, composed in the server that processes of tests are forked from: they have the trees, too."""

from pipeline.compose import compose

for overrides in ([], ["data=criteo", "data.path=logs"]):
    compose(overrides)
