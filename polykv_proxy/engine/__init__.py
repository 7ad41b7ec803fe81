"""Talking to the engine process. Law: wire formats stop here; callers get values of the core."""
