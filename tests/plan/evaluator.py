"""An evaluator of plan files that imports nothing of the package: times by events of its own, memory rank by rank.

It reads JSON alone: a plan's file, the programs of its ranks (in which order each rank runs which tasks), the profile
and the cluster. Which samples a message holds, what it takes and what is held while it travels is worked out here anew.

A task is ``(stage, kind, micro-batch, half)`` with the kinds F, B, I and W; a *run* is ``(rank, task)``.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import pairwise


def orders_of(programs):
    """Return by rank its tasks, in order, from the programs' JSON."""
    found = {}
    for program in programs:
        tasks = [each["task"] for each in program["instructions"] if each["task"] is not None]
        found[program["rank"]] = [(t["stage"], t["kind"], t["micro_batch"], t["half"]) for t in tasks]
    return found


def order_by_hand(plan, index):
    """Return the order of a stage under 1F1B, kFkB or GPipe, halves left out; None under other schedules."""
    stage = plan["stages"][index]
    total = plan["mini_batch"] // stage["micro_batch_size"]
    name = stage["schedule"]
    if name not in ("1f1b", "gpipe"):
        return None
    held, k = (total, total) if name == "gpipe" else (min(stage["in_flight"], total), stage["k"])
    order, forward, backward = [("F", m) for m in range(held)], held, 0
    while backward < total:
        for _ in range(min(k, forward - backward)):
            order.append(("B", backward))
            backward += 1
        for _ in range(min(k, total - forward)):
            order.append(("F", forward))
            forward += 1
    return order


def is_trained(plan, index):
    """Return whether a gradient flows through a stage: it yields a loss, or sends or is sent gradients."""
    name, edges = plan["stages"][index]["name"], plan["edges"]
    readers = {edge["src"] for edge in edges}
    yields = name in plan["losses"] if plan["losses"] else index not in readers
    return yields or any(index in (e["src"], e["dst"]) and e["gradient_tensors"] for e in edges)


class Evaluation:
    """The step of one plan: when each run starts and ends, and what each rank holds at its peak.

    Stages have nothing to sum: gradients are reduced nowhere. Then all ranks step.
    """

    def __init__(self, plan, programs, cluster, profile, zero_stage):
        self.plan, self.cluster, self.profile, self.zero_stage = plan, cluster, profile, zero_stage
        self.orders = orders_of(programs)
        self._ran = {(rank, task) for rank, order in self.orders.items() for task in order}
        self.messages = {}
        for number in range(len(plan["edges"])):
            self._add_messages(number)
        self.times = self._play()
        begun, ended = zip(*self.times.values(), strict=True)
        self.step_us = max(ended) - min(begun) + max(map(self._update_us, self.orders))

    def _update_us(self, rank):
        """Return what a rank's optimizer takes: state and gradients of its stages are read, what is new is written."""
        stages = [i for i, stage in enumerate(self.plan["stages"]) if rank in stage["ranks"]]
        moved = 2 * sum(self._stage_bytes(index)["stepped"] for index in stages)
        return moved / self.cluster["devices"][rank]["memory_bytes_per_s"] * 1e6

    # ---- who sends what to whom

    def _run_of(self, index, sample, kinds):
        """Return the run of a stage that computes a sample, by the first of these kinds that there is."""
        stage = self.plan["stages"][index]
        size = stage["micro_batch_size"]
        local = size // len(stage["ranks"])
        micro_batch, within = divmod(sample, size)
        rank = stage["ranks"][within // local]
        halves = int(within % local >= local // 2) if local > 1 else None
        for kind in kinds:
            for half in (None, halves):
                if (rank, (index, kind, micro_batch, half)) in self._ran:
                    return rank, (index, kind, micro_batch, half)
        return None

    def _add_messages(self, number):
        edge, mini_batch = self.plan["edges"][number], self.plan["mini_batch"]
        src, dst = edge["src"], edge["dst"]
        if all(name.startswith("(order)") for name in (*edge["batch_tensors"], *edge["whole_tensors"])):
            raise NotImplementedError("edges that are order alone")
        gradients, whole_tensors = set(edge["gradient_tensors"]), set(edge["whole_tensors"])
        for is_back in (False, True):
            kinds = "BI" if is_back else "F"
            names = gradients if is_back else {*edge["batch_tensors"], *whole_tensors}
            prefix = "gradient_bytes" if is_back else "bytes"
            cuts = []
            for sample in range(mini_batch):
                made, read = self._run_of(src, sample, kinds), self._run_of(dst, sample, kinds)
                if made is None or read is None:
                    break
                if made[1][3] == 0 and self.plan["stages"][src]["joins_last_slice"] and not is_back:
                    last = self.plan["stages"][src]["num_sliced"] - 1
                    if made[1][2] == last:  # both halves leave together
                        made = (made[0], (*made[1][:3], 1))
                if not cuts or cuts[-1][:2] != [made, read]:
                    cuts.append([made, read, sample, 0])
                cuts[-1][3] += 1
            degree, size = (
                len(self.plan["stages"][dst]["ranks"]),
                self.plan["stages"][dst]["micro_batch_size"],
            )
            for made, read, first, count in cuts:
                is_first = first % (size // degree) == 0
                held = names - (set() if is_first else whole_tensors)
                if not held:
                    continue
                num_bytes = edge[f"{prefix}_per_sample"] * count
                num_bytes += edge[f"{prefix}_fixed"] if is_first and whole_tensors else 0.0
                ends = (read, made) if is_back else (made, read)
                self.messages[is_back, number, first] = (*ends, num_bytes)

    # ---- when everything happens

    def _travel(self, sender, receiver, num_bytes):
        """Return what a message takes up of both links, and its latency."""
        if sender == receiver or self.cluster is None:
            return 0.0, 0.0
        for link in self.cluster["links"]:
            if sender // link["span"] == receiver // link["span"]:
                break
        return num_bytes / link["bytes_per_s"] * 1e6, link["latency_us"]

    def _takes(self, task):
        index, kind, _, half = task
        stage = self.plan["stages"][index]
        if kind == "F":
            whole = stage["forward_us"]
            return whole if half is None else stage["half_forward_us"] or whole / 2
        if kind == "B":
            return stage["backward_us"]
        parts = {"I": stage["input_gradient_us"], "W": stage["weight_gradient_us"]}
        return parts[kind] if any(parts.values()) else stage["backward_us"] / 2

    def _play(self):
        waits, frees = defaultdict(int), defaultdict(list)
        sends = defaultdict(list)
        for key, (made, read, _) in sorted(self.messages.items()):
            sends[made].append(key)
            waits[read] += 1
        for rank, order in self.orders.items():
            for before, after in pairwise(order):
                frees[rank, before].append((rank, after))
                waits[rank, after] += 1
        for made, keys in sends.items():  # a frozen stage runs m + k when what it sent of m was read
            rank, (index, _, micro_batch, _) = made
            if is_trained(self.plan, index):
                continue
            later = micro_batch + self.plan["stages"][index]["in_flight"]
            for half in (None, 0):
                locked = (rank, (index, "F", later, half))
                for key in keys if locked in self._ran else ():
                    frees[self.messages[key][1]].append(locked)
                    waits[locked] += 1
        events, times, begun = [], {}, defaultdict(float)
        out_free, in_free = defaultdict(float), defaultdict(float)

        def go_on(run, now):
            begun[run] = max(begun[run], now)
            waits[run] -= 1
            if waits[run] == 0:
                start(run)

        def start(run):
            heapq.heappush(events, (begun[run] + self._takes(run[1]), 0, run))

        for run in [run for run in self._ran if not waits[run]]:
            start(run)
        # at one time: tasks end, then messages leave in order, then they come to their receivers' links
        while events:
            now, step, what = heapq.heappop(events)
            if step == 0:
                times[what] = (begun[what], now)
                for run in frees[what]:
                    go_on(run, now)
                for key in sends[what]:
                    read = self.messages[key][1]
                    if read[0] == what[0]:
                        go_on(read, now)  # between two stages of a rank
                    else:
                        heapq.heappush(events, (now, 1, key))
                continue
            made, read, num_bytes = self.messages[what]
            busy_us, latency_us = self._travel(made[0], read[0], num_bytes)
            if step == 1:
                leaves = max(now, out_free[made[0]])
                out_free[made[0]] = leaves + busy_us
                heapq.heappush(events, (leaves, 2, what))
            elif step == 2:
                in_free[read[0]] = max(now, in_free[read[0]]) + busy_us
                heapq.heappush(events, (in_free[read[0]] + latency_us, 3, what))
            else:
                go_on(read, now)
        assert times.keys() == self._ran, "some tasks never ran"
        return times

    # ---- what ranks hold

    def peaks(self):
        """Return by rank the most bytes it holds, messages left out."""
        changes = defaultdict(list)
        for (rank, task), (start, end) in self.times.items():
            index, kind, micro_batch, half = task
            held = self._stage_bytes(index)
            if kind == "F" and half != 1 and is_trained(self.plan, index):
                changes[rank].append((start, 1, held["saved"]))
            if kind in "BW":
                changes[rank].append((end, 0, -held["saved"]))
            changes[rank] += [(start, 1, held["running"]), (end, 0, -held["running"])]
            if kind == "I":
                changes[rank].append((end, 1, held["pending"]))
            if kind == "W":
                changes[rank].append((end, 0, -held["pending"]))
        found = {}
        for rank, own in changes.items():
            stages = {task[0] for task in self.orders[rank]}
            most = now = sum(self._stage_bytes(index)["always"] for index in stages)
            for _, _, change in sorted(own):
                now += change
                most = max(most, now)
            found[rank] = most
        return found

    def _stage_bytes(self, index):
        profile, zero_stage, stage = self.profile, self.zero_stage, self.plan["stages"][index]
        degree, blocks = len(stage["ranks"]), set(stage["blocks"])
        local = stage["micro_batch_size"] // degree
        costs = [cost for cost in profile["costs"] if cost["block"] in blocks]

        def summed(name):
            total = sum(cost[name] for cost in costs)
            for tie in profile["tied"]:  # a parameter that several of its blocks have is held once
                total -= tie[name] * max(0, sum(block in blocks for block in tie["blocks"]) - 1)
            return total

        saved = sum(c["saved_bytes_per_sample"] * local + c["saved_bytes_fixed"] for c in costs)
        for storage in profile["shared"]:
            first, *others = storage["blocks"]
            if first not in blocks and blocks & set(others):
                saved += storage["bytes_per_sample"] * local + storage["bytes_fixed"]
        running = max(cost["transient_bytes_per_sample"] for cost in costs) * local
        memory = stage["memory"]
        if memory is not None:
            saved -= sum(tensor["bytes"] for tensor in memory["swapped"])
            saved -= sum(segment["bytes"] - segment["held_bytes"] for segment in memory["recomputed"])
            running += memory["working_bytes"]
        weights, gradients, state = map(summed, ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
        always = weights / (degree if zero_stage == 3 else 1)
        running += weights - always
        always += gradients / (degree if zero_stage >= 2 else 1) + state / (degree if zero_stage >= 1 else 1)
        stepped = (gradients + state) / (degree if zero_stage >= 1 else 1)
        for entry in profile["inputs"]:
            if blocks & set(entry["blocks"]):
                always += entry["bytes"] / (degree if entry["is_shared_out"] else 1)
        pending = sum(cost["pending_bytes_per_sample"] for cost in costs) * local
        return {"always": always, "saved": saved, "running": running, "pending": pending, "stepped": stepped}
