"""Random requests, sent directly and through the relay: what arrives and what comes back are compared byte for byte.

Law: one request is one value (`asks.py`), written in pieces (`wire.py`); what is equal is said in `equality.py` and nowhere else.
"""
