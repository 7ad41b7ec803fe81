"""Admission: may one more session start, so that those that run keep their tokens per second?

Law: pure, like all of core. `gate.py` is the whole of it; figures of the engine come in as `Load`, times as `now` (seconds of a
steady clock), and what is decided goes out as `Verdict`. Nothing here waits: who is held stands in a line until `wake`.
"""
