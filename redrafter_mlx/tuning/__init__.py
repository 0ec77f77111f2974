"""Auto-tuning: step costs on this machine, acceptance statistics, and the choice of beam shapes."""
