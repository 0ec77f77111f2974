"""Commands about models and drafters, and what is kept beside them: `cache`, `corpora`."""
