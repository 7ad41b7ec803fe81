"""The decisions: values in, values out.

Law: no clock, no I/O, no asyncio, no logging, no pydantic. Callers pass `now`; effects come back as commands.
"""
