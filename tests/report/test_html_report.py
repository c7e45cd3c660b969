"""The HTML page: self-contained, well formed, escaped, and right when parts are absent."""

import html.parser
import re

import pytest
from made_up_run import CONFIG, fill, make_plan, make_record, make_result, result_of

from pipeline.core.errors import ArtifactError
from pipeline.records import Plan
from pipeline.report import write_report
from pipeline.report.html import ReportData, render
from pipeline.report.run_tables import config_excerpt

VOID = {"meta", "br"}


class Checker(html.parser.HTMLParser):
    """Fails on tags that are not closed in order; collects tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def page_of(store):
    path = write_report(store, "demo")
    assert path == "runs/demo/report.html"
    with store.open(path) as source:
        return source.read().decode()


def test_the_page_shows_everything_and_loads_nothing(store):
    fill(store)
    page = page_of(store)
    checker = checked(page)
    assert checker.tags.count("figure") == 6
    assert not {"script", "link", "img", "iframe", "object"} & set(checker.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in checker.attributes}
    assert "http" not in page and "url(" not in page and "@import" not in page
    text = " ".join(checker.text)
    for expected in (
        "0.8321",
        "84.8%",
        "0.7812",
        "81,494",
        "400,000",
        "table wise",
        "50,003",
        "all 2",
        "global_batch: 4096",
        "test 0.8321",
        "best reachable 0.8021",
        "1 min 16 s",
        "planned for laptop",
    ):
        assert expected in text
    assert not re.search(r"\bnan\b|\binf\b|None", page)


def test_the_page_is_light_and_dark_and_fits_a_phone(store):
    fill(store)
    page = page_of(store)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport" content="width=device-width' in page
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = (re.findall(r"(--[\w-]+):", block) for block in re.findall(r":root \{(.*?)\}", page, re.S))
    assert used == set(light) == set(dark)


@pytest.mark.parametrize("part", ["stages", "ingest", "plan", "train", "checkpoint", "eval"])
def test_any_part_may_be_absent(part):
    result = make_result()
    del result[part]
    checked(render(ReportData(result=result_of(result), records=[make_record(20)])))
    checked(render(ReportData(result=result_of(make_result(**{part: {}})))))


def test_a_failed_run_says_why(store):
    error = {"message": "the loss is not finite", "exit_code": 5}
    fill(store, {"run": "demo", "status": "failed", "stages": {}, "error": error}, records=[])
    page = page_of(store)
    text = " ".join(checked(page).text)
    assert "<h2>Error</h2>" in page and "the loss is not finite (exit code 5)" in text


def test_a_run_that_the_gate_held_is_called_held():
    gate = {"verdict": "HOLD", "reasons": ["NE rose"]}
    held = render(ReportData(result=result_of(make_result(status="failed", gate=gate))))
    assert '<span class="pill HOLD">held</span>' in held and ">failed<" not in held
    assert ">failed<" in render(ReportData(result=result_of(make_result(status="failed"))))


def test_everything_from_the_run_is_escaped():
    evil = '<script>alert("x")</script>'
    stages = {evil: {"status": evil, "seconds": 1.0, "artifact": evil}}
    tables = {evil: {"tier": evil, "sharding": evil, "ranks": [0]}}
    result = make_result(
        run=evil,
        status=evil,
        stages=stages,
        plan={"tables": tables, "tiers": {}},
        error={"message": evil, "exit_code": 1, "hint": evil},
        model={"version": evil, "uri": evil},
        gate={"verdict": evil, "reasons": [evil]},
    )
    page = render(ReportData(result=result_of(result), config=f"seed: {evil}\nmodel:\n  name: {evil}\n"))
    assert "<script" not in page
    checked(page)


def test_no_calibration_plot_without_predictions(store):
    fill(store, reliability=False)
    assert checked(page_of(store)).tags.count("figure") == 5


def test_records_that_are_not_finite_leave_a_gap_not_a_fault(store):
    fill(store, records=[make_record(20, loss=None, ne_window=None), make_record(40)])
    assert not re.search(r"\bnan\b|None", page_of(store))


def test_a_run_without_a_result_is_an_artifact_error(store):
    with pytest.raises(ArtifactError, match="result.json does not exist"):
        write_report(store, "demo")


def test_the_config_excerpt_keeps_the_plain_values_of_data_and_all_of_the_model():
    assert config_excerpt(CONFIG) == [
        "seed: 2026",
        "data:\n  name: synthetic\n  format: synthetic",
        "model:\n  name: dlrm\n  top_mlp:\n  - 512\n  - 256",
        "train:\n  global_batch: 4096\n  lr: 0.002",
    ]
    assert config_excerpt("") == []


def test_the_plan_table_is_sorted_by_size_and_works_without_plan_json():
    result = result_of({"plan": make_result()["plan"]})
    whole = render(ReportData(result=result, plan=Plan.from_json(make_plan())))
    assert whole.index(">C25<") < whole.index(">C24<") < whole.index(">C1<")
    assert "C3 is cheapest data_parallel" in whole
    assert ">0-1<" in render(ReportData(result=result))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "plan.json is corrupt: 1 bytes"),
        (b"", "plan.json is corrupt: 0 bytes"),
        (None, "has version 1, expected 2"),
    ],
)
def test_a_plan_that_cannot_be_read_is_said_in_its_place_and_the_rest_is_shown(store, content, said):
    result = fill(store, plan={**make_plan(), "version": 1})  # another release's, as that release committed it
    if content is not None:
        store.write_bytes(f"{result['stages']['plan']['artifact']}/plan.json", content)
    text = " ".join(checked(page_of(store)).text)
    assert "Sizes and costs are missing:" in text and said in text
    assert "row wise" in text and "0.8321" in text and "planned for laptop" not in text


@pytest.mark.parametrize("record", [[], {"version": 2}, {**make_plan(), "tables": {"C1": 3}}, {**make_plan(), "x": 1}])
def test_what_is_no_plan_is_an_artifact_error(record):
    with pytest.raises(ArtifactError, match="is not a plan of version 2"):
        Plan.from_json(record)


def rows_of(page):
    text = re.search(r"<h2>Step time and memory, predicted and measured</h2>(.*?)</section>", page, re.S).group(1)
    rows = re.findall(r"<tr><td>(.*?)</tr>", text, re.S)
    return [re.sub(r"<[^>]*>", " ", row).split() for row in rows]


def test_the_page_shows_predicted_beside_measured():
    rows = rows_of(render(ReportData(result=result_of(make_result()))))
    assert rows[0] == ["input", "exchange", "2.000", "ms", "2.500", "ms", "1.25"]
    assert rows[3] == ["overhead", "0.000", "ms", "1.250", "ms", "-"]
    assert rows[4] == ["whole", "step,", "slowest", "rank", "48.100", "ms", "50.250", "ms", "1.04"]
    assert rows[5][-5:] == ["600", "MiB", "700", "MiB", "1.17"]
    checked(render(ReportData(result=result_of(make_result()))))


def test_without_predictions_the_page_shows_what_was_measured():
    train = {"phases": {"dense": {"measured_ms": 5.0}}, "step": {"measured_ms": 6.0}}
    page = render(ReportData(result=result_of(make_result(train=train))))
    assert rows_of(page) == [
        ["dense", "-", "5.000", "ms", "-"],
        ["whole", "step,", "slowest", "rank", "-", "6.000", "ms", "-"],
    ]
    assert "predicted and measured" not in render(ReportData(result=result_of(make_result(train={"steps": 3}))))
