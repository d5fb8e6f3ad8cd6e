"""What `gpp bench NAME` runs: each public module has `add_arguments(parser)` and `run(args)`."""
