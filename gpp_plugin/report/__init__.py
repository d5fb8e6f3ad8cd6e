"""Pictures and tables of plans and timelines, as text and as trace files; pure Python."""

from gpp_plugin.report.chrome_trace import chrome_trace
from gpp_plugin.report.plan_text import format_plan
from gpp_plugin.report.summary import TimelineSummary, summarize_timeline
from gpp_plugin.report.timeline_text import format_timeline

__all__ = ["TimelineSummary", "chrome_trace", "format_plan", "format_timeline", "summarize_timeline"]
