"""Sub-commands of ``gpp``: each module has ``add_arguments(parser)`` and ``run(args) -> dict``."""
