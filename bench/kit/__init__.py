"""What the benches share: timed requests, paired statistics, the report, and the two engines."""
