"""Orders of tasks as a grid of text, one row a rank, with cells that are wrong marked.

rank 0   0F0    0F1   0B0  0F2  0B1   ...
rank 1  [1F1]!  1B0   1F0
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpp_plugin.ir.program import InstructionKind, RankProgram

MOST_COLUMNS = 16
MOST_ROWS = 24


def format_grid(rows: Mapping[str, Sequence[str]], *, bad: Collection[tuple[int, int]] = ()) -> str:
    """Return the rows aligned in columns; ``bad`` cells (row, column) print as ``[2F1]!``.

    Large grids are cut to a window around the first bad cell; ``...`` stands for what is left out.
    """
    labels = list(rows)
    columns = max((len(cells) for cells in rows.values()), default=0)
    row, column = min(bad, default=(0, 0), key=lambda cell: (cell[1], cell[0]))
    first_row, last_row = _window(row, len(labels), MOST_ROWS)
    first, last = _window(column, columns, MOST_COLUMNS)
    table = []
    for index in range(first_row, last_row):
        cells = rows[labels[index]]
        shown = [
            f"[{cells[c]}]!" if (index, c) in bad else cells[c] for c in range(first, min(last, len(cells)))
        ]
        table.append(
            [labels[index], *(["..."] if first else []), *shown, *(["..."] if last < len(cells) else [])]
        )
    widths = [
        max(len(line[c]) for line in table if c < len(line)) for c in range(max(map(len, table), default=0))
    ]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in table
    ]
    above = ["..."] if first_row else []
    below = ["..."] if last_row < len(labels) else []
    return "\n".join([*above, *lines, *below])


def program_grid(programs: Iterable[RankProgram], *, positions: Mapping[int, int]) -> str:
    """Return the tasks of each rank, marking the one at or after instruction ``positions[rank]``."""
    rows: dict[str, list[str]] = {}
    bad = set()
    for row, program in enumerate(programs):
        tasks = [
            (i, str(x.task)) for i, x in enumerate(program.instructions) if x.kind is InstructionKind.COMPUTE
        ]
        rows[f"rank {program.rank}"] = [text for _, text in tasks] or ["-"]
        if program.rank in positions:
            later = [column for column, (i, _) in enumerate(tasks) if i >= positions[program.rank]]
            bad.add((row, later[0] if later else max(len(tasks) - 1, 0)))
    return format_grid(rows, bad=bad)


def _window(center: int, total: int, most: int) -> tuple[int, int]:
    if total <= most:
        return 0, total
    first = max(0, min(center - most // 2, total - most))
    return first, first + most
