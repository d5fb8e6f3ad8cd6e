"""Pictures of random graphs, every line followed to its box."""

import random

import pytest

from gpp_plugin.report.picture import draw_graph


def follow_edges(picture):
    """Return the edges a reader of the picture sees, by following each line from box to box."""
    rows = picture.splitlines()
    width = max(map(len, rows))
    rows = [row.ljust(width) for row in rows]
    seen = []
    for y, row in enumerate(rows):
        for x, char in enumerate(row):
            if char == "┬":
                top = next(t for t in range(y, -1, -1) if rows[t][row.rindex("└", 0, x)] == "┌")
                seen.append((box_name(rows, top, x), arrive(rows, y + 1, x)))
    return sorted(seen)


def arrive(rows, y, x):
    dy, dx = 1, 0
    for _ in range(10_000):
        char = rows[y][x]
        if char == "▼":
            return box_name(rows, y + 1, x)
        turns = {"└": (0, 1), "┘": (0, -1)} if dy else {"┐": (1, 0), "┌": (1, 0)}
        if char in turns:
            dy, dx = turns[char]
        else:
            assert char == "┼" or char == ("│" if dy else "─"), (y, x, char)
        y, x = y + dy, x + dx
    raise AssertionError("a line without end")


def box_name(rows, top, x):
    left, right = rows[top].rindex("┌", 0, x), rows[top].index("┐", x)
    return int(rows[top + 1][left + 1 : right].split()[0])


@pytest.mark.parametrize("seed", range(200))
def test_the_picture_shows_exactly_the_edges(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    density = draw.choice([0.2, 0.4, 0.7])
    edges = {
        (src, dst): draw.choice(["", "8 B", "1.25 MiB"])
        for src in range(count)
        for dst in range(src + 1, count)
        if draw.random() < density
    }
    boxes = [[str(node) + " x" * draw.randint(0, 5), "line two"] for node in range(count)]
    assert follow_edges(draw_graph(boxes, edges)) == sorted(edges)
