"""``nightjar run partition=dmt``: one machine acts as two hosts, from raw rows to figures; bad settings stop it."""

import json
import re

import pytest

from tests.commands import nightjar

SMALL = [
    "experiment=demo",
    "hardware.hosts=2",
    "hardware.ranks_per_host=1",
    "data.synthetic.rows=4000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=256",
    "train.log_every_steps=4",
    "train.threads_per_rank=1",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "plan.sharding_types=[table_wise]",
]


def run(store, *overrides):
    return nightjar("run", *SMALL, f"store={store}", *overrides)


@pytest.mark.slow
def test_towers_train_and_are_evaluated_and_say_what_they_sent(tmp_path):
    module = ["partition.module=dlrm", "partition.c=0", "partition.p=2", "partition.dim=8"]
    done = run(tmp_path, "partition=dmt", "partition.strategy=strided", *module)
    assert done.returncode == 0, done.stderr
    assert "2 towers, module dlrm" in done.stdout
    assert "tower 0 on host 0: 13 features: C1, C3, C5" in done.stdout
    result = json.loads((tmp_path / "runs/demo/result.json").read_text())
    sent = result["train"]["bytes_per_sample"]
    assert result["towers"] == {
        "towers": 2,
        "hosts": 2,
        "features": [13, 13],
        "module": "dlrm",
        "strategy": "strided",
    }
    assert "2 towers on 2 hosts, 13 features each; strided, module dlrm" in done.stdout
    assert {name: table["ranks"] for name, table in result["plan"]["tables"].items()} == {
        f"C{number}": [(number + 1) % 2] for number in range(1, 27)
    }, "the plan in the result is the one that keeps to the towers' hosts"
    assert sent["intra_host"] == 0 and sent["dense_inter_host"] > 0
    # Half of the samples' ids and lengths go to either host, and two vectors of a tower come back and return.
    ids, vectors = 13 * (4 + 4), 2 * 2 * 8 * 4
    assert ids + vectors <= sent["inter_host"] <= 1.15 * (ids + vectors)
    records = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert all(record["inter_host_bytes_per_sample"] > 0 for record in records)
    page = (tmp_path / "runs/demo/report.html").read_text()
    assert "between hosts" in done.stdout and "Embeddings between hosts" in page
    for link in re.findall(r'href="../../(towers/[^"]*)"', page):
        assert (tmp_path / link).exists()
    assert re.findall(r'href="../../towers/\w+/(\w+).html"', page) == ["plan", "towers"]
    assert 0.5 < result["eval"]["auc"] < 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["partition.towers=3"], "3 towers do not divide 2 hosts"),
        (
            ["partition.groups=[[C1,C2],[C2,C3]]"],
            "partition.groups names 'C2' twice, but a feature belongs to one tower",
        ),
        (["+partition.pins.C1=7"], "partition.pins.C1 is 7"),
        (
            ["partition.module=transformer"],
            "partition.module is 'transformer', expected one of: pass_through, dlrm, dcn",
        ),
    ],
)
def test_bad_settings_are_exit_code_2_before_anything_runs(tmp_path, overrides, message):
    done = run(tmp_path, "partition=dmt", *overrides)
    assert done.returncode == 2 and message in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "datasets").exists()
