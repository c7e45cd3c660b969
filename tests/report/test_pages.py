"""All pages: wide tables scroll in a container of their own, and headings are the words of the field."""

import ast
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.plugins.capacity.outlook_page import outlook_page
from pipeline.plugins.capacity.outlook_record import NightPlan, Outlook, Reached, TableOutlook
from pipeline.plugins.capacity.price_page import price_page
from pipeline.plugins.capacity.price_record import OfferNight, OfferOutlook, PriceOutlook
from pipeline.plugins.capacity.scale_page import scale_page
from pipeline.plugins.capacity.scale_record import Scale, ScaleFigure, Wall, World
from pipeline.plugins.search.search_page import search_page
from pipeline.plugins.tuning.study_page import study_page
from pipeline.records import (
    DecisionRecord,
    Figures,
    GateRecord,
    Interval,
    NightLine,
    NightRecord,
    Plan,
    Price,
    Record,
    Result,
    RunChange,
    RunLine,
    RunsComparison,
    RunSlice,
    SearchPoint,
    SearchRecord,
    StoreOverview,
    Towers,
)
from pipeline.report.comparing import comparison_page, comparison_text
from pipeline.report.gate import gate_page
from pipeline.report.html import ReportData, render
from pipeline.report.night import night_markdown, night_page
from pipeline.report.page import wrapping
from pipeline.report.plans import plan_page
from pipeline.report.store_page import store_page
from pipeline.report.towers import towers_page
from tests.plugins.tuning.studies import shown, trial
from tests.records.made import figures

PACKAGE = Path(__file__).parents[2] / "pipeline"
TEMPLATES = PACKAGE / "report" / "templates"
RECORDED = Path(__file__).parents[1] / "records" / "recorded"
PARTS = {"base.html", "parts.html", "figures.html"}  # no pages with tables
OWN_WORDS = (
    "question",
    "worth a look",
    "carry",
    "held-out",
    "looks",
    "what decides",
    "rows can tell",
    "waits for",
    "worlds",
    "no sure difference",
    "ended early",
    "moved (psi)",
    "quarantined because",
    "serving gap",
    "held rows",
)


def recorded(kind: type[Record], name: str) -> Iterator[Record]:
    """The recorded files of ``kind``: ``<name>.json`` and ``<name>-*.json``."""
    for path in sorted([*RECORDED.glob(f"{name}.json"), *RECORDED.glob(f"{name}-*.json")]):
        yield kind.from_json(json.loads(path.read_text()))


@pytest.mark.parametrize("problem", [None, "other test rows"])
def test_the_lowest_ne_is_marked_among_runs_on_the_same_rows_alone(problem):
    change = None if problem else figures(0.001, 0.001, 0.001, kind=Figures)
    record = RunsComparison(
        runs=(RunLine(run="a", status="done", ne=0.9), RunLine(run="b", status="done", ne=0.8)),
        settings={},
        confidence=0.95,
        changes=(RunChange(run="b", rows=400, change=change, problem=problem),),
    )
    marked = problem is None
    assert ("0.80000*" in comparison_text(record)) is marked
    page = comparison_page(record, {"a": [], "b": []})
    assert ("0.80000*" in page) is marked and ("marked *" in page) is marked


def compared() -> str:
    change = figures(0.001, 0.001, 0.001, kind=Figures)
    part = RunSlice(slice="country", value="de", rows=400, clicks=100, change=change)
    record = RunsComparison(
        runs=tuple(RunLine(run=name, status="done", ne=0.8, stages={"train": 2.0}) for name in ("a", "b")),
        settings={"train.lr": [0.1, 0.2]},
        confidence=0.95,
        changes=(RunChange(run="b", rows=400, change=change, slices=(part,)),),
    )
    return comparison_page(record, {"a": [], "b": []})


def scaled() -> str:
    world = {"fits": True, "bound": "compute", "setting": "train.global_batch", "parts": {"compute": 2.0}}
    more = {"samples_per_s": 1e5, "step_ms": 2.0, "efficiency": 1.0, "memory": 2**30, "filled": 0.5}
    worlds = tuple(World(ranks=ranks, hosts=1, batch=4096, **world, **more) for ranks in (2, 4))
    figure = {"link": ScaleFigure(value=10.0, unit="GB/s", source="hardware")}
    wall = Wall(ranks=4, bound="compute", setting="train.global_batch")
    return scale_page(
        Scale(hardware="laptop", data="criteo", model="dlrm", worlds=worlds, wall=wall, measured=figure, assumed=figure)
    )


def priced() -> str:
    seconds = {"ingest": 60.0, "train": 600.0}
    night = OfferNight(night=0, fits=True, bound="compute", setting="", seconds=seconds, night_s=720.0, cost=0.5)
    offer = OfferOutlook(offer="cpu", hardware="laptop", device="cpu", hosts=1, ranks=1, nights=(night,), cost=15.0)
    figures = {"currency": "EUR", "model": "dlrm", "data": "criteo", "nights": 30, "start": "02:00", "by": "03:00"}
    return price_page(
        PriceOutlook(**figures, time_zone="Etc/UTC", limit_s=3600.0, source="run one", offers=(offer,), choices=())
    )


def searched() -> str:
    price = Price(step_ms=2.0, bytes={"ddr": 2**20})
    point = SearchPoint(step=10, temperature=1.0, loss=0.5, held_loss=0.5, cost=0.1)
    choice = DecisionRecord(part="width", choices=(8, 4), chosen=4, probability=0.9, history=((0.5, 0.5),))
    record = SearchRecord(
        name="s",
        dataset="datasets/d/k",
        seed=1,
        steps=10,
        rows=100,
        held_rows=10,
        seconds=1.0,
        before=price,
        after=price,
        decisions={"C1": choice},
        points=(point,),
        undecided=("C1",),
    )
    return search_page(record)


def foreseen() -> str:
    bands = dict.fromkeys(("0", "30"), (10, 20, 30))
    table = TableOutlook(
        trend="steady",
        history=(5, 10),
        limit=100,
        setting="data.sparse.C1.rows",
        when_full="keep",
        rows=bands,
        full=Reached(),
        paths=((10, 20, 30),),
    )
    plans = tuple(NightPlan(night=night, day="2026-01-01", rows=10, fits=True, step_ms=1.0) for night in (0, 30))
    record = Outlook(
        settings={},
        hardware="laptop",
        world_size=1,
        model="clicks",
        nights=30,
        band=0.8,
        read=("a", "b"),
        missing=(),
        fits=True,
        tables={"C1": table},
        plans=plans,
        tiers={},
    )
    return outlook_page([record])


def listed_night() -> NightLine:
    ne = Interval(0.8, 0.79, 0.81)
    return NightLine(model="clicks", date="2026-01-01", run="clicks-2026-01-01", outcome="published", ne=ne)


def pages() -> Iterator[tuple[str, str]]:
    """The template and the text of every page."""
    yield from (("report.html", render(ReportData(result=each))) for each in recorded(Result, "result"))
    yield from (("gate.html", gate_page(each)) for each in recorded(GateRecord, "gate"))
    yield from (("night.html", night_page(each)) for each in recorded(NightRecord, "night"))
    yield from (("plan.html", plan_page(each)) for each in recorded(Plan, "plan"))
    yield from (("towers.html", towers_page(each)) for each in recorded(Towers, "towers"))
    yield "study.html", study_page(shown([trial(0), trial(1, state="failed", error="NE is not finite")]))
    yield from (("compare.html", compared()), ("scale.html", scaled()), ("search.html", searched()))
    yield from (("outlook.html", foreseen()), ("price.html", priced()))
    yield "store.html", store_page(StoreOverview(nights=(listed_night(),)), 1e9)


def test_every_table_of_every_page_scrolls_in_a_container_and_headings_are_the_fields_words() -> None:
    wrong, seen, with_tables = [], set(), set()
    for template, page in pages():
        seen.add(template)
        main = ET.fromstring(page[page.index("<main>") : page.index("</main>") + len("</main>")])
        parents = {child: parent for parent in main.iter() for child in parent}
        for table in main.iter("table"):
            with_tables.add(template)
            box = parents[table].attrib
            if box.get("class") != "scroll" or box.get("tabindex") != "0":
                wrong.append(f"{template}: a table outside of a container that scrolls")
        text = re.sub(r"\s+", " ", " ".join(main.itertext())).lower()
        wrong += [f"{template}: {words!r}" for words in OWN_WORDS if words in text]
    assert not wrong, wrong
    assert seen == with_tables == {path.name for path in TEMPLATES.glob("*.html")} - PARTS
    style = (TEMPLATES / "style.css").read_text()
    assert re.search(r"\.scroll \{ overflow-x: auto;", style) and re.search(
        r"@media print.*\.scroll \{ overflow: v", style, re.S
    )


def test_the_key_of_a_setting_wraps_after_its_dots_and_is_escaped() -> None:
    assert wrapping("train.<lr>") == "train.<wbr/>&lt;lr&gt;"


def test_reasons_and_reports_say_test_rows() -> None:
    wrong = []
    for path in (path for room in ("evaluation", "report") for path in (PACKAGE / room).glob("*.py")):
        tree = ast.parse(path.read_text())
        documents = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in documents)
        wrong += [f"{path.name}: {text}" for text in texts if isinstance(text, str) and "held-out" in text]
    assert wrong == []


def test_what_comes_from_outside_does_nothing_in_a_terminal_or_in_markdown() -> None:
    value = "de\x1b[31m@here"
    night = NightRecord(
        model="m",
        date="2026-01-02",
        run="m-2026-01-02",
        outcome="failed",
        exit_code=1,
        finished=0.0,
        message=f"no such id: {value}",
        skipped=(f"2026-01-01: <b> {value}",),
        changed=(f"data.path: {value}",),
    )
    text = night_markdown(night)
    assert "\x1b" not in text and "@here" not in text and "<b>" not in text
    change = figures(0.05, 0.05, 0.05, kind=Figures)
    part = RunSlice(slice="country", value=value, rows=400, clicks=100, change=change)
    compared = RunsComparison(
        runs=tuple(RunLine(run=name, status="done") for name in ("a", "b")),
        settings={},
        confidence=0.95,
        changes=(RunChange(run="b", rows=400, change=change, slices=(part,)),),
    )
    shown = comparison_text(compared)
    assert "country=de\\x1b[31m@here" in shown and "\x1b" not in shown
