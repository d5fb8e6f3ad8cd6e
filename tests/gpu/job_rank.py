"""One process of a watched job: calls a function, keeps what it returned, and says what it does when it is asked.

python -m tests.gpu.job_rank MODULE:FUNCTION FOLDER

The launcher speaks through standard input: a line ``dump`` asks for records, its end ends the process. So a rank
stays while others still need it (its store, its NCCL communicators), and none outlives its launcher.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

RECORDS_SHOWN = 12
ARGUMENTS, ANSWER, DONE_DUMPING = "arguments.pickle", "answer{}.pickle", "dumped{}"


def main() -> None:
    """Run the function; its result or its error is in the folder before the process waits for its end."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ["RANK"]
    faulthandler.enable()
    # Works where the interpreter hangs inside a library with its lock held, as the thread below does not.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    listener = threading.Thread(target=_listen, args=(folder, rank), daemon=True)
    listener.start()
    module, _, function = name.partition(":")
    try:
        arguments = pickle.loads((folder / ARGUMENTS).read_bytes())
        answer = True, getattr(importlib.import_module(module), function)(*arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    kept = folder / f"part{rank}"
    kept.write_bytes(pickle.dumps(answer))
    kept.rename(folder / ANSWER.format(rank))  # whole or not there
    listener.join()


def _listen(folder: Path, rank: str) -> None:
    for line in sys.stdin:
        if line.strip() == "dump":
            try:
                _dump(folder, rank)
            except Exception:  # what can be said is said; the rank is ended in any case
                traceback.print_exc()
            (folder / DONE_DUMPING.format(rank)).touch()
    os._exit(0)  # a process group that lost a rank must not be torn down politely


def _dump(folder: Path, rank: str) -> None:
    """Write where every thread is, and what was launched on communicators and has not ended."""
    faulthandler.dump_traceback(all_threads=True)
    records = flight_records()
    (folder / f"flight{rank}.pickle").write_bytes(pickle.dumps(records))
    print(f"rank {rank}, records of communicators:\n" + format_records(records), flush=True)


def flight_records() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder: NCCL's, where this torch has it, and gloo's."""
    c10d = sys.modules.get("torch._C._distributed_c10d")  # not imported here: the main thread may be at it
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
    return [entry for dump in dumps if dump is not None for entry in pickle.loads(dump()).get("entries", [])]


def format_records(entries: list[dict[str, Any]]) -> str:
    """Return the last records, a line each; those that have not completed stand first."""
    waiting = [entry for entry in entries if entry.get("state") != "completed"]
    last = [entry for entry in entries[-RECORDS_SHOWN:] if entry not in waiting]
    lines = [
        f"  {entry.get('state', '?'):10} {entry.get('profiling_name', '?')} group {entry.get('process_group', '?')} "
        f"sequence {entry.get('p2p_seq_id') or entry.get('collective_seq_id', '?')} sizes {entry.get('input_sizes', '?')}"
        for entry in (*waiting[:RECORDS_SHOWN], *last)
    ]
    return "\n".join([f"{len(entries)} launched, {len(waiting)} not completed", *lines])


if __name__ == "__main__":
    main()
