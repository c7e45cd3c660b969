"""All nights of a store at a glance: ``index.html`` of the store, and ``nightjar nights ls``."""

import json
import logging
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.publishing.promotion import promote
from pipeline.records import NightRecord
from pipeline.records.night import Cost, NightLine
from pipeline.records.result import ErrorPart, Grown, Shrunk, StageAttempt, StageOutcome
from pipeline.report.night import night_markdown, night_page
from pipeline.report.store_page import STORE_PAGE, _cards, store_page
from pipeline.schedule.night_summary import finished_record, host_seconds
from pipeline.schedule.nightly import read_record, run_night
from pipeline.schedule.store_gc import collect
from pipeline.schedule.store_overview import MOST_NIGHTS, read_overview, write_store_page
from pipeline.store import Store
from tests.checkpoint.s3 import Proxy, bucket

FIRST, DAY_SECONDS = date(2025, 1, 1), 86_400.0
BEGIN = 1_735_700_000.0  # a time of the first night, seconds since 1970
REASON = "NE rose by 1.20% [+0.80%, +1.60%], more than gate.max_ne_increase=0.5% & <none>"
MISSING = "its logs are not complete: hour=23 is missing"


def write_night(store: Store, number: int, outcome: str = "published", model: str = "clicks") -> str:
    """Write the records of a night and return its run's name; the first one has a baseline in place of an incumbent."""
    day = FIRST + timedelta(days=number)
    run, version = f"{model}-{day}", f"v{number + 1:05d}-0123abcd"
    record: dict[str, Any] = {"format": 1, "model": model, "date": str(day), "run": run, "outcome": outcome}
    record |= {"base": None, "finished": BEGIN + DAY_SECONDS * number, "summary": f"runs/{run}/nightly.html"}
    if outcome == "failed":
        store.write_json(f"runs/{run}/nightly.json", {**record, "exit_code": 3, "message": MISSING})
        return run
    folder = f"models/{model}/{version}" if outcome == "published" else f"runs/{run}/publish/{'ab' * 16}"
    ne = 0.8 + number / 10_000
    record |= {"exit_code": 0, "version": version, "rows": 81_234, "rows_quarantined": 5, "ne": ne}
    record |= {"ne_interval": [ne - 0.01, ne + 0.01], "gate_page": f"{folder}/gate.html", "verdict": "PASS"}
    record |= {"seconds": {"ingest": 10.0, "train": 80.0, "evaluate": 6.5}}
    gate: dict[str, Any] = {"rows": 9000, "clicks": 300, "click_rate": 0.03, "confidence": 0.95}
    gate |= {"predictions_not_finite": {}, "candidate": figures(ne, 1.01)}
    if number:
        record |= {"incumbent_ne": ne + 0.002, "ne_change": [-0.0025, -0.004, -0.001]}
        gate["incumbent"] = figures(ne + 0.002, 0.99)
    else:
        gate["baseline"] = {"ne": [0.9, 0.89, 0.91]}
    if outcome == "held":
        record |= {"exit_code": 6, "verdict": "HOLD", "reasons": [REASON]}
    store.write_json(f"{folder}/gate.json", gate)
    store.write_json(f"runs/{run}/nightly.json", record)
    return run


def figures(ne: float, calibration: float) -> dict[str, Any]:
    intervals = {"ne": [ne, ne - 0.01, ne + 0.01], "auc": [0.7, 0.69, 0.71]}
    return {**intervals, "calibration": [calibration, 0.95, 1.05], "calibration_by_prediction": 0.01}


def write_served(store: Store, numbers: list[int], model: str = "clicks") -> None:
    """Write ``current.json``: the versions of these nights served one after the other, each from noon on."""
    names = [f"v{number + 1:05d}-0123abcd" for number in numbers]
    log = []
    for number, name in zip(numbers, names, strict=True):
        log.append({"version": name, "by": "publish", "reason": "", "at": BEGIN + DAY_SECONDS * number})
    record = {"format": 1, "model": model, "line": names[-2:], "log": log}
    store.write_json(f"models/{model}/current.json", record)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four nights, published, published, held and failed, and a run that is no night."""
    made = Store(str(tmp_path / "store"))
    for number, outcome in enumerate(("published", "published", "held", "failed")):
        write_night(made, number, outcome)
    write_served(made, [0, 1])
    stages = {"train": {"status": "done", "seconds": 60.0, "started": BEGIN}}
    result = {"run": "try", "status": "done", "stages": stages, "eval": {"ne": 0.81, "auc": 0.7, "calibration": 1.02}}
    made.write_json("runs/try/result.json", result)
    return made


def page_of(store: Store) -> str:
    return store_page(read_overview(store, with_runs=True), BEGIN + 4 * DAY_SECONDS)


def main_of(page: str) -> ET.Element:
    return ET.fromstring(page[page.index("<main>") : page.index("</main>") + len("</main>")])


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below ``heading``."""
    for section in main_of(page).iter("section"):
        if section.findtext("h2") == heading:
            return [["".join(cell.itertext()).strip() for cell in row] for row in section.iter("tr")][1:]
    return []


def test_the_overview_has_the_figures_of_every_night_and_what_served_when(store: Store) -> None:
    overview = read_overview(store)
    assert [night.outcome for night in overview.nights] == ["published", "published", "held", "failed"]
    first, second, held, failed = overview.nights
    assert first.baseline_ne is not None and first.baseline_ne.point == 0.9 and first.incumbent_ne is None
    assert second.incumbent_ne is not None and second.incumbent_ne.point == pytest.approx(0.8021)
    assert second.calibration == (1.01, 0.95, 1.05) and second.incumbent_calibration == (0.99, 0.95, 1.05)
    assert (held.reasons, failed.reasons) == ((REASON,), (MISSING,))
    assert second.pages == {
        "night": "runs/clicks-2025-01-02/nightly.html",
        "run": "runs/clicks-2025-01-02/report.html",
        "version": "models/clicks/v00002-0123abcd/README.md",
        "gate": "models/clicks/v00002-0123abcd/gate.html",
    }
    assert failed.pages == {"night": "runs/clicks-2025-01-04/nightly.html"}, "it has no run"
    spans = overview.served["clicks"]
    assert [(span.version, span.since, span.until) for span in spans] == [
        ("v00001-0123abcd", BEGIN, BEGIN + DAY_SECONDS),
        ("v00002-0123abcd", BEGIN + DAY_SECONDS, None),
    ]
    assert overview.runs is None and overview.problems == ()


def test_the_page_lists_nights_newest_first_with_reasons_links_and_totals(store: Store) -> None:
    page = page_of(store)
    rows = rows_of(page, "Nights")
    assert [row[0] for row in rows] == ["2025-01-04", "2025-01-03", "2025-01-02", "2025-01-01"]
    assert rows[0][1:4] == ["failed", MISSING, "-"]
    assert rows[1][1:3] == ["held", REASON]
    assert rows[2][3:8] == ["v00002-0123abcd", "0.8001", "-0.25%", "1.010", "81,234"]
    assert rows[2][8].startswith("1 min 36 s")
    assert [row[0] for row in rows_of(page, "Versions that served")] == ["v00002-0123abcd", "v00001-0123abcd"]
    assert rows_of(page, "Versions that served")[0][2:4] == ["now", "3.0 days"]
    assert rows_of(page, "Other runs")[0][:2] == ["try", "done"]
    cards = dict(re.findall(r'<dt>(.*?)</dt><dd><div class="value">(.*?)</div>', page))
    assert (cards["Nights"], cards["Held"], cards["Failed"], cards["Serves now"]) == ("4", "1", "1", "v00002")
    links = {link.attrib["href"] for link in main_of(page).iter("a")}
    assert {"runs/clicks-2025-01-03/nightly.html", "runs/try/report.html"} <= links
    assert not any(link.startswith(("/", "http", "file")) for link in links)
    titles = " ".join(title.text or "" for title in main_of(page).iter("title"))
    assert f"2025-01-03, held: 0.8002 [0.7902, 0.8102], incumbent 0.8022 [0.7922, 0.8122]; {REASON}" in titles
    assert "baseline 0.9000 [0.8900, 0.9100]" in titles
    assert [figure.text for figure in main_of(page).iter("figcaption")] == ["NE ", "Calibration ", "Time "]
    assert "<script" not in page and "prefers-color-scheme: dark" in page


def test_no_page_links_to_that_of_a_run_that_was_refused_before_its_first_stage(store: Store) -> None:
    """As by a setting that must be allowed: such a run has a result, and no report."""
    error = {"message": "train.lr was 0.01, is 0.02", "exit_code": 2}
    for run in ("clicks-2025-01-04", "refused"):
        refused = {"run": run, "status": "failed", "stages": {}, "error": error}
        store.write_json(f"runs/{run}/result.json", refused)
    night = read_record(store, "clicks", FIRST + timedelta(days=3))
    assert night is not None
    night = finished_record(store, replace(night, exit_code=2), None)
    store.write_json("runs/clicks-2025-01-04/nightly.json", night.to_json())
    for page in (page_of(store), night_page(night), night_markdown(night)):
        assert error["message"] in page
        assert "clicks-2025-01-04/report.html" not in page and "refused/report.html" not in page
    assert [row[0] for row in rows_of(page_of(store), "Other runs")] == ["try", "refused"]


def test_a_year_of_nights_is_one_file_below_a_megabyte(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for number in range(MOST_NIGHTS + 4):
        write_night(store, number, "held" if number % 12 == 5 else "published")
    write_served(store, list(range(200)))
    write_store_page(store)
    page = (tmp_path / STORE_PAGE).read_text()
    assert len(page) < 2**20
    assert len(rows_of(page, "Nights")) == MOST_NIGHTS and "4 older ones left out" in page
    assert rows_of(page, "Nights")[0][0] == str(FIRST + timedelta(days=MOST_NIGHTS + 3))
    assert len(rows_of(page, "Versions that served")) == 12 and "And 188 earlier changes" in page


@pytest.mark.parametrize("text", ['{"a": ', '{"format": 9}', '{"model": "clicks"}', "[]"])
def test_a_record_that_cannot_be_read_hides_no_other_night(store: Store, capsys, text: str) -> None:
    store.write_bytes("runs/clicks-2025-01-02/nightly.json", text.encode())
    page = page_of(store)
    assert len(rows_of(page, "Nights")) == 3
    assert "Records that cannot be read" in page and "<li>runs/clicks-2025-01-02/nightly.json" in page
    assert [row[0] for row in rows_of(page, "Other runs")] == ["try"]
    assert cli.main(["nights", "ls", "--store", store.url]) == 0
    shown = capsys.readouterr()
    assert "left out: runs/clicks-2025-01-02/nightly.json" in shown.err and "2025-01-03" in shown.out


def test_a_gate_record_that_cannot_be_read_leaves_the_night_its_verdict_and_ne(store: Store) -> None:
    store.write_bytes("models/clicks/v00002-0123abcd/gate.json", b"{")
    overview = read_overview(store)
    assert len(overview.nights) == 4 and overview.nights[1].calibration is None
    assert overview.nights[1].ne is not None and overview.nights[1].ne.point == 0.8001
    assert overview.problems[0].startswith("models/clicks/v00002-0123abcd/gate.json is not valid JSON")


def test_a_damaged_log_of_versions_hides_no_night(store: Store) -> None:
    store.write_bytes("models/clicks/current.json", b"{}")
    overview = read_overview(store)
    assert len(overview.nights) == 4 and overview.served == {}
    assert "does not say which version serves" in overview.problems[0]


SPENT = {"budget": 2.0, "spent": 0.015, "looks": 2, "day": "2025-01-03"}
WORDS = "2 looks in the year to 2025-01-03 spent 0.015 of gate.budget=2"


def write_ledger(store: Store) -> None:
    """The looks at two nights, and at one that is more than a year older."""
    looks = []
    for day, alpha in (("2023-12-31", 0.5), ("2025-01-02", 0.005), ("2025-01-03", 0.01)):
        looks.append({"id": day, "day": day, "at": BEGIN, "candidate": "v", "budget": 2.0, "alpha": alpha})
    store.write_json("models/clicks/budget.json", {"format": 1, "looks": looks})


def test_what_was_spent_of_the_error_budget_is_on_the_page_and_in_the_list(store: Store, capsys) -> None:
    assert "Error budget" not in page_of(store) and read_overview(store).budgets is None
    write_ledger(store)
    page = page_of(store)
    cards = dict(re.findall(r'<dt>(.*?)</dt><dd><div class="value">(.*?)</div>', page))
    assert cards["Error budget spent"] == "0.015" and WORDS in page
    assert cli.main(["nights", "ls", "--store", store.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"clicks: {WORDS}"
    assert cli.main(["nights", "ls", "--json", "--store", store.url]) == 0
    assert json.loads(capsys.readouterr().out)["budgets"] == {"clicks": SPENT}
    store.write_bytes("models/clicks/budget.json", b"{}")
    overview = read_overview(store)
    assert overview.budgets is None and len(overview.nights) == 4
    assert overview.problems[0].startswith("models/clicks/budget.json is not a ledger of gate.budget")


def test_a_night_says_what_it_spent(store: Store) -> None:
    """From the gate's record to its own, its page and its Markdown."""
    folder, run = "runs/clicks-2025-01-02/publish/k", "clicks-2025-01-02"
    stages = {"publish": {"status": "done", "seconds": 1.0, "artifact": folder}}
    store.write_json(f"runs/{run}/result.json", {"run": run, "status": "done", "stages": stages})
    gate = store.read_json("models/clicks/v00002-0123abcd/gate.json")
    gate["budget"] = {**SPENT, "alpha": 0.01, "first_alpha": 0.01, "look": 1}
    for known, words in ((gate, WORDS), ({**gate, "budget": None}, "")):
        store.write_json(f"{folder}/gate.json", known)
        night = NightRecord(model="clicks", date="2025-01-02", run=run, outcome="published", finished=BEGIN)
        night = finished_record(store, night, None)
        assert ("budget" in night.to_json()) == bool(words)
        for text in (night_page(night), night_markdown(night)):
            assert words in text and ("Error budget spent" in text) == bool(words)


def test_the_list_is_text_or_json_and_last_counts_for_each_model(store: Store, capsys) -> None:
    write_night(store, 1, model="video")
    assert cli.main(["nights", "ls", f"store={store.url}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    assert shown[0] == "night model outcome version NE change calibration rows seconds reason"
    assert "2025-01-02 clicks published v00002-0123abcd 0.8001 -0.25% 1.010 81,234 96.5" in shown
    assert lines[-2].split()[:3] == ["2025-01-04", "clicks", "failed"] and lines[-2].endswith(MISSING)
    assert lines[-1] == "clicks: v00002-0123abcd serves since 2025-01-02 02:53 UTC"
    assert cli.main(["nights", "ls", "--last", "1", "--json", "--store", store.url]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(night["date"], night["model"]) for night in answer["nights"]] == [
        ("2025-01-02", "video"),
        ("2025-01-04", "clicks"),
    ]
    assert answer["nights_left_out"] == 3 and answer["served"]["clicks"][-1]["version"] == "v00002-0123abcd"
    assert answer["nights"][0]["ne"] == pytest.approx([0.8001, 0.7901, 0.8101])


def test_mistakes_and_a_store_without_nights(tmp_path: Path, capsys) -> None:
    assert cli.main(["nights", "ls", "--store", str(tmp_path / "none")]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert cli.main(["nights", "ls", "--last", "0", "--store", str(tmp_path)]) == 2
    assert "--last 0, expected 1 or more" in capsys.readouterr().err
    assert cli.main(["nights", "ls", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no nights\n"
    assert "There is no night and no run yet" in page_of(Store(str(tmp_path)))


def test_what_models_gc_removed_leaves_the_figures_of_the_run(store: Store) -> None:
    store.fs.rm(store.full("models/clicks/v00001-0123abcd"), recursive=True)
    result = {"run": "clicks-2025-01-01", "status": "done", "eval": {"ne": 0.8, "calibration": 1.03}}
    store.write_json("runs/clicks-2025-01-01/result.json", result)
    first = read_overview(store).nights[0]
    assert first.calibration == (1.03, 1.03, 1.03) and first.ne is not None
    assert first.pages is not None and not {"gate", "version"} & first.pages.keys()


def test_a_run_named_like_a_night_is_a_run_and_no_date_is_none(store: Store) -> None:
    for name in ("clicks-2025-02-01", "clicks-2025-02-31"):
        store.write_json(f"runs/{name}/result.json", {"run": name, "status": "failed"})
    overview = read_overview(store, with_runs=True)
    assert len(overview.nights) == 4 and overview.problems == ()
    assert {line.run for line in overview.runs or ()} == {"try", "clicks-2025-02-01", "clicks-2025-02-31"}


def test_figures_that_are_not_finite_stay_out_of_the_plots(store: Store) -> None:
    path = "runs/clicks-2025-01-03/nightly.json"
    store.write_json(path, {**store.read_json(path), "ne": float("nan")})
    page = page_of(store)
    assert rows_of(page, "Nights")[1][4] == "-"
    assert not re.search(r'(?:d|cx|cy|x|y)="[^"]*nan', page)


def test_one_night_has_a_page(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_night(store, 0)
    assert len(rows_of(page_of(store), "Nights")) == 1


def test_a_model_without_promotions_has_no_times_of_service(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_night(store, 0)
    assert read_overview(store).served == {}


def test_an_object_store_is_asked_once_for_every_record(
    store: Store, endpoint: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket(endpoint, monkeypatch) as url:
        other = Store(url)
        for path in Path(store.url).rglob("*.json"):
            other.write_bytes(str(path.relative_to(store.url)), path.read_bytes())
        assert read_overview(other, with_runs=True) == read_overview(store, with_runs=True)
        endpoint.read.clear()
        write_store_page(other)
        asked = Counter(path for path, _ in endpoint.read.elements() if path.endswith(".json"))
        assert len(asked) >= 8 and set(asked.values()) == {1}
        assert b"clicks-2025-01-03/nightly.html" in other.fs.cat_file(other.full(STORE_PAGE))


def test_what_the_commands_on_versions_change_is_on_the_page_at_once(tmp_path: Path, capsys) -> None:
    """Whoever rolls back at night looks at the page next."""
    store = Store(str(tmp_path))
    first, second, third = (f"v{number:05d}-0123abcd" for number in (1, 2, 3))
    for number, version in enumerate((first, second, third)):
        with store.draft(f"models/clicks/{version}", kind="model", key=version, config={}, inputs={}) as draft:
            draft.commit({"run": write_night(store, number)})
        promote(store, "clicks", version, by="publish")
    undone, again = ["rollback", "clicks"], ["models", "promote", "clicks", third, "--reason", "it was right"]
    for command, now in ((undone, second), (again, third)):
        assert cli.main([*command, "--store", store.url]) == 0
        page = (tmp_path / STORE_PAGE).read_text()
        served = rows_of(page, "Versions that served")
        assert served[0][0] == now and served[0][2] == "now"
        assert f"{first}/README.md" in page
    assert cli.main(["models", "gc", "clicks", "--keep", "1", "--min-age", "0", "--store", store.url]) == 0
    page = (tmp_path / STORE_PAGE).read_text()
    assert f"{first}/README.md" not in page and f"{second}/README.md" in page
    capsys.readouterr()


def test_clean_up_keeps_the_page(store: Store) -> None:
    write_store_page(store)
    before = (Path(store.url) / STORE_PAGE).read_bytes()
    store.fs.rm(store.full("models"), recursive=True)  # the versions here have no manifests
    collect(store, 0.0, 0.0, dry_run=False)
    assert (Path(store.url) / STORE_PAGE).read_bytes() == before


def test_a_night_writes_the_page_and_stands_where_it_cannot(tmp_path: Path, caplog) -> None:
    store, days = Store(str(tmp_path)), [date(2026, 1, 1), date(2026, 1, 2)]

    def run(config: Config) -> int:
        return 5

    def night(day: date) -> int | None:
        return run_night(
            compose(["publish.model=clicks", f"data.day={day}"], night=True), store, day, run, 0.0
        ).exit_code

    assert night(days[0]) == 5
    assert [row[:2] for row in rows_of((tmp_path / STORE_PAGE).read_text(), "Nights")] == [["2026-01-01", "failed"]]
    (tmp_path / STORE_PAGE).unlink()
    (tmp_path / STORE_PAGE).mkdir()
    with caplog.at_level(logging.WARNING):
        assert night(days[1]) == 5
    record = read_record(store, "clicks", days[1])
    assert record is not None and (record.outcome, record.exit_code) == ("failed", 5)
    assert "index.html, is not up to date" in caplog.text


def test_each_currency_has_its_median_on_the_page(tmp_path: Path) -> None:
    nights = []
    for number, (amount, currency) in enumerate([(1.0, "EUR"), (2.0, "EUR"), (9.0, "USD")], 1):
        cost = Cost(amount=amount, currency=currency, offer="big", hosts=1)
        night = NightLine(run=f"m-{number}", model="m", date=f"2026-01-0{number}", outcome="published", cost=cost)
        nights.append(replace(night, seconds={"train": 10.0 * amount}))
    cards = _cards(nights, [], None)
    assert [card[1:] for card in cards if card[0] == "Cost of a night"] == [
        ("1.50", "EUR, median; 3.00 in all"),
        ("9.00", "USD, median; 9.00 in all"),
    ]
    assert [card[1] for card in cards if card[0] == "Time of a night"] == ["20.0 s"]


def test_with_prices_a_night_has_its_cost_in_record_page_and_list(tmp_path: Path, capsys) -> None:
    store, day = Store(str(tmp_path / "store")), date(2026, 1, 1)
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nhardware: {big: {on_demand: 7.2, spot: 3.6, start_minutes: 10}}")

    def run(config: Config) -> int:
        stages = {name: {"status": "done", "seconds": 1500.0, "artifact": None} for name in ("train", "evaluate")}
        store.write_json(f"runs/{config.run}/result.json", {"run": config.run, "status": "done", "stages": stages})
        return 0

    def night(number: int, *settings: str) -> Any:
        overrides = ["publish.model=clicks", f"data.day={day + timedelta(days=number)}", *settings]
        run_night(compose(overrides, night=True), store, day + timedelta(days=number), run, 0.0)
        return json.loads((tmp_path / f"store/runs/clicks-{day + timedelta(days=number)}/nightly.json").read_text())

    assert "cost" not in night(0) and "cost" not in capsys.readouterr().out
    assert cli.main(["nights", "ls", "--store", store.url]) == 0
    assert "cost" not in capsys.readouterr().out
    # 50 minutes of stages and 10 of the start, on two hosts.
    priced = [f"nightly.prices={prices}", "hardware=laptop", "hardware.hosts=2"]
    assert night(1, *priced)["cost"] == {"amount": 14.4, "currency": "EUR", "offer": "big", "hosts": 2}
    assert night(2, *priced, "nightly.priced_spot=true")["cost"]["amount"] == 7.2
    page = (tmp_path / "store" / STORE_PAGE).read_text()
    costs = [row[9] for row in rows_of(page, "Nights")]
    assert costs == ["7.20 EUR", "14.40 EUR", "-"] and "Cost of a night" in page
    assert "14.40 EUR" in (tmp_path / f"store/runs/clicks-{day + timedelta(days=1)}/nightly.html").read_text()
    assert cli.main(["nights", "ls", "--store", store.url]) == 0
    assert "14.40 EUR" in capsys.readouterr().out


def test_a_night_whose_prices_are_gone_keeps_its_verdict_and_page(tmp_path: Path) -> None:
    store, day = Store(str(tmp_path / "store")), date(2026, 1, 1)
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nhardware: {big: {on_demand: 7.2}}")
    folder = tmp_path / "store/runs/clicks-2026-01-01"

    def run(config: Config) -> int:
        stages = {"train": {"status": "done", "seconds": 1500.0, "artifact": None}}
        gate = {"verdict": "hold", "reasons": ["worse"], "version": "v1", "incumbent": "v0", "warnings": ["late"]}
        result = {"run": config.run, "status": "failed", "stages": stages, "gate": gate}
        store.write_json(f"runs/{config.run}/result.json", result)
        prices.unlink()
        return 6

    config = compose(["publish.model=clicks", f"data.day={day}", f"nightly.prices={prices}"], night=True)
    record = run_night(config, store, day, run, 0.0)
    written = json.loads((folder / "nightly.json").read_text())
    assert (written["outcome"], written["verdict"], written["version"]) == ("held", "hold", "v1")
    assert record.cost is None and record.warnings == tuple(written["warnings"])
    assert written["warnings"][0] == "late" and "the night has no cost: prices" in written["warnings"][1]
    assert "the night has no cost" in (folder / "nightly.html").read_text()


def test_the_cost_of_a_night_counts_the_hosts_that_its_stages_had() -> None:
    full = "2 of 4 pods find no place"
    ended = [("node gone", 100.0), (full, 50.0), ("room for 2 more hosts", 300.0), (None, 150.0)]
    attempts = []
    for message, seconds in ended:
        error = None if message is None else ErrorPart(message=message, exit_code=8)
        attempts.append(StageAttempt(started=0.0, seconds=seconds, error=error))
    done = StageOutcome(status="done", seconds=600.0, artifact="a")
    record = NightRecord(
        model="clicks",
        date="2026-01-01",
        run="clicks-2026-01-01",
        outcome="published",
        seconds={"ingest": 10.0, "train": 600.0, "evaluate": 20.0},
        stages={"train": replace(done, attempts=tuple(attempts))},
        shrunk=(Shrunk(stage="train", from_hosts=4, hosts=2, why=full),),
        grown=(Grown(stage="train", from_hosts=2, hosts=4),),
    )
    assert host_seconds(record, 4) == 10 * 4 + (150 * 4 + 300 * 2 + 150 * 4) + 20 * 4
    # Without a record of attempts, a stage counts with the hosts that it ended with.
    assert host_seconds(replace(record, stages=None, grown=None), 4) == 10 * 4 + 600 * 2 + 20 * 2
    assert host_seconds(replace(record, stages=None, shrunk=None, grown=None), 4) == 630 * 4


def test_the_page_explains_only_the_marks_that_it_shows_and_names_the_versions_in_the_bar(store: Store) -> None:
    overview = read_overview(store)
    page = store_page(overview, BEGIN + 4 * DAY_SECONDS)
    assert "Rings on the curve" in page and "Strokes below" in page
    names = page.partition('<p class="spans')[2].partition("</p>")[0]
    assert re.findall(r"flex: ([\d.]+) 0 0\">(\w*)<", names) == [("0.2500", "v00001"), ("0.7500", "v00002")]
    published = replace(overview, nights=tuple(night for night in overview.nights if night.outcome == "published"))
    page = store_page(published, BEGIN + 400 * DAY_SECONDS)
    assert "Rings on the curve" not in page and "Strokes below" not in page and "Point at a night" in page
    assert "v00001" not in page.partition('<p class="spans')[2].partition("</p>")[0], "too short for its name"
