"""What `make test-gpu` runs: every job in processes of its own, watched, on one CUDA device and on as many as there are.

`checks.py` has one function a subject; `python -m tests.gpu --device cpu` runs all of it on CPU ranks over gloo. That
shows that the suite works, and nothing of a device: no number is held against its bound.
"""
