"""One learner, or several in step, with actors in other processes."""
