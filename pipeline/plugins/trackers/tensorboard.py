"""TensorBoard: event files of scalars, histograms and hyper-parameters in ``runs/<run>/tensorboard`` of the store."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.plugins.trackers.figures import curve_figures, final_figures, grouped
from pipeline.records.runs import run_directory
from pipeline.specs.tracker import RunTracking, Tracker

if TYPE_CHECKING:
    from pipeline.config.nightly import TrackConfig
    from pipeline.records.result import Result
    from pipeline.store.artifacts import Store

FOLDER = "tensorboard"
HPARAMS = ("train.", "model.", "data.", "partition.", "checkpoint.", "seed")


class _EventFile(RunTracking):
    """One event file for a launcher. Steps that a resumed training repeats are written again."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.folder = store, f"{run_directory(run)}/{FOLDER}"
        self.path = f"{self.folder}/events.out.tfevents.{int(time.time())}.nightjar"
        self.written: dict[int, Mapping[str, Any]] = {}
        self.content = b""
        self._begun, self._size = False, 0
        self._last = 0  # the last step in the file

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the records that are new."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # A resumed training repeats steps with other times, so a record that differs from the written one is new.
        new_records = [record for record in records if self.written.get(record["step"]) != record]
        events: list[Any] = []
        if new_records and new_records[0]["step"] <= self._last:
            # A session start makes TensorBoard forget this step and all later ones.
            session_log = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=new_records[0]["step"], session_log=session_log))
        for record in new_records:
            figures = {grouped(name): value for name, value in curve_figures(record).items()}
            events.append(self._event(record["step"], figures, record.get("norms", {})))
        self._write(events)
        if new_records:
            self._last = new_records[-1]["step"]
        self.written = {record["step"]: record for record in records}

    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Write the final figures, the seconds of the stages, and the hyper-parameters with them."""
        step = max(self.written, default=0)
        figures = {f"eval/{name}": value for name, value in final_figures(result).items()}
        for name, stage in result.stages.items():
            figures[f"seconds/{name}"] = stage.seconds
        # TensorBoard's HPARAMS page shows scalars beside the hyper-parameters of the same file.
        chosen = {name: value for name, value in settings.items() if name.startswith(HPARAMS)}
        self._write([*_session(chosen, result.status), self._event(step, figures, {})])

    def _event(self, step: int, figures: Mapping[str, float], norms: Mapping[str, Any]) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        for name, table in norms.items():
            values.append(Summary.Value(tag=f"embeddings/{name}", histo=_histogram(table)))
        return Event(wall_time=time.time(), step=step, summary=Summary(value=values))

    def _write(self, events: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if not events:
            return
        if not self._begun:
            # The file of an earlier launcher has the same steps.
            for name in self.store.names(self.folder):
                self.store.fs.rm(self.store.full(f"{self.folder}/{name}"))
            events = [Event(wall_time=time.time(), file_version="brain.Event:2"), *events]
        sink = io.BytesIO()
        writer = RecordWriter(sink)
        for event in events:
            writer.write(event.SerializeToString())
        fresh = sink.getvalue()
        if self.store.is_local and self._begun:
            # TensorBoard keeps the file open, so do not replace it. Seek instead of appending, to overwrite what a full
            # disk cut short: TensorBoard could not read past it.
            with self.store.fs.open(self.store.full(self.path), "r+b") as file:
                file.seek(self._size)
                file.write(fresh)
        else:
            self.store.write_bytes(self.path, self.content + fresh)
        # Objects can only be replaced as a whole, so keep all that was written for the next write.
        if not self.store.is_local:
            self.content += fresh
        self._begun, self._size = True, self._size + len(fresh)


def _histogram(norms: Mapping[str, Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    rows, low = norms["rows"], norms["low"]
    # The bins of pipeline.embeddings.norms are half octaves.
    limits = [2.0 ** ((low + place + 1) / 2) for place in range(len(norms["counts"]))]
    return HistogramProto(
        min=norms["smallest"],
        max=norms["largest"],
        num=rows,
        sum=rows * norms["mean"],
        sum_squares=rows * norms["mean_square"],
        bucket_limit=limits,
        bucket=norms["counts"],
    )


def _session(settings: Mapping[str, Any], status: str) -> list[Any]:
    """Begin and end of a session of the hyper-parameters plugin."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        # Check bool first, since isinstance(True, int) holds.
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = str(value)
    ended = api_pb2.STATUS_SUCCESS if status == "done" else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=ended, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData
    parts = (
        (metadata.SESSION_START_INFO_TAG, data(session_start_info=start)),
        (metadata.SESSION_END_INFO_TAG, data(session_end_info=end)),
    )
    events = []
    for tag, part in parts:
        summary_metadata = metadata.create_summary_metadata(part)
        value = Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)
        events.append(Event(wall_time=time.time(), summary=Summary(value=[value])))
    return events


class _TensorBoard(Tracker):
    name = "tensorboard"
    doc = "event files in runs/<run>/tensorboard of the store, for tensorboard --logdir"
    package = "tensorboard"

    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        return _EventFile(store, run)


TENSORBOARD = _TensorBoard()
