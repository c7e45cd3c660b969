"""The progress line, and that each record is in metrics.jsonl exactly once, on disks and object stores."""

import json
import math
import uuid

import pytest
from made_up_run import make_record

from pipeline.core.errors import ArtifactError, NightjarError, is_full
from pipeline.core.logs import Terminal
from pipeline.records import Result
from pipeline.report import Reporter, read_records
from pipeline.report import records as records_module
from pipeline.report.progress import CLEAR_TO_END, live_line, plain_line
from pipeline.store import Store
from tests.logged import listen

KNOWN = make_record(
    200, 1171, samples_per_s=81234.4, data_wait_share=0.0041, loss=0.47123, ne_window=0.83214, eta_seconds=72.3
)


@pytest.fixture(params=["disk", "object store"])
def any_store(request, tmp_path):
    return Store(str(tmp_path) if request.param == "disk" else f"memory://{uuid.uuid4().hex}")


def reporter(store, columns=0):
    written = []
    return Reporter(store, "demo", columns=columns, terminal=Terminal(written.append)), written


def steps_of(store):
    return [record["step"] for record in read_records(store, "demo")]


def test_the_plain_line_is_as_documented():
    assert plain_line(KNOWN) == (
        "step  200/1171   17%  samples/s 81,234  wait 0.4%  loss 0.4712  NE 0.8321  ETA 00:01:12"
    )


def test_a_profiled_run_says_its_speed_and_the_share_of_the_ceiling():
    assert "NE 0.8321  GFLOP/s 247, 64.5% of the ceiling  ETA" in plain_line(
        {**KNOWN, "gflop_per_s": 247.13, "ceiling_share": 0.645}
    )


def test_values_that_are_not_known_are_shown_as_a_dash():
    line = plain_line(make_record(5, 10, ne_window=None, loss=math.nan, eta_seconds=math.inf))
    assert "loss -  NE -  ETA -" in line


@pytest.mark.parametrize("width", range(20, 200, 3))
def test_the_live_line_always_fits(width):
    line = live_line(KNOWN, width)
    assert len(line) <= width
    assert "200/1171" in line and "17%" in line
    if width >= 79:
        assert line.startswith("[=") and "wait 0.4%" in line and "ETA 01:12" in line


def test_elsewhere_each_record_is_one_plain_line(store):
    said = listen()
    found, written = reporter(store)
    for step in (20, 40):
        found.interval(make_record(step, 40))
    assert len(said) == 2 and not written and not any(sign in line for line in said for sign in "\r\n\x1b")


def test_a_terminal_has_one_line_that_the_last_step_ends(store):
    found, written = reporter(store, columns=80)
    for step in (20, 40):
        found.interval(make_record(step, 40))
    text = "".join(written)
    assert text.count("\r") == text.count(CLEAR_TO_END) == 2
    assert text.count("\n") == 1 and text.endswith("\n")
    found.close()
    assert "".join(written) == text


def test_an_early_end_closes_the_live_line(store):
    found, written = reporter(store, columns=80)
    found.interval(make_record(20, 40))
    found.summary(Result(run="demo", status="failed"))
    assert "\n" in written[1]


def test_records_are_stored_as_they_came(any_store):
    found, _ = reporter(any_store)
    sent = [make_record(step, 60) for step in (20, 40, 60)]
    for record in sent:
        found.interval(record)
    assert read_records(any_store, "demo") == sent
    assert set(sent[0]) == set(records_module.KEYS)


def test_each_line_is_strict_json_even_when_a_value_is_not_finite(any_store):
    found, _ = reporter(any_store)
    found.interval(make_record(20, 20, loss=math.nan, eta_seconds=math.inf))
    with any_store.open("runs/demo/metrics.jsonl") as source:
        lines = source.read().decode().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [None]


def test_a_resumed_run_goes_on_and_no_step_appears_twice(any_store):
    first, _ = reporter(any_store)
    for step in (20, 40, 60):
        first.interval(make_record(step, 100, loss=1.0))
    first.close()
    again, _ = reporter(any_store)
    for step in (40, 60, 80, 100):
        again.interval(make_record(step, 100, loss=2.0))
    assert steps_of(any_store) == [20, 40, 60, 80, 100]
    assert [record["loss"] for record in read_records(any_store, "demo")] == [1.0, 2.0, 2.0, 2.0, 2.0]
    with any_store.open("runs/demo/metrics.jsonl") as source:
        assert len(source.read().decode().splitlines()) == 5


def test_a_fresh_run_of_the_same_name_replaces_the_records(any_store):
    for _ in range(2):
        found, _written = reporter(any_store)
        found.interval(make_record(20, 40))
        found.interval(make_record(40, 40))
    assert steps_of(any_store) == [20, 40]


def test_a_fresh_run_that_logs_less_often_drops_the_old_records_too(any_store):
    old, new = Reporter(any_store, "r"), Reporter(any_store, "r")
    for step in (10, 20, 30):
        old.interval(make_record(step))
    old.close()
    new.interval({**make_record(50), "resumed_step": 0})
    new.close()
    assert [record["step"] for record in read_records(any_store, "r")] == [50]


def test_a_line_that_a_crash_cut_short_is_left_out(any_store):
    whole = json.dumps(make_record(20, 60))
    any_store.write_bytes("runs/demo/metrics.jsonl", f'{whole}\n[1]\n{{"loss": 1}}\n{whole[:30]}'.encode())
    found, _ = reporter(any_store)
    found.interval(make_record(40, 60))
    found.close()
    assert steps_of(any_store) == [20, 40]


def test_an_object_store_is_not_written_at_every_interval(monkeypatch):
    store = Store(f"memory://{uuid.uuid4().hex}")
    puts, seconds = [], [0.0]
    monkeypatch.setattr(store, "write_bytes", lambda path, data: puts.append(data.count(b"\n")))
    kept = records_module.MetricsLog(store, "demo", now=lambda: seconds[0])
    for step in range(1, 61):
        kept.append(make_record(step, 100))
    assert puts == [1]  # the first record
    seconds[0] = records_module.REWRITE_SECONDS
    for step in range(61, 101):
        kept.append(make_record(step, 100))
    assert puts == [1, 61, 100]  # once it is due, and with the last step


def test_a_full_disk_is_an_artifact_error(store, monkeypatch):
    found, _ = reporter(store)
    found.interval(make_record(1, 9))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.fs, "open", full)
    writing = "no space left on the store's disk while writing runs/demo/metrics.jsonl"
    with pytest.raises(ArtifactError, match=writing) as caught:
        found.interval(make_record(2, 9))
    told = NightjarError.from_json(caught.value.to_json())  # by a rank to its launcher
    assert is_full(told) and is_full(caught.value) and not is_full(ArtifactError("x")) and told.exit_code == 7


def test_without_records_there_is_nothing_to_read(store):
    assert read_records(store, "demo") == []


def test_levels_of_a_cache_on_a_gpu_are_in_the_line():
    figures = {"ssd_hit_rate": 0.99, "ssd_device_share": 0.8, "ssd_host_share": 0.15}
    assert "ssd hit 99.0% (device 80.0%, host 15.0%) ahead" in plain_line({**KNOWN, **figures})
    assert "ssd hit 99.0% ahead" in plain_line({**KNOWN, **figures, "ssd_host_share": 0.0})
