"""Parts of tools/mutation.py: `make` makes mutants, `reach` selects their tests, `trial` runs these."""
