"""Parts of tools/mutation.py: `make` has the mutants, `reach` which tests notice one, `trial` runs it."""
