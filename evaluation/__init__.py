"""Plays, scores and films what was trained."""
