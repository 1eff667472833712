"""What keeps a run: its folder, checkpoints, curves, screen and threads."""
