"""Which backend runs which operators of a stage: patterns, candidates, placements; pure Python, measured by others."""
