"""An independent simulator: slow, by sets of samples and repeated scans; shares no code with the fast one."""

from __future__ import annotations

from gpp_plugin.ir.schedule import TaskKind


def transfer(cluster, src, dst, num_bytes):
    """Return (time on the wire, latency)."""
    if cluster is None:
        return 0.0, 0.0
    link = next((x for x in cluster.links if src // x.span == dst // x.span), cluster.links[-1])
    return num_bytes / link.bytes_per_s * 1e6, link.latency_us


def needed_messages(plan, schedules):
    """Return {(direction, edge, first sample): (sender task, receiver task, bytes)}; a task is (rank, kind, micro-batch)."""
    trained = {s.stage for s in schedules if any(t.kind is TaskKind.BACKWARD for t in s.tasks)}
    found = {}
    for number, edge in enumerate(plan.edges):
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]

        def owner(stage, sample):
            within = sample % stage.micro_batch_size
            return stage.ranks[
                within // (stage.micro_batch_size // len(stage.ranks))
            ], sample // stage.micro_batch_size

        runs = {}
        for sample in range(plan.mini_batch):
            runs.setdefault((owner(src, sample), owner(dst, sample)), []).append(sample)
        seen = set()
        for (producer, consumer), samples in sorted(runs.items(), key=lambda item: item[1][0]):
            whole = bool(edge.whole_tensors) and consumer not in seen
            seen.add(consumer)
            if not edge.batch_tensors and not whole:
                continue
            sender, receiver = (producer[0], "F", producer[1]), (consumer[0], "F", consumer[1])
            size = edge.bytes_per_sample * len(samples) + edge.bytes_fixed * whole
            found[0, number, samples[0]] = (sender, receiver, size)
            held = {*edge.batch_tensors, *(edge.whole_tensors if whole else ())}
            if held & set(edge.gradient_tensors) and edge.src in trained and edge.dst in trained:
                size = edge.gradient_bytes_per_sample * len(samples) + edge.gradient_bytes_fixed * whole
                sender, receiver = (consumer[0], "B", consumer[1]), (producer[0], "B", producer[1])
                found[1, number, samples[0]] = (sender, receiver, size)
    return found


def reference_times(plan, schedules, *, cluster=None, share_links=True):
    """Return {(rank, kind, micro-batch): (start, end)}; times must be those of the plan's stages."""
    orders = {
        rank: [(rank, task.kind.value, task.micro_batch) for task in schedule.tasks]
        for schedule in schedules
        for rank in plan.stages[schedule.stage].ranks
    }
    stage_of = {rank: i for i, stage in enumerate(plan.stages) for rank in stage.ranks}
    messages = needed_messages(plan, schedules)
    times, arrived, out_free, in_free = {}, {}, {}, {}
    waiting = []  # (time, step, key): a message at its sender (0) or at its receiver's link (1)
    while len(times) < sum(map(len, orders.values())):
        progress = False
        for rank, order in orders.items():
            ran = [t for t in order if t in times]
            if len(ran) == len(order):
                continue
            task = order[len(ran)]
            inputs = [key for key, (_, receiver, _) in messages.items() if receiver == task]
            schedule = schedules[stage_of[rank]]
            held_back = []
            if all(t.kind is TaskKind.FORWARD for t in schedule.tasks):
                freed = (rank, "F", task[2] - schedule.num_in_flight)
                held_back = [r for s, r, _ in messages.values() if s == freed and s[1] == "F"]
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
            times[task] = (start, start + (stage.forward_us if task[1] == "F" else stage.backward_us))
            waiting += [
                (times[task][1], 0, key) for key, (sender, _, _) in messages.items() if sender == task
            ]
            progress = True
        if progress:
            continue  # every message that can be ready before the next one must be known first
        if not waiting:
            raise RuntimeError("stopped")
        now, step, key = min(waiting)
        waiting.remove((now, step, key))
        sender, receiver, size = messages[key]
        wire, latency = transfer(cluster, sender[0], receiver[0], size)
        free, rank = (out_free, sender[0]) if step == 0 else (in_free, receiver[0])
        begin = max(now, free.get(rank, 0.0)) if share_links else now
        free[rank] = begin + wire
        if step == 0:
            waiting.append((begin, 1, key))
        else:
            arrived[key] = begin + wire + latency
    return times
