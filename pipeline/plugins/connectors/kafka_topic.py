"""Ranges of a Kafka topic: a day's messages as offsets, pinned in the fingerprint, and their reader.

A day of a partition begins with the first message whose timestamp is of that day and ends before the first one of a
later day. Messages that arrive later do not belong to a range that was pinned.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.times import end_of_day
from pipeline.plugins.connectors.messages import MessageBlock, decoder_of, schema_mark
from pipeline.plugins.connectors.options import CONFIG_FILE, REGISTRY, SCHEMA_FILE
from pipeline.specs.connector import Delivery, Excerpt, Snapshot

SECONDS = 30.0  # time limit for an answer of the brokers
AT_ONCE = 10_000  # messages per request
WAIT = 0.2  # seconds to wait for them
PART_MESSAGES = 1_000_000  # messages in a part that another process reads
_RANGE = re.compile(r"(\d+):(\d+)-(\d+)")
_OURS = {CONFIG_FILE, SCHEMA_FILE, REGISTRY}
_EXCERPT_PARTS = 8
_REFUSALS = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True)
class Span:
    """Offsets of a ``partition`` from ``start`` on and below ``end``."""

    partition: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.start}-{self.end}"

    @property
    def size(self) -> int:
        """The number of offsets, which have at most as many messages."""
        return self.end - self.start


def spans_of(text: str) -> list[Span]:
    """Parse ``0:10-99,1:0-50`` into spans; ValueError for anything else."""
    spans: dict[int, Span] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(text)
        span = Span(*map(int, match.groups()))
        # Two spans of a partition could overlap, which would count rows twice.
        if span.end < span.start or span.partition in spans:
            raise ValueError(text)
        spans[span.partition] = span
    if not spans:
        raise ValueError(text)
    return list(spans.values())


def properties(data: DataConfig) -> dict[str, Any]:
    """Return the properties of a consumer that reads only the given ranges and leaves no trace in the cluster."""
    given = {name: value for name, value in data.options.items() if name not in _OURS}
    file = data.options.get(CONFIG_FILE)
    if file:
        try:
            text = Path(file).read_text()
        except OSError as error:
            raise ConfigError(
                f"data.options.{CONFIG_FILE}={file} cannot be read: {error}", hint="a file of lines name=value"
            ) from None
        for line in map(str.strip, text.splitlines()):
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                given[name] = value
    return {
        "log_level": 2,
        **given,
        # These come last, so that no given option changes them: offsets of the group are never stored, and a range that
        # retention has cut raises an error instead of jumping to what is left.
        "group.id": given.get("group.id", "nightjar"),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
    }


@contextmanager
def consumer_of(data: DataConfig) -> Iterator[Any]:
    """Yield a consumer and close it afterwards; its errors are raised as errors that say what to do."""
    try:
        consumer = Consumer(properties(data))
    except (KafkaException, ValueError) as error:
        raise ConfigError(
            f"data.options do not make a consumer: {error}", hint="names as in librdkafka's documentation"
        ) from None
    try:
        yield consumer
    except KafkaException as error:
        cause = error.args[0] if error.args else error
        if isinstance(cause, KafkaError) and cause.code() in _REFUSALS:
            raise DataError(
                f"the brokers of topic {data.path} refuse: {cause}",
                hint="the rights of that account; its credentials are in data.options.config.file",
            ) from None
        raise _silent(data, str(cause)) from error
    finally:
        consumer.close()


def _silent(data: DataConfig, reason: str) -> UnreachableError:
    return UnreachableError(
        f"the brokers of topic {data.path} do not answer: {reason}",
        hint="run the same command once they answer; their addresses are in data.options",
    )


class TopicSnapshot(Snapshot):
    """The ``spans`` of a topic by day (None: everything), and ``open``, the days without an end in some partition."""

    def __init__(
        self, data: DataConfig, cluster: str, spans: dict[date | None, list[Span]], open: frozenset[date] = frozenset()
    ) -> None:
        self.data, self.spans, self._open = data, spans, open
        days, total = [], 0
        for day, of_day in spans.items():
            # ``open_topic`` parses these spans out of the mark.
            days.append(f"{day or 'all'} {','.join(map(str, of_day))}")
            total += sum(map(attrgetter("size"), of_day))
        self.mark = "; ".join([f"kafka {cluster} {data.path}{schema_mark(data)}", *days])
        self.version = f"{total:,} offsets of topic {data.path}: {'; '.join(days)}"

    def delivery(self, day: date | None) -> Delivery:
        parts = rows = 0
        for span in self.spans[day]:
            parts += span.size > 0
            rows += span.size
        # A day is complete once it is over. Offsets that data.snapshot names are always complete.
        over = day is None or self.data.snapshot or time.time() >= end_of_day(day, self.data.time_zone)
        missing: tuple[str, ...] = ()
        if not over:
            missing = (f"{day} is not over yet, and topic {self.data.path} still takes messages of it",)
        return Delivery(
            parts=parts,
            rows=rows,
            later=day is not None and day not in self._open,
            missing=missing,
        )

    def sources(self, day: date | None, spec: DataSpec, block_bytes: int) -> list[Source]:
        sources: list[Source] = []
        for span in self.spans[day]:
            if span.size:
                sources.append(SpanSource(data=self.data, spec=spec, span=span, block_bytes=block_bytes))
        return sources

    def excerpt(self, rows: int) -> Excerpt:
        spans = [span for span in self.spans[None] if span.size]
        # Choose partitions that are spread evenly, since messages may be distributed among them by content.
        chosen = [spans[round(at)] for at in np.linspace(0, len(spans) - 1, min(len(spans), _EXCERPT_PARTS))]
        each = rows // max(len(chosen), 1)
        decoder, values = decoder_of(self.data), list[bytes | None]()
        for span in chosen:
            # Read the newest messages, which look most like future ones.
            some = Span(span.partition, max(span.start, span.end - each), span.end)
            values += [value for _, value in read_span(self.data, some)]
        frame, bad = decoder.sampled(values)
        return Excerpt(frame=frame, total=sum(map(attrgetter("size"), spans)), parts=len(spans), bad=bad)


def open_topic(data: DataConfig, mark: str) -> TopicSnapshot:
    """Return the ranges of ``data.day``: from ``mark``, from ``data.snapshot``, or by the times of the messages."""
    days: Sequence[date | None] = data.days or [None]
    with consumer_of(data) as consumer:
        known = consumer.list_topics(data.path, timeout=SECONDS)
        topic = known.topics.get(data.path)
        if topic is None or topic.error is not None or not topic.partitions:
            reason = topic.error if topic is not None else "unknown"
            raise DataError(
                f"there is no topic {data.path}: {reason}",
                hint="data.path=<topic>, and data.options.bootstrap.servers of its cluster",
            )
        # Old brokers report no cluster id.
        cluster, partitions = known.cluster_id or "?", sorted(topic.partitions)
        if mark:
            pinned: dict[date | None, list[Span]] = {}
            for part in mark.split("; ")[1:]:
                day, _, text = part.partition(" ")
                pinned[None if day == "all" else date.fromisoformat(day)] = spans_of(text)
            return TopicSnapshot(data, cluster, pinned)
        if data.snapshot is not None:
            return TopicSnapshot(data, cluster, {days[0]: _named(data, partitions)})
        # For each partition, find the first offset that retention has left and the one after the last.
        watermarks = {}
        for partition in partitions:
            place = TopicPartition(data.path or "", partition)
            watermarks[partition] = consumer.get_watermark_offsets(place, timeout=SECONDS)
        if days[0] is None:
            everything = [Span(partition, *watermarks[partition]) for partition in partitions]
            return TopicSnapshot(data, cluster, {None: everything})
        return _by_days(consumer, data, cluster, watermarks)


def _named(data: DataConfig, partitions: list[int]) -> list[Span]:
    form = f"data.snapshot={partitions[0]}:0-1000, <partition>:<first offset>-<offset behind the last>, ..."
    if len(data.days) > 1:
        raise ConfigError(f"data.snapshot names offsets of one day, but data.day is {data.day}", hint="one day")
    try:
        spans = spans_of(data.snapshot or "")
    except ValueError:
        raise ConfigError(f"data.snapshot is {data.snapshot!r}, expected offsets of the topic", hint=form) from None
    for span in spans:
        if span.partition not in partitions:
            raise ConfigError(f"topic {data.path} has no partition {span.partition}", hint=form)
    return spans


def first_offsets(consumer: Any, topic: str, partitions: Sequence[int], milliseconds: int) -> list[int | None]:
    """Return each partition's first offset from ``milliseconds`` since 1970 on; None if there is none."""
    times = [TopicPartition(topic, partition, milliseconds) for partition in partitions]
    offsets: dict[int, int | None] = {}
    for answer in consumer.offsets_for_times(times, timeout=SECONDS):
        if answer.error is not None:
            raise KafkaException(answer.error)
        # A negative offset stands for the end of the partition.
        offsets[answer.partition] = answer.offset if answer.offset >= 0 else None
    return [offsets[partition] for partition in partitions]


def _by_days(consumer: Any, data: DataConfig, cluster: str, watermarks: dict[int, tuple[int, int]]) -> TopicSnapshot:
    days, numbers = data.days, sorted(watermarks)
    offsets = []
    for day in [*days, days[-1] + timedelta(days=1)]:
        # The time of a message is in milliseconds since 1970. A day begins where the previous one ends.
        begin = int(end_of_day(day - timedelta(days=1), data.time_zone) * 1000)
        offsets.append(first_offsets(consumer, data.path or "", numbers, begin))
    spans: dict[date | None, list[Span]] = {}
    unended = set()
    for at, day in enumerate(days):
        each = []
        for place, number in enumerate(numbers):
            low, high = watermarks[number]
            first, last = offsets[at][place], offsets[at + 1][place]
            start = first if first is not None else high
            end = last if last is not None else high
            # Retention has removed messages and the first one left is of the first day, so some of that day may be
            # gone.
            if at == 0 and start == low > 0 and end > start:
                raise _retained(data, f"before offset {low} of partition {number}", str(day))
            each.append(Span(number, start, max(start, end)))
            # No message of a later day has arrived, so some messages of this day may still arrive.
            if last is None:
                unended.add(day)
        spans[day] = each
    return TopicSnapshot(data, cluster, spans, frozenset(unended))


def _retained(data: DataConfig, which: str, what: str) -> DataError:
    return DataError(
        f"messages {which} of topic {data.path} were removed by its retention, and {what} may have begun there",
        hint="a longer retention.ms for the topic; data.snapshot=<partition>:<first>-<end>,... takes what is left",
    )


@dataclass(frozen=True, kw_only=True)
class SpanSource(Source):
    """A span of a topic, parsed as ``data.messages`` says."""

    data: DataConfig
    spec: DataSpec
    span: Span
    block_bytes: int

    def parts(self) -> list[SpanSource]:
        """Return spans of PART_MESSAGES offsets."""
        span = self.span
        parts = []
        for start in range(span.start, span.end, PART_MESSAGES):
            end = min(start + PART_MESSAGES, span.end)
            parts.append(replace(self, span=Span(span.partition, start, end)))
        return parts

    def blocks(self) -> Iterator[Block]:
        """Yield the messages in blocks that are not parsed yet; their lines are offsets."""
        label, decoder = f"{self.data.path}/{self.span.partition}", decoder_of(self.data)
        offsets, values, size = list[int](), list[bytes | None](), 0
        for offset, value in read_span(self.data, self.span):
            offsets.append(offset)
            values.append(value)
            size += len(value or b"") + 1
            if size >= self.block_bytes:
                yield MessageBlock(decoder, self.spec, label, np.array(offsets), tuple(values))
                offsets, values, size = [], [], 0
        if offsets:
            yield MessageBlock(decoder, self.spec, label, np.array(offsets), tuple(values))


def read_span(data: DataConfig, span: Span) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and value of the messages of ``span`` in order, without offsets that have no message (compaction).

    Raises DataError if retention removed some of them, and UnreachableError if the brokers do not answer.
    """
    if not span.size:
        return
    with consumer_of(data) as consumer:
        place = TopicPartition(data.path or "", span.partition)
        low, high = consumer.get_watermark_offsets(place, timeout=SECONDS)
        which = f"{span.start} to {min(span.end, low) - 1} of partition {span.partition}"
        if low > span.start:
            raise _retained(data, which, "the range that was pinned")
        if high < span.end:
            raise DataError(
                f"partition {span.partition} of topic {data.path} ends at offset {high}, expected {span.end}: the "
                "topic was truncated or made anew",
                hint="run the same command again: it looks the offsets up anew",
            )
        consumer.assign([TopicPartition(data.path or "", span.partition, span.start)])
        heard, left = time.monotonic(), span.size
        while True:
            for message in consumer.consume(max(1, min(AT_ONCE, left)), timeout=WAIT):
                heard, error = time.monotonic(), message.error()
                if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise _retained(data, which, "the range that was pinned")
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                # Do not count messages, since compaction and transactions leave offsets without one. If the last
                # offsets of a span have no message, the end of the partition, which arrives as an error, ends the span.
                left = span.end - message.offset() - 1
                if error is None and left >= 0:
                    yield message.offset(), message.value()
                if left <= 0 and (error is None or left < 0):
                    return
            if time.monotonic() - heard > SECONDS:
                raise _silent(data, f"nothing for {SECONDS:.0f} seconds")
