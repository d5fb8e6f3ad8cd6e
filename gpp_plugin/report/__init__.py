"""Pictures and tables of plans and timelines, as text and as trace files; pure Python."""
