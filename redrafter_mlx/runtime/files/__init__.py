"""Files: our folders, atomic writes, and careful reading of what a user names."""
