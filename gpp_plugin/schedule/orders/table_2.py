"""How many samples a stage holds for one successor: GraphPipe's Table 2.

Table 3.2 of the thesis is the same. Symbols: stage x feeds stage y; ``b`` samples a micro-batch, ``k`` of kFkB, ``i``
samples in flight.

Deviations from the paper:

- The result is rounded up to a multiple of ``b_x`` (thesis, Figure 3.5: 7 samples are 4 micro-batches of 2).
- Table 2 is for groups ``k b`` that are multiples of one another. For others (4F4B before 5F5B) its
  result can be too small for x ever to run its first backward; the least number that cannot stop
  the pair, found from both orders of tasks, is a lower bound here.
- The table assumes balanced stages and no latency; the simulator has the last word on time.

Source: GraphPipe (arXiv 2406.17145), section 6, Table 2, and appendix A.1
Tests: tests/schedule/test_in_flight.py
"""

from __future__ import annotations

import math


def compute_in_flight(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the samples stage x holds so that its successor y never waits for it (Table 2).

    Args:
        k_x, k_y: the k of each stage's kFkB; 1 is 1F1B.
        b_x, b_y: samples a micro-batch.
        i_y: samples in flight in y.

    Raises:
        ValueError: an argument is below 1.

    >>> compute_in_flight(k_x=1, b_x=1, k_y=1, b_y=2, i_y=8)
    10
    """
    if min(k_x, b_x, k_y, b_y, i_y) < 1:
        raise ValueError(f"k, b and i must be positive: k_x={k_x} b_x={b_x} k_y={k_y} b_y={b_y} i_y={i_y}")
    samples = max(
        _table_2(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y),
        least_samples(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y),
    )
    return -(-samples // b_x) * b_x


def _table_2(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    x, y, larger = k_x * b_x, k_y * b_y, max(b_x, b_y)
    if x < y and larger < x:  # row 1
        return i_y + 2 * larger
    if x < y and larger == x:  # row 2
        return i_y + larger
    if x < y:  # row 9: b_x <= x < b_y <= y
        return i_y + b_y
    if x == y:  # rows 7 and 8
        return i_y + y if larger == y else i_y + 2 * larger
    if y < larger:  # row 10: b_y <= y < b_x <= x
        return i_y + x - y + b_x
    if y == larger:  # rows 4 and 6
        return i_y + x
    return i_y + x - y + 2 * larger  # rows 3 and 5


def least_samples(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the fewest samples x must hold for the pair not to stop, whatever the times.

    Before its backward of micro-batch i, x has run ``held_x + (i // k_x) k_x`` forwards. The backward
    waits for y's backward of the same samples, before which y has run ``held_y + (j // k_y) k_y``
    forwards, all fed by x. The difference repeats after a common multiple of both groups.
    """
    # An example: 4F4B before 5F5B, one sample a micro-batch, y holding 5. To end x's first group of backwards (i = 3)
    # y must have run its backward 3, in its own first group, before which it ran 5 forwards: x must have sent 5. x's
    # second group (i = 7) needs y's second group: 5 + 5 forwards, of which x has made 4 between its groups, so 6. The
    # third (i = 11) needs 5 + 10 - 8 = 7, the fourth (i = 15) 5 + 15 - 12 = 8, the fifth (i = 19) 5 + 15 - 16 = 4;
    # after 20 micro-batches, a multiple of both groups, it repeats. So x holds at least 8, where the table says less.
    x, y = k_x * b_x, k_y * b_y
    least = 0
    for group in range(math.lcm(x, y) // x):
        last = (group + 1) * k_x - 1  # the last backward of a group waits for most and has no more forwards
        j = -(-(last + 1) * b_x // b_y) - 1
        least = max(least, i_y + (j // k_y) * y - group * x)
    return least
