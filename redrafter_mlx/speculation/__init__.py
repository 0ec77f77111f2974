"""Pure functions of arrays: trees, beam search, acceptance, sampling."""
