"""The shell around the core: feeds it what happens, does what it says, keeps the journal.

Law: one event loop; every decision is a call into the core with no await inside; effects follow it.
"""
