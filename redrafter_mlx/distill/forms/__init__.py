"""The forms of drafters that can be trained, one file per form."""
