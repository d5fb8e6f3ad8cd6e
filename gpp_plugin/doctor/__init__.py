"""What `gpp doctor` checks: installed packages, devices, backends, patches."""
