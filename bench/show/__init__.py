"""Figures for people: tables, heatmaps, pictures."""
