"""What people are shown: benchmarks, reports, checks."""
