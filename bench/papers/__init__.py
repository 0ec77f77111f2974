"""The papers' tables: what each of them measures, and the published figures next to ours."""
