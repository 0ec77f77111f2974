"""Presentation of results: tables, heatmaps, pictures."""
