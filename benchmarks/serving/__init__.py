"""TightKV against other engines: one driver per engine, and the works that compare them."""
