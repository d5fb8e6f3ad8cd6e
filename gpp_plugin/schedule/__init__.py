"""Orders of tasks: one schedule a file, lowering to rank programs, and the validator."""
