"""What is tried next: the legal set, the samplers, the kept studies. Optuna lives here only."""
