"""All that only a CPU needs, behind one door: `cpu/door.py`."""
