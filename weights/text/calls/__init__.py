"""Read tool calls from the text of an answer, in every form that mlx-lm's parsers know.

`values` types a parameter by its schema, `json_calls`, `tagged_calls` and `literal_calls` read the
three families of forms, and `forms` is the table of all. mlx-lm decides which form a model writes.
"""
