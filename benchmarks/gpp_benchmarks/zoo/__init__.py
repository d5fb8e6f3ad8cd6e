"""Whether models are captured, and equal one process once they are cut: the zoo."""

from gpp_benchmarks.zoo._catalogue import CATALOGUE, build

__all__ = ["CATALOGUE", "build"]
