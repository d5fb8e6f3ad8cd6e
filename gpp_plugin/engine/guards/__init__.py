"""What stops a job that runs wrong: ranks with different jobs, steps that are skipped for ever."""
