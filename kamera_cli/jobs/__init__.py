"""What the engine does, one file per job."""
