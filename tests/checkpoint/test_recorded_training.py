"""A training that an earlier release began goes on: its checkpoint records settings under names they had then.

``recorded/training.tar.xz`` holds a store of commit 9b5f519 whose training was killed after step 4 of 6, the
configuration of its data, and the dense weights (``expected.safetensors``) that the same release got after step 6.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.commands import nightjar

RECORDED = Path(__file__).parent / "recorded" / "training.tar.xz"
STAGES = "ingest,plan,partition,train"
SETTINGS = [
    "data=tiny",
    "run=old",
    f"stages=[{STAGES}]",
    f"launch.inline=[{STAGES}]",
    "train.max_steps=6",
    "train.global_batch=128",
    "checkpoint.every_steps=4",
    "checkpoint.quantise=fp32",
    "model.embedding_dim=4",
    "model.bottom_mlp=[4]",
    "model.top_mlp=[4]",
    "train.schedule=cosine",
    "train.decay_ratio=0.6",
    "train.min_lr_factor=0.1",
    "train.precision=fp32",
    "train.threads_per_rank=1",
]


def test_a_training_of_an_earlier_release_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    (first,) = (tmp_path / "store/runs/old/checkpoints").glob("*/step-00000004")
    assert {"decay_share", "min_lr_share"} <= json.loads((first / "state.json").read_text())["train"]["schedule"].keys()
    done = nightjar("run", "-cd", str(tmp_path / "conf"), f"store={tmp_path}/store", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"{stage:<10} skipped" in done.stdout for stage in STAGES.split(",")] == [True, True, True, False]
    assert "step-00000004 after step 4" in done.stdout
    last = first.with_name("step-00000006")
    schedule = json.loads((last / "state.json").read_text())["train"]["schedule"]
    assert (schedule["decay_ratio"], schedule["min_lr_factor"]) == (0.6, 0.1)
    made, expected = load_file(last / "dense.safetensors"), load_file(tmp_path / "expected.safetensors")
    assert made.keys() == expected.keys()
    random_state = {name for name in made if name.endswith("rng")}  # of the step today, of the whole run then
    assert len(random_state) == 1
    for name, value in ((name, value) for name, value in made.items() if name not in random_state):
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
