"""A memory report as text."""

from gpp_plugin.ir.memory_plan import MemoryBreakdown
from gpp_plugin.ir.memory_report import COUNTED, HeldBytes, MemoryCounts, MemoryReport, RankMemory
from gpp_plugin.report.plan_text import format_memory_report

KIB = 1024


def test_predicted_and_measured_stand_side_by_side():
    part = MemoryBreakdown(
        stage="text", weights=KIB, stashed_weights=0, gradients=KIB, optimizer=2 * KIB, activations=4 * KIB, working=0,
        transient=KIB, inputs=100, limit=16 * KIB,
    )  # fmt: skip
    counts = MemoryCounts(held_bytes=2 * KIB, swapped_bytes=512, recomputed_bytes=0, peak_held_bytes=4 * KIB)
    held = HeldBytes(weights=KIB, gradients=KIB, optimizer=2 * KIB, buffers=100)
    known = RankMemory(
        rank=0, stage="text", predicted=part, held=held, counts=counts, measured_peak_bytes=8 * KIB + 100
    )
    unknown = RankMemory(rank=1, stage="given", predicted=None, held=held, counts=None, measured_peak_bytes=0)
    report = MemoryReport(
        measure=COUNTED, ranks=(known, unknown), differences=("stage 'x' is off",), advice=("use less",)
    )
    assert known.predicted_peak_bytes == 9 * KIB + 100 and unknown.predicted_peak_bytes == 0
    lines = format_memory_report(report).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["rank", "0", "1"]
    assert "4.00 KiB / 4.00 KiB" in lines[1] and "9.10 KiB / 8.10 KiB" in lines[1] and "512 B" in lines[1]
    assert "16.0 KiB" in lines[1] and "/" not in lines[2].replace("0 B / 0 B", "")
    assert COUNTED in lines[3] and lines[4:] == ["stage 'x' is off", "use less"]
