"""What `make test-gpu` runs: every job in processes of its own, watched, on one CUDA device and on as many as there are.

    checks.py          what is run, compared and recorded: one function a subject
    test_one_gpu.py    those that one device is enough for
    test_many_gpus.py  those that need several
    test_dry_run.py    one of each kind on CPU ranks, in the normal tests
    lab.py             devices there are; runs jobs and `gpp` commands there, keeps their numbers
    watched_job.py     starts a job's processes, and when one fails or the time is up has stacks and NCCL's records kept
    job_rank.py        one of those processes
    gpu_jobs.py        what ranks run beyond the jobs of other tests
    __main__.py        what `make test-gpu` calls

`python -m tests.gpu --device cpu` runs all of it on CPU ranks over gloo. That shows that the suite works, and nothing of
a device: no number is held against its bound.
"""
