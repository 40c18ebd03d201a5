"""A whole job: resolved, checked, run, resumed."""
