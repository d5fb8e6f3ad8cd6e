"""What keeps a job from going on wrong: ranks that were given different jobs, steps that are skipped for ever."""
