"""Parts of bench/mutation.py: `make` has the mutants, `reach` which tests notice one, `trial` runs it."""
