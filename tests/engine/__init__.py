"""Tests of the patched engine alone, over its private protocol; no proxy takes part."""
