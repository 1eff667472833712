"""A learner, or several in step, and actors in processes of their own."""
