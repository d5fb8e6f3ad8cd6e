"""What becomes of a model of the zoo."""

EXACT, ONE_LENGTH, REFUSED, LATE, RAW, WRONG, ENDED, BROKEN = (
    "exact", "exact at one length", "refused", "late", "raw error", "wrong", "ended", "no model",
)  # fmt: skip
VERDICTS = (EXACT, ONE_LENGTH, REFUSED, LATE, RAW, WRONG, ENDED, BROKEN)
"""What becomes of a model. `refused`: one line of the plugin's own says why it is not captured. `exact at one length`:
the same at the other length. `late`: a line as well, but in a step and not at the start. `raw error`: an error of
another kind. `ended`: its process crashed or took too long. `no model`: the plain model itself did not give a loss
twice alike; that is the zoo's own fault."""
