"""Reports: one HTML page about runs, made of their records, events and configurations, without any network."""

from fmegatron.loop.report.page import report_page
from fmegatron.loop.report.read import Recorded, read_run

__all__ = ["Recorded", "read_run", "report_page"]
