"""An independent simulator: slow, by sets of samples and repeated scans; shares no code with the fast one."""

from __future__ import annotations

from gpp_plugin.ir.schedule import TaskKind


def transfer(cluster, src, dst, num_bytes):
    """Return (time on the payload, latency)."""
    if cluster is None:
        return 0.0, 0.0
    link = next((x for x in cluster.links if src // x.span == dst // x.span), cluster.links[-1])
    return num_bytes / link.bytes_per_s * 1e6, link.latency_us


def label(task):
    """Return F, B, I or W, and Fa or Fb for half a forward."""
    return task.kind.value + ("" if task.half is None else "ab"[task.half])


def needed_messages(plan, schedules):
    """Return {(direction, edge, first sample): (sender task, receiver task, bytes)}; a task is (rank, label, micro-batch)."""
    ran = [{(label(t), t.micro_batch) for t in s.tasks} for s in schedules]
    trained = {i for i, tasks in enumerate(ran) if any(what in "BI" for what, _ in tasks)}
    found = {}

    def owner(index, sample, backward=False):
        """Return who computes that sample."""
        stage = plan.stages[index]
        micro_batch, within = divmod(sample, stage.micro_batch_size)
        local = stage.micro_batch_size // len(stage.ranks)
        what = "F"
        if backward:
            what = "B" if ("B", micro_batch) in ran[index] else "I"
        elif ("Fa", micro_batch) in ran[index]:
            what = "Fa" if within % local < local // 2 else "Fb"
        return stage.ranks[within // local], what, micro_batch

    def add(direction, number, runs, held, per_sample, fixed):
        edge = plan.edges[number]
        seen = set()
        for (producer, consumer), samples in sorted(runs.items(), key=lambda item: item[1][0]):
            whole = bool(edge.whole_tensors) and (consumer[0], consumer[2]) not in seen
            seen.add((consumer[0], consumer[2]))
            if not edge.batch_tensors and not whole:
                continue
            if not held & {*edge.batch_tensors, *(edge.whole_tensors if whole else ())}:
                continue
            ends = (producer, consumer) if direction == 0 else (consumer, producer)
            found[direction, number, samples[0]] = (*ends, per_sample * len(samples) + fixed * whole)

    for number, edge in enumerate(plan.edges):
        runs, returned = {}, {}
        for sample in range(plan.mini_batch):
            sender = owner(edge.src, sample)
            if sender[2] in schedules[edge.src].joined:
                sender = (sender[0], "Fb", sender[2])
            runs.setdefault((sender, owner(edge.dst, sample)), []).append(sample)
            ends = (owner(edge.src, sample, True), owner(edge.dst, sample, True))
            returned.setdefault(ends, []).append(sample)
        held = {*edge.batch_tensors, *edge.whole_tensors}
        add(0, number, runs, held, edge.bytes_per_sample, edge.bytes_fixed)
        if edge.src in trained and edge.dst in trained:
            held = set(edge.gradient_tensors)
            add(1, number, returned, held, edge.gradient_bytes_per_sample, edge.gradient_bytes_fixed)
    return found


def task_us(stage, what):
    """Return the plan's time of a task."""
    if what in ("Fa", "Fb"):
        return stage.half_forward_us or stage.forward_us / 2
    if what in "IW" and stage.input_gradient_us + stage.weight_gradient_us == 0.0:
        return stage.backward_us / 2
    return {
        "F": stage.forward_us,
        "B": stage.backward_us,
        "I": stage.input_gradient_us,
        "W": stage.weight_gradient_us,
    }[what]


def reference_times(plan, schedules, *, cluster=None, share_links=True):
    """Return {(rank, label, micro-batch): (start, end)}; times must be those of the plan's stages."""
    orders = {
        rank: [(rank, label(task), task.micro_batch) for task in schedule.tasks]
        for schedule in schedules
        for rank in plan.stages[schedule.stage].ranks
    }
    stage_of = {rank: i for i, stage in enumerate(plan.stages) for rank in stage.ranks}
    messages = needed_messages(plan, schedules)
    needs, makes = {}, {}
    for key, (sender, receiver, _) in messages.items():
        needs.setdefault(receiver, []).append(key)
        makes.setdefault(sender, []).append(key)
    times, arrived, out_free, in_free = {}, {}, {}, {}
    ran_of = {rank: [] for rank in orders}
    waiting = []  # (time, step, key): a message at its sender (0) or at its receiver's link (1)
    while len(times) < sum(map(len, orders.values())):
        progress = False
        for rank, order in orders.items():
            ran = ran_of[rank]
            if len(ran) == len(order):
                continue
            task = order[len(ran)]
            inputs = needs.get(task, [])
            schedule = schedules[stage_of[rank]]
            held_back = []
            if all(t.kind is TaskKind.FORWARD for t in schedule.tasks) and task[1] != "Fb":
                freed = [(rank, what, task[2] - schedule.num_in_flight) for what in ("F", "Fa", "Fb")]
                held_back = [messages[key][1] for other in freed for key in makes.get(other, [])]
            if any(key not in arrived for key in inputs) or any(r not in times for r in held_back):
                continue
            stage = plan.stages[stage_of[rank]]
            start = max(
                [
                    times[ran[-1]][1] if ran else 0.0,
                    *(arrived[k] for k in inputs),
                    *(times[r][1] for r in held_back),
                ]
            )
            times[task] = (start, start + task_us(stage, task[1]))
            waiting += [(times[task][1], 0, key) for key in makes.get(task, [])]
            ran.append(task)
            progress = True
        if progress:
            continue  # every message that can be ready before the next one must be known first
        if not waiting:
            raise RuntimeError("stopped")
        now, step, key = min(waiting)
        waiting.remove((now, step, key))
        sender, receiver, size = messages[key]
        payload, latency = transfer(cluster, sender[0], receiver[0], size)
        free, rank = (out_free, sender[0]) if step == 0 else (in_free, receiver[0])
        begin = max(now, free.get(rank, 0.0)) if share_links else now
        free[rank] = begin + payload
        if step == 0:
            waiting.append((begin, 1, key))
        else:
            arrived[key] = begin + payload + latency
    return times
