"""Tasks to try the program with, and to copy from."""
