"""Starting coding agents on a server of ours."""
