"""What a run tells people: a progress line, ``metrics.jsonl``, the summary table and an HTML page."""

from pipeline.report.html import write_report
from pipeline.report.plans import PLAN_PAGE, plan_page
from pipeline.report.progress import Reporter
from pipeline.report.records import read_records
from pipeline.report.summary import compare, summary

__all__ = ["PLAN_PAGE", "Reporter", "compare", "plan_page", "read_records", "summary", "write_report"]
