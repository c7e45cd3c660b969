"""The answers of ``nightjar price`` as text, as a page, and the list of sealed predictions as text or Markdown."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pipeline.config.prices import ON_DEMAND
from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.plugins.capacity.price import NIGHTS, TONIGHT
from pipeline.plugins.capacity.price_record import CheapestOffer, OfferOutlook, PriceOutlook
from pipeline.records.sealed_prediction import COMPARED, SealedLine, SealedList, SealedPrediction
from pipeline.report.page import COLOURS, Figure, PageTable, from_template
from pipeline.report.stacked_bars import BarSeries, StackedBars
from pipeline.report.summary import off_by, paragraph

KINDS = {ON_DEMAND: "on demand", "spot": "on spot"}
BOUNDS = {"within_hosts": "links within hosts", "between_hosts": "links between hosts", "all_reduce": "all-reduce"}
HASH = 16  # hex digits of a hash that are shown


def price_text(record: PriceOutlook) -> str:
    """Return a line for each offer, the cheapest with reasons and walls, and what is assumed."""
    lines = [title_of(record), "", text_table(*offers_of(record)), ""]
    lines += map(paragraph, choices_of(record))
    lines += [paragraph(f"note: {note}") for note in record.notes]
    lines += ["", *map(paragraph, record.rules)]
    return "\n".join(lines)


def title_of(record: PriceOutlook) -> str:
    when = f"starts {record.start}"
    if record.by is not None:
        when += f", to end by {record.by}"
    return f"{record.model} on {record.data}, tonight and the next {record.nights} nights: {when} ({record.time_zone})"


def offers_of(record: PriceOutlook) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of the table of offers."""
    head = ["offer", "hosts*", "ranks*", "fits", "train*", "night*", "in time", f"{record.currency}*", "on spot*"]
    head += [f"{record.nights} nights*", "on spot*", "memory*", "bottleneck"]
    rows = []
    for each in record.offers:
        tonight = each.tonight
        train = (tonight.seconds or {}).get("train")
        fits, in_time = "no", units.ABSENT
        if tonight.fits:
            fits = "yes"
            in_time = "yes" if tonight.in_time else "no"
        rows.append(
            [
                each.offer,
                units.count(each.hosts),
                units.count(each.ranks),
                fits,
                units.duration(train),
                units.duration(tonight.night_s),
                in_time,
                units.money(tonight.cost),
                units.money(tonight.spot_cost),
                units.money(each.cost),
                units.money(each.spot_cost),
                units.percent(tonight.filled, 0),
                BOUNDS.get(tonight.bound, tonight.bound),
            ]
        )
    return head, rows


def choices_of(record: PriceOutlook) -> Iterator[str]:
    """Say what is cheapest, why nothing cheaper is taken, and until when."""
    for choice in record.choices:
        yield _choice_words(choice, record)
        for reason in choice.reasons:
            yield f"   out, though cheaper an hour: {reason}"
        if choice.of != TONIGHT:
            continue
        wall = choice.wall
        if wall is None:
            yield f"   next wall: none until night {record.nights}"
            continue
        night = f"night {wall.night}"
        if wall.day:
            night += f" ({wall.day})"
        then = f"then {wall.then}" if wall.then else "no offer holds from then on"
        yield f"   next wall: {night}, {wall.reason}; {then}; to move it: {wall.setting}"
    scopes = {choice.of for choice in record.choices}
    if TONIGHT not in scopes:
        yield "No offer fits and ends in time tonight."
    elif NIGHTS not in scopes:
        yield f"No offer fits and ends in time on all of the next {record.nights} nights."


def _choice_words(choice: CheapestOffer, record: PriceOutlook) -> str:
    cost = f"{units.money(choice.cost, record.currency)}"
    if choice.of == TONIGHT:
        took = units.duration(choice.seconds)
        if choice.kind != ON_DEMAND:
            chosen = next(each for each in record.offers if (each.offer, each.hosts) == (choice.offer, choice.hosts))
            uninterrupted = chosen.tonight.uninterrupted or 0.0
            # Two decimals keep 99.96% from reading as certainty.
            digits = 0 if uninterrupted < 0.99 else 2
            chance = units.percent(uninterrupted, digits)
            took += f" as expected, uninterrupted with probability {chance}"
        return f"Cheapest tonight, {KINDS[choice.kind]}: {choice.offer} x {choice.hosts}, {cost}, {took}."
    span = f"the next {record.nights} nights"
    return f"Cheapest for {span}, {KINDS[choice.kind]}: {choice.offer} x {choice.hosts}, {cost} in all."


def price_page(record: PriceOutlook) -> str:
    """Return the page as HTML: a bar for each offer, the table, the choices."""
    fitting, problems = [], []
    for each in record.offers:
        if each.tonight.fits:
            fitting.append(each)
        if each.tonight.problem:
            problems.append(f"{each.offer} x {each.hosts}: {each.tonight.problem}")
    series = _stage_series(fitting)
    return from_template(
        "price.html",
        title=f"Nightjar: {title_of(record)}",
        files="the output of --json",
        heading=f"What the night of {record.model} costs",
        about=title_of(record),
        choices=list(map(str.strip, choices_of(record))),
        figures=list(_figures(record, fitting, series)),
        legend_of=series,
        offers=PageTable(*offers_of(record)),
        problems=problems,
        rules=list(record.rules),
        notes=list(record.notes),
    )


def _stage_series(fitting: list[OfferOutlook]) -> list[BarSeries]:
    starts, spent = [], []
    for each in fitting:
        seconds = each.tonight.seconds or {}
        spent.append(seconds)
        # The rest is the start of the hosts. Stages are rounded, so their sum may exceed the night's time.
        starts.append(max((each.tonight.night_s or 0.0) - sum(seconds.values()), 0.0))
    series = []
    if any(starts):
        series.append(BarSeries(name="start", colour=0, values=starts))
    # The first offer's stages name the series, since all offers have the same stages.
    for place, stage in enumerate(spent[0] if spent else (), 1):
        values = [seconds.get(stage, 0.0) for seconds in spent]
        series.append(BarSeries(name=stage, colour=place % COLOURS, values=values))
    return series


def _figures(record: PriceOutlook, fitting: list[OfferOutlook], stages: list[BarSeries]) -> Iterator[Figure]:
    if not fitting:
        return
    names, costs = [], []
    for each in fitting:
        names.append(f"{each.offer} x {each.hosts}")
        costs.append(each.tonight.cost or 0.0)
    yield StackedBars(
        title="Time of tonight",
        unit="by stage, on demand",
        series=stages,
        show=units.duration,
        limit=record.limit_s or 0.0,
        limit_name="allowed",
        names=names,
    ).figure()
    series = [BarSeries(name="on demand", colour=0, values=costs)]
    yield StackedBars(
        title="Cost of tonight", unit=record.currency, series=series, show=units.money, names=names
    ).figure()


def sealed_text(path: str, sealed: SealedPrediction, note: str = "") -> str:
    """Describe what was sealed, and where."""
    prediction = sealed.open(path)
    spans = [f"{stage} {units.duration(seconds)}" for stage, seconds in prediction.seconds.items()]
    total = units.duration(sum(prediction.seconds.values()))
    lines = [
        f"{prediction.model} on {prediction.data}, batch {prediction.batch:,}, "
        f"{units.plural(prediction.threads, 'thread')}",
        f"predicted  {total}: {', '.join(spans)}",
        f"step       {units.decimal(prediction.step_ms, 2)} ms, {units.plural(prediction.steps, 'step')}; peak memory "
        f"{units.size(prediction.memory_bytes)}",
        f"from       {prediction.source}",
        f"sealed     {path}",
        f"SHA-256    {sealed.sha256}",
    ]
    if note:
        lines.append(note)
    return "\n".join(lines)


def sealed_list_text(record: SealedList) -> str:
    """Return all sealed predictions as a table, and the errors in a line."""
    head, rows = sealed_rows(record)
    if not rows:
        return "no sealed predictions"
    lines = [text_table(head, rows), "", errors_words(record)]
    for each in record.sealed:
        if each.problem:
            lines.append(paragraph(f"{each.sealed}: {each.problem}"))
    return "\n".join(lines)


def sealed_list_markdown(record: SealedList) -> str:
    """Return all sealed predictions as a table of Markdown, for docs/measurements.md."""
    head, rows = sealed_rows(record)
    names, marks = [], []
    for name in head:
        # A star marks a column of numbers; in Markdown a colon after the dashes aligns it to the right.
        names.append(name.removesuffix("*"))
        marks.append("---:" if name.endswith("*") else "---")
    lines = [f"| {' | '.join(cells)} |" for cells in (names, marks, *rows)]
    return "\n".join([*lines, "", errors_words(record)])


def errors_words(record: SealedList) -> str:
    text = f"{units.plural(len(record.sealed), 'sealed prediction')}, {record.compared} compared with their runs"
    if record.compared:
        text += f": median error {units.percent(record.median_error)}, worst {units.percent(record.worst_error)}"
    return text + "."


def sealed_rows(record: SealedList) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of the sealed predictions, none left out."""
    head = ["sealed", "model", "data", "batch*", "threads*", "predicted*", "measured*", "off by*", "train*", "step*"]
    head += ["memory*", "SHA-256"]
    return head, list(map(_sealed_row, record.sealed))


def _sealed_row(line: SealedLine) -> list[str]:
    when = units.ABSENT
    if line.created is not None:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(line.created))
    cells = [when, line.model or units.ABSENT, line.data or units.ABSENT]
    cells += [units.count(line.batch or None), units.count(line.threads or None), units.duration(line.predicted_s)]
    # A damaged prediction, or one whose run has not happened yet, keeps its line: none is left out.
    if line.state != COMPARED:
        return [*cells, line.state, *[units.ABSENT] * 4, line.sha256[:HASH] or units.ABSENT]
    train = line.seconds.get("train")
    errors = [line.error, None, None, None]
    if train is not None:
        errors[1] = train.predicted_s / train.measured_s - 1
    if line.step is not None and line.step.predicted_ms is not None:
        errors[2] = line.step.predicted_ms / line.step.measured_ms - 1
    if line.memory is not None and line.memory.predicted_bytes is not None:
        errors[3] = line.memory.predicted_bytes / line.memory.measured_bytes - 1
    measured = sum(each.measured_s for each in line.seconds.values())
    return [*cells, units.duration(measured), *map(off_by, errors), line.sha256[:HASH]]
